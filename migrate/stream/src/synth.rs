//! Made streams of every variant, for tests and benches.
