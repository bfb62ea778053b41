//! The workers with their request rings: how a job gets to a worker, and how an idle worker gets a
//! job.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ring::{EventCount, Fenced, Ring};
use rustix::thread::gettid;
use rustix::time::{clock_gettime, ClockId};

use crate::job::{Job, Ticket};
use crate::results::Results;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, Padded};

/// The workers and all that their submitters share with them.
pub(crate) struct Workers<J: Job> {
    workers: Box<[Worker<J>]>,
    /// A submitter that waits for room is woken when at most this many jobs wait in all rings
    /// together.
    low: usize,
    /// Submitters that wait for room sleep here.
    room: EventCount,
    /// Where the next search for room starts. Only a hint, hence relaxed.
    next: Padded<AtomicUsize>,
    /// Submitters inside `try_submit`, plus `CLOSED`.
    gate: Padded<AtomicUsize>,
    /// Set when the gate is closed and empty: no ring gets another job. Release in `close`, Acquire
    /// in the workers, which then see every queued job.
    sealed: AtomicBool,
}

/// High enough to leave the lower bits to any number of submitters.
const CLOSED: usize = 1 << (usize::BITS - 1);

struct Worker<J: Job> {
    ring: Ring<Task<J>>,
    /// The worker sleeps here when its ring is empty.
    work: EventCount,
    state: Padded<WorkerState>,
}

/// Except for `idle`, written by the worker alone. Relaxed: the fields are for reports.
#[derive(Default)]
struct WorkerState {
    /// The worker found no job in any ring and waits, or is about to. A submitter that gives it a
    /// job clears the flag first, so that the next job goes to another worker. Relaxed: the fences
    /// of `idle_wait` and `place` provide the ordering.
    idle: AtomicBool,
    busy: AtomicBool,
    /// The thread's id; 0 before it starts and after it has ended.
    tid: AtomicU32,
    /// CPU time in nanoseconds, set when the thread ends.
    cpu_ns: AtomicU64,
}

struct Task<J: Job> {
    job: J,
    results: Arc<Results<J::Output>>,
}

impl<J: Job> Workers<J> {
    /// At least one worker; each ring has room for `ring_capacity` jobs.
    pub(crate) fn new(threads: usize, ring_capacity: usize) -> Self {
        let worker = |_| Worker {
            ring: Ring::new(ring_capacity),
            work: EventCount::new(),
            state: Padded::default(),
        };
        let workers: Box<[Worker<J>]> = (0..threads.max(1)).map(worker).collect();
        Self {
            low: workers.iter().map(|worker| worker.ring.capacity()).sum::<usize>() / 4,
            workers,
            room: EventCount::new(),
            next: Padded::default(),
            gate: Padded::default(),
            sealed: AtomicBool::new(false),
        }
    }

