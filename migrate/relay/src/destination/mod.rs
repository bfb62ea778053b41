//! The relay beside the destination QEMU: frames in, connections to QEMU out, the return path back.
//!
//! ```text
//! run ─► sink (what the session tells) ─► decode (codec threads)
//!          └─► deliver ─► read_back ─► shared ─► barrier
//! ```

mod barrier;
mod decode;
mod deliver;
mod read_back;
mod run;
mod shared;
mod sink;

pub(crate) use decode::{DecodeContext, DecodeJob};
pub use run::{Destination, DestinationEnd};
