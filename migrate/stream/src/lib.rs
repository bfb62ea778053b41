//! QEMU's migration stream as lossless tokens, and the packed form they travel in. No I/O.
//!
//! ```text
//!  bytes of one     ┌───────────┐ tokens + the  ┌──────┐   codec, link,   ┌────────┐
//!  direction of ───►│ Tokeniser │ same bytes ──►│ pack │ ──► codec    ──► │ unpack │ ──► bytes
//!  one connection   └───────────┘               └──────┘                  └────────┘
//!                         └──► Facts: barriers, SYNCs, tail, page size, ...
//! ```
//!
//! * [`Tokeniser`] reads a connection in whatever pieces the socket gives and says what each byte
//!   belongs to. Tokens cover every feed exactly, whatever the bytes are and wherever they were
//!   cut: what is not understood is [`Token::Raw`]. A wrong guess costs ratio, never a byte.
//! * [`pack`] rewrites one feed as structure, then literals, then page bodies, leaving out what can
//!   be said shorter (zero runs, same-filled pages, multifd headers); [`unpack`] gives back the
//!   identical bytes. One packed chunk needs no other: the format is in `PACKED.md`.
//! * [`Facts`] is what the relays must know to keep a VM single and alive: barrier markers on the
//!   main channel, SYNC packets on multifd channels, where the end-of-stream tag may be.
//!
//! # What fails
//!
//! The tokeniser never fails: it turns opaque ([`Facts::opaque`]) and, before the end of RAM, looks
//! for a place to resume. `pack` answers `None` when the result has no room in the output, or when
//! tokens and bytes do not belong together. `unpack` reads bytes of a peer: every count is checked
//! against the room left, errors say what was wrong and at which offset.
//!
//! # Limits
//!
//! Page sizes of 1 KiB to 64 KiB. A chunk is at most [`MAX_CHUNK`] bytes when packed. The tokeniser
//! keeps about 1 KiB of state and never a copy of page data. Streams under TLS, RDMA and
//! mapped-ram files are opaque. Structure is understood as QEMU 7.2 to 10.x write it.

mod blocks;
mod cursor;
mod facts;
mod handlers;
mod layout;
mod main_channel;
mod multifd;
mod packed;
mod resync;
#[cfg(any(test, feature = "synth"))]
pub mod synth;
mod token;
mod tokeniser;

pub use facts::Facts;
pub use layout::{
    is_page_size, multifd_header_len, MAX_PAGE_SIZE, MIN_PAGE_SIZE, MULTIFD_PACKET_SIZE,
};
pub use packed::{pack, saving, unpack, worth_packing_without_codec, UnpackError, MAX_CHUNK};
pub use token::Token;
pub use tokeniser::{classify, Kind, Tokeniser};
