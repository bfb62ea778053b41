//! QEMU's migration stream as lossless tokens, and their packed form for the wire. No I/O.
//!
//! ```text
//!  bytes of one     ┌───────────┐ tokens + the  ┌──────┐   codec, link,   ┌────────┐
//!  direction of ───►│ Tokeniser │ same bytes ──►│ pack │ ──► codec    ──► │ unpack │ ──► bytes
//!  one connection   └───────────┘               └──────┘                  └────────┘
//!                         └──► Facts: barriers, SYNCs, tail, page size, ...
//! ```
//!
//! * [`Tokeniser`] reads a connection in whatever pieces the socket returns and classifies every
//!   byte. Tokens cover every feed exactly, whatever the bytes are and wherever they were split;
//!   unknown bytes become [`Token::Raw`]. A wrong guess costs ratio, never a byte.
//! * [`pack`] rewrites one feed as structure, then literals, then page bodies, and shortens zero
//!   runs, same-filled pages and multifd headers; [`unpack`] restores the identical bytes. A packed
//!   chunk depends on no other: `PACKED.md` specifies the format.
//! * [`Facts`] hold what the relays must know to keep a VM single and alive: barrier markers on the
//!   main channel, SYNC packets on multifd channels, and where the end-of-stream tag may be.
//!
//! # What fails
//!
//! The tokeniser never fails: it turns opaque ([`Facts::opaque`]) and, before the end of RAM, looks
//! for a place to resume. `pack` returns `None` when the result does not fit into the output, or
//! when tokens and bytes do not belong together. `unpack` reads bytes of a peer: it checks every
//! count against the room left, and its errors state the defect and the offset.
//!
//! # Limits
//!
//! Page sizes of 1 KiB to 64 KiB. A packed chunk stands for at most [`MAX_CHUNK`] bytes. The
//! tokeniser has about 1 KiB of state and never copies page data. Streams under TLS, RDMA and
//! mapped-ram files are opaque. The grammar is that of QEMU 7.2 to 11.1.

mod blocks;
mod cursor;
mod facts;
mod handlers;
mod layout;
mod main_channel;
mod multifd;
mod packed;
mod places;
mod resync;
#[cfg(any(test, feature = "synth"))]
pub mod synth;
mod token;
mod tokeniser;

pub use blocks::BlockTable;
pub use facts::Facts;
pub use layout::multifd_header_len;
pub use packed::{pack, unpack, worth_packing_without_codec, UnpackError, MAX_CHUNK};
pub use token::Token;
pub use tokeniser::{classify, Kind, Tokeniser};
