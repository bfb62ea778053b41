//! The wait for the work that a driver still does for a dead server.
//!
//! From Linux 6.7 to 6.14 the driver ends the commands of a dead server in a work item of the
//! kernel, which it queues once for each queue of the disk. It lets a new server begin while an
//! item is pending, or at its end. That item then ends commands of the new server, and the driver
//! goes on passing requests to them: a request is never answered, or the kernel crashes. (A crash
//! was seen in a guest with Linux 6.12.95, and one is SPDK's issue 3384.) Later drivers clean up
//! when the dead server's last ring is closed, before a new server may begin.
//!
//! So a new server waits until the dead one's rings are closed, after which almost no item is
//! queued, and then until each CPU has had time for what was queued to it. That makes a late item
//! unlikely, and not impossible: the kernel may have no worker for it, where all wait for memory.
//! Before requests flow, the new server therefore looks whether one of its commands has been ended.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{gettid, sched_getaffinity, sched_setaffinity, CpuSet};

use super::{Control, ControlError, EBUSY};
use crate::geometry::DiskState;
use crate::sys;

/// The pause between two looks at a dead server's remains.
const PAUSE: Duration = Duration::from_millis(2);
/// The name of the thread that visits CPUs.
const NAME: &str = "visits-cpus";
/// How long all CPUs together may take to run what was queued to them: a thread of real time may
/// have one of them for itself.
const CPUS: Duration = Duration::from_millis(500);

impl Control {
    /// Waits until a device's dead server has left nothing that could disturb the next, or until
    /// `deadline`. The driver is asked without the lock that the work item takes: a waiter for that
    /// lock would run in the middle of the item.
    pub(crate) fn remains_are_gone(
        &mut self,
        id: u32,
        deadline: Instant,
    ) -> Result<(), ControlError> {
        while self.may_leave_work() && Instant::now() < deadline {
            if self.info(id)?.state == DiskState::Quiesced && rings_are_closed(id) {
                each_cpu_runs(CPUS);
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether the driver may leave work of a dead server. Since Linux 6.15 it does not, and since
    /// then it lists zero copy among its features.
    pub(crate) fn may_leave_work(&self) -> bool {
        self.features & sys::ZERO_COPY == 0
    }
}

/// Whether no ring holds the device's character device, which one process at a time may open. Any
/// other error is reported by the server, which opens the device too.
fn rings_are_closed(id: u32) -> bool {
    let opened = File::options().read(true).write(true).open(format!("/dev/ublkc{id}"));
    !opened.is_err_and(|error| error.raw_os_error() == Some(EBUSY))
}

/// Has a thread sleep for a moment on one CPU after the other, up to a time limit. The thread gets
/// a CPU where threads of its priority do, so that a worker of the kernel which waited there has
/// most likely run. No call of the kernel waits for its workers without a limit of its own: a
/// process that hangs in one cannot be killed, and would hold the disk. Returns the CPUs on which
/// it has slept.
fn each_cpu_runs(limit: Duration) -> Vec<usize> {
    let Ok(usual) = sched_getaffinity(None) else {
        thread::sleep(limit);
        return Vec::new();
    };
    let (tell, told) = mpsc::channel();
    // Dropped when this function returns, which ends the thread.
    let (_end, go) = mpsc::channel::<()>();
    let (done, is_done) = mpsc::channel();
    let is_late = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_late);
    let visit = move || {
        let mut visited = Vec::new();
        let _ = tell.send(gettid());
        // Also those on which this process does not run: requests time out on any.
        for cpu in 0..CpuSet::MAX_CPU {
            if stop.load(Ordering::Acquire) {
                break;
            }
            let mut one = CpuSet::new();
            one.set(cpu);
            // Returns on that CPU. The kernel refuses one that is offline or not for this process.
            if sched_setaffinity(None, &one).is_ok() {
                thread::sleep(Duration::from_millis(1));
                visited.push(cpu);
            }
        }
        // It has to end, too, and the last CPU may be taken.
        let _ = sched_setaffinity(None, &usual);
        let _ = done.send(visited);
        // Its number may not be another thread's while the caller uses it.
        let _ = go.recv();
    };
    if thread::Builder::new().name(NAME.into()).stack_size(64 << 10).spawn(visit).is_err() {
        thread::sleep(limit);
        return Vec::new();
    }
    if let Ok(visited) = is_done.recv_timeout(limit) {
        return visited;
    }
    // On a CPU that it does not get the thread could not end, nor could the process.
    is_late.store(true, Ordering::Release);
    let Ok(thread) = told.recv_timeout(limit) else { return Vec::new() };
    for _ in 0..100 {
        let _ = sched_setaffinity(Some(thread), &usual);
        if let Ok(visited) = is_done.recv_timeout(PAUSE) {
            return visited;
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_exist_has_no_rings() {
        assert!(rings_are_closed(u32::MAX));
    }

    #[test]
    fn a_thread_visits_each_cpu_and_leaves_the_caller_where_it_may_run() {
        let before = sched_getaffinity(None).unwrap();
        let visited = each_cpu_runs(Duration::from_secs(600));
        for cpu in (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu)) {
            assert!(visited.contains(&cpu), "CPU {cpu} is not in {visited:?}");
        }
        assert!(sched_getaffinity(None).unwrap() == before);
        // A thread that is late is told to stop, and ends.
        each_cpu_runs(Duration::ZERO);
        while std::fs::read_dir("/proc/self/task").unwrap().flatten().any(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == NAME)
        }) {
            thread::sleep(PAUSE);
        }
    }
}
