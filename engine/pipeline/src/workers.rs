//! The workers with their request rings, and the way of a job to a worker. `work.rs` describes how
//! an idle worker gets a job.

mod work;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use ring::{EventCount, Ring};

use crate::job::Job;
use crate::results::Results;
use crate::sync::{
    fence_behind, step, strong, yield_now, AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
    BeforeFence, Ordering, Padded, Site,
};

/// The workers and all state that their submitters share with them.
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
    /// Creates at least one worker; each ring has room for `ring_capacity` jobs.
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

    /// Passes `job` to a worker with room. Returns the job when no worker has room, or the workers
    /// are closed.
    pub(crate) fn try_submit(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        // Relaxed: either this comes before `close` in the order of changes to the gate, and
        // `close` waits for the decrement, or it sees that the gate is closed.
        let open = self.gate.0.fetch_add(1, Ordering::Relaxed) & CLOSED == 0;
        let submitted = if open { self.place(job, results) } else { Err(job) };
        // Behind the fence that `place` executes after the push, so that `close`, which reads the
        // gate with Acquire and finds it empty, sees the job in its ring.
        self.gate.0.fetch_sub(1, Ordering::Relaxed);
        submitted
    }

    /// Passes `job` to a worker, and sleeps until one has room. Returns the job when the workers
    /// are closed.
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

    /// Puts a job into the ring of worker `number`, which does not run yet.
    #[cfg(all(test, loom))]
    pub(crate) fn queue(&self, number: usize, job: J, results: &Arc<Results<J::Output>>) {
        results.expect_one();
        let task = Task { job, results: Arc::clone(results) };
        assert!(self.workers[number].ring.push(task).is_ok(), "it has no room");
    }

    /// The main loop of worker `number` without results: fewer steps for a model to explore.
    #[cfg(all(test, loom))]
    pub(crate) fn work_only(&self, number: usize, mut context: J::Context) {
        let busy = &self.workers[number].state.0.busy;
        while let Some(task) = self.next_task(number) {
            self.has_taken_one();
            busy.store(true, Ordering::Relaxed);
            task.job.run(&mut context);
            busy.store(false, Ordering::Relaxed);
        }
    }

    /// Takes a job for worker `number`, which the model plays.
    #[cfg(all(test, loom))]
    pub(crate) fn take(&self, number: usize) -> Option<J> {
        self.waiting_task(number).map(|task| task.job)
    }

    /// Marks worker `number`, which the model plays, as idle.
    #[cfg(all(test, loom))]
    pub(crate) fn mark_idle(&self, number: usize) {
        self.workers[number].state.0.idle.store(true, Ordering::Relaxed);
    }

    /// Makes the next search for room start at worker `number`.
    #[cfg(all(test, loom))]
    pub(crate) fn start_at(&self, number: usize) {
        self.next.0.store(number, Ordering::Relaxed);
    }

    /// Accepts no more jobs. The workers finish the queued jobs, then end.
    pub(crate) fn close(&self) {
        self.gate.0.fetch_or(CLOSED, Ordering::Relaxed);
        // Submitters never sleep inside the gate, so this takes a few instructions, or one time
        // slice when a submitter was preempted. Pairs with the fence in `place`.
        while self.gate.0.load(strong(Site::GateAcquire, Ordering::Acquire)) & !CLOSED != 0 {
            yield_now();
        }
        // Pairs with the Acquire in `idle_wait`.
        self.sealed.store(true, strong(Site::SealRelease, Ordering::Release));
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

    /// The number of workers that run a job, or have one in flight on a device.
    pub(crate) fn busy(&self) -> usize {
        let busy = |worker: &&Worker<J>| worker.state.0.busy.load(Ordering::Relaxed);
        self.workers.iter().filter(busy).count()
    }

    /// The number of jobs for which there is room at once: in the rings and running.
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
            let before = BeforeFence::new(Site::PlaceFence);
            match worker.ring.push(next.expect("the job is here or in its task")) {
                Ok(()) => {
                    self.next.0.store(number + 1, Ordering::Relaxed);
                    let fence = fence_behind(Site::PlaceFence, before);
                    worker.work.notify_one_after(&fence);
                    // Either the push above comes first, or the worker's store to `idle` before its
                    // last look into all rings. In the first case that look finds the job, in the
                    // second the flag is found here.
                    match idle {
                        // The chosen worker may have found another job meanwhile, and is then busy.
                        Some(chosen) if chosen == number => {
                            if worker.state.0.busy.load(Ordering::Relaxed) && step(Site::ChecksBusy)
                            {
                                self.wake_idle();
                            }
                        }
                        // The chosen worker had no room after all. It looks into all rings and
                        // marks itself idle again.
                        Some(chosen) => {
                            if step(Site::ReturnsChoice) {
                                self.workers[chosen].work.notify_one_after(&fence);
                            }
                        }
                        None => {
                            if step(Site::WakesIdle) {
                                self.wake_idle();
                            }
                        }
                    }
                    return Ok(());
                }
                Err(back) => task = Some(back),
            }
        }
        if let Some(chosen) = idle {
            // As above: the worker looks into all rings and marks itself idle again.
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

    /// Wakes an idle worker, if there is one. The worker looks into all rings, and finds a job that
    /// was pushed before the caller's last fence.
    fn wake_idle(&self) {
        let before = BeforeFence::new(Site::WakeFence);
        if let Some(worker) = self.workers.iter().find(|worker| worker.state.0.claim()) {
            // Another fence, behind the claim: either the worker is seen to sleep, or it sees that
            // it was claimed and marks itself idle again. Otherwise it would sleep unmarked, and
            // no later job would wake it.
            worker.work.notify_one_after(&fence_behind(Site::WakeFence, before));
        }
    }

    /// The number of jobs that wait in the rings: a snapshot.
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
