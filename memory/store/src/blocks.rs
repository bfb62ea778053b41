//! Reference counts of the backing device's blocks.
//!
//! Ownership rule: a block without references belongs to the thread that holds the writer's lock,
//! which alone may *take* it. The writer has a reference while it writes the block. Then each entry
//! that names the block has one, from before the entry is published until the thread that removed
//! the entry *drops* the block. Readers have no reference: see `writeback.rs`.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name it"))]

use crate::sync::{strong, AtomicU32, AtomicU8, Ordering, Site};

/// The most references to a block: the objects that it has room for, and the writer.
pub(crate) const MAX_HOLDS: u8 = 33;

/// Added to the count of a block to which a killed server's write may be pending. More than all
/// references together, so the count never reaches 0.
const SHUT: u8 = 64;

/// One count for each block. The count of block 0, the header, is never 0.
#[derive(Debug)]
pub struct Blocks {
    holds: Box<[AtomicU8]>,
    free: AtomicU32,
}

impl Blocks {
    /// `count` blocks, all free but the header.
    pub fn new(count: u32) -> Self {
        let holds = (0..count).map(|block| AtomicU8::new(u8::from(block == 0))).collect();
        Self { holds, free: AtomicU32::new(count.saturating_sub(1)) }
    }

    /// Blocks, the header included.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.holds.len()).expect("it was made for as many")
    }

    /// Free blocks.
    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Whether the block has no references. Only for the thread that may take it.
    #[must_use]
    pub fn is_free(&self, block: u32) -> bool {
        // Pairs with the Release in `drop_hold`: a thread that sees the 0 sees that no entry names
        // the block.
        let acquire = strong(Site::TakeBlockAcquire, Ordering::Acquire);
        self.holds[block as usize].load(acquire) == 0
    }

    /// Takes a free block.
    pub fn take(&self, block: u32) {
        self.holds[block as usize].store(1, Ordering::Relaxed);
        self.free.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds a reference, for an entry about to name a block to which the caller has a reference.
    pub fn hold(&self, block: u32) {
        self.holds[block as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Drops a reference. A block number out of range comes from a damaged entry, and was never
    /// counted.
    pub fn drop_hold(&self, block: u32) {
        let Some(holds) = self.holds.get(block as usize) else { return };
        let release = strong(Site::DropBlockRelease, Ordering::Release);
        if holds.fetch_sub(1, release) == 1 {
            self.free.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// For recovery: counts an entry that names this block; `false` if the entry cannot be right.
    pub(crate) fn count_one(&self, block: u32) -> bool {
        let Some(holds) = self.holds.get(block as usize).filter(|_| block > 0) else {
            return false;
        };
        let held = holds.load(Ordering::Relaxed);
        if held + 1 >= MAX_HOLDS {
            return false;
        }
        if held == 0 {
            self.free.fetch_sub(1, Ordering::Relaxed);
        }
        holds.store(held + 1, Ordering::Relaxed);
        true
    }

    /// For recovery, after all entries are counted: bars a block to which the kernel may still
    /// write on behalf of a killed server. `false` if it is barred already or is not a block for
    /// pages.
    pub(crate) fn shut(&self, block: u32) -> bool {
        let holds = self.holds.get(block as usize).filter(|_| block > 0);
        let Some(holds) = holds.filter(|holds| holds.load(Ordering::Relaxed) < SHUT) else {
            return false;
        };
        if holds.fetch_add(SHUT, Ordering::Relaxed) == 0 {
            self.free.fetch_sub(1, Ordering::Relaxed);
        }
        true
    }
}

const _: () = assert!(SHUT > MAX_HOLDS && SHUT as u32 + (MAX_HOLDS as u32) < 256);
