//! A group's own 64 bytes: how many pages are in it, and the entries that name its objects.
//!
//! A group is pages that were compressed as one. Its bytes lie in up to [`PIECES`] objects, each
//! named by an entry of the record as a page's object is by the table's: compaction moves them in
//! the same way. Pages say in their entries which group they are in.
//!
//! Ownership rule: a free record belongs to whoever holds the lock of the free ones. Who *takes*
//! one fills its entries in and then lets pages name it; each page that does, and the one that took
//! it while it works, has a *part* in it. Who gives the last part up has the record, takes the
//! objects out and says that it is free. A reader pins its page's entry, so that this page's part
//! stays, and with it the record.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

use crate::slot::Slot;
use crate::sync::{both, strong, AtomicU64, Ordering, Site};

/// The most objects of a group: all full ones but the last.
pub const PIECES: usize = 7;

/// Bytes of a record.
pub(crate) const RECORD: usize = 64;

/// Parts are counted below this: 32 pages and who makes the group, more only in a damaged table.
const PARTS: u64 = 0xffff;
const STAMP_SHIFT: u32 = 16;
/// Set while the record is taken, so that one without parts is not free before its objects are.
const TAKEN: u64 = 1 << 63;

/// One record. All zero is a free one.
#[derive(Debug)]
#[repr(C)]
pub struct Record {
    /// Taken, stamp (47 bits), parts (16 bits).
    state: AtomicU64,
    /// In the order of their bytes; none after the first that names nothing.
    pieces: [Slot; PIECES],
}

impl Record {
    /// A free one, outside of a file.
    #[cfg(loom)]
    pub fn new() -> Self {
        let pieces = [(); PIECES].map(|()| Slot::new(crate::slot::Word::ABSENT));
        Self { state: AtomicU64::new(0), pieces }
    }

    /// The entries.
    #[inline]
    pub fn pieces(&self) -> &[Slot; PIECES] {
        &self.pieces
    }

    /// Takes the record with `parts` parts; `false` if it is not free. `stamp` is one that no group
    /// had before. For one thread at a time.
    pub fn take(&self, parts: u32, stamp: u64) -> bool {
        // Pairs with the Release in `free`: who had it is done with it.
        if self.state.load(strong(Site::TakeAcquire, Ordering::Acquire)) != 0 {
            return false;
        }
        self.set(parts, stamp);
        true
    }

    /// For recovery as well, before anybody else is there.
    pub(crate) fn set(&self, parts: u32, stamp: u64) {
        let state = TAKEN | (stamp << STAMP_SHIFT & !TAKEN) | u64::from(parts) & PARTS;
        self.state.store(state, Ordering::Relaxed);
    }

    /// Gives one part up; whether it was the last, and the record is the caller's to free.
    #[inline]
    #[must_use]
    pub fn leave(&self) -> bool {
        // Release: our reading is over. Acquire: so is that of all the others, for the last one.
        let order = both(Site::LeaveAcquire, Site::LeaveRelease);
        self.state.fetch_sub(1, order) & PARTS == 1
    }

    /// Says that it is free: the entries name nothing any more.
    pub fn free(&self) {
        // Pairs with the Acquire in `take`.
        self.state.store(0, strong(Site::FreeRecordRelease, Ordering::Release));
    }

    /// How many have a part in it; it may be another number at once.
    pub(crate) fn parts(&self) -> u32 {
        u32::try_from(self.state.load(Ordering::Relaxed) & PARTS).expect("16 bits")
    }

    /// What tells this group from those that had the record before. For who has a part in it.
    #[inline]
    pub fn stamp(&self) -> u64 {
        (self.state.load(Ordering::Relaxed) & !TAKEN) >> STAMP_SHIFT
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.state.load(Ordering::Relaxed) & TAKEN != 0
    }
}
