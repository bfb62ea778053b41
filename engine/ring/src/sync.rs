//! The only file that names atomics, so that loom's can stand in for them.
//!
//! Every ordering stronger than `Relaxed` and every fence in this crate is written through a
//! [`Site`]. In a normal build the site vanishes. Under `--cfg loom` the environment variable
//! `WEAKEN=<site>` takes that one ordering or fence away, `WEAKEN=<site>AcqRel` leaves an acquire
//! and release fence of it, and a model must then fail: an ordering nobody misses is either not
//! needed or not tested.

/// A place where the proof rests on an ordering, a fence or a step of the wake-up protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name the sites"))]
pub enum Site {
    /// `Ring::push` reads the cell's number: the item before has been taken out.
    PushAcquire,
    /// `Ring::push` writes the cell's number: the item is in.
    PushRelease,
    /// `Ring::pop` reads the cell's number: the item is in.
    PopAcquire,
    /// `Ring::pop` writes the cell's number: the item has been taken out.
    PopRelease,
    /// `Stack::push` moves the head: the number's owner is done with it.
    StackRelease,
    /// `Stack::pop` reads and moves the head: the owner before is done with it.
    StackAcquire,
    /// `Stack`: the head counts its changes, so that one that came back is told apart.
    StackCount,
    /// `EventCount::wait_until`: between registering as a sleeper and looking once more.
    WaitFence,
    /// `Fenced::new`: between the notifier's change and its looking for sleepers.
    NotifyFence,
    /// `EventCount::notify_all`: the word changes, so that who saw it before does not sleep.
    NewEpoch,
    /// `EventCount::wait_until`: a waiter that runs takes the mark of the wake-up off.
    ClearWaking,
    /// `EventCount::wait_until`: one that was woken and leaves content wakes the next.
    PassOn,
}

#[cfg(not(loom))]
pub(crate) use real::{
    fence_seq_cst, spins, step, strong, AtomicU32, AtomicU64, AtomicUsize, Futex, Ordering,
    UnsafeCell,
};

#[cfg(loom)]
pub(crate) use model::{
    fence_seq_cst, spins, step, strong, AtomicU32, AtomicU64, AtomicUsize, Futex, Ordering,
    UnsafeCell,
};

#[cfg(not(loom))]
mod real {
    use std::sync::atomic::fence;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use std::sync::OnceLock;
    use std::time::Duration;

    use rustix::thread::futex;

    use super::Site;

    #[inline(always)]
    pub(crate) const fn strong(_: Site, ordering: Ordering) -> Ordering {
        ordering
    }

    #[inline(always)]
    pub(crate) const fn step(_: Site) -> bool {
        true
    }

    #[inline(always)]
    pub(crate) fn fence_seq_cst(_: Site) {
        fence(Ordering::SeqCst);
    }

    /// How often a waiter looks again before it sleeps.
    #[inline]
    pub(crate) fn spins() -> u32 {
        static SPINS: OnceLock<u32> = OnceLock::new();
        *SPINS.get_or_init(|| match std::thread::available_parallelism() {
            Ok(cpus) if cpus.get() > 1 => 64,
            // Alone on its CPU a spinning thread only keeps away the one it waits for.
            _ => 0,
        })
    }

    /// `std`'s cell with loom's closures.
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

        /// Sleeps unless the word is no longer `seen`. Returns for any reason, wake-up, time-out,
        /// signal or chance: the caller looks for itself.
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
            // The word is ours and mapped, so the kernel has nothing to refuse.
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, sleepers);
        }

        pub(crate) fn calls(&self) -> u64 {
            self.calls.load(Ordering::Relaxed)
        }
    }
}

#[cfg(loom)]
mod model {
    use std::sync::OnceLock;
    use std::time::Duration;

    use loom::sync::atomic::fence;
    use loom::sync::{Condvar, Mutex};
    pub(crate) use loom::{
        cell::UnsafeCell,
        sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    };

    use super::Site;

    impl Site {
        /// All of them, in the order of the table that `scripts/loom` prints.
        pub const ALL: [Site; 12] = [
            Site::PushAcquire,
            Site::PushRelease,
            Site::PopAcquire,
            Site::PopRelease,
            Site::StackRelease,
            Site::StackAcquire,
            Site::StackCount,
            Site::WaitFence,
            Site::NotifyFence,
            Site::NewEpoch,
            Site::ClearWaking,
            Site::PassOn,
        ];
    }

    /// What `WEAKEN` names: a site, and whether an acquire and release fence is left of it.
    fn weakened() -> Option<(Site, bool)> {
        static WEAKEN: OnceLock<Option<(Site, bool)>> = OnceLock::new();
        *WEAKEN.get_or_init(|| {
            let name = std::env::var("WEAKEN").ok()?;
            let (plain, acq_rel) = match name.strip_suffix("AcqRel") {
                Some(plain) => (plain, true),
                None => (&*name, false),
            };
            let site = Site::ALL.into_iter().find(|site| format!("{site:?}") == plain);
            let site = site.unwrap_or_else(|| panic!("WEAKEN={name} is not known"));
            Some((site, acq_rel))
        })
    }

    pub(crate) fn strong(site: Site, ordering: Ordering) -> Ordering {
        if weakened() == Some((site, false)) {
            Ordering::Relaxed
        } else {
            ordering
        }
    }

    pub(crate) fn step(site: Site) -> bool {
        weakened() != Some((site, false))
    }

    pub(crate) fn fence_seq_cst(site: Site) {
        match weakened() {
            Some((weak, acq_rel)) if weak == site => {
                if acq_rel {
                    fence(Ordering::AcqRel);
                }
            }
            _ => fence(Ordering::SeqCst),
        }
    }

    /// Looking again adds nothing but states.
    pub(crate) fn spins() -> u32 {
        0
    }

    /// The kernel's promise, no more: a waiter that saw the word changed does not sleep, one that
    /// sleeps is woken by a wake that comes after. Deadlines are not modelled.
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
