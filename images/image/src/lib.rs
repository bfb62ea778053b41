//! The image of a saved VM: one file with compressed pages, device state and an index.
//!
//! `docs/image.md` is the format; the names here are those of that document.
//!
//! ```text
//!  pages ─► Writer ─► slots ─► unit ─► lanes: encode, decode again, compare ─► file ─┐ fsync,
//!            │ page map: the last slot of each page                                  ├─► link
//!            └─ finish(State) ─► state, index, trailer ──────────────────────────────┘
//!
//!  Image::open ─► trailer, header, state, index ─► Units::read(number) ─► plain bytes of its pages
//!  verify ─► every byte, by name
//! ```
//!
//! A [`Writer`] takes pages in any order and any number of times; the last version counts. A page
//! that repeats a word of 8 bytes gets no slot. An [`Image`] is read by any number of threads, each
//! with its own [`Units`].
//!
//! # What fails
//!
//! Writing: the file system, and a unit that does not decode to its pages. Whatever fails, or a
//! writer that is dropped or killed, leaves no file at the image's name. Reading: everything in the
//! file is hostile input. [`Damage`] says which part is not sound, by number and offset; nothing
//! panics, and memory is allocated by the file's length and the limits below.
//!
//! # Limits
//!
//! 16 TiB of RAM in 4096 blocks, an index of 1 GiB, a state of 512 MiB. A writer holds 8 bytes a
//! page of the guest and about `2 * (threads * 5 + 2)` units; an open image holds its index and
//! state.

mod compress;
mod damage;
mod extents;
mod file;
mod index;
mod layout;
mod map;
mod reader;
mod state;
mod verify;
mod writer;

pub use damage::Damage;
pub use extents::{Content, Extent};
pub use index::{Block, Index, UnitEntry};
pub use layout::{Shape, HEADER_LEN, MAX_UNIT, MIN_UNIT, TRAILER_LEN, VERSION};
pub use map::RamBlock;
pub use reader::{Image, Units};
pub use state::State;
pub use verify::{verify, Finding, Report};
pub use writer::{Finished, Options, Summary, WriteError, Writer};
