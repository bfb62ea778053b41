//! The library's calls that are under way, for [`Watchdog`](crate::Watchdog).
//!
//! A thread cannot leave a call that does not return. So each engine records the call that it is
//! in, in memory that another thread reads. A record costs a few stores to a cache line of the
//! engine's own: no lock, no system call, no clock.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// A call of the library, or a few calls in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Call {
    Compress = 1,
    Decompress = 2,
    Poll = 3,
    Open = 4,
    Close = 5,
    Start = 6,
}

impl Call {
    const ALL: [Self; 6] =
        [Self::Compress, Self::Decompress, Self::Poll, Self::Open, Self::Close, Self::Start];

    /// The library's function, for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Compress => "cpaDcCompressData2",
            Self::Decompress => "cpaDcDecompressData",
            Self::Poll => "icp_sal_DcPollInstance",
            Self::Open => "cpaDcStartInstance or cpaDcInitSession",
            Self::Close => "cpaDcRemoveSession",
            Self::Start => "icp_sal_userStartMultiProcess",
        }
    }
}

/// One engine's calls. Only the thread that has the engine writes.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Calls {
    /// The number of calls so far, and in the lowest byte the `Call` under way; 0 outside of one.
    word: AtomicU64,
    /// The thread of the last call.
    thread: AtomicU32,
}

/// A look at an engine's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// Two looks with the same number are looks at the same call.
    word: u64,
    pub(crate) call: Call,
    pub(crate) thread: u32,
}

const CALL: u64 = 0xff;

impl Calls {
    /// Records a call until the guard is dropped. Calls do not nest.
    #[inline]
    pub(crate) fn enter(&self, call: Call) -> Inside<'_> {
        self.thread.store(own_thread(), Ordering::Relaxed);
        let word = self.word.load(Ordering::Relaxed);
        debug_assert_eq!(word & CALL, 0, "calls do not nest");
        let next = (word & !CALL).wrapping_add(CALL + 1);
        // Relaxed: a late look sees the call a moment later, and a watchdog looks for seconds.
        self.word.store(next | call as u64, Ordering::Relaxed);
        Inside(self)
    }

    /// The call under way.
    pub(crate) fn look(&self) -> Option<Look> {
        let word = self.word.load(Ordering::Relaxed);
        let call = Call::ALL.into_iter().find(|call| *call as u64 == word & CALL)?;
        Some(Look { word, call, thread: self.thread.load(Ordering::Relaxed) })
    }
}

/// A call under way.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Calls);

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        let word = self.0.word.load(Ordering::Relaxed);
        self.0.word.store(word & !CALL, Ordering::Relaxed);
    }
}

/// The number of the calling thread; the kernel is asked once a thread.
#[inline]
fn own_thread() -> u32 {
    thread_local! {
        static OWN: Cell<u32> = const { Cell::new(0) };
    }
    if OWN.get() == 0 {
        OWN.set(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
    }
    OWN.get()
}

/// The calls of all engines of the process that have a library.
static ENGINES: Mutex<Vec<Weak<Calls>>> = Mutex::new(Vec::new());
/// The library's shut-down has been left to itself.
static LEFT: AtomicBool = AtomicBool::new(false);

fn engines() -> MutexGuard<'static, Vec<Weak<Calls>>> {
    ENGINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows the calls to watchdogs until they are dropped.
pub(crate) fn register(calls: &Arc<Calls>) {
    let mut engines = engines();
    engines.retain(|engine| engine.strong_count() > 0);
    engines.push(Arc::downgrade(calls));
}

/// The calls of all engines.
pub(crate) fn all() -> Vec<Arc<Calls>> {
    engines().iter().filter_map(Weak::upgrade).collect()
}

/// Records that the library's shut-down did not end in time.
pub(crate) fn leave_behind() {
    LEFT.store(true, Ordering::Release);
}

/// A call that lasts for this long at the end of the process may never return.
const LAST: Duration = Duration::from_millis(500);

/// Whether a thread may be in a call of the library for ever. Then the library's own code at the
/// exit of the process may wait for that thread; see [`end_process`](crate::end_process). Takes up
/// to half a second while a call is under way, and no time otherwise.
pub fn is_stuck() -> bool {
    if LEFT.load(Ordering::Acquire) {
        return true;
    }
    let mut inside: Vec<(Arc<Calls>, Look)> =
        all().into_iter().filter_map(|calls| calls.look().map(|look| (calls, look))).collect();
    let start = Instant::now();
    while !inside.is_empty() && start.elapsed() < LAST {
        std::thread::sleep(Duration::from_millis(5));
        inside.retain(|(calls, look)| calls.look() == Some(*look));
    }
    !inside.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_seen_while_it_lasts_and_told_from_the_next_one() {
        let calls = Calls::default();
        assert_eq!(calls.look(), None);
        let inside = calls.enter(Call::Poll);
        let first = calls.look().unwrap();
        assert_eq!((first.call, calls.look()), (Call::Poll, Some(first)));
        assert_eq!(first.thread, rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
        drop(inside);
        assert_eq!(calls.look(), None);
        let _inside = calls.enter(Call::Poll);
        assert_ne!(calls.look(), Some(first));
    }
}
