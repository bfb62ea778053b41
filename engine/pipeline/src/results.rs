//! The ring of results: where the outputs of one submitter's jobs arrive.

use std::sync::Arc;
use std::time::Instant;

use ring::{EventCount, Fenced, Ring};

use crate::sync::{AtomicBool, AtomicU64, Ordering, Padded};

/// One submitter's results, in the order in which workers finished.
///
/// Any number of threads may push and pop.
#[derive(Debug)]
pub struct Results<T> {
    ring: Ring<T>,
    /// Poppers sleep here.
    items: EventCount,
    /// Pushers sleep here.
    room: EventCount,
    /// Flushers sleep here.
    settled: EventCount,
    /// Release in `close`, Acquire wherever it is read.
    closed: AtomicBool,
    /// Jobs handed to the lanes with these results. Written by submitters.
    queued: Padded<AtomicU64>,
    /// Jobs among them that have been dealt with. Written by workers, with Release: what they
    /// pushed before is seen by whoever reads it with Acquire.
    done: Padded<AtomicU64>,
}

/// What [`Results::pop_until`] came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Popped<T> {
    /// The oldest result.
    Item(T),
    /// The deadline passed with nothing there.
    Timeout,
    /// Closed, and nothing is left.
    Closed,
}

impl<T> Results<T> {
    /// Room for at least `capacity` results, rounded up to a power of two.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: Ring::new(capacity),
            items: EventCount::new(),
            room: EventCount::new(),
            settled: EventCount::new(),
            closed: AtomicBool::new(false),
            queued: Padded::default(),
            done: Padded::default(),
        })
    }

    /// Puts `item` in, waiting while there is no room.
    ///
    /// # Errors
    ///
    /// Gives it back when the results are closed.
    #[inline]
    pub fn push(&self, item: T) -> Result<(), T> {
        self.put(item)?;
        self.items.notify_one();
        Ok(())
    }

    /// `push` without the notification.
    #[inline]
    fn put(&self, item: T) -> Result<(), T> {
        if self.is_closed() {
            return Err(item);
        }
        self.ring.push(item).or_else(|item| self.push_wait(item))
    }

    #[cold]
    fn push_wait(&self, item: T) -> Result<(), T> {
        let mut item = Some(item);
        let pushed = self.room.wait_until(None, || {
            if self.is_closed() {
                return Some(());
            }
            item = item.take().and_then(|item| self.ring.push(item).err());
            item.is_none().then_some(())
        });
        debug_assert!(pushed.is_some(), "without a deadline the wait ends only when ready");
        item.map_or(Ok(()), Err)
    }

    /// The oldest result, if there is one.
    #[inline]
    pub fn pop(&self) -> Option<T> {
        let item = self.ring.pop()?;
        self.room.notify_one();
        Some(item)
    }

    /// The oldest result, waiting for one until `deadline`.
    pub fn pop_until(&self, deadline: Option<Instant>) -> Popped<T> {
        let popped = self.items.wait_until(deadline, || {
            // Read before looking: what was pushed before closing is then seen by the look.
            let closed = self.is_closed();
            match self.pop() {
                Some(item) => Some(Popped::Item(item)),
                None => closed.then_some(Popped::Closed),
            }
        });
        popped.unwrap_or(Popped::Timeout)
    }

    /// Ends it: pushers get their items back, poppers get what is left and then `Closed`.
    ///
    /// A push that runs at the same time may still succeed after a popper was told `Closed`; its
    /// item goes with the ring. Close when no results are under way, or none are wanted.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.items.notify_all();
        self.room.notify_all();
    }

    /// How many results wait to be popped: a snapshot.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// Whether none waits to be popped: a snapshot.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// How many results fit.
    pub fn capacity(&self) -> usize {
        self.ring.capacity()
    }

    /// Futex system calls made at this ring so far.
    pub fn futex_calls(&self) -> u64 {
        self.items.futex_calls() + self.room.futex_calls() + self.settled.futex_calls()
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// A job with these results is about to be queued.
    pub(crate) fn expect_one(&self) {
        // Relaxed: ordered before the worker's `finish_one` by the request ring, and before a flush
        // by being in the thread that flushes.
        self.queued.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The job that was expected has been finished. Closed results drop its output.
    #[inline]
    pub(crate) fn finish_one(&self, output: T) {
        let pushed = self.put(output).is_ok();
        self.done.0.fetch_add(1, Ordering::Release);
        let fence = Fenced::new();
        if pushed {
            self.items.notify_one_after(&fence);
        }
        self.settled.notify_all_after(&fence);
    }

    /// The job that was expected could not be queued after all.
    pub(crate) fn give_up_one(&self) {
        self.done.0.fetch_add(1, Ordering::Release);
        self.settled.notify_all();
    }

    /// Returns at a moment when every job that was queued is settled.
    pub(crate) fn wait_settled(&self) {
        self.settled.wait_until(None, || {
            // `done` first: it never exceeds `queued`, so equality means that at the moment of this
            // first read nothing was under way. Pairs with the Release in `finish_one`.
            let done = self.done.0.load(Ordering::Acquire);
            (done == self.queued.0.load(Ordering::Relaxed)).then_some(())
        });
    }
}
