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
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
