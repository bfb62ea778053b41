//! Crash injection: a test may kill the process between any two steps of an operation that another
//! server could find half done. Empty outside of tests.

#[cfg(not(test))]
#[inline(always)]
pub(crate) fn step() {}

#[cfg(test)]
pub(crate) use schedule::{arm, step};

#[cfg(test)]
mod schedule {
    use std::sync::atomic::{AtomicI64, Ordering};

    use rustix::process::{getpid, kill_process, Signal};

    static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

    /// The `steps`th step from now kills the process as `kill -9` does.
    pub(crate) fn arm(steps: i64) {
        LEFT.store(steps, Ordering::Relaxed);
    }

    pub(crate) fn step() {
        if LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            kill_process(getpid(), Signal::KILL).expect("we may kill ourselves");
        }
    }
}
