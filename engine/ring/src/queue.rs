//! The ring: cells with sequence numbers, after D. Vyukov's bounded queue.
#![expect(unsafe_code, reason = "cells are shared and each belongs to one thread at a time")]

use std::fmt;
use std::mem::MaybeUninit;

use crate::sync::{strong, AtomicUsize, Ordering, Site, UnsafeCell};

/// A bounded lock-free queue for any number of producers and consumers.
///
/// Ownership rule: positions count up for ever and position `p` uses cell `p % capacity`. A cell
/// whose number is `p` is empty and belongs to the producer that moves `tail` from `p` to `p + 1`.
/// A cell whose number is `p + 1` is full and belongs to the consumer that moves `head` from `p` to
/// `p + 1`; when it has taken the item out it numbers the cell `p + capacity`, for the next lap.
/// Only the owner touches the value, and only the owner changes the number.
pub struct Ring<T> {
    /// Next position to write. Relaxed: it only assigns positions; the cell's number provides the
    /// ordering. Padded, because producers and consumers would otherwise contend for one cache
    /// line.
    tail: Padded<AtomicUsize>,
    /// Next position to read; as `tail`.
    head: Padded<AtomicUsize>,
    cells: Box<[Cell<T>]>,
    mask: usize,
}

struct Cell<T> {
    number: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// Two cache lines: the prefetcher of x86 fetches them in pairs.
#[repr(align(128))]
struct Padded<T>(T);

// SAFETY: an item goes in on one thread and comes out on another, which `T: Send` allows; the
// ring hands out no reference to it, and by the ownership rule one thread at a time has the cell.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as above; all shared access goes through the cells' numbers.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    /// Creates a ring for at least `capacity` items, rounded up to a power of two, and at least 2.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(2).next_power_of_two();
        let cells = (0..capacity).map(|position| Cell {
            number: AtomicUsize::new(position),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        });
        Self {
            tail: Padded(AtomicUsize::new(0)),
            head: Padded(AtomicUsize::new(0)),
            cells: cells.collect(),
            mask: capacity - 1,
        }
    }

    /// Adds `item`.
    ///
    /// # Errors
    ///
    /// The ring is full, or a consumer has not finished with the cell that the item needs. The item
    /// is returned.
    #[inline]
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut position = self.tail.0.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[position & self.mask];
            // Pairs with the Release in `pop`: the consumer has taken the previous item out.
            let number = cell.number.load(strong(Site::PushAcquire, Ordering::Acquire));
            if number == position {
                let claim = self.tail.0.compare_exchange_weak(
                    position,
                    position.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                match claim {
                    Ok(_) => {
                        // SAFETY: the number was `position` and we moved `tail` past it, so by the
                        // ownership rule the cell is empty and ours until we number it.
                        cell.value.with_mut(|value| unsafe { value.write(MaybeUninit::new(item)) });
                        // Pairs with the Acquire in `pop`: publishes the write above.
                        cell.number.store(
                            position.wrapping_add(1),
                            strong(Site::PushRelease, Ordering::Release),
                        );
                        return Ok(());
                    }
                    Err(now) => position = now,
                }
            } else if is_before(number, position) {
                // The cell still holds the item of the previous lap.
                return Err(item);
            } else {
                // Another producer claimed this position.
                position = self.tail.0.load(Ordering::Relaxed);
            }
        }
    }

    /// Removes the oldest item; `None` when the ring is empty or that item is still being written.
    #[inline]
    pub fn pop(&self) -> Option<T> {
        let mut position = self.head.0.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[position & self.mask];
            let full = position.wrapping_add(1);
            // Pairs with the Release in `push`: the item is written.
            let number = cell.number.load(strong(Site::PopAcquire, Ordering::Acquire));
            if number == full {
                let claim = self.head.0.compare_exchange_weak(
                    position,
                    full,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                match claim {
                    Ok(_) => {
                        // SAFETY: the number was `position + 1` and we moved `head` past it, so by
                        // the ownership rule the cell is full and ours until we number it.
                        let item = cell.value.with_mut(|value| unsafe { value.read() });
                        // Pairs with the Acquire in `push`: the item has been read.
                        cell.number.store(
                            position.wrapping_add(self.cells.len()),
                            strong(Site::PopRelease, Ordering::Release),
                        );
                        // SAFETY: a full cell holds an initialised item, and the cell's new number
                        // says empty, so this is the only copy of it.
                        return Some(unsafe { item.assume_init() });
                    }
                    Err(now) => position = now,
                }
            } else if is_before(number, full) {
                return None;
            } else {
                // Another consumer claimed this position.
                position = self.head.0.load(Ordering::Relaxed);
            }
        }
    }

    /// Whether a push would have found room: a snapshot, which may be stale at once.
    ///
    /// The call reads only the memory that a push reads, so that asking first costs a producer
    /// nothing. `len` reads memory that the consumers write.
    #[inline]
    pub fn has_room(&self) -> bool {
        let position = self.tail.0.load(Ordering::Relaxed);
        // Relaxed: the answer is only a hint. The number is behind the position while the cell is
        // occupied, and ahead of it when another producer has just claimed the position.
        let number = self.cells[position & self.mask].number.load(Ordering::Relaxed);
        !is_before(number, position)
    }

    /// The number of items that are in the ring, or are being pushed or popped: a snapshot, which
    /// may be stale at once.
    pub fn len(&self) -> usize {
        // Head first: it cannot pass the tail, so the difference is not negative. The bound below
        // covers the case in which both moved between the two loads.
        let head = self.head.0.load(Ordering::Relaxed);
        let tail = self.tail.0.load(Ordering::Relaxed);
        if is_before(tail, head) {
            return 0;
        }
        tail.wrapping_sub(head).min(self.cells.len())
    }

    /// Whether [`len`](Self::len) is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of items for which there is room.
    pub fn capacity(&self) -> usize {
        self.cells.len()
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// Whether `a` comes before `b` on a counter that wraps.
fn is_before(a: usize, b: usize) -> bool {
    a.wrapping_sub(b) > usize::MAX / 2
}
