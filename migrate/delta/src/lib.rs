//! Pages that are sent again go as their difference from what was sent before.
//!
//! Both ends of a stream hold a cache of as many pages. The sender says in a *table* beside each
//! chunk which of its pages go into which slot, and which of them stand in the chunk as a
//! difference (exclusive or) from what was in that slot. The receiver does as the table says and
//! knows nothing of addresses. A page that has not changed is zeros then, one that has changed a
//! little is nearly so, and whatever codec comes next makes next to nothing of it.
//!
//! ```text
//!  sender:    chunk, addresses of its pages ─► Sender ─► chunk with differences, table ─► codec ─►
//!  receiver:  ─► codec ─► chunk with differences, table ─► Receiver ─► chunk
//! ```
//!
//! Both work on one stream's chunks in their order. The two caches are equal as long as they have
//! seen the same tables, so the receiver's must see each table once. Nothing here finds out when
//! they are not: a hash over the plain bytes has to (W12 of the wire protocol). Addresses are the
//! sender's business alone: two pages that take each other for the same cost bytes, never a wrong
//! one.
//!
//! The caches hold plain pages: compressed ones would hold 2.6 times as many, for 2 us a page.
//!
//! # Limits
//! A cache takes its memory as slots are used, a segment of 256 pages at a time. Where the kernel
//! refuses some the sender does without; the receiver, which cannot, says so. Whoever sizes a cache
//! sees to it that the host has the memory: a kernel that overcommits refuses nothing and kills
//! somebody later. Two pages of one address take each other's slot: whoever has addresses in
//! several RAM blocks makes them one. A table is at most [`TABLE_ROOM`] bytes: pages for which it
//! has no room go as they are and leave the caches alone.

mod cache;
mod receiver;
mod sender;
mod table;

pub use receiver::{Receiver, TableError};
pub use sender::{Pass, Sender};

/// Bytes that a table takes at most. 128 pages that have nothing to do with each other need 1,200.
pub const TABLE_ROOM: usize = 2048;

/// Bytes before each page of a run: the record's address and flags.
pub const RECORD_HEAD: usize = 8;

/// Of pages that a table named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Put into the cache; all of them.
    pub stored: u64,
    /// Of these, those that were a difference.
    pub deltas: u64,
}
