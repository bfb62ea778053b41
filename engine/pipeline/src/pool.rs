//! The worker threads and their request rings.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::job::Job;
use crate::results::Results;
use crate::workers::Workers;

/// The number of workers, and the capacity of each worker's ring.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Worker threads, at least one.
    pub threads: usize,
    /// Jobs that may wait in each worker's ring, besides the one that runs; a power of two.
    ///
    /// Four batches feed a worker while the submitter is off its CPU for the duration of two. More
    /// only adds to the bytes in flight. Jobs of a few microseconds need more: see [`Pool`].
    pub ring_capacity: usize,
    /// Thread name; a number is appended, and the kernel truncates the result to 15 bytes.
    pub name: &'static str,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { threads: 1, ring_capacity: 4, name: "worker" }
    }
}

/// Worker threads that run jobs of one type for any number of submitters.
///
/// A submitter that waits for room is woken when only a quarter of the rings' capacity is still in
/// use, or when a worker has no job left, and not at each job. It then finds room for many, and the
/// workers have work while it wakes up. With jobs shorter than the wake-up (some 10 us) give the
/// rings more capacity.
///
/// No job waits while a worker is idle. A job goes to an idle worker if there is one, and a worker
/// without jobs takes the oldest job from another's ring before it sleeps. So no job waits behind a
/// long one, or behind a preempted thread, while another worker has nothing to do.
pub struct Pool<J: Job> {
    workers: Arc<Workers<J>>,
    /// Locked only to start and to join the threads.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// See `leave_behind_after`.
    patience: OnceLock<Duration>,
}

impl<J: Job> Pool<J> {
    /// Starts the workers. Calls `make_context` once for each, with its number.
    ///
    /// # Errors
    ///
    /// The system's error when a thread cannot be created. The threads that were already created
    /// are ended.
    pub fn new(
        config: PoolConfig,
        mut make_context: impl FnMut(usize) -> J::Context,
    ) -> io::Result<Arc<Self>> {
        let workers = Arc::new(Workers::new(config.threads, config.ring_capacity));
        let pool = Self { workers, threads: Mutex::default(), patience: OnceLock::new() };
        for number in 0..pool.threads() {
            let workers = Arc::clone(&pool.workers);
            let context = make_context(number);
            let thread = thread::Builder::new()
                .name(format!("{}{number}", config.name))
                .spawn(move || workers.work(number, context))?;
            pool.handles().push(thread);
        }
        Ok(Arc::new(pool))
    }

    /// Passes `job` to a worker with room. Tries all workers, from the one after the last used.
    ///
    /// # Errors
    ///
    /// Returns the job when no worker has room or the pool is closed.
    pub fn try_submit(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        self.workers.try_submit(job, results)
    }

    /// Passes `job` to a worker, and sleeps until one has room.
    ///
    /// # Errors
    ///
    /// Returns the job when the pool is closed, and only then.
    pub fn submit_wait(&self, job: J, results: &Arc<Results<J::Output>>) -> Result<(), J> {
        self.workers.submit_wait(job, results)
    }

    /// Accepts no more jobs. The workers finish the queued jobs, then end. Does not wait for them.
    pub fn close(&self) {
        self.workers.close();
    }

    /// Closes the pool, and waits until the workers have finished the queued jobs and ended.
    ///
    /// Afterwards [`cpu_times`](Self::cpu_times) is exact. Another thread has to pop results that
    /// are full, as with any wait for a worker.
    pub fn join(&self) {
        self.close();
        let own = thread::current().id();
        for thread in std::mem::take(&mut *self.handles()) {
            // A job may hold the last reference to its own pool; it cannot join its own thread.
            if thread.thread().id() != own {
                // Only a panic is an error, and then `AbortOnPanic` has already ended the process.
                let _ = thread.join();
            }
        }
    }

    /// Limits the wait of a dropped pool for its workers, which is unlimited otherwise. A worker
    /// that has not ended by then is left to itself, with its job and its context. For workers
    /// whose contexts have a device: a call of its library may never return.
    pub fn leave_behind_after(&self, patience: Duration) {
        let _ = self.patience.set(patience);
    }

    /// Whether [`close`](Self::close) has been called.
    pub fn is_closed(&self) -> bool {
        self.workers.is_closed()
    }

    /// How many workers there are.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// How many workers run a job, or have one in flight on a device, at this moment.
    pub fn busy_workers(&self) -> usize {
        self.workers.busy()
    }

    /// How many jobs wait in the workers' rings: a snapshot.
    pub fn waiting(&self) -> usize {
        self.workers.waiting()
    }

    /// How many jobs fit at once: in the rings and running.
    pub fn depth(&self) -> usize {
        self.workers.depth()
    }

    /// CPU time of each worker so far.
    ///
    /// The call costs the workers nothing: the kernel is asked about each thread. For a running
    /// thread the answer may be as old as the scheduler's last tick, some milliseconds.
    pub fn cpu_times(&self) -> Vec<Duration> {
        self.workers.cpu_times()
    }

    /// Futex system calls made so far for room and for work; [`Results`] counts its own.
    pub fn futex_calls(&self) -> u64 {
        self.workers.futex_calls()
    }
}

impl<J: Job> Pool<J> {
    fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J: Job> Drop for Pool<J> {
    fn drop(&mut self) {
        if let Some(patience) = self.patience.get() {
            self.close();
            let end = Instant::now() + *patience;
            let own = thread::current().id();
            let runs =
                |thread: &JoinHandle<()>| !thread.is_finished() && thread.thread().id() != own;
            while self.handles().iter().any(runs) && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
            // A thread without a handle runs on, and owns all that it uses.
            self.handles().retain(|thread| thread.is_finished());
        }
        self.join();
    }
}

impl<J: Job> fmt::Debug for Pool<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .field("waiting", &self.waiting())
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}
