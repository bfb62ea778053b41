//! The two relays: QEMU's sockets on one side, a session on the other.
//!
//! ```text
//!  source QEMU ─unix─► intake (a thread per connection)          deliver (a thread per stream) ─unix─► destination QEMU
//!                        │ tokens, checksum, permit                 ▲ order, hash, barriers, commit
//!                        ▼                                          │
//!                      lanes: pack + encode ─► session ══════► session ─► lanes: decode + unpack
//!                                                                   │
//!  source QEMU ◄─unix─ hand_back (SHUT last) ◄════════════════ read_back ◄─unix─ destination QEMU
//! ```
//!
//! [`Source`] and [`Destination`] each have one thread that decides (`run`): all others tell it what they saw, and it
//! alone ends things, so that the rules about who is told what (`docs/wire.md`, W18 to W28) stand
//! in two functions.
//!
//! **What fails.** Before the commit point every failure ends with QEMU's sockets closed on both
//! sides: the source VM goes on, the destination QEMU gives up. After it, only the destination's
//! word or a person decides, also when the source relay is killed ([`Keeper`]). In postcopy every
//! failure ends with both QEMUs paused, to be taken up again by new relays.
//!
//! **Limits.** Those of the session; one chunk is at most `chunk-bytes` long.

mod accelerator;
mod auto;
mod counters;
mod destination;
mod error;
mod inbox;
mod postcopy;
mod return_path;
mod server;
mod sockets;
mod source;
mod stream_kind;
mod threads;
mod units;
mod unix;

pub use accelerator::{Accelerator, AcceleratorSnapshot, QatZipSnapshot, QatZipSoftware};
pub use auto::{AutoConfig, AutoReport, Part};
pub use counters::Counters;
pub use destination::{Destination, DestinationEnd};
pub use error::RelayError;
pub use return_path::ReturnPath;
pub use server::{Host, Server, ServerConfig};
pub use source::{keep, Keeper, Progress, Source, SourceConfig, SourceEnd, SourceHandle};
pub use unix::{Listening, UnixAddress};
