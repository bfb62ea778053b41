//! The event count: threads sleep until lock-free code has made their condition true.

use std::fmt;
use std::marker::PhantomData;
use std::time::Instant;

use crate::sync::{fence_seq_cst, spins, step, Futex, Ordering, Site};

/// Lets threads sleep until a condition on other atomics holds.
///
/// One 32-bit word, which is also the futex:
///
/// ```text
///   31            16 15               1   0
///  ├─── epoch ──────┼─── sleepers ─────┼ waking ┤
/// ```
///
/// `sleepers` counts the registered waiters. `waking` says that a wake-up of one waiter is under
/// way and that this waiter has not checked its condition yet: further notifications rely on that
/// check and make no system call. `epoch` counts the wake-ups of all waiters. Both `waking` and
/// `epoch` change the word, so that a waiter that read it before does not sleep.
///
/// Four rules, checked by the loom models, make sure that no wake-up is lost:
/// 1. The notifier changes the condition, then fences, then reads the word; the waiter registers in
///    the word, then fences, then reads the condition. One of two `SeqCst` fences comes first, so
///    either the notifier sees the sleeper or the sleeper sees the change.
/// 2. A running waiter clears `waking` *before* its fence and its check. By the same argument, a
///    notifier that saw `waking` set comes before that check.
/// 3. A waiter sleeps only on a word without `waking`, read before its check.
/// 4. One `waking` bit may stand for several notifications, while one waiter takes one item. So a
///    waiter that cleared the bit or slept wakes the next sleeper when it returns with an item.
///
/// The accesses to the word are relaxed: the fences provide all the ordering.
pub struct EventCount {
    futex: Futex,
}

const WAKING: u32 = 1;
const SLEEPER: u32 = 1 << 1;
const SLEEPERS: u32 = ((1 << 16) - 1) & !WAKING;
const EPOCH: u32 = 1 << 16;

impl EventCount {
    /// Creates an event count without waiters.
    pub fn new() -> Self {
        Self { futex: Futex::new() }
    }

    /// Announces that the condition may have become true for one waiter.
    ///
    /// Call it after the change. It costs a fence and a load when no thread sleeps or a wake-up is
    /// already under way. All waiters of one event count must wait for the same kind of condition,
    /// since any of them may be the one to wake; otherwise use [`notify_all`](Self::notify_all).
    #[inline]
    pub fn notify_one(&self) {
        self.notify_one_after(&Fenced::new());
    }

    /// Announces that the condition may have become true for every waiter.
    #[inline]
    pub fn notify_all(&self) {
        self.notify_all_after(&Fenced::new());
    }

    /// As [`notify_one`](Self::notify_one), for changes made before the fence.
    #[inline]
    pub fn notify_one_after(&self, fence: &Fenced) {
        let word = self.word_after(fence);
        if word & SLEEPERS != 0 && word & WAKING == 0 {
            self.wake_one(word);
        }
    }

    /// As [`notify_all`](Self::notify_all), for changes made before the fence.
    #[inline]
    pub fn notify_all_after(&self, fence: &Fenced) {
        if self.word_after(fence) & SLEEPERS != 0 {
            self.wake_all();
        }
    }

    /// Whether a thread sleeps, or is about to and may have missed changes made before the fence.
    ///
    /// For a change that rarely needs a notification: check further, or notify, only when this is
    /// true.
    #[inline]
    pub fn has_sleepers_after(&self, fence: &Fenced) -> bool {
        self.word_after(fence) & SLEEPERS != 0
    }

    /// Calls `ready` until it returns `Some`, and returns that value. Sleeps between notifications.
    ///
    /// `ready` is called at least once, and once more after the deadline; `None` means that this
    /// last call returned `None` too. It spins briefly before it sleeps.
    #[inline]
    pub fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        if let Some(found) = ready() {
            return Some(found);
        }
        for _ in 0..spins() {
            std::hint::spin_loop();
            if let Some(found) = ready() {
                return Some(found);
            }
        }
        self.wait_registered(deadline, ready)
    }

    /// Futex system calls so far, waits and wakes together.
    pub fn futex_calls(&self) -> u64 {
        self.futex.calls()
    }

    /// Rule 1: the word, read after the change and the fence.
    #[inline]
    fn word_after(&self, _: &Fenced) -> u32 {
        self.futex.word().load(Ordering::Relaxed)
    }

    #[cold]
    fn wait_registered<R>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let futex_word = self.futex.word();
        let mut word = futex_word.fetch_add(SLEEPER, Ordering::Relaxed).wrapping_add(SLEEPER);
        // Whether a notification may have been meant for this waiter (rule 4).
        let mut received = false;
        let found = loop {
            // Rule 2.
            if word & WAKING != 0 && step(Site::ClearWaking) {
                word = futex_word.fetch_and(!WAKING, Ordering::Relaxed) & !WAKING;
                received = true;
            }
            // Rule 1; pairs with the fence in `Fenced::new`.
            fence_seq_cst(Site::WaitFence);
            let found = ready();
            if found.is_some() {
                break found;
            }
            let timeout =
                match deadline.map(|deadline| deadline.checked_duration_since(Instant::now())) {
                    None => None,
                    Some(Some(left)) if !left.is_zero() => Some(left),
                    Some(_) => break None,
                };
            // Rule 3.
            self.futex.wait(word, timeout);
            received = true;
            word = futex_word.load(Ordering::Relaxed);
        };
        futex_word.fetch_sub(SLEEPER, Ordering::Relaxed);
        if received && found.is_some() && step(Site::PassOn) {
            self.notify_one();
        }
        found
    }

    #[cold]
    fn wake_one(&self, mut word: u32) {
        while word & SLEEPERS != 0 && word & WAKING == 0 {
            match self.futex.word().compare_exchange_weak(
                word,
                word | WAKING,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return self.futex.wake(1),
                Err(now) => word = now,
            }
        }
    }

    #[cold]
    fn wake_all(&self) {
        if step(Site::NewEpoch) {
            self.futex.word().fetch_add(EPOCH, Ordering::Relaxed);
        }
        self.futex.wake(i32::MAX.unsigned_abs());
    }
}

/// A sequentially consistent fence that this thread has executed.
///
/// A notifier of several event counts makes its changes, then one fence, then all notifications:
/// the fence is most of a notification's cost. Changes made after the fence need another.
#[derive(Debug)]
pub struct Fenced {
    /// Not `Send`, and made by `new` only: the fence orders this thread's accesses.
    _here: PhantomData<*const ()>,
}

impl Fenced {
    /// Executes the fence.
    #[inline]
    #[expect(clippy::new_without_default, reason = "a fence has to be visible in the code")]
    pub fn new() -> Self {
        // Rule 1; pairs with the fence in `wait_registered`.
        fence_seq_cst(Site::NotifyFence);
        Self { _here: PhantomData }
    }
}

impl Default for EventCount {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for EventCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventCount").field("futex_calls", &self.futex_calls()).finish()
    }
}
