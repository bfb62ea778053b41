//! Detects a call of the library that does not return.
//!
//! | the thread in the call | a look at it |
//! |---|---|
//! | runs, or sleeps | counts: after 10 looks, one a second, the call hangs |
//! | waits for a CPU, and has not had one since the last look | does not count |
//! | sleeps, while another thread of the process waits for a CPU in vain | does not count: the sleeper may wait for that thread |
//! | is traced (a debugger) | does not count |
//!
//! A start of the library hangs after 30 looks instead.
//!
//! A look that is late does not count either. Whatever delayed the watchdog, such as a suspended
//! machine or a stopped process, has delayed the call too.

use crate::calls::{self, Call, Calls, Look};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thread_stat::{Proc, Process, ThreadStat, Threads};

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// A look that comes this long after the last one does not count.
const LATE: Duration = Duration::from_millis(2500);
/// After this many looks at the same call the call hangs. A call takes microseconds.
const LOOKS: u64 = 10;
/// The same for the start of the library. It takes part of a second for each virtual function.
const START_LOOKS: u64 = 30;

/// A call of the library that has not returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the call {call} of the QAT library has not returned for {seconds} s, and thread {thread} is \
     in it"
)]
pub struct Hang {
    /// The library's function.
    pub call: &'static str,
    /// Seconds in which the watchdog saw the call. Those in which thread or watchdog had no CPU do
    /// not count.
    pub seconds: u64,
    /// The thread, as in `/proc/PID/task`.
    pub thread: u32,
}

/// A call that the watchdog has seen before.
#[derive(Debug)]
struct Suspicion {
    calls: Arc<Calls>,
    look: Look,
    stat: Option<ThreadStat>,
    looks: u64,
}

/// Watches the calls of all engines of this process. It makes no system call while no call lasts
/// from one look to the next.
#[derive(Debug, Default)]
pub struct Watchdog {
    last: Option<Instant>,
    suspicions: Vec<Suspicion>,
    /// All threads of the process, while there is a suspicion.
    threads: Threads,
}

impl Watchdog {
    /// Looks at the calls, at most once a second. Call it a few times a second.
    pub fn look(&mut self, now: Instant) -> Option<Hang> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < LOOK) {
            return None;
        }
        self.look_at(now, calls::all(), &mut Proc::own())
    }

    fn look_at(
        &mut self,
        now: Instant,
        engines: Vec<Arc<Calls>>,
        process: &mut dyn Process,
    ) -> Option<Hang> {
        let since = self.last.replace(now);
        let counts = since.is_some_and(|last| now.saturating_duration_since(last) < LATE);
        let before = std::mem::take(&mut self.suspicions);
        let mut hung = None;
        let mut starved = None;
        for calls in engines {
            let Some(look) = calls.look() else { continue };
            let known =
                before.iter().find(|known| Arc::ptr_eq(&known.calls, &calls) && known.look == look);
            let Some(known) = known else {
                self.suspicions.push(Suspicion { calls, look, stat: None, looks: 0 });
                continue;
            };
            let stat = process.thread(look.thread);
            let has_counted = counts
                && match (stat, known.stat) {
                    // The kernel tells nothing here: only the looks are left.
                    (None, _) => true,
                    // The first one has nothing to be compared with.
                    (Some(_), None) => false,
                    (Some(now), Some(before)) if now.starved_since(&before) => false,
                    (Some(now), Some(_)) if now.state == b't' => false,
                    (Some(now), Some(before)) if now.ran != before.ran => true,
                    _ => !*starved.get_or_insert_with(|| self.threads.look(&mut *process)),
                };
            let looks = known.looks + u64::from(has_counted);
            let most = if look.call == Call::Start { START_LOOKS } else { LOOKS };
            if looks >= most && hung.is_none() {
                let (call, thread) = (look.call.name(), look.thread);
                hung = Some(Hang { call, seconds: looks, thread });
            }
            self.suspicions.push(Suspicion { calls, look, stat, looks });
        }
        if self.suspicions.iter().all(|suspicion| suspicion.stat.is_none()) {
            self.threads.clear();
        } else if starved.is_none() {
            self.threads.look(process);
        }
        hung
    }
}

#[cfg(test)]
mod tests;
