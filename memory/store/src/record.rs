//! A group's record of 64 bytes: its reference count, and the entries that name its objects.
//!
//! A group's bytes lie in up to [`PIECES`] objects. Each is named by an entry of the record, as a
//! page's object is by an entry of the table, so that compaction moves both in the same way. Each
//! page's entry names the group.
//!
//! Ownership rule: a free record belongs to the holder of the free list's lock. The thread that
//! *takes* a record fills in its entries and then lets pages name it. Each such page has a
//! reference (a *part*), and so has that thread while it works. The thread that drops the last part
//! owns the record, removes the objects and frees it. A reader pins its page's entry, so that this
//! page's part stays, and with it the record.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

use crate::slot::Slot;
use crate::sync::{both, strong, AtomicU64, Ordering, Site};

/// The most objects of a group; all but the last are full.
pub const PIECES: usize = 7;

/// Bytes of a record.
pub(crate) const RECORD: usize = 64;

/// Mask of the reference count: 32 pages and the maker; more only in a damaged table.
const PARTS: u64 = 0xffff;
const STAMP_SHIFT: u32 = 16;
/// Set while the record is taken, so that a record without references is not free before its
/// objects are.
const TAKEN: u64 = 1 << 63;

/// One record. A record of zeros is free.
#[derive(Debug)]
#[repr(C)]
pub struct Record {
    /// Taken, stamp (47 bits), parts (16 bits).
    state: AtomicU64,
    /// The entries of the group's objects, in the order of their bytes. They end with the first
    /// absent entry.
    pieces: [Slot; PIECES],
}

impl Record {
    /// A free record, outside of a file.
    #[cfg(loom)]
    pub fn new() -> Self {
        let pieces = [(); PIECES].map(|()| Slot::new(crate::entry::Word::ABSENT));
        Self { state: AtomicU64::new(0), pieces }
    }

    /// The entries.
    #[inline]
    pub fn pieces(&self) -> &[Slot; PIECES] {
        &self.pieces
    }

    /// Takes the record with `parts` references; `false` if it is not free. `stamp` is one that no
    /// group had before. One thread at a time may call it.
    pub fn take(&self, parts: u32, stamp: u64) -> bool {
        // Pairs with the Release in `free`: the former owner is done with it.
        if self.state.load(strong(Site::TakeAcquire, Ordering::Acquire)) != 0 {
            return false;
        }
        self.set(parts, stamp);
        true
    }

    /// Sets the record's state. Also for recovery, before other threads use the store.
    pub(crate) fn set(&self, parts: u32, stamp: u64) {
        let state = TAKEN | (stamp << STAMP_SHIFT & !TAKEN) | u64::from(parts) & PARTS;
        self.state.store(state, Ordering::Relaxed);
    }

    /// Drops one reference; returns whether it was the last, so that the caller owns the record.
    #[inline]
    #[must_use]
    pub fn drop_part(&self) -> bool {
        // Release: our reads are over. Acquire: for the last one, so are all other threads' reads.
        let order = both(Site::DropAcquire, Site::DropRelease);
        self.state.fetch_sub(1, order) & PARTS == 1
    }

    /// Frees the record. Its entries must name nothing any more.
    pub fn free(&self) {
        // Pairs with the Acquire in `take`.
        self.state.store(0, strong(Site::FreeRecordRelease, Ordering::Release));
    }

    /// The current reference count.
    pub(crate) fn parts(&self) -> u32 {
        u32::try_from(self.state.load(Ordering::Relaxed) & PARTS).expect("16 bits")
    }

    /// Distinguishes this group from earlier ones in the same record. Only for threads with a
    /// reference.
    #[inline]
    pub fn stamp(&self) -> u64 {
        (self.state.load(Ordering::Relaxed) & !TAKEN) >> STAMP_SHIFT
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.state.load(Ordering::Relaxed) & TAKEN != 0
    }
}
