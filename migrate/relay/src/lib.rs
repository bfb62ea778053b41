//! The two relays: QEMU's sockets on one side, a session on the other.
//!
//! ```text
//!  source QEMU                                                        destination QEMU
//!    │ unix: a thread per connection                  unix: a thread per stream ▲
//!    ▼                                                                          │
//!  intake: tokens, checksum, permit                deliver: order, hash, barriers, commit
//!    ▼                                                                          ▲
//!  lanes: pack, encode ─► session ══════════════════► session ─► lanes: decode, unpack
//!                            ▲                          ▲
//!  source QEMU ◄─ hand_back ─┘ (SHUT last)              └─ read_back ◄─ destination QEMU
//! ```
//!
//! [`Source`] and [`Destination`] each have one thread that decides (`run`). All other threads tell
//! it what they saw, and it alone ends a migration, so that the rules on who is told what
//! (`docs/wire.md`, W18 to W28) stand in two places.
//!
//! **What fails.** Before the commit point every failure ends with QEMU's sockets closed on both
//! sides: the source QEMU goes on with its VM, the destination QEMU gives up. After it, only the
//! destination relay's answer or a person decides, also when the source relay is killed
//! ([`Keeper`]). In postcopy every failure ends with both QEMUs paused, and new relays can take the
//! migration up again.
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
