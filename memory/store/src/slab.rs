//! A slab's state of 24 bytes: its objects in use, and its owner.
//!
//! Ownership rule: only the slab's owner may *claim* a free object. The owner is the worker whose
//! current slab it is (`Owned`), or the holder of the class's lock (`Listed`, `Full`, `Leaving`).
//! An object in use is *released* without a lock by the one thread that removed its entry from the
//! table, whichever thread owns the slab. So a claim needs no retry: clear bits stay clear until
//! the owner sets them.
//!
//! The role changes under the class's lock. A slab is never lost from the lists: a thread that
//! changes the role looks at the objects afterwards, a thread that frees an object looks at the
//! role afterwards, and a fence between the two steps on either side ensures that at least one of
//! them sees what the other did.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

use crate::sync::{fence_seq_cst, strong, AtomicU32, AtomicU64, Ordering, Site};

/// No slab: the end of a list.
pub(crate) const NIL: u32 = u32::MAX;

/// The most objects in a slab.
pub(crate) const MAX_OBJECTS: u32 = 64;

/// The class of a slab that belongs to none. A thread with a class's lock reads class and role one
/// after the other: only a slab of that class cannot change in between.
pub(crate) const NO_CLASS: u32 = 0xffff;

/// The current use of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// The slab is an address without memory.
    Bare = 0,
    /// The slab has memory, and belongs to no class yet.
    Ready = 1,
    /// The slab has free objects and is in its class's list.
    Listed = 2,
    /// The slab is a worker's current slab.
    Owned = 3,
    /// The slab has no free object, or one was just freed.
    Full = 4,
    /// Compaction is moving the slab's objects out.
    Leaving = 5,
}

/// The next step of the thread that freed an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freed {
    /// Nothing is left to do.
    Done,
    /// Take the class's lock and look at the slab again.
    LookAgain,
}

/// The state of one slab. All zeros is a bare slab.
#[derive(Debug)]
#[repr(C)]
pub struct Slab {
    /// A set bit marks an object in use, or lies beyond the last object. Pairs with itself: see
    /// `claim` and `release`.
    used: AtomicU64,
    /// Role, class in the upper half. Changed under the class's lock.
    role: AtomicU32,
    /// List links; protected by the lock of the list.
    next: AtomicU32,
    prev: AtomicU32,
    _pad: u32,
}

impl Slab {
    /// A slab outside of a file, with this many objects, all free.
    #[cfg(loom)]
    pub fn new(role: Role, objects: u32) -> Self {
        Self {
            used: AtomicU64::new(beyond(objects)),
            role: AtomicU32::new(role as u32),
            next: AtomicU32::new(NIL),
            prev: AtomicU32::new(NIL),
            _pad: 0,
        }
    }

    /// Makes this a slab of `objects` free objects of `class`. Only for the owner, when no object
    /// of the slab is in use.
    pub fn reset(&self, role: Role, class: u32, objects: u32) {
        self.used.store(beyond(objects), Ordering::Relaxed);
        self.role.store(role as u32 | class << 16, Ordering::Relaxed);
    }

    /// Claims the lowest free object. Only for the owner.
    #[inline]
    pub fn claim(&self) -> Option<u32> {
        // Pairs with the Release in `release`: the last user of the object is done with it.
        let used = self.used.load(strong(Site::ClaimAcquire, Ordering::Acquire));
        let index = used.trailing_ones();
        if index == MAX_OBJECTS {
            return None;
        }
        self.used.fetch_or(1 << index, Ordering::Relaxed);
        Some(index)
    }

    /// For recovery: claims this object; `false` if it is in use already.
    pub(crate) fn claim_this(&self, index: u32) -> bool {
        self.used.fetch_or(1 << index, Ordering::Relaxed) & 1 << index == 0
    }

    /// Frees an object that the caller owns. `objects` is the number of objects in the slab.
    #[inline]
    pub fn release(&self, index: u32, objects: u32) -> Freed {
        // Pairs with the Acquire in `claim`: we are done with the bytes.
        let order = strong(Site::FreeRelease, Ordering::Release);
        let used = self.used.fetch_and(!(1 << index), order) & !(1 << index);
        fence_seq_cst(Site::FreeFence);
        // If this was the last object, the slab may have been freed meanwhile. The role is then any
        // bytes, and where its region has no memory, this read allocates a page. The caller looks
        // again under locks before it changes anything.
        match self.role() {
            Role::Full => Freed::LookAgain,
            Role::Listed if used == beyond(objects) => Freed::LookAgain,
            _ => Freed::Done,
        }
    }

    /// Changes the role under the class's lock, and returns the used bits as they are afterwards.
    pub fn set_role(&self, role: Role) -> u64 {
        let class = self.role.load(Ordering::Relaxed) & 0xffff_0000;
        self.role.store(role as u32 | class, Ordering::Relaxed);
        fence_seq_cst(Site::RoleFence);
        self.used.load(Ordering::Relaxed)
    }

    /// The role. It may change at once, unless the caller holds the class's lock.
    #[inline]
    pub fn role(&self) -> Role {
        match self.role.load(Ordering::Relaxed) & 0xff {
            1 => Role::Ready,
            2 => Role::Listed,
            3 => Role::Owned,
            4 => Role::Full,
            5 => Role::Leaving,
            _ => Role::Bare,
        }
    }

    pub(crate) fn class(&self) -> u32 {
        self.role.load(Ordering::Relaxed) >> 16
    }

    pub(crate) fn used_bits(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Objects in use, of `objects`.
    pub(crate) fn in_use(&self, objects: u32) -> u32 {
        self.used_bits().count_ones() - (MAX_OBJECTS - objects)
    }

    /// Whether no object is in use; if so, all former users are done with the bytes. The answer is
    /// stable only for the owner.
    pub fn is_empty(&self, objects: u32) -> bool {
        // Pairs with the Release in `release`: the slab's memory may go to another class.
        self.used.load(strong(Site::EmptyAcquire, Ordering::Acquire)) == beyond(objects)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used_bits() == u64::MAX
    }

    pub(crate) fn next(&self) -> u32 {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn set_next(&self, slab: u32) {
        self.next.store(slab, Ordering::Relaxed);
    }

    pub(crate) fn prev(&self) -> u32 {
        self.prev.load(Ordering::Relaxed)
    }

    pub(crate) fn set_prev(&self, slab: u32) {
        self.prev.store(slab, Ordering::Relaxed);
    }
}

/// The bits beyond the last of `objects` objects.
pub(crate) fn beyond(objects: u32) -> u64 {
    if objects >= MAX_OBJECTS {
        0
    } else {
        u64::MAX << objects
    }
}
