//! The CPU time of this thread, and of this process.

use rustix::time::{clock_gettime, ClockId};
use std::time::Duration;

pub(crate) fn thread_cpu() -> Duration {
    cpu_time(ClockId::ThreadCPUTime)
}

pub(crate) fn process_cpu() -> Duration {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> Duration {
    clock_gettime(clock).try_into().unwrap_or_default()
}
