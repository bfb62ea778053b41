//! The host-to-host protocol: links, streams, credits, acknowledgements. The document is
//! `docs/wire.md`; clauses are quoted as `W1` ... `W28`.
//!
//! ```text
//!  reader of a QEMU socket                               sink (the other relay)
//!    │ Credits::permit, then issue_data                     ▲ Sink::frame
//!    ▼                                                      │
//!  [codec threads] ─► outbox ─► link-tx 0..n ══TCP══► link-rx 0..n
//!                                   ▲                       │
//!                       Session::delivered ◄── writer of a QEMU socket
//! ```
//!
//! A link is TCP, with TLS 1.3 of crate `tls` in it unless the user has said otherwise. This crate
//! knows links, order numbers and buffers; it does not know QEMU, and it does not compress: a DATA
//! frame carries a unit that somebody else made and somebody else decodes.
//!
//! **What fails.** A link that is lost is no failure: what it had written and nobody acknowledged
//! goes over the others, or waits until a new link is there (`kept`, `resume`). Everything else
//! ends the session ([`Session::fail`]), and so does a time without links that is too long:
//! everybody who waits is woken, the peer is told why, and the relay decides what that means for
//! QEMU. Bytes from the peer are hostile: every length is bounded before anything is allocated or
//! read, and an honest sender's credit is exactly what the buffers hold.
//!
//! **Limits.** See section 6 of the document.

mod credit;
mod error;
mod frame;
mod hash;
mod hello;
mod kept;
mod link;
mod pacing;
mod resume;
mod session;
mod transport;
mod waiting;

pub use credit::{Credits, Grants, Permit, MAX_FRAMES_IN_FLIGHT};
pub use error::SessionError;
pub use frame::{
    AckEntry, FrameType, Header, FLAG_PACKED, HEADER_BYTES, MAX_FREE_PAYLOAD, MAX_STREAMS,
};
pub use hash::RunningHash;
pub use hello::{
    dial, random_id, read_preamble, write_preamble, Hello, Setup, Welcome, HELLO_TIMEOUT,
    MAX_LINKS, VERSION,
};
pub use link::SILENCE;
pub use resume::{Redial, Verdict};
pub use session::{Incoming, Outgoing, Session, Sink};
pub use transport::Link;
