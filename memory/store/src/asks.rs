//! How long the kernel leaves the keeper's request for memory unanswered.
//!
//! A writer without a slab waits for the keeper. The kernel may need memory's own users to make
//! progress before it answers the keeper, and reads wait behind the write: so the write fails when
//! the kernel takes too long. It must not fail because the keeper gets no CPU, which depends on the
//! load of the machine and not on its memory. Time alone does not tell the two apart. The writer
//! therefore looks at the keeper's thread at intervals and counts two things only: looks that find
//! the thread asleep, and CPU time that the thread uses. Within one request a writer is patient for
//! [`Options::patience`](crate::Options::patience); for a keeper that does something else, as where
//! it waits for a lock, [`LONGEST_WAIT`], or the patience if that is longer. A thread that is
//! runnable and does not run adds to neither, and neither does a late look.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::sync::{AtomicU64, Ordering};

/// Looks in the time that a writer is patient.
const LOOKS: u32 = 5;

/// A request that uses this many times the writer's patience in CPU time is unanswered: the kernel
/// searches for memory without sleep. Zeroing the pages of a slab takes microseconds, or some
/// milliseconds in an emulator.
const SEARCH: u32 = 10;

/// How long a writer waits in all for a keeper that sleeps, or computes, outside its requests:
/// requests that wait behind a write must not wait until the watchdog takes the server for one that
/// hangs, after 10 s.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The unit of CPU times in `/proc`.
const TICK: Duration = Duration::from_millis(10);

/// The keeper's requests to the kernel for memory.
#[derive(Debug)]
pub(crate) struct Asks {
    patience: Duration,
    /// Odd while the keeper's thread asks; each request has a number of its own.
    number: AtomicU64,
    /// The last request that some writer found unanswered for too long.
    unanswered: AtomicU64,
    /// `/proc/thread-self/stat` of the keeper's thread.
    stat: Mutex<Option<File>>,
}

/// A writer's looks at the keeper's thread in one wait.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    elsewhere: Count,
    /// The last request.
    number: u64,
    within: Count,
}

/// The findings of several looks.
#[derive(Debug, Default)]
struct Count {
    asleep: u32,
    /// The thread's CPU time at the first look, in ticks.
    cpu: Option<u64>,
}

impl Asks {
    pub(crate) fn new(patience: Duration) -> Self {
        let (number, unanswered) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { patience, number, unanswered, stat: Mutex::new(None) }
    }

    /// The calling thread is the keeper's from now on.
    pub(crate) fn enter(&self) {
        *self.stat.lock().unwrap_or_else(PoisonError::into_inner) =
            File::open("/proc/thread-self/stat").ok();
        // The kernel allocates its buffer at the first read.
        let _ = self.thread();
    }

