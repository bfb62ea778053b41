//! Deltas: a page sent again goes as its difference from the version sent before.
//!
//! Both ends of a stream hold a page cache of the same size. Beside each chunk the sender sends a
//! *table*: which of the chunk's pages go into which slot, and which of them are in the chunk as a
//! difference (exclusive or) from the slot's previous page. The receiver follows the table and
//! knows nothing of addresses. An unchanged page becomes zeros, a slightly changed one almost
//! zeros, and the codec reduces either to next to nothing.
//!
//! ```text
//!  sender:    chunk, addresses of its pages ─► Sender ─► chunk with differences, table ─► codec ─►
//!  receiver:  ─► codec ─► chunk with differences, table ─► Receiver ─► chunk
//! ```
//!
//! Both process one stream's chunks in order. The two caches are equal as long as they have
//! processed the same tables, so the receiver must process each table once. This crate does not
//! notice when the caches differ: a hash over the plain bytes has to (W12 of the wire protocol).
//! Only the sender uses addresses: two pages that it takes for the same cost bytes, never a wrong
//! byte.
//!
//! The caches hold plain pages: compressed ones would hold 2.6 times as many, for 2 us a page.
//!
//! A page must be stored the first time it is sent, which gains nothing if it is never sent again.
//! A [`Budget`] bounds that cost: beyond it, only pages sent again are stored.
//!
//! Slots behind those of the cache are the pages of a [`Seed`], which the destination has from
//! another time: a saved VM, say. The destination offers their hashes. A page with such a hash goes
//! as zeros and its slot. These slots never change, and the tables of any stream may refer to them.
//!
//! # Limits
//! A cache allocates memory as its slots are used, in segments of 256 pages. Where an allocation
//! fails, the sender sends the page itself; the receiver, which has no choice, returns an error.
//! The caller that sizes a cache must make sure that the host has the memory: a kernel that
//! overcommits refuses nothing, and kills a process later. Two pages of one address compete for one
//! slot: a caller whose addresses are in several RAM blocks must combine the two. A table has at
//! most [`TABLE_ROOM`] bytes: pages beyond that go as they are and do not change the caches.

mod budget;
mod cache;
mod channels;
mod output;
mod receiver;
mod seed;
mod sender;
mod table;

pub use budget::Budget;
pub use cache::slots;
pub use channels::{ChannelCache, ChannelPass, ChannelSender};
pub use receiver::{Receiver, TableError};
pub use seed::{
    fill, offer, page_hash, refers_to_cache, refers_to_seed, FillError, Known, OfferError,
    PageHash, PageReader, Seed, SeedKey, SeedPages, MAX_OFFER, MAX_SEED,
};
pub use sender::{Pass, Sender};

/// The most bytes of a table. 128 pages with unrelated addresses need 1,200.
pub const TABLE_ROOM: usize = 2048;

/// Bytes before each page of a main stream: the record's address and flags.
pub const RECORD_HEAD: usize = 8;

/// The bytes between the pages of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// [`RECORD_HEAD`] bytes before each page.
    Records,
    /// None: the pages of a multifd packet.
    Bodies,
}

/// A table as it was received.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// That of the chunk.
    pub layout: Layout,
}

impl<'a> From<&'a [u8]> for Table<'a> {
    /// A table of records.
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, layout: Layout::Records }
    }
}

impl Layout {
    fn between(self) -> usize {
        match self {
            Self::Records => RECORD_HEAD,
            Self::Bodies => 0,
        }
    }
}

/// Counts of the pages in a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages put into the cache.
    pub stored: u64,
    /// Pages that were sent as a difference from the cache.
    pub deltas: u64,
    /// Pages that the destination had in its seed.
    pub seeded: u64,
}
