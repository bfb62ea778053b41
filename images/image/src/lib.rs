//! The image of a saved VM: one file of compressed pages, device state and an index; or a save of a
//! store, whose saves share their pages.
//!
//! `docs/image.md` specifies the format; this crate uses its terms.
//!
//! ```text
//!  pages ─► Writer ─► slots ─► unit ─► threads: encode, decode, compare ─────► file ─┐ fsync,
//!            │ page map: the last slot of each page                                  ├─► link
//!            └─ finish(State) ─► state, index, trailer ──────────────────────────────┘
//!
//!  Image::open ─► trailer, header, state, index ─► Units::read(number) ─► plain bytes of its pages
//!  verify ─► reads every byte, names each damaged part   check_units ─► checksums of all units
//! ```
//!
//! In a [`Store`], a page that a pack holds is found by its hash and not written again:
//!
//! ```text
//!  pages ─► Sharing ─┬─ equal to a page in a pack: that page's slot
//!                    ├─ little changed since the parent: a difference ─► unit ─► new pack ─► link,
//!                    └─ else: the page ────────────────────────────────► unit ─►             then
//!  finish(State) ─► state, index into all packs ───────────────────────────────► save ─────► link
//! ```
//!
//! A [`Writer`] accepts pages in any order and any number of times; the last version of a page
//! counts. A same-filled page (one that repeats an 8-byte word) gets no slot. Any number of
//! threads may read an [`Image`], each with its own [`Units`].
//!
//! # What fails
//!
//! Writing fails if the file system fails, or if a unit does not decode to its pages. A writer that
//! fails, is dropped or is killed leaves no file at the image's name. Reading treats the whole file
//! as hostile input. [`Damage`] names the damaged part by number and offset. Nothing panics, and
//! the file's length and the limits below bound the memory that is allocated.
//!
//! # Limits
//!
//! 16 TiB of RAM in 4096 blocks, an index of 1 GiB, a state of 512 MiB. A writer holds 8 bytes per
//! guest page and about `2 * (threads * 5 + 3)` units in memory, and in a store at most 1.3 GiB of
//! hashes (`docs/image.md`, "Memory of a writer"); an open image holds its index and state.

mod adapt;
mod apart;
mod collect;
mod compress;
mod damage;
mod disk;
mod extents;
mod file;
mod finish;
mod hot;
mod image_file;
mod index;
mod layout;
mod map;
mod options;
mod pack;
mod packs;
mod part;
mod reader;
mod reads;
mod rewrite;
mod save;
mod seed;
mod sharing;
mod sparse;
mod state;
mod store;
mod unit_file;
mod units;
mod verify;
mod writeback;
mod writer;

pub use collect::Collected;
pub use damage::Damage;
pub use extents::{Content, Extent};
pub use file::{is_at, LinkError, NewFile};
pub use finish::Finished;
pub use hot::{HotPage, HotSet};
pub use image_file::{ImageFile, RemoteFile};
pub use index::{Block, Index, UnitEntry};
pub use layout::{Shape, HEADER_LEN, MAX_STATE, MAX_UNIT, MIN_UNIT, TRAILER_LEN, VERSION};
pub use map::RamBlock;
pub use options::{Options, Summary, WriteError};
pub use pack::{pack_name, PackRef};
pub use reader::Image;
pub use reads::{readings, ReadPart, Reading};
pub use seed::{SeedPacks, SeedReader};
pub use state::State;
pub use store::{remove_image, SaveInfo, Store, STORE_FILE};
pub use units::Units;
pub use verify::{check_units, verify, verify_but, Finding, Report};
pub use writer::Writer;
