//! Which blocks of the backing device are in use: how many entries name each.
//!
//! Ownership rule: a block that nobody holds belongs to the one thread that may *take* (the
//! writer's lock is held). It holds the block while it writes it; then each entry that names it
//! does, from before it is published until whoever swapped it out has *left*. Readers hold nothing:
//! see `writeback.rs`.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name it"))]

use crate::sync::{strong, AtomicU32, AtomicU8, Ordering, Site};

/// The most that may hold a block: the objects that it has room for, and the writer.
pub(crate) const MAX_HOLDS: u8 = 33;

/// Added to what holds a block that nobody knows what is yet written to: more than can leave it.
const SHUT: u8 = 64;

/// One byte for each block; that of block 0, the header, is never free.
#[derive(Debug)]
pub struct Blocks {
    holds: Box<[AtomicU8]>,
    free: AtomicU32,
}

impl Blocks {
    /// All of `count` blocks, the header among them, free but for the header.
    pub fn new(count: u32) -> Self {
        let holds = (0..count).map(|block| AtomicU8::new(u8::from(block == 0))).collect();
        Self { holds, free: AtomicU32::new(count.saturating_sub(1)) }
    }

    /// Blocks, the header among them.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.holds.len()).expect("it was made for as many")
    }

    /// Blocks that nobody holds.
    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Whether nobody holds the block, for the thread that may take.
    #[must_use]
    pub fn is_free(&self, block: u32) -> bool {
        // Pairs with the Release in `leave`: no entry names it, and all who look see that.
        let acquire = strong(Site::TakeBlockAcquire, Ordering::Acquire);
        self.holds[block as usize].load(acquire) == 0
    }

    /// Takes a block that is free.
    pub fn take(&self, block: u32) {
        self.holds[block as usize].store(1, Ordering::Relaxed);
        self.free.fetch_sub(1, Ordering::Relaxed);
    }

    /// One more entry is about to name a block that the caller holds.
    pub fn hold(&self, block: u32) {
        self.holds[block as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The block is named by one entry less, or the writer is done with it. A block that is not
    /// there was named by a damaged entry, and is not counted.
    pub fn leave(&self, block: u32) {
        let Some(holds) = self.holds.get(block as usize) else { return };
        let release = strong(Site::LeaveBlockRelease, Ordering::Release);
        if holds.fetch_sub(1, release) == 1 {
            self.free.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// For recovery: an entry names this block; `false` if it cannot be right.
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

    /// For recovery, when the entries are counted: the kernel may still write to this block what a
    /// killed server has asked for. It is never free; `false` if that is so already, or it is no
    /// block for pages.
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
