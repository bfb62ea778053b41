//! Counters of the device, by the names of zram's `io_stat` and beyond.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made; the sums are taken while others work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoStats {
    /// Pages that could not be read.
    pub failed_reads: u64,
    /// Pages that could not be written.
    pub failed_writes: u64,
    /// Requests that were not valid.
    pub invalid_io: u64,
    /// Pages that clients said they no longer need: discards, and zeros that free.
    pub notify_free: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Requests split over the workers.
    pub split_requests: u64,
    /// Requests of any kind.
    pub requests: u64,
}

/// One thread's share; it alone writes them.
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

/// Adds to a counter of one's own.
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
