//! Requested writeback passes: the queue, and the outcomes.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::stats::PolicyStats;
use crate::writeback::What;

/// The most waiting requests.
const WAITING: usize = 8;

/// The most outcomes that are remembered.
const KEPT: usize = 64;

/// The requests of one policy. All memory is allocated when it is made.
#[derive(Debug)]
pub(crate) struct Requests {
    queue: Mutex<Queue>,
    /// Readable while requests wait; the policy's thread polls it.
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
        // A panic under this lock interrupts no update.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, wakes the thread, and returns a ticket.
    pub(crate) fn add(&self, what: What) -> Result<u64, AskError> {
        let mut queue = self.lock();
        if queue.waiting.len() == WAITING {
            return Err(AskError::Busy);
        }
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push_back((ticket, what));
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        Ok(ticket)
    }

    /// The state of the request with this ticket.
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

    /// For the thread: records the outcome of a request.
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

/// The outcome of a requested pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Pages written back.
    pub pages: u64,
    /// Whether today's limit ended the pass.
    pub limited: bool,
    /// Whether the pass ended because only `backing_free` bytes are free on the file system.
    pub no_space: bool,
    /// Whether the pass ended because no block was free.
    pub full: bool,
    /// Whether a failed write, then or earlier, ended the pass.
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

/// The state of a requested pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The pass is waiting or running.
    Waiting,
    /// The pass has ended.
    Done(Outcome),
    /// The ticket was never given out, or its outcome is no longer remembered.
    Unknown,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// There is no backing device.
    #[error("it has no backing device")]
    NoBacking,
    /// Too many requests wait already.
    #[error("{WAITING} others wait for the same already")]
    Busy,
}
