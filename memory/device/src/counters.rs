//! The device's counters: those of zram's `io_stat`, and more.

use std::sync::atomic::{AtomicU64, Ordering};

/// The device's counters since it was made. They are summed while threads work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoStats {
    /// Pages that could not be read.
    pub failed_reads: u64,
    /// Pages that could not be written.
    pub failed_writes: u64,
    /// Invalid requests.
    pub invalid_io: u64,
    /// Pages freed by clients: discards, and write-zeroes that may free.
    pub notify_free: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Requests that were split over the workers.
    pub split_requests: u64,
    /// All requests.
    pub requests: u64,
}

/// One thread's counters, which it alone writes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub(crate) failed_reads: AtomicU64,
    pub(crate) failed_writes: AtomicU64,
    pub(crate) invalid_io: AtomicU64,
    pub(crate) notify_free: AtomicU64,
    pub(crate) pages_read: AtomicU64,
    pub(crate) pages_written: AtomicU64,
    pub(crate) split_requests: AtomicU64,
    pub(crate) requests: AtomicU64,
}

/// Adds to a counter that only this thread writes.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// The sums over all threads.
pub(crate) fn sum(all: &[Counters]) -> IoStats {
    let of = |counter: fn(&Counters) -> &AtomicU64| {
        all.iter().map(|one| counter(one).load(Ordering::Relaxed)).sum()
    };
    IoStats {
        failed_reads: of(|c| &c.failed_reads),
        failed_writes: of(|c| &c.failed_writes),
        invalid_io: of(|c| &c.invalid_io),
        notify_free: of(|c| &c.notify_free),
        pages_read: of(|c| &c.pages_read),
        pages_written: of(|c| &c.pages_written),
        split_requests: of(|c| &c.split_requests),
        requests: of(|c| &c.requests),
    }
}
