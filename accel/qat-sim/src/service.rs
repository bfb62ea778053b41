//! A device's simulated time, its threads' CPU clocks, and their sleep.

#![expect(unsafe_code, reason = "reads per-thread CPU clocks")]

use crate::counters::{add, Tallies};
use std::sync::atomic::{fence, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Where idle engine threads sleep.
#[derive(Debug, Default)]
pub(crate) struct Doorbell {
    parked: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Doorbell {
    /// Wakes sleeping threads. Costs one load if there are none.
    pub(crate) fn ring(&self) {
        // Pairs with the fence in `park`: either we see the sleeping thread, or it sees our task.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    pub(crate) fn park(&self, longest: Duration, idle: impl Fn() -> bool) {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.parked.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if idle() {
            drop(self.wake.wait_timeout(guard, longest));
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }
}

/// CPU clocks of the device's threads.
#[derive(Debug, Default)]
pub(crate) struct Clocks(Mutex<Vec<libc::clockid_t>>);

impl Clocks {
    /// CPU time of the running threads, nanoseconds.
    pub(crate) fn read(&self) -> u64 {
        let clocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.iter().map(|clock| clock_ns(*clock)).sum()
    }

    pub(crate) fn enter(&self) -> libc::clockid_t {
        let mut clock = libc::CLOCK_THREAD_CPUTIME_ID;
        // SAFETY: the calling thread exists.
        let me = unsafe { libc::pthread_self() };
        // SAFETY: the out pointer is a local.
        unsafe { libc::pthread_getcpuclockid(me, &raw mut clock) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(clock);
        clock
    }

    pub(crate) fn remove(&self, clock: libc::clockid_t, tallies: &Tallies) {
        let mut clocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.retain(|other| *other != clock);
        add(&tallies.device_cpu_ns, clock_ns(clock));
    }
}

/// A clock in nanoseconds; 0 if it is gone.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the out pointer is a local.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return 0;
    }
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// One device's simulated time: when each of its engines is free.
#[derive(Debug)]
pub(crate) struct Service {
    free_ns: Mutex<Vec<u64>>,
    pub(crate) latency_ns: u64,
    /// Throughput of one engine in Gbit/s (bits per nanosecond), in thousandths; 0 for no limit.
    milli_gbps: u64,
}

impl Service {
    pub(crate) fn new(engines: usize, latency_ns: u64, gbps: u64) -> Self {
        Self {
            free_ns: Mutex::new(vec![0; engines]),
            latency_ns,
            milli_gbps: gbps * 1000 / engines as u64,
        }
    }

    /// Whether requests take time.
    pub(crate) fn is_timed(&self) -> bool {
        self.latency_ns > 0 || self.milli_gbps > 0
    }

    /// When a request of `bytes` plain bytes, submitted at `submitted_ns`, is answered.
    pub(crate) fn due(&self, submitted_ns: u64, bytes: usize) -> u64 {
        if self.milli_gbps == 0 {
            return submitted_ns + self.latency_ns;
        }
        let mut free = self.free_ns.lock().unwrap_or_else(PoisonError::into_inner);
        let first = free.iter_mut().min().expect("at least one engine");
        let start = submitted_ns.max(*first);
        *first = start + bytes as u64 * 8000 / self.milli_gbps;
        *first + self.latency_ns
    }
}
