//! The ring of results: the outputs of one submitter's jobs.

use std::sync::Arc;
use std::time::Instant;

use ring::{EventCount, Fenced, Ring};

use crate::sync::{strong, AtomicBool, AtomicU64, Ordering, Padded, Site};

/// One submitter's results, in the order in which the workers finished them.
///
/// Any number of threads may push and pop.
#[derive(Debug)]
pub struct Results<T> {
    ring: Ring<T>,
    /// Threads that pop sleep here.
    items: EventCount,
    /// Threads that push sleep here.
    room: EventCount,
    /// Threads that flush sleep here.
    finished: EventCount,
    /// Release in `close`, Acquire in every load.
    closed: AtomicBool,
    /// Jobs submitted with these results. Incremented by submitters.
    queued: Padded<AtomicU64>,
    /// The number of these jobs that are finished or could not be queued. Incremented with Release:
    /// a thread that reads it with Acquire sees the outputs pushed before.
    done: Padded<AtomicU64>,
}

/// The result of [`Results::pop_until`].
#[derive(Debug, PartialEq, Eq)]
pub enum Popped<T> {
    /// The oldest result.
    Item(T),
    /// The deadline passed without a result.
    Timeout,
    /// The ring is closed, and nothing is left.
    Closed,
}

impl<T> Results<T> {
    /// Room for at least `capacity` results, rounded up to a power of two.
    pub fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: Ring::new(capacity),
            items: EventCount::new(),
            room: EventCount::new(),
            finished: EventCount::new(),
            closed: AtomicBool::new(false),
            queued: Padded::default(),
            done: Padded::default(),
        })
    }

    /// Adds `item`; waits while there is no room.
    ///
    /// # Errors
    ///
    /// Returns the item when the results are closed.
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

    /// Takes the oldest result, if there is one.
    #[inline]
    pub fn pop(&self) -> Option<T> {
        let item = self.ring.pop()?;
        self.room.notify_one();
        Some(item)
    }

    /// Takes the oldest result; waits for one until `deadline`.
    pub fn pop_until(&self, deadline: Option<Instant>) -> Popped<T> {
        let popped = self.items.wait_until(deadline, || {
            // Read before looking: the pop then finds every item that was pushed before `close`.
            let closed = self.is_closed();
            match self.pop() {
                Some(item) => Some(Popped::Item(item)),
                None => closed.then_some(Popped::Closed),
            }
        });
        popped.unwrap_or(Popped::Timeout)
    }

    /// Closes the ring: threads that push get their items back; threads that pop get the remaining
    /// items and then `Closed`.
    ///
    /// A concurrent push may still succeed after a pop has returned `Closed`; its item is dropped
    /// with the ring. Close when no results are under way, or none are wanted.
    pub fn close(&self) {
        self.closed.store(true, strong(Site::CloseRelease, Ordering::Release));
        self.items.notify_all();
        self.room.notify_all();
    }

    /// The number of results that wait to be popped: a snapshot.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// Whether no result waits to be popped: a snapshot.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Whether a job with these results is queued, runs, or is in flight on a device: a snapshot.
    pub fn has_jobs(&self) -> bool {
        // `done` first, as in `wait_finished`.
        let done = self.done.0.load(Ordering::Acquire);
        done != self.queued.0.load(Ordering::Relaxed)
    }

    /// Futex system calls made at this ring so far.
    pub fn futex_calls(&self) -> u64 {
        self.items.futex_calls() + self.room.futex_calls() + self.finished.futex_calls()
    }

    fn is_closed(&self) -> bool {
        self.closed.load(strong(Site::CloseAcquire, Ordering::Acquire))
    }

    /// Counts a job with these results that is about to be queued.
    pub(crate) fn expect_one(&self) {
        // Relaxed: the request ring orders this before the worker's `finish_one`, and program order
        // puts it before a flush by the same thread.
        self.queued.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Pushes the output of a counted job. Closed results drop it.
    #[inline]
    pub(crate) fn finish_one(&self, output: T) {
        let pushed = self.put(output).is_ok();
        self.done.0.fetch_add(1, strong(Site::DoneRelease, Ordering::Release));
        let fence = Fenced::new();
        if pushed {
            self.items.notify_one_after(&fence);
        }
        self.finished.notify_all_after(&fence);
    }

    /// Records that a counted job could not be queued after all.
    pub(crate) fn give_up_one(&self) {
        self.done.0.fetch_add(1, strong(Site::DoneRelease, Ordering::Release));
        self.finished.notify_all();
    }

    /// Waits for a moment at which every counted job is finished.
    pub(crate) fn wait_finished(&self) {
        self.finished.wait_until(None, || {
            // `done` first: it never exceeds `queued`, so if the two are equal, no job was under
            // way at the moment of this first read. Pairs with the Release in `finish_one`.
            let done = self.done.0.load(strong(Site::DoneAcquire, Ordering::Acquire));
            (done == self.queued.0.load(Ordering::Relaxed)).then_some(())
        });
    }
}
