//! Detects a call of the library that does not return.
//!
//! | the thread in the call | a look at it |
//! |---|---|
//! | runs, or sleeps | counts: after 10 looks, one a second, the call hangs |
//! | waits for a CPU, and has not had one since the last look | does not count |
//! | sleeps, while another thread of the process waits for a CPU in vain | does not count: the sleeper may wait for that thread |
//! | is traced (a debugger) | does not count |
//!
//! A look that is late does not count either. Whatever delayed the watchdog, such as a suspended
//! machine or a stopped process, has delayed the call too.

use crate::calls::{self, Calls, Look};
use std::fs;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// A look that comes this long after the last one does not count.
const LATE: Duration = Duration::from_millis(2500);
/// After this many looks at the same call the call hangs. A call takes microseconds.
const LOOKS: u64 = 10;

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

/// The kernel's facts about a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Evidence {
    /// The letter of the thread's state.
    state: u8,
    /// Nanoseconds of CPU time, and how often the thread was scheduled.
    ran: u64,
    times: u64,
}

impl Evidence {
    /// Whether the thread waits for a CPU, and has had none since `before`.
    fn starved_since(&self, before: &Self) -> bool {
        self.state == b'R' && (self.ran, self.times) == (before.ran, before.times)
    }
}

/// The source of facts: the kernel, or a test.
trait Witness {
    /// The facts about a thread of this process; `None` if there are none.
    fn thread(&mut self, thread: u32) -> Option<Evidence>;

    /// The numbers of all threads of this process.
    fn threads(&mut self) -> Vec<u32>;
}

/// A call that the watchdog has seen before.
#[derive(Debug)]
struct Suspicion {
    calls: Arc<Calls>,
    look: Look,
    evidence: Option<Evidence>,
    looks: u64,
}

/// Watches the calls of all engines of this process. It makes no system call while no call lasts
/// from one look to the next.
#[derive(Debug, Default)]
pub struct Watchdog {
    last: Option<Instant>,
    suspicions: Vec<Suspicion>,
    /// All threads of the process, while there is a suspicion.
    threads: Vec<(u32, Evidence)>,
}

impl Watchdog {
    /// Looks at the calls, at most once a second. Call it a few times a second.
    pub fn look(&mut self, now: Instant) -> Option<Hang> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < LOOK) {
            return None;
        }
        self.look_at(now, calls::all(), &mut Proc)
    }

    fn look_at(
        &mut self,
        now: Instant,
        engines: Vec<Arc<Calls>>,
        witness: &mut dyn Witness,
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
                self.suspicions.push(Suspicion { calls, look, evidence: None, looks: 0 });
                continue;
            };
            let evidence = witness.thread(look.thread);
            let has_counted = counts
                && match (evidence, known.evidence) {
                    // The kernel tells nothing here: only the looks are left.
                    (None, _) => true,
                    // The first evidence has nothing to be compared with.
                    (Some(_), None) => false,
                    (Some(now), Some(before)) if now.starved_since(&before) => false,
                    (Some(now), Some(_)) if now.state == b't' => false,
                    (Some(now), Some(before)) if now.ran != before.ran => true,
                    _ => !*starved.get_or_insert_with(|| self.others(&mut *witness)),
                };
            let looks = known.looks + u64::from(has_counted);
            if looks >= LOOKS && hung.is_none() {
                let (call, thread) = (look.call.name(), look.thread);
                hung = Some(Hang { call, seconds: looks, thread });
            }
            self.suspicions.push(Suspicion { calls, look, evidence, looks });
        }
        if self.suspicions.iter().all(|suspicion| suspicion.evidence.is_none()) {
            self.threads.clear();
        } else if starved.is_none() {
            self.others(witness);
        }
        hung
    }
}

impl Watchdog {
    /// Whether a thread of the process has waited for a CPU in vain since the last look.
    fn others(&mut self, witness: &mut dyn Witness) -> bool {
        let all: Vec<_> = witness
            .threads()
            .into_iter()
            .filter_map(|thread| Some((thread, witness.thread(thread)?)))
            .collect();
        let starved = all.iter().any(|(thread, evidence)| {
            let before = self.threads.iter().find(|(other, _)| other == thread);
            before.is_some_and(|(_, before)| evidence.starved_since(before))
        });
        self.threads = all;
        starved
    }
}

/// The kernel's facts, from /proc.
struct Proc;

impl Witness for Proc {
    fn thread(&mut self, thread: u32) -> Option<Evidence> {
        let folder = format!("/proc/self/task/{thread}");
        let mut bytes = [0; 1024];
        let stat = read(&format!("{folder}/stat"), &mut bytes)?;
        // The name may contain brackets and blanks.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = *fields.next()?.as_bytes().first()?;
        let mut fields = fields.skip(10).map_while(|field| field.parse::<u64>().ok());
        let ticks = fields.next()? + fields.next()?;
        let mut bytes = [0; 128];
        // Without schedstat, CPU time has the resolution of a tick.
        let stat = read(&format!("{folder}/schedstat"), &mut bytes).unwrap_or_default();
        let mut fields = stat.split_whitespace().map_while(|field| field.parse::<u64>().ok());
        let ran = fields.next().unwrap_or(ticks * 10_000_000);
        Some(Evidence { state, ran, times: fields.nth(1).unwrap_or(0) })
    }

    fn threads(&mut self) -> Vec<u32> {
        let tasks = fs::read_dir("/proc/self/task");
        let number = |task: fs::DirEntry| task.file_name().to_str()?.parse().ok();
        tasks.into_iter().flatten().flatten().filter_map(number).collect()
    }
}

fn read<'a>(path: &str, bytes: &'a mut [u8]) -> Option<&'a str> {
    let got = fs::File::open(path).ok()?.read(bytes).ok()?;
    std::str::from_utf8(&bytes[..got]).ok()
}

#[cfg(test)]
mod tests;
