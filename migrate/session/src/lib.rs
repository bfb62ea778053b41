//! The host-to-host protocol: links, streams, credits, acknowledgements. The document is
//! `docs/wire.md`; the code quotes its clauses as `W1` ... `W29`.
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
//! A link is TCP, with TLS 1.3 of crate `tls` in it unless the user has said otherwise. This crate
//! knows links, order numbers and buffers. It does not know QEMU, and it does not compress: a DATA
//! frame carries a unit that the relay has encoded and the other relay decodes.
//!
//! **Modules**, each of which knows only those above it:
//!
//! | | |
//! |---|---|
//! | `frame_type`, `error`, `frame`, `hash` | what goes over the wire |
//! | `transport`, `hello`, `dial`, `redial` | how a link is made, and made again |
//! | `pacing`, `credit` | how much the sender may have in flight |
//! | `outgoing`, `unacked`, `links`, `outbound` | what goes out, by which link |
//! | `sink`, `arrivals`, `inbound` | what comes in |
//! | `commit`, `session` | what the links share, and how a session ends |
//! | `writer`, `reader`, `link` | the two threads of a link |
//! | `resume` | the thread that makes lost links anew |
//!
//! **What fails.** A link that is lost is no failure: what it had written and nobody acknowledged
//! goes over the others, or waits until a new link is there (`unacked`, `resume`). Everything else
//! ends the session ([`Session::fail`]), and so does a time without links that is too long: every
//! waiting thread wakes, the peer is told why, and the relay decides what that means for QEMU.
//! Bytes from the peer are hostile: every length is bounded before anything is allocated or read,
//! and an honest sender's credit is exactly what the buffers hold.
//!
//! **Limits.** See section 6 of the document.

mod arrivals;
mod commit;
mod credit;
mod dial;
mod error;
mod frame;
mod frame_type;
mod hash;
mod hello;
mod inbound;
mod link;
mod links;
mod outbound;
mod outgoing;
mod pacing;
mod reader;
mod redial;
mod resume;
mod session;
mod sink;
mod sync;
mod tcp_info;
mod transport;
mod unacked;
mod writer;

pub use credit::{Credits, Grants, Permit, MAX_FRAMES_IN_FLIGHT};
pub use dial::dial;
pub use error::SessionError;
pub use frame::{AckEntry, Header, FLAG_PACKED, HEADER_BYTES, MAX_FREE_PAYLOAD, MAX_STREAMS};
pub use frame_type::FrameType;
pub use hash::RunningHash;
pub use hello::{
    decode_preamble, encode_preamble, random_id, read_preamble, write_preamble, Hello, Setup,
    Welcome, HELLO_TIMEOUT, MAX_LINKS, VERSION,
};
pub use outgoing::Outgoing;
pub use reader::SILENCE;
pub use redial::{Redial, Verdict};
pub use session::Session;
pub use sink::{Incoming, Sink};
pub use transport::Link;
