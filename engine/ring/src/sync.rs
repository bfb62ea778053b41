//! The only file that names atomics, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed` and every fence in this crate is written through a
//! [`Site`], which the models take away with `WEAKEN` (crate `weaken`).

weaken::sites! {
    "WEAKEN",
    /// A place where the proof rests on an ordering, a fence or a step of the wake-up protocol.
    pub(crate) enum Site {
        /// `Ring::push` reads the cell's number: the previous item has been taken out.
        PushAcquire,
        /// `Ring::push` writes the cell's number: the item is written.
        PushRelease,
        /// `Ring::pop` reads the cell's number: the item is written.
        PopAcquire,
        /// `Ring::pop` writes the cell's number: the item has been taken out.
        PopRelease,
        /// `Stack::push` moves the head: the number's owner is done with it.
        StackRelease,
        /// `Stack::pop` reads and moves the head: the previous owner is done with the number.
        StackAcquire,
        /// `Stack`: the head counts its changes, so that a number that came back is noticed (ABA).
        StackCount,
        /// `EventCount::wait_until`: between registering as a sleeper and checking the condition
        /// again.
        WaitFence,
        /// `Fenced::new`: between the notifier's change and its check for sleepers.
        NotifyFence,
        /// `EventCount::notify_all`: the word changes, so that a waiter that read it before does
        /// not sleep.
        NewEpoch,
        /// `EventCount::wait_until`: a running waiter clears `waking`.
        ClearWaking,
        /// `EventCount::wait_until`: a woken waiter that returns with an item wakes the next.
        PassOn,
    }
}

pub(crate) use weaken::{fence_seq_cst, step, strong};

#[cfg(not(loom))]
pub(crate) use real::{spins, AtomicU32, AtomicU64, AtomicUsize, Futex, Ordering, UnsafeCell};

#[cfg(loom)]
pub(crate) use model::{spins, AtomicU32, AtomicU64, AtomicUsize, Futex, Ordering, UnsafeCell};

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use std::sync::OnceLock;
    use std::time::Duration;

    use rustix::thread::futex;

    /// How often a waiter checks again before it sleeps.
    #[inline]
    pub(crate) fn spins() -> u32 {
        static SPINS: OnceLock<u32> = OnceLock::new();
        *SPINS.get_or_init(|| match std::thread::available_parallelism() {
            Ok(cpus) if cpus.get() > 1 => 64,
            // On a single CPU, spinning only delays the thread that the waiter waits for.
            _ => 0,
        })
    }

    /// `std`'s cell with the closures of loom's.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// A word in memory and the kernel's wait queue behind it.
    #[derive(Debug, Default)]
    pub(crate) struct Futex {
        word: AtomicU32,
        calls: AtomicU64,
    }

    impl Futex {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        #[inline(always)]
        pub(crate) fn word(&self) -> &AtomicU32 {
            &self.word
        }

        /// Sleeps unless the word differs from `seen`. May return for any reason (wake-up,
        /// time-out, signal, spuriously): the caller checks its condition.
        #[cold]
        pub(crate) fn wait(&self, seen: u32, timeout: Option<Duration>) {
            self.calls.fetch_add(1, Ordering::Relaxed);
            // A time-out beyond what the kernel can count is no time-out.
            let timeout = timeout.and_then(|t| t.try_into().ok());
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, seen, timeout.as_ref());
        }

        #[cold]
        pub(crate) fn wake(&self, sleepers: u32) {
            self.calls.fetch_add(1, Ordering::Relaxed);
            // The word is ours and mapped, so the kernel has no reason to refuse.
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, sleepers);
        }

        pub(crate) fn calls(&self) -> u64 {
            self.calls.load(Ordering::Relaxed)
        }
    }
}

#[cfg(loom)]
mod model {
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex};
    pub(crate) use loom::{
        cell::UnsafeCell,
        sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    };

    /// Under loom, spinning only adds states.
    pub(crate) fn spins() -> u32 {
        0
    }

    /// Only what the kernel promises: a waiter that finds the word changed does not sleep, and a
    /// sleeper is woken by a later wake. Deadlines are not modelled.
    #[derive(Debug)]
    pub(crate) struct Futex {
        word: AtomicU32,
        queue: Mutex<()>,
        wakes: Condvar,
    }

    impl Futex {
        pub(crate) fn new() -> Self {
            Self { word: AtomicU32::new(0), queue: Mutex::new(()), wakes: Condvar::new() }
        }

        pub(crate) fn word(&self) -> &AtomicU32 {
            &self.word
        }

        pub(crate) fn wait(&self, seen: u32, _: Option<Duration>) {
            let queue = self.queue.lock().unwrap();
            if self.word.load(Ordering::Relaxed) == seen {
                drop(self.wakes.wait(queue).unwrap());
            }
        }

        pub(crate) fn wake(&self, sleepers: u32) {
            let _queue = self.queue.lock().unwrap();
            if sleepers == 1 {
                self.wakes.notify_one();
            } else {
                self.wakes.notify_all();
            }
        }

        pub(crate) fn calls(&self) -> u64 {
            0
        }
    }
}
