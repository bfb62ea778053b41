//! The arena: one mapping, a free list, and slots that return to it when dropped.
#![expect(unsafe_code, reason = "hands out disjoint parts of one mapping made with mmap")]

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::time::Instant;

use ring::{EventCount, Stack};
use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

use crate::PAGE_SIZE;

/// A fixed number of equal slots of memory.
///
/// Ownership rule: a slot's bytes belong to the one [`Slot`] with its number, and to no thread
/// while the number is in `free`. The stack's own ordering passes the bytes from one owner to the
/// next.
///
/// The slot freed last is given out first: its bytes are still in the cache, and slots that were
/// never needed are never touched. (A queue touches every slot in turn: page faults then took 1.7
/// of 2.4 CPU seconds a GiB.)
pub struct Arena {
    base: NonNull<u8>,
    len_bytes: usize,
    slot_bytes: usize,
    free: Stack,
    freed: EventCount,
}

// SAFETY: the mapping is plain memory without thread affinity, and by the ownership rule on `Arena`
// no two threads reach the same byte of it.
unsafe impl Send for Arena {}
// SAFETY: as above; shared access is to `free` and `freed`, which are `Sync`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `slots` slots of `slot_bytes` each, rounded up to whole pages; both at least one.
    ///
    /// # Errors
    ///
    /// The kernel's error when it refuses the mapping; `InvalidInput` when the sizes overflow.
    pub fn new(slots: usize, slot_bytes: usize) -> io::Result<Arc<Self>> {
        let too_large = || {
            let text = format!("arena of {slots} slots of {slot_bytes} bytes does not fit");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let count = u32::try_from(slots.max(1)).map_err(|_| too_large())?;
        let slot_bytes =
            slot_bytes.max(1).checked_next_multiple_of(PAGE_SIZE).ok_or_else(too_large)?;
        let len_bytes = slot_bytes
            .checked_mul(slots.max(1))
            .filter(|&len| isize::try_from(len).is_ok())
            .ok_or_else(too_large)?;
        // SAFETY: a new private mapping at an address of the kernel's choice: it replaces no other.
        let base = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        let free = Stack::full(count);
        Ok(Arc::new(Self { base, len_bytes, slot_bytes, free, freed: EventCount::new() }))
    }

    /// Takes a free slot, if there is one. It holds the bytes of its last owner, or zeros.
    #[inline]
    pub fn take(self: &Arc<Self>) -> Option<Slot> {
        let number = self.free.pop()?;
        Some(Slot { arena: Arc::clone(self), number })
    }

    /// Waits for a free slot until `deadline`, or until `stop` returns true.
    ///
    /// `stop` is called each time the wait wakes. The thread that makes it true must call
    /// [`wake_all`](Self::wake_all) afterwards. A slot that is free is returned even then.
    pub fn take_until(
        self: &Arc<Self>,
        deadline: Option<Instant>,
        stop: impl Fn() -> bool,
    ) -> Option<Slot> {
        let end = |slot: Option<Slot>| match slot {
            Some(slot) => Some(Some(slot)),
            None => stop().then_some(None),
        };
        self.freed.wait_until(deadline, || end(self.take())).flatten()
    }

    /// Makes every thread in [`take_until`](Self::take_until) call its `stop` again.
    pub fn wake_all(&self) {
        self.freed.notify_all();
    }

    /// The number of free slots; approximate while other threads take and free slots. The call
    /// walks the free list.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    fn slot_base(&self, number: u32) -> NonNull<u8> {
        let offset = self.slot_bytes * number as usize;
        // SAFETY: numbers are below the slot count, so the offset is inside the mapping, whose
        // length fits an `isize`.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping. Each slot holds an `Arc` of the arena,
        // so no slot is left. The result is dropped: unmapping our own mapping cannot fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.len_bytes / self.slot_bytes;
        f.debug_struct("Arena")
            .field("slots", &slots)
            .field("slot_bytes", &self.slot_bytes)
            .field("free", &self.free())
            .finish()
    }
}

/// One slot of an [`Arena`]; derefs to all of its bytes. Dropping it frees the slot.
pub struct Slot {
    arena: Arc<Arena>,
    number: u32,
}

impl Slot {}

impl Deref for Slot {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let base = self.arena.slot_base(self.number);
        // SAFETY: `slot_bytes` bytes from there are in the mapping, which the kernel made readable
        // and filled with zeros; by the ownership rule they are ours, and `&self` rules out a
        // writer.
        unsafe { slice::from_raw_parts(base.as_ptr(), self.arena.slot_bytes) }
    }
}

impl DerefMut for Slot {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let base = self.arena.slot_base(self.number);
        // SAFETY: as in `deref`, and `&mut self` on a type that is not `Clone` makes this the only
        // reference.
        unsafe { slice::from_raw_parts_mut(base.as_ptr(), self.arena.slot_bytes) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.arena.free.push(self.number);
        self.arena.freed.notify_one();
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("number", &self.number).finish_non_exhaustive()
    }
}
