//! A rehearsal of a migration: the discarding end of the stream, and the measurements.
//!
//! ```text
//!  QEMU ─► Discard (thread: read, tokenise, differences) ─► sampler (thread) ─► Sizes
//!            ▲ how far, how fast                                each candidate codec
//!  monitor ─► Schedule (how far to read) ─► Pass ──► DirtyCurve ┐
//!                                                         Sizes ┼─► crate forecast
//!                                                      LinkRate ┘
//! ```
//!
//! # The VM stays
//!
//! [`Discard`] never writes to QEMU's socket. With a return path, QEMU completes a migration only
//! after the destination has reported that it has loaded the VM, so this end cannot make a
//! migration complete. It ends the connection as soon as the stream leaves the RAM section. The
//! caller adds a setting that keeps QEMU from stopping the VM at all (`switchover-ack`, QEMU 8.1
//! and later) or from handing it over (`pause-before-switchover`).
//!
//! # What is measured
//!
//! * **Dirtying.** QEMU reads the dirty log at the end of each pass. A page that was written to
//!   counts once, so the bytes that are dirty after a pass depend on how long the pass took.
//!   [`Schedule`] makes QEMU wait in a write to its socket so that passes last from milliseconds to
//!   seconds, and [`forecast::DirtyCurve`] has the bytes for any time in between.
//! * **Sizes.** A thread of its own encodes chunks, packed and with differences as a relay sends
//!   them: each with zstd 1, and with one of the other candidates of `--codec auto`.
//!
//! [`measure_pages`] measures the same sizes for pages that were not read from a stream.
//!
//! # Limits
//!
//! Single stream. The device state is never sent, and its time stays unknown.

mod bench;
mod discard;
mod pages;
mod sampler;
mod schedule;
mod sums;

pub use discard::{Discard, DiscardError, Totals};
pub use pages::{measure_pages, Page};
pub use schedule::{Allowed, Observation, Schedule};
