//! A rehearsal of a migration: the discarding end of the stream, the measurements, and the forecast.
//!
//! ```text
//!  QEMU ─► Discard (thread: read, tokenise, differences) ─► sampler (thread) ─► Sizes
//!            ▲ how far, how fast                                each candidate codec
//!  monitor ─► Schedule (how far to read) ─► Pass ─► DirtyCurve ┐
//!                                                            Sizes ─────┼─► forecast
//!                                                            LinkRate ──┘
//! ```
//!
//! # The VM stays
//!
//! [`Discard`] never writes to QEMU's socket. With a return path, QEMU completes a migration only
//! after the destination has said that it has loaded the VM, so this end cannot make a migration
//! complete. It ends the connection as soon as the stream leaves the RAM section. The caller adds
//! what keeps QEMU from stopping the VM at all (`switchover-ack`, QEMU 8.1 and later) or from
//! handing it over (`pause-before-switchover`).
//!
//! # What is measured
//!
//! * **Dirtying.** QEMU reads the dirty log at the end of each pass. A page that was written to
//!   counts once, so the bytes that are dirty after a pass depend on how long the pass took.
//!   [`Schedule`] makes QEMU wait in a write to its socket so that passes last from milliseconds to
//!   seconds, and [`DirtyCurve`] has the bytes for any time in between.
//! * **Sizes.** A thread of its own encodes chunks, packed and with differences as a relay sends them:
//!   each with zstd 1, and with one of the other candidates of `--codec auto`.
//!
//! # What the forecast is
//!
//! A model of QEMU's passes ([`forecast`]); pure functions. It is no measurement, and its errors are
//! those of its input: a guest that writes otherwise later, a link that others use.
//!
//! # Limits
//!
//! Single stream. The device state is never sent: its time is a guess. Dirtying beyond the longest
//! pass is extrapolated from the curve's last part.

mod best;
mod curve;
mod discard;
mod forecast;
mod methods;
mod sampler;
mod schedule;
mod sizes;

pub use best::{best, Best, Cores};
pub use curve::{DirtyCurve, Pass};
pub use discard::{Discard, DiscardError, Totals};
pub use forecast::{forecast, Course, End, Forecast, Guest};
pub use methods::{Link, Method, QemuSettings, Setup};
pub use sampler::Sampled;
pub use schedule::{Allowed, Observation, Schedule};
pub use sizes::{Candidate, Sizes};
