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
//!
//! # What belongs to whom
//!
//! The codec threads of a [`Server`] serve all its sessions; every other thread belongs to one
//! session. `accept` takes QEMU's connections at the source, `hello` each new TCP connection at the
//! destination. With a QAT device a codec thread keeps 8 chunks, 72 pieces of 64 KiB, in flight,
//! submits and polls by itself, and redoes in software what the device refuses, fails or is late
//! with (crates `offload`, `qat`). With a postcopy preempt channel one link carries that stream's
//! frames and nothing else.
//!
//! # Why it is built so
//!
//! * **`deliver` runs the tokeniser too.** Barriers, SYNCs and the place of the end-of-stream tag
//!   are then facts of the bytes about to be written, not claims of the peer. The number of
//!   channels alone is the peer's claim.
//! * **Chunks, not batches of 1 to 128 pages.** A chunk is what the socket held. Main channel,
//!   multifd channel, device state and unknown bytes take the same path, and none of them waits for
//!   a batch to fill.
//! * **A chunk that is not full may wait 1 ms for QEMU's next write, 5 ms in all.** QEMU writes
//!   about 130 KB at a time, and chunks of that size cost ratio and wake-ups. Once the VM has
//!   stopped nothing waits.
//! * **The results ring is the links' outbox.** Workers push where the link writers pop; no thread
//!   stands between.
//! * **Hashes run at the edges**: over the bytes as read from QEMU, and as about to be written to
//!   QEMU. Everything between is covered, this code included. ACKs carry the receiver's value, so
//!   that no final comparison can be forgotten.
//! * **Blocking threads instead of tokio.** CPU per GiB is the figure that counts. Threads that
//!   block on a socket or a ring measured 0.75 CPU seconds per GiB for both relays together, codec
//!   `none`, hashes included.
//! * **`--codec auto` assumes no bottleneck.** `intake` asks for a choice by the kind of data (two
//!   atomic operations) and passes raw chunks by the codec threads; the codec threads report what
//!   became of each chunk. A thread of its own looks every 5 ms whether bytes wait for a link
//!   (TCP_INFO: unsent, or a round trip longer than the shortest) and every 25 ms at bytes, CPU time
//!   and waits for credit. Crate `controller` computes the optimum from these figures.
//! * **Deltas are of the main stream alone.** `intake` looks each page's address up, with the RAM
//!   blocks one behind the other; `deliver` follows the table beside the chunk and knows no
//!   addresses. Packing, codecs, devices, links and frames waiting for an ACK see a chunk like any
//!   other. Multifd channels have no order among them that both ends know before SYNC, so their
//!   pages go whole.

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

pub use auto::{AutoConfig, AutoReport, Part};
pub use counters::Counters;
pub use destination::{Destination, DestinationEnd};
pub use error::RelayError;
pub use return_path::ReturnPath;
pub use server::{Host, Server, ServerConfig};
pub use source::{keep, Keeper, Progress, Source, SourceConfig, SourceEnd, SourceHandle};
pub use unix::{Listening, UnixAddress};
