//! QEMU's scheme for submitting: `compress-wait-thread` on or off, and its counters.

use std::sync::Arc;

use crate::job::Job;
use crate::pool::Pool;
use crate::results::Results;
use crate::sync::{AtomicU64, Ordering};

/// Submits jobs, and counts them as QEMU does. May be shared by several threads.
#[derive(Debug)]
pub struct Submitter<J: Job> {
    pool: Arc<Pool<J>>,
    results: Arc<Results<J::Output>>,
    wait: bool,
    pages: AtomicU64,
    busy: AtomicU64,
    busy_pages: AtomicU64,
    passed_by: AtomicU64,
}

/// The outcome of [`Submitter::submit`].
#[derive(Debug)]
pub enum Submitted<J> {
    /// A worker's ring has the job; its output will be in the results.
    Queued,
    /// No worker has room, and the submitter does not wait: the caller sends or stores the pages as
    /// they are.
    Busy(J),
    /// The worker threads are closed.
    Closed(J),
}

/// Totals since the start, named as in `query-migrate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// `compression.pages`: pages given to workers.
    pub pages: u64,
    /// `compression.busy`: how often no worker had room. Without batches, as in QEMU, each is one
    /// page.
    pub busy: u64,
    /// Pages in the jobs counted by `busy`.
    pub busy_pages: u64,
    /// Pages that needed no worker ([`Submitter::pass_by`]).
    pub passed_by: u64,
}

impl Counters {
    /// `compression.busy-rate`: the share of pages that found no room, 0 to 1; 0 without pages. As
    /// in QEMU, all pages count, those that needed no worker included.
    pub fn busy_rate(&self) -> f64 {
        let pages = self.pages + self.busy_pages + self.passed_by;
        if pages == 0 {
            return 0.0;
        }
        self.busy_pages as f64 / pages as f64
    }
}

impl<J: Job> Submitter<J> {
    /// Creates a submitter to `pool`. The outputs go to `results`.
    ///
    /// With `compress_wait_thread` a job that finds no room waits for it; otherwise it is returned.
    pub fn new(
        pool: Arc<Pool<J>>,
        results: Arc<Results<J::Output>>,
        compress_wait_thread: bool,
    ) -> Self {
        Self {
            pool,
            results,
            wait: compress_wait_thread,
            pages: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            busy_pages: AtomicU64::new(0),
            passed_by: AtomicU64::new(0),
        }
    }

    /// Submits a job that holds `pages` pages.
    #[inline]
    pub fn submit(&self, job: J, pages: u64) -> Submitted<J> {
        let submitted = if self.wait {
            self.pool.submit_wait(job, &self.results)
        } else {
            self.pool.try_submit(job, &self.results)
        };
        match submitted {
            Ok(()) => {
                self.pages.fetch_add(pages, Ordering::Relaxed);
                Submitted::Queued
            }
            Err(job) if self.pool.is_closed() => Submitted::Closed(job),
            Err(job) => {
                self.busy.fetch_add(1, Ordering::Relaxed);
                self.busy_pages.fetch_add(pages, Ordering::Relaxed);
                Submitted::Busy(job)
            }
        }
    }

    /// Counts pages that need no worker, such as zero pages: QEMU's busy-rate refers to all pages.
    pub fn pass_by(&self, pages: u64) {
        self.passed_by.fetch_add(pages, Ordering::Relaxed);
    }

    /// Returns when the output of every queued job has been pushed to the results.
    ///
    /// The call does not pop the outputs: the results must have room, or another thread must pop
    /// them. Threads that go on submitting to the same results can delay its return.
    pub fn flush(&self) {
        self.results.wait_finished();
    }

    /// The totals so far.
    pub fn counters(&self) -> Counters {
        Counters {
            pages: self.pages.load(Ordering::Relaxed),
            busy: self.busy.load(Ordering::Relaxed),
            busy_pages: self.busy_pages.load(Ordering::Relaxed),
            passed_by: self.passed_by.load(Ordering::Relaxed),
        }
    }

    /// The worker threads.
    pub fn pool(&self) -> &Arc<Pool<J>> {
        &self.pool
    }
}
