//! platen: moves and holds memory at a fraction of its size.
fn main() {}
