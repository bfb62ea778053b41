//! The protocol between the relays: links, streams, credits, acknowledgements. `docs/wire.md`
//! specifies it; the code quotes its rules as `W1` ... `W38`.
//!
//! ```text
//!  reader of a QEMU socket                               Sink (the other relay)
//!    │ Credits::permit, then issue_data                     ▲ Sink::frame
//!    ▼                                                      │
//!  [codec threads] ─► outbox ─► writer 0..n ══TCP══► reader 0..n
//!                                   ▲                       │
//!                       Session::delivered ◄── writer of a QEMU socket
//! ```
//!
//! A link is TCP, with TLS 1.3 of crate `tls` inside unless the user chose otherwise. This crate
//! handles links, sequence numbers and buffers. It knows nothing of QEMU and does not compress: one
//! relay encodes the unit in a DATA frame, and the other decodes it.
//!
//! **Modules**. Each depends only on those above it:
//!
//! | | |
//! |---|---|
//! | `sync` | a lock that stays usable after a panic |
//! | `frame_type`, `verdict`, `error`, `frame`, `hash` | the wire format |
//! | `tcp_info`, `overhead` | the kernel's figures of a link, and a frame's bytes on the network |
//! | `history`, `transport`, `preamble`, `hello`, `pass` | what the ends exchange to open a link |
//! | `dial`, `redial` | attempts to open and to reopen a link |
//! | `pacing`, `credit` | the limit on bytes in flight |
//! | `outgoing`, `unacked`, `links`, `outbound` | the sending half |
//! | `sink`, `arrivals`, `inbound` | the receiving half |
//! | `commit`, `session` | the state that the links share, and the end of a session |
//! | `writer`, `reader`, `link` | the two threads of a link |
//! | `resume` | the thread that reopens lost links |
//!
//! **What fails.** The loss of a link is no failure: frames that were written to it and not
//! acknowledged go over the other links, or wait for a new link (`unacked`, `resume`). Everything
//! else ends the session ([`Session::fail`]), and so does too long a time without links. Then every
//! waiting thread wakes, the peer gets the reason, and the relay decides how to close QEMU's
//! sockets. Bytes from the peer are hostile: every length is bounded before anything is allocated
//! or read. An honest sender's credit is exactly the capacity of the buffers.
//!
//! **Limits.** See section 6 of `docs/wire.md`.

mod arrivals;
mod commit;
mod credit;
mod dial;
mod error;
mod frame;
mod frame_type;
mod hash;
mod hello;
mod history;
mod inbound;
mod link;
mod links;
mod outbound;
mod outgoing;
mod overhead;
mod pacing;
mod pass;
mod preamble;
mod reader;
mod redial;
mod resume;
mod session;
mod sink;
mod sync;
mod tcp_info;
mod transport;
mod unacked;
mod verdict;
mod writer;

pub use credit::{Credits, Grants, Permit};
pub use dial::dial;
pub use error::SessionError;
pub use frame::{
    AckEntry, Header, FLAG_BODIES, FLAG_HISTORY, FLAG_PACKED, HEADER_BYTES, MAX_FREE_PAYLOAD,
    MAX_STREAMS,
};
pub use frame_type::FrameType;
pub use hash::RunningHash;
pub use hello::{random_id, Hello, Setup, Welcome, HELLO_TIMEOUT, MAX_LINKS};
pub use history::{Histories, MAX_HISTORIES};
pub use outgoing::Outgoing;
pub use pass::{Pass, PASS_BYTES};
pub use preamble::{decode_preamble, encode_preamble, read_preamble, write_preamble, VERSION};
pub use redial::Redial;
pub use session::{Session, SILENCE};
pub use sink::{Incoming, Sink};
pub use transport::Link;
pub use verdict::Verdict;
