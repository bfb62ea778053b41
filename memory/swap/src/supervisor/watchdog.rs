//! Detects a server that hangs, by its heartbeats and the kernel's state of its threads.
//!
//! A thread that has had the same request for some seconds without finishing a page of it may hang,
//! or it may have got no CPU. The kernel tells the two apart:
//!
//! | the thread | counts as |
//! |---|---|
//! | stopped (state T of the process) | hung after 5 s |
//! | sleeps and was not woken once (S or D, not scheduled) | hung after 4 s; not while another thread of the server waits for a CPU in vain, because the sleeper may wait for that thread |
//! | runs (has used CPU) | hung when it has used 1.5 s of CPU in 4 s or more: a page takes milliseconds |
//! | is woken, and sleeps again | hung after 60 s; a second in which another thread waits for a CPU in vain does not count, as above |
//! | waits for a CPU (R, not scheduled) | starved: the second does not count |
//! | is traced (state t) | under a debugger: does not count |
//!
//! The watchdog counts its own looks, one a second. A late look does not count: whatever delayed
//! the supervisor (a suspended machine, no CPU) may have delayed the server too. A thread that
//! waits for a backing device reports that, and is not suspected.

use std::time::{Duration, Instant};

use pulse::{Look, Slot, State};
use thread_stat::{Process, ThreadStat, Threads};

/// The time between two looks.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A look that comes this long after the last one does not count.
const LATE: Duration = Duration::from_millis(2500);

/// After this many looks at a stopped process it counts as hung.
const STOPPED: u32 = 5;

/// After this many looks at a thread asleep in the same place it counts as hung.
const ASLEEP: u32 = 4;

/// The most CPU time that a page takes, however slow codec and machine are.
const SPENT: Duration = Duration::from_millis(1500);

/// After this many looks a thread counts as hung whatever it does, unless a thread of the server
/// gets no CPU.
const SLOW: u32 = 60;

/// The watchdog's record of one heartbeat slot.
#[derive(Clone, Copy, Debug)]
struct Suspicion {
    look: Look,
    stat: Option<ThreadStat>,
    /// Looks that found the same step of the same request, and the thread not starved.
    looks: u32,
    /// Those of `looks` that found no thread of the server starved.
    slow: u32,
    asleep: u32,
    ran: Duration,
}

impl Suspicion {
    fn none(look: Look) -> Self {
        Self { look, stat: None, looks: 0, slow: 0, asleep: 0, ran: Duration::ZERO }
    }
}

/// A server that hangs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hang {
    /// How the watchdog knows.
    pub(super) why: String,
    /// The slot of the thread that hangs; `None` if the process is stopped.
    pub(super) slot: Option<usize>,
}

/// Watches one server.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    slots: Vec<Suspicion>,
    last: Option<Instant>,
    /// Consecutive looks that found the process stopped.
    stopped: u32,
    /// All threads of the server, while one is suspected.
    threads: Threads,
}

impl Watchdog {
    /// Starts over, for another server.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Looks at the process, whose state letter the caller passes. If several threads hang, the
    /// first slot counts. Makes no system call while no thread is suspected.
    pub(super) fn look(
        &mut self,
        now: Instant,
        slots: &[Slot],
        state: Option<u8>,
        process: &mut dyn Process,
    ) -> Option<Hang> {
        let since = self.last.replace(now);
        let counts = since.is_some_and(|last| now.saturating_duration_since(last) < LATE);
        match state {
            Some(b't') => {
                self.slots.clear();
                self.stopped = 0;
                return None;
            }
            Some(b'T') => {
                self.stopped += u32::from(counts);
                let why = || format!("it has been stopped (SIGSTOP) for {STOPPED} s");
                return (self.stopped >= STOPPED).then(|| Hang { why: why(), slot: None });
            }
            _ => self.stopped = 0,
        }
        if self.slots.is_empty() {
            self.slots = slots.iter().map(|slot| Suspicion::none(slot.look())).collect();
            return None;
        }
        let suspected = self.slots.iter().any(|suspicion| suspicion.stat.is_some());
        // Whether a thread of the server has waited for a CPU in vain since the last look.
        let starved = suspected && self.threads.look(process);
        if !suspected {
            self.threads.clear();
        }
        let mut hung = None;
        for (number, (suspicion, slot)) in self.slots.iter_mut().zip(slots).enumerate() {
            let look = slot.look();
            if look.state != State::Busy || look != suspicion.look || look.thread == 0 {
                *suspicion = Suspicion::none(look);
                continue;
            }
            let Some(stat) = process.thread(look.thread) else { continue };
            let Some(before) = suspicion.stat.replace(stat) else { continue };
            if counts && !stat.starved_since(&before) {
                suspicion.looks += 1;
                // It may poll for what the starved thread is to do.
                suspicion.slow += u32::from(!starved);
                suspicion.ran += stat.ran.saturating_sub(before.ran);
                let same = stat.state != b'R' && stat.times == before.times;
                suspicion.asleep = if same { suspicion.asleep + 1 } else { 0 };
            }
            hung = hung.or_else(|| Some((number, suspicion.verdict()?)));
        }
        match hung {
            Some((_, Verdict::Asleep(_))) if starved => None,
            hung => hung.map(|(slot, verdict)| Hang { why: verdict.to_string(), slot: Some(slot) }),
        }
    }
}

enum Verdict {
    Asleep(u32),
    Spins(u32, Duration),
    Slow(u32),
}

impl Suspicion {
    fn verdict(&self) -> Option<Verdict> {
        let thread = self.look.thread;
        if self.asleep >= ASLEEP {
            Some(Verdict::Asleep(thread))
        } else if self.ran >= SPENT && self.looks >= ASLEEP {
            Some(Verdict::Spins(thread, self.ran))
        } else if self.slow >= SLOW {
            Some(Verdict::Slow(thread))
        } else {
            None
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asleep(thread) => {
                write!(f, "its thread {thread} sleeps in a request, and nothing wakes it")
            }
            Self::Spins(thread, ran) => {
                write!(f, "its thread {thread} has run for {ran:.1?} over one page")
            }
            Self::Slow(thread) => write!(f, "its thread {thread} has done no page in {SLOW} s"),
        }
    }
}

#[cfg(test)]
mod tests;
