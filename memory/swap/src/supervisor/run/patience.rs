//! How long a server may take to end: longer than its limit while it works on that.
//!
//! A host that is short of CPU may give a server less than a second of CPU in the limit
//! ([`Service::end_limit`]). A server that waits for a disk uses none and nothing in it advances.
//! Its threads that look at the clock wait for a CPU now and then; on a host that is very short of
//! CPU such a server, too, may get all of its time.
//!
//! [`Service::end_limit`]: crate::supervisor::Service::end_limit

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pulse::Pulse;
use thread_stat::{Proc, Process};

use crate::supervisor::child::Server;

/// How many limits a server may take that works on its end all the time, or seems to: it may spin.
const MOST: u32 = 10;

/// A server that has used a CPU for this part of the time, one hundredth, works: the threads of a
/// server that waits for a disk use less.
const PART: u32 = 100;

/// A server whose threads have waited for a CPU for this part of the time, a tenth, works.
const STARVED: u32 = 10;

/// A server that was told to end.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// Limits that it has been given.
    limits: u32,
    /// CPU time that it had used when the last one began.
    ran: Duration,
    /// The time for which each of its threads had waited for a CPU then.
    delayed: HashMap<u32, Duration>,
    /// The sum of its heartbeats then.
    progress: u64,
}

impl Patience {
    /// Gives the server its first limit, and returns its deadline.
    pub(super) fn begin(
        server: &Server,
        pulse: Option<&Pulse>,
        limit: Duration,
    ) -> (Self, Instant) {
        let ran = server.ran().unwrap_or_default();
        let delayed = Proc::of(server.child.id()).delayed();
        (Self { limits: 1, ran, delayed, progress: progress(pulse) }, Instant::now() + limit)
    }

    /// Another limit for a server that has worked on its end in the last one: its deadline. `None`
    /// if it has not, or has had [`MOST`].
    pub(super) fn more(
        &mut self,
        server: &Server,
        pulse: Option<&Pulse>,
        limit: Duration,
    ) -> Option<Instant> {
        if self.limits >= MOST {
            return None;
        }
        let ran = server.ran().unwrap_or_default();
        let used = ran.saturating_sub(std::mem::replace(&mut self.ran, ran));
        // A thread that wakes up now and then seldom waits just at this look.
        let delayed = Proc::of(server.child.id()).delayed();
        let before = std::mem::replace(&mut self.delayed, delayed);
        let starved = since(&before, &self.delayed);
        let now = progress(pulse);
        let advanced = std::mem::replace(&mut self.progress, now) != now;
        let works = advanced || used * PART >= limit || starved * STARVED >= limit;
        if !works && !wants_cpu(server.child.id()) {
            return None;
        }
        self.limits += 1;
        Some(Instant::now() + limit)
    }

    /// How long the server has had.
    pub(super) fn waited(&self, limit: Duration) -> Duration {
        limit * self.limits
    }
}

/// The time for which threads have waited for a CPU since an earlier look. The last of it is lost
/// with a thread that has ended.
fn since(before: &HashMap<u32, Duration>, now: &HashMap<u32, Duration>) -> Duration {
    let of = |(thread, time): (&u32, &Duration)| {
        time.saturating_sub(before.get(thread).copied().unwrap_or_default())
    };
    now.iter().map(of).sum()
}

fn progress(pulse: Option<&Pulse>) -> u64 {
    let slots = pulse.map(Pulse::slots).unwrap_or_default();
    slots.iter().fold(0, |sum, slot| sum.wrapping_add(slot.look().progress))
}

/// Whether a thread of the process runs, or would if it got a CPU.
fn wants_cpu(process: u32) -> bool {
    let mut kernel = Proc::of(process);
    let threads = kernel.threads();
    threads.into_iter().any(|id| kernel.thread(id).is_some_and(|thread| thread.state == b'R'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One thread has ended, one is new.
    #[test]
    fn the_wait_of_threads_that_end_does_not_hide_that_of_others() {
        let times = |of: &[(u32, u64)]| -> HashMap<u32, Duration> {
            of.iter().map(|&(thread, seconds)| (thread, Duration::from_secs(seconds))).collect()
        };
        let waited = since(&times(&[(1, 100), (2, 5)]), &times(&[(2, 8), (3, 1)]));
        assert_eq!(waited, Duration::from_secs(4));
    }
}
