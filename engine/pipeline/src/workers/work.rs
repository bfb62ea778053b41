//! A worker takes jobs from the rings, runs them, and sleeps when there is none.

use std::thread;
use std::time::Duration;

use ring::Fenced;
use rustix::thread::gettid;
use rustix::time::{clock_gettime, ClockId};

use super::{Task, Worker, Workers};
use crate::job::{Job, Ticket};
use crate::sync::{fence, step, strong, Ordering, Padded, Site};

impl<J: Job> Workers<J> {
    /// The main loop of worker `number`.
    pub(crate) fn work(&self, number: usize, mut context: J::Context) {
        let _abort = AbortOnPanic;
        let worker = &self.workers[number];
        let state = &worker.state.0;
        state.tid.store(gettid().as_raw_nonzero().get().unsigned_abs(), Ordering::Relaxed);
        loop {
            let kept = J::in_flight(&context);
            let task = if kept == 0 {
                // No job is in flight: this may sleep.
                let Some(task) = self.next_task(number) else { break };
                Some(task)
            } else if J::has_room(&context) {
                self.waiting_task(number)
            } else {
                None
            };
            let idle = task.is_none();
            if let Some(Task { job, results }) = task {
                self.has_taken_one();
                state.busy.store(true, Ordering::Relaxed);
                let finished = job.start(&mut context, Ticket(results));
                if J::in_flight(&context) == 0 {
                    // Before the output is visible: a thread that has all outputs finds no worker
                    // busy.
                    state.busy.store(false, Ordering::Relaxed);
                }
                if let Some((Ticket(results), output)) = finished {
                    results.finish_one(output);
                }
            }
            if J::in_flight(&context) > 0 {
                if idle {
                    // As `next_task` does before it sleeps.
                    self.room.notify_one();
                }
                J::poll(&mut context, idle, &mut |Ticket(results), output| {
                    results.finish_one(output);
                });
                if J::in_flight(&context) == 0 {
                    state.busy.store(false, Ordering::Relaxed);
                }
            }
        }
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let cpu = Duration::try_from(cpu).unwrap_or_default();
        state.cpu_ns.store(u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        state.tid.store(0, Ordering::Relaxed);
    }

    /// Called when a worker has taken a job: wakes a submitter that waits for room when few jobs
    /// are left.
    pub(super) fn has_taken_one(&self) {
        // When several workers count at the same moment, each may miss the jobs that the others
        // took, and none notifies. Then more jobs follow, and `next_task` notifies at the last.
        if self.room.has_sleepers_after(&Fenced::new()) && self.waiting() <= self.low {
            self.room.notify_one();
        }
    }

    /// Takes a waiting job: from the ring of worker `number`, or else from another's.
    pub(super) fn waiting_task(&self, number: usize) -> Option<Task<J>> {
        let (before, from) = self.workers.split_at(number);
        from.iter().chain(before).find_map(|worker| worker.ring.pop())
    }

    /// Takes the next job for worker `number`; `None` once the pool is closed and all rings are
    /// empty.
    pub(super) fn next_task(&self, number: usize) -> Option<Task<J>> {
        if let Some(task) = self.waiting_task(number) {
            return Some(task);
        }
        self.room.notify_one();
        self.idle_wait(number)
    }

    /// Waits until any ring has a job; `None` once the pool is closed and all rings are empty.
    fn idle_wait(&self, number: usize) -> Option<Task<J>> {
        let worker = &self.workers[number];
        let state = &worker.state.0;
        let next = worker.work.wait_until(None, || {
            if !state.idle.load(Ordering::Relaxed) {
                // On the first pass, and when another worker took the job that this one was woken
                // for.
                state.idle.store(true, Ordering::Relaxed);
                // Pairs with the fence in `place`.
                fence(Site::IdleFence);
            }
            // Read before looking: sealed rings that are empty stay empty. Pairs with the Release
            // in `close`.
            let sealed = self.sealed.load(strong(Site::SealAcquire, Ordering::Acquire));
            match self.waiting_task(number) {
                Some(task) => Some(Some(task)),
                None => sealed.then_some(None),
            }
        });
        if next.is_some() {
            self.has_found_one(number);
        }
        next.flatten()
    }

    /// Called when an idle worker has found a job.
    pub(crate) fn has_found_one(&self, number: usize) {
        let Worker { ring, state: Padded(state), .. } = &self.workers[number];
        if state.claim() {
            return;
        }
        // A submitter has chosen this worker, and its job may be another one than the job found.
        state.busy.store(true, Ordering::Relaxed);
        // Either the submitter sees `busy` set above, or the job is seen here.
        fence(Site::BusyFence);
        if step(Site::PassesChoice) && !ring.is_empty() {
            self.wake_idle();
        }
    }
}

/// Aborts the process when a job panics. The panic's message has been printed by then.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}
