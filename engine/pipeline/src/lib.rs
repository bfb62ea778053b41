//! The lanes: worker threads with a request ring each, results by ring, wait or busy.
