//! The two relays: QEMU's sockets on one side, a session on the other.
//!
//! ```text
//!  source QEMU                                                        destination QEMU
//!    │ unix: a thread per connection                  unix: a thread per stream ▲
//!    ▼                                                                          │
//!  intake: tokens, checksum, permit                deliver: order, hash, barriers, commit
//!    ▼                                                                          ▲
//!  pool: pack, encode ──► session ══════════════════► session ─► pool: decode, unpack
//!                            ▲                          ▲
//!  source QEMU ◄─ hand_back ─┘ (SHUT last)              └─ read_back ◄─ destination QEMU
//! ```
//!
//! [`Source`] and [`Destination`] each have one deciding thread (`run`). All other threads send it
//! events, and it alone ends a migration, so that the rules on telling either QEMU of success or
//! failure (`docs/wire.md`, W18 to W28) are in two places only.
//!
//! **What fails.** Before the commit point every failure ends with QEMU's sockets closed on both
//! sides: the source VM continues, and the destination QEMU ends. After the commit point only the
//! destination relay's answer or an administrator decides, even when the source relay is killed
//! ([`Keeper`]). In postcopy every failure ends with both QEMUs paused, and new relays can recover
//! the migration. A codec thread that never returns from its accelerator's library counts as such a
//! failure, and nothing waits for it.
//!
//! **Limits.** Those of the session; a chunk has at most `chunk-bytes` bytes.
//!
//! # Threads and ownership
//!
//! The codec threads of a [`Server`] serve all its sessions; every other thread belongs to one
//! session. `accept` accepts QEMU's connections at the source, `hello` handles each new TCP
//! connection at the destination. With a QAT device a codec thread has 8 chunks (72 pieces of 64
//! KiB) in flight, submits and polls by itself, and repeats in software what the device refuses,
//! fails or delays (crates `offload`, `qat`). With a postcopy preempt channel one link carries that
//! stream's frames and nothing else.
//!
//! # Design decisions
//!
//! * **`deliver` runs the tokeniser too.** So barriers, SYNCs and the position of the end-of-stream
//!   tag come from the bytes about to be written, not from the peer. Only the number of channels is
//!   the peer's claim.
//! * **Chunks, not batches of 1 to 128 pages.** A chunk is what the socket held. Main channel,
//!   multifd channel, device state and unknown bytes take the same path, and none of them waits for
//!   a batch to fill.
//! * **A chunk that is not full may wait 1 ms for QEMU's next write, 5 ms in all.** QEMU writes
//!   about 130 KB at a time, and chunks of that size would cost compression ratio and wake-ups.
//!   Once the VM has stopped, no chunk waits.
//! * **The results ring is the links' outbox.** Workers push into the ring that the link writers
//!   pop from; no thread is in between.
//! * **Hashes run at the edges**: over the bytes as read from QEMU, and as about to be written to
//!   QEMU. They cover everything in between, including this code. ACKs carry the receiver's hash,
//!   so that no final comparison can be forgotten.
//! * **Blocking threads instead of tokio.** CPU per GiB is the figure that counts. Threads that
//!   block on a socket or a ring took 0.75 CPU seconds per GiB for both relays together, with codec
//!   `none` and hashes.
//! * **`--codec auto` assumes no bottleneck.** `intake` requests a choice by the kind of data (two
//!   atomic operations) and sends raw chunks past the codec threads; the codec threads report the
//!   outcome of each chunk. A separate thread checks every 5 ms whether bytes wait for a link
//!   (TCP_INFO: unsent, or a round trip longer than the shortest), and every 25 ms reads bytes, CPU
//!   time and waits for credit. Crate `controller` computes the optimum from these figures.
//! * **Deltas need an order that both ends know.** `intake` looks up each page's address, with the
//!   RAM blocks concatenated; `deliver` follows the table beside the chunk and knows no addresses.
//!   Packing, codecs, devices, links and unacknowledged frames treat such a chunk like any other. A
//!   main stream has one order. Multifd channels have none before SYNC, so the SYNC packets order
//!   their tables (W29c). A page that the destination has in its seed (W29b) needs no order.

mod auto;
mod counters;
mod cpu_time;
mod destination;
mod entrance;
mod error;
mod inbox;
mod link_rate;
mod packaged;
mod postcopy;
mod qemu_socket;
mod return_path;
mod server;
mod settle;
mod sockets;
mod source;
mod stream_kind;
mod threads;
mod units;
mod unix;

pub use auto::{AutoConfig, AutoReport, Part};
pub use counters::Counters;
pub use destination::{Destination, DestinationEnd};
pub use entrance::Entrance;
pub use error::RelayError;
pub use link_rate::{measure_links, LinkRate};
pub use qemu_socket::{QemuAddress, QemuSocket};
pub use return_path::ReturnPath;
pub use server::{Allowance, Front, FrontConfig, Host, Promise, Server, ServerConfig, Switchboard};
pub use source::{
    keep, take_differences, Differences, DiskError, Keeper, PageSink, Progress, Source,
    SourceConfig, SourceEnd, SourceHandle, ANSWER_TIMEOUT, SETUP_TIMEOUT,
};
pub use unix::{Listening, UnixAddress};
