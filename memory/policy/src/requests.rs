//! Passes that somebody has asked for: they wait here, and here is what came of them.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::stats::PolicyStats;
use crate::writeback::What;

/// Requests that may wait at a time.
const WAITING: usize = 8;

/// Outcomes that are kept for those who ask for them.
const KEPT: usize = 64;

/// The requests of one policy. All memory is taken when it is made.
#[derive(Debug)]
pub(crate) struct Requests {
    queue: Mutex<Queue>,
    /// Readable while requests wait: the policy's thread polls it.
    wake: OwnedFd,
}

#[derive(Debug)]
struct Queue {
    /// The next ticket.
    next: u64,
    waiting: VecDeque<(u64, What)>,
    done: VecDeque<(u64, Outcome)>,
}

impl Requests {
    /// `wake` is an eventfd.
    pub(crate) fn new(wake: OwnedFd) -> Self {
        let (waiting, done) = (VecDeque::with_capacity(WAITING), VecDeque::with_capacity(KEPT));
        Self { queue: Mutex::new(Queue { next: 1, waiting, done }), wake }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing is left half done by a panic while it is held.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, wakes the thread, and gives a ticket.
    pub(crate) fn add(&self, what: What) -> Result<u64, AskError> {
        let mut queue = self.lock();
        if queue.waiting.len() == WAITING {
            return Err(AskError::Busy);
        }
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push_back((ticket, what));
        // Full only after 2^64 times, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        Ok(ticket)
    }

    /// How far the request with this ticket is.
    pub(crate) fn progress(&self, ticket: u64) -> Asked {
        let queue = self.lock();
        if let Some((_, outcome)) = queue.done.iter().find(|(done, _)| *done == ticket) {
            return Asked::Done(*outcome);
        }
        let last = queue.done.back().map_or(0, |(done, _)| *done);
        if (last + 1..queue.next).contains(&ticket) {
            Asked::Waiting
        } else {
            Asked::Unknown
        }
    }

    /// For the thread: the next request.
    pub(crate) fn next(&self) -> Option<(u64, What)> {
        let mut queue = self.lock();
        if queue.waiting.is_empty() {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        queue.waiting.pop_front()
    }

    /// For the thread: what came of a request.
    pub(crate) fn finish(&self, ticket: u64, outcome: Outcome) {
        let mut queue = self.lock();
        if queue.done.len() == KEPT {
            queue.done.pop_front();
        }
        queue.done.push_back((ticket, outcome));
    }

    /// Readable while requests wait.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// What came of a pass that somebody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Pages that it wrote back.
    pub pages: u64,
    /// It ended because today's budget is spent.
    pub limited: bool,
    /// It ended because the file system has no more than is to stay free.
    pub no_space: bool,
    /// It ended because no block is free.
    pub full: bool,
    /// It ended because a write failed, now or before.
    pub failed: bool,
}

impl Outcome {
    pub(crate) fn between(before: &PolicyStats, after: &PolicyStats) -> Self {
        Self {
            pages: after.pages_written_back - before.pages_written_back,
            limited: after.writeback_limited > before.writeback_limited,
            no_space: after.writeback_no_space > before.writeback_no_space,
            full: after.writeback_full > before.writeback_full,
            failed: after.writeback_failed > before.writeback_failed,
        }
    }
}

/// How far a pass is that somebody asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It waits for others, or is on.
    Waiting,
    /// It is over.
    Done(Outcome),
    /// Nobody got this ticket, or it is forgotten.
    Unknown,
}

/// Why nothing is written back for who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// There is nothing to write to.
    #[error("it has no backing device")]
    NoBacking,
    /// Too many wait already.
    #[error("{WAITING} others wait for the same already")]
    Busy,
}