    /// Runs `ask`, in the keeper's thread: a system call that waits until the kernel has memory.
    pub(crate) fn ask<R>(&self, ask: impl FnOnce() -> R) -> R {
        self.number.fetch_add(1, Ordering::Relaxed);
        let answer = ask();
        self.number.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// The time between two looks.
    pub(crate) fn interval(&self) -> Duration {
        (self.patience / LOOKS).clamp(Duration::from_millis(1), Duration::from_secs(1))
    }

    /// The state of a writer that begins to wait.
    pub(crate) fn looks(&self) -> Looks {
        Looks { number: self.number.load(Ordering::Relaxed), ..Looks::default() }
    }

    /// Looks once, an [`interval`](Self::interval) after the last time. Returns whether the kernel
    /// has left the present request unanswered for too long, or the keeper does something else.
    pub(crate) fn are_unanswered(&self, looks: &mut Looks) -> bool {
        let number = self.number.load(Ordering::Relaxed);
        if looks.number != number {
            // Another request, or none: the kernel has answered the last one.
            (looks.number, looks.within) = (number, Count::default());
        }
        if number.is_multiple_of(2) {
            let limits = [LONGEST_WAIT.max(self.patience); 2];
            return looks.elsewhere.exceeds(self.thread(), self.interval(), limits);
        }
        if self.unanswered.load(Ordering::Relaxed) == number {
            return true;
        }
        let thread = self.thread();
        if self.number.load(Ordering::Relaxed) != number {
            return false;
        }
        let limits = [self.patience, self.patience.saturating_mul(SEARCH).max(TICK)];
        let over = looks.within.exceeds(thread, self.interval(), limits);
        if over {
            self.unanswered.store(number, Ordering::Relaxed);
        }
        over
    }

    /// Whether the keeper's thread is asleep, and its CPU time in ticks; `None` if the kernel does
    /// not say.
    fn thread(&self) -> Option<(bool, u64)> {
        let mut bytes = [0; 512];
        let stat = self.stat.lock().unwrap_or_else(PoisonError::into_inner);
        let read = stat.as_ref()?.read_at(&mut bytes, 0).ok()?;
        drop(stat);
        parse(&bytes[..read])
    }
}

impl Count {
    /// Adds a look. Returns whether the thread has slept, or computed, for as long as `limits`.
    fn exceeds(
        &mut self,
        thread: Option<(bool, u64)>,
        interval: Duration,
        [asleep_for, computed_for]: [Duration; 2],
    ) -> bool {
        // Without a report the time alone decides: a request must not hold up reads for ever.
        let (asleep, cpu) = thread.unwrap_or((true, 0));
        self.asleep = self.asleep.saturating_add(u32::from(asleep));
        let used = cpu.saturating_sub(*self.cpu.get_or_insert(cpu));
        let used = TICK.saturating_mul(u32::try_from(used).unwrap_or(u32::MAX));
        interval.saturating_mul(self.asleep) >= asleep_for || used >= computed_for
    }
}

/// Whether a thread sleeps, and its user and system time in ticks: fields 3, 14 and 15 of `stat`.
fn parse(stat: &[u8]) -> Option<(bool, u64)> {
    // The name before them may have spaces and parentheses.
    let name = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = std::str::from_utf8(&stat[name + 1..]).ok()?.split_ascii_whitespace();
    let asleep = matches!(fields.next()?, "S" | "D");
    let user = fields.nth(10)?.parse::<u64>().ok()?;
    let system = fields.next()?.parse::<u64>().ok()?;
    Some((asleep, user.saturating_add(system)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(50);

    fn count(count: &mut Count, thread: Option<(bool, u64)>) -> bool {
        count.exceeds(thread, Asks::new(PATIENCE).interval(), [PATIENCE, PATIENCE * SEARCH])
    }

    #[test]
    fn a_thread_that_gets_no_cpu_adds_nothing() {
        let mut looks = Count::default();
        assert!((0..100_000).all(|_| !count(&mut looks, Some((false, 7)))));
    }

    #[test]
    fn a_thread_asleep_or_busy_in_one_request_adds_up() {
        let mut looks = Count::default();
        let asleep = (1..100).find(|_| count(&mut looks, Some((true, 7))));
        assert_eq!(asleep, Some(LOOKS));
        let mut looks = Count::default();
        let busy = (7..100).find(|&cpu| count(&mut looks, Some((false, cpu))));
        assert_eq!(busy, Some(7 + 50), "ten times the patience, in ticks");
        let mut looks = Count::default();
        assert_eq!((1..100).find(|_| count(&mut looks, None)), Some(LOOKS));
    }

    #[test]
    fn each_request_has_its_own_count() {
        let asks = Asks::new(PATIENCE);
        let mut looks = asks.looks();
        assert!((0..100).all(|_| !asks.are_unanswered(&mut looks)), "the keeper does not ask");
        asks.ask(|| {
            assert!((0..LOOKS - 1).all(|_| !asks.are_unanswered(&mut looks)));
        });
        asks.ask(|| {
            let many = (1..100).find(|_| asks.are_unanswered(&mut looks));
            assert_eq!(many, Some(LOOKS));
            // It goes for other writers as well.
            assert!(asks.are_unanswered(&mut asks.looks()));
        });
        assert!(!asks.are_unanswered(&mut looks));
        asks.ask(|| assert!(!asks.are_unanswered(&mut looks)));
    }

    #[test]
    fn the_kernel_reports_a_thread() {
        let asks = Asks::new(PATIENCE);
        assert_eq!(asks.thread(), None);
        asks.enter();
        assert!(matches!(asks.thread(), Some((false, _))), "this thread runs");
        let rest = "1 2 3 4 5 6 7 8 9 10 31 11 13";
        assert_eq!(parse(format!("5 (a) b) D {rest}").as_bytes()), Some((true, 42)));
        assert_eq!(parse(format!("5 (store-keeper) R {rest}").as_bytes()), Some((false, 42)));
        assert_eq!(parse(b"5 (store-keeper) R 1 2"), None);
        assert_eq!(parse(b""), None);
    }
}