    /// Gives `job` to a worker with room; gives it back when none has, or they are closed.
    pub(crate) fn try_submit(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        // Acquire and Release: everything inside the gate happens before `close` sees the gate
        // empty.
        if self.gate.0.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            self.gate.0.fetch_sub(1, Ordering::Release);
            return Err(job);
        }
        let submitted = self.place(job, results);
        self.gate.0.fetch_sub(1, Ordering::Release);
        submitted
    }

    /// Gives `job` to a worker, sleeping until one has room; gives it back when they are closed.
    pub(crate) fn submit_wait(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        let mut job = Some(job);
        self.room.wait_until(None, || {
            // Read before trying, so that a job refused by workers that were open is tried again.
            let closed = self.is_closed();
            job = job.take().and_then(|job| self.try_submit(job, results).err());
            (job.is_none() || closed).then_some(())
        });
        job.map_or(Ok(()), Err)
    }

    /// Accepts no more jobs. The workers finish the queued jobs, then end.
    pub(crate) fn close(&self) {
        self.gate.0.fetch_or(CLOSED, Ordering::Relaxed);
        // Submitters never sleep inside the gate, so this takes a few instructions, or one time
        // slice when a submitter was preempted. Pairs with the Release in `try_submit`.
        while self.gate.0.load(Ordering::Acquire) & !CLOSED != 0 {
            thread::yield_now();
        }
        self.sealed.store(true, Ordering::Release);
        self.room.notify_all();
        for worker in &self.workers {
            worker.work.notify_all();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.gate.0.load(Ordering::Relaxed) & CLOSED != 0
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len()
    }

    /// How many workers run a job, or have one in flight on a device.
    pub(crate) fn busy(&self) -> usize {
        let busy = |worker: &&Worker<J>| worker.state.0.busy.load(Ordering::Relaxed);
        self.workers.iter().filter(busy).count()
    }

    /// How many jobs fit at once: in the rings and running.
    pub(crate) fn depth(&self) -> usize {
        self.workers.iter().map(|worker| worker.ring.capacity() + 1).sum()
    }

    /// CPU time of each worker so far.
    pub(crate) fn cpu_times(&self) -> Vec<Duration> {
        self.workers.iter().map(|worker| worker.state.0.cpu_time()).collect()
    }

    /// Futex system calls so far, for room and for work.
    pub(crate) fn futex_calls(&self) -> u64 {
        let work = self.workers.iter().map(|worker| worker.work.futex_calls());
        self.room.futex_calls() + work.sum::<u64>()
    }

    fn place(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        let count = self.workers.len();
        let start = self.next.0.load(Ordering::Relaxed);
        let from_start = (0..count).map(|step| (start + step) % count);
        let idle = from_start.clone().find(|&number| self.workers[number].state.0.claim());
        let mut task: Option<Task<J>> = None;
        let mut job = Some(job);
        for number in idle.into_iter().chain(from_start) {
            let worker = &self.workers[number];
            // A cheap check first: when all rings are full, nothing else is done.
            if !worker.ring.has_room() {
                continue;
            }
            let next = task.take().or_else(|| {
                results.expect_one();
                job.take().map(|job| Task { job, results: Arc::clone(results) })
            });
            match worker.ring.push(next.expect("the job is here or in its task")) {
                Ok(()) => {
                    self.next.0.store(number + 1, Ordering::Relaxed);
                    let fence = Fenced::new();
                    worker.work.notify_one_after(&fence);
                    // Either the push above comes first, or the worker's store to `idle` before its
                    // last look into all rings. In the first case that look finds the job, in the
                    // second the flag is found here.
                    match idle {
                        // The chosen worker may have found another job meanwhile, and is then busy.
                        Some(chosen) if chosen == number => {
                            if worker.state.0.busy.load(Ordering::Relaxed) {
                                self.wake_idle(&fence);
                            }
                        }
                        // The chosen worker had no room after all. It looks into all rings and
                        // marks itself idle again.
                        Some(chosen) => self.workers[chosen].work.notify_one_after(&fence),
                        None => self.wake_idle(&fence),
                    }
                    return Ok(());
                }
                Err(back) => task = Some(back),
            }
        }
        if let Some(chosen) = idle {
            // As above: it looks into all rings and marks itself idle again.
            self.workers[chosen].work.notify_one();
        }
        match task {
            None => Err(job.expect("the job never became a task")),
            Some(task) => {
                results.give_up_one();
                Err(task.job)
            }
        }
    }

    /// Wakes an idle worker, if there is one. It looks into all rings and finds the job that was
    /// pushed before the fence.
    fn wake_idle(&self, fence: &Fenced) {
        if let Some(worker) = self.workers.iter().find(|worker| worker.state.0.claim()) {
            worker.work.notify_one_after(fence);
        }
    }

    /// The main loop of worker `number`.
    pub(crate) fn work(&self, number: usize, mut context: J::Context) {
        let _abort = AbortOnPanic;
        let worker = &self.workers[number];
        let state = &worker.state.0;
        state.tid.store(gettid().as_raw_nonzero().get().unsigned_abs(), Ordering::Relaxed);
        loop {
            let kept = J::kept(&context);
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
                // When several workers count at the same moment, each may miss the jobs that the
                // others took, and none notifies. Then more jobs follow, and `next_task` notifies
                // at the last.
                if self.room.has_sleepers_after(&Fenced::new()) && self.waiting() <= self.low {
                    self.room.notify_one();
                }
                state.busy.store(true, Ordering::Relaxed);
                let finished = job.start(&mut context, Ticket(results));
                if J::kept(&context) == 0 {
                    // Before the output is visible: a thread that has all outputs finds no worker
                    // busy.
                    state.busy.store(false, Ordering::Relaxed);
                }
                if let Some((Ticket(results), output)) = finished {
                    results.finish_one(output);
                }
            }
            if J::kept(&context) > 0 {
                if idle {
                    // As `next_task` does before it sleeps.
                    self.room.notify_one();
                }
                J::poll(&mut context, idle, &mut |Ticket(results), output| {
                    results.finish_one(output);
                });
                if J::kept(&context) == 0 {
                    state.busy.store(false, Ordering::Relaxed);
                }
            }
        }
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        let cpu = Duration::try_from(cpu).unwrap_or_default();
        state.cpu_ns.store(u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        state.tid.store(0, Ordering::Relaxed);
    }

    /// A waiting job: from the ring of worker `number`, or else from another's.
    fn waiting_task(&self, number: usize) -> Option<Task<J>> {
        let (before, from) = self.workers.split_at(number);
        from.iter().chain(before).find_map(|worker| worker.ring.pop())
    }

    /// The next job for worker `number`; `None` once the lanes are closed and all rings are empty.
    fn next_task(&self, number: usize) -> Option<Task<J>> {
        if let Some(task) = self.waiting_task(number) {
            return Some(task);
        }
        self.room.notify_one();
        self.idle_wait(number)
    }

    /// Waits until any ring has a job; `None` once the lanes are closed and all rings are empty.
    fn idle_wait(&self, number: usize) -> Option<Task<J>> {
        let worker = &self.workers[number];
        let state = &worker.state.0;
        let next = worker.work.wait_until(None, || {
            if !state.idle.load(Ordering::Relaxed) {
                // On the first pass, and when another worker took the job that this one was woken
                // for.
                state.idle.store(true, Ordering::Relaxed);
                // Pairs with the fence in `place`.
                let _ = Fenced::new();
            }
            // Read before looking: sealed rings that are empty stay empty.
            let sealed = self.sealed.load(Ordering::Acquire);
            match self.waiting_task(number) {
                Some(task) => Some(Some(task)),
                None => sealed.then_some(None),
            }
        });
        if !state.claim() && next.is_some() {
            // A submitter has chosen this worker, and its job may be another one than the job
            // found.
            state.busy.store(true, Ordering::Relaxed);
            // Either the submitter sees `busy` set above, or the job is seen here.
            let fence = Fenced::new();
            if !worker.ring.is_empty() {
                self.wake_idle(&fence);
            }
        }
        next.flatten()
    }

    /// How many jobs wait in the rings: a snapshot.
    pub(crate) fn waiting(&self) -> usize {
        self.workers.iter().map(|worker| worker.ring.len()).sum()
    }
}

impl WorkerState {
    /// Clears the `idle` flag; false when it was not set.
    fn claim(&self) -> bool {
        // The load comes first: a cache line that all submitters only read stays shared.
        self.idle.load(Ordering::Relaxed) && self.idle.swap(false, Ordering::Relaxed)
    }

    fn cpu_time(&self) -> Duration {
        let tid = self.tid.load(Ordering::Relaxed);
        let running = || {
            // The first field is nanoseconds on a CPU.
            let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
            text.split(' ').next()?.parse().ok()
        };
        let cpu_ns = (tid != 0).then(running).flatten();
        Duration::from_nanos(cpu_ns.unwrap_or_else(|| self.cpu_ns.load(Ordering::Relaxed)))
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
