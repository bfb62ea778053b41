//! Takes a QEMU migration stream apart: pages, device state, and what stands between.
//!
//! ```text
//!  bytes of QEMU ─► Source ─┬─► grammar ─► header, configuration, block table ─► State
//!                           │      ├─────► pages, zero pages ──► Sink (an image's Writer)
//!                           │      └─────► device sections, description ──► State
//!                           └─► Tokeniser (crate stream): must have seen the same pages
//! ```
//!
//! [`record()`] reads one main channel, a single stream, from its file header to its end. Crate
//! `stream` reads the same bytes for a relay: there a guess costs ratio, and what is not understood
//! passes. Here it would cost the VM. So this grammar is strict: whatever it does not know ends the
//! recording with the place and a reason. The tokeniser reads along as a second judge, and both
//! have to count the same pages.
//!
//! Device sections have no length. The state ends where QEMU's description of it does, which comes
//! last: `00 06`, a length that fits, JSON, and each device of the description has to be found in
//! the state, in order.
//!
//! # What fails
//!
//! [`RecordError`]: the stream, with an offset; what a save must not have switched on, with what to
//! do; the sink. Nothing panics, and memory is bounded by the block table (see `image`) and by 512
//! MiB of device state.
//!
//! # Limits
//!
//! Precopy streams of QEMU 7.2 to 11.1 in version 3. No multifd, XBZRLE, `compress`, mapped-ram,
//! x-ignore-shared, COLO, and no other iterated section than RAM (VFIO, block bitmaps).

mod configuration;
mod error;
mod ram;
mod record;
mod sink;
mod source;
mod tail;

pub use error::RecordError;
pub use record::{record, Ending, Recorded};
pub use sink::Sink;
