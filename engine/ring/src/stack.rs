//! The stack: a free list that returns the number freed last, whose memory is still in the cache.

use std::fmt;

use crate::sync::{step, strong, AtomicU32, AtomicU64, Ordering, Site};

/// Numbers `0..capacity`, each in the stack or out of it; lock-free, for any number of threads.
///
/// Ownership rule: the thread that pops a number owns the memory behind it until it pushes the
/// number again. `next[n]` belongs to the owner of `n`; other threads may read it, but discard the
/// value when `head` has changed.
pub struct Stack {
    /// The top number plus 1 (0: empty) in the low half. The high half counts changes, so that a
    /// number that was popped and pushed again in between is noticed (the ABA problem).
    head: AtomicU64,
    next: Box<[AtomicU32]>,
}

impl Stack {
    /// Creates a stack that holds all of `0..capacity`, with 0 on top.
    ///
    /// # Panics
    ///
    /// If `capacity` is `u32::MAX`.
    pub fn full(capacity: u32) -> Self {
        assert!(capacity < u32::MAX, "a stack of {capacity} numbers");
        let below = |number: u32| if number + 1 < capacity { number + 2 } else { 0 };
        Self {
            head: AtomicU64::new(u64::from(capacity > 0)),
            next: (0..capacity).map(|number| AtomicU32::new(below(number))).collect(),
        }
    }

    /// Puts back a number that was popped.
    ///
    /// # Panics
    ///
    /// If the number is not below the capacity.
    #[inline]
    pub fn push(&self, number: u32) {
        let next = &self.next[number as usize];
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            next.store(top(head), Ordering::Relaxed);
            // Pairs with the Acquire in `pop`: the owner's accesses to the memory, and `next`, come
            // before.
            let moved = self.head.compare_exchange_weak(
                head,
                after(head, number + 1),
                strong(Site::StackRelease, Ordering::Release),
                Ordering::Relaxed,
            );
            match moved {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pops the number that was pushed last; `None` when the stack is empty.
    #[inline]
    pub fn pop(&self) -> Option<u32> {
        // Pairs with the Release in `push`, also for numbers further down: every change of `head`
        // is a read-modify-write, so it continues the release sequence of those before it.
        let mut head = self.head.load(strong(Site::StackAcquire, Ordering::Acquire));
        loop {
            let number = top(head).checked_sub(1)?;
            let below = self.next[number as usize].load(Ordering::Relaxed);
            let moved = self.head.compare_exchange_weak(
                head,
                after(head, below),
                strong(Site::StackAcquire, Ordering::Acquire),
                strong(Site::StackAcquire, Ordering::Acquire),
            );
            match moved {
                Ok(_) => return Some(number),
                Err(now) => head = now,
            }
        }
    }

    /// The number of numbers in the stack: exact while no thread pushes or pops, otherwise
    /// approximate. The call walks the stack.
    pub fn len(&self) -> usize {
        let mut count = 0;
        let mut at = top(self.head.load(Ordering::Relaxed));
        // Bounded, since other threads may change the list during the walk.
        while at != 0 && count < self.next.len() {
            count += 1;
            at = self.next[at as usize - 1].load(Ordering::Relaxed);
        }
        count
    }

    /// Whether the stack is empty.
    pub fn is_empty(&self) -> bool {
        top(self.head.load(Ordering::Relaxed)) == 0
    }
}

/// The top number plus 1.
#[allow(clippy::cast_possible_truncation, reason = "the low half is meant")]
fn top(head: u64) -> u32 {
    head as u32
}

/// `head` with another top and the change count increased.
fn after(head: u64, top: u32) -> u64 {
    ((head >> 32).wrapping_add(u64::from(step(Site::StackCount))) << 32) | u64::from(top)
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("capacity", &self.next.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_freed_comes_first_and_none_is_lost() {
        let stack = Stack::full(3);
        assert_eq!(
            (stack.pop(), stack.pop(), stack.pop(), stack.pop()),
            (Some(0), Some(1), Some(2), None)
        );
        stack.push(1);
        stack.push(2);
        assert_eq!(stack.len(), 2);
        assert_eq!((stack.pop(), stack.pop()), (Some(2), Some(1)));
        assert!(stack.is_empty());
    }

    #[test]
    fn no_number_has_two_owners() {
        use std::sync::atomic::AtomicBool;
        let stack = Stack::full(4);
        let owned: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        if let Some(number) = stack.pop() {
                            let was = owned[number as usize]
                                .swap(true, std::sync::atomic::Ordering::Relaxed);
                            assert!(!was, "{number} has two owners");
                            owned[number as usize]
                                .store(false, std::sync::atomic::Ordering::Relaxed);
                            stack.push(number);
                        }
                    }
                });
            }
        });
        assert_eq!(stack.len(), 4);
    }
}
