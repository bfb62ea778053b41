//! A running QEMU: the answers of its monitor, the rate at which its guest writes, and a sample of
//! its memory.
//!
//! Every command only reads. `calc-dirty-rate` in its sampling mode hashes pages twice and tracks
//! nothing; `pmemsave` copies pages to a file. The guest runs on, and no setting changes.

mod backing;
mod dirty;
mod error;
mod look;
mod memory;
mod ranges;

pub use dirty::{dirtying, Dirtying};
pub use error::VmError;
pub use look::Vm;
pub use memory::{Saved, SavedPage};
pub use ranges::ram_ranges;
