//! The relay beside the destination QEMU: receives frames, writes QEMU's connections, sends the
//! return path back.
//!
//! ```text
//! run ─► sink (calls of the session) ─► decode (codec threads) ─► histories
//!          └─► deliver ─► read_back ─► shared ─► barrier
//! ```
//!
//! `offer` offers pages that this host has already, and `seed` puts them into chunks.
//!
//! `disk` takes the place of `deliver` and `read_back` in a session of an NBD connection.

mod barrier;
mod begin;
mod decode;
mod deliver;
mod disk;
mod histories;
mod offer;
mod read_back;
mod run;
mod seed;
mod shared;
mod sink;

pub(crate) use begin::GAVE_WAY;
pub(crate) use decode::{DecodeContext, DecodeJob};
pub use run::{Destination, DestinationEnd};
