//! The only file that names the atomics of flights and stations, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed` and every fence of the protocols in `flight.rs` and
//! `station.rs` has a [`Site`], which the models take away with `WEAKEN_DEVICE` (crate `weaken`;
//! `WEAKEN` is the ring's, which the models use).

weaken::sites! {
    "WEAKEN_DEVICE",
    /// A place where the proof depends on an ordering, a fence or a step of the protocol.
    pub(crate) enum Site {
        /// `Flight::is_free`: all invited threads have released it.
        FreeAcquire,
        /// `Flight::release`: this thread no longer accesses the request.
        InvitationRelease,
        /// `Flight::complete`: the other threads' work is visible.
        LeftAcquire,
        /// `Flight::complete`: this thread's work is visible.
        LeftRelease,
        /// `Station::notify`: between the push of the flight and the look whether the queue sleeps.
        FinishFence,
        /// `Station::arm`: between arming and the look into the ring.
        ArmFence,
        /// `Station::notify`: wakes a sleeping queue.
        Wakes,
    }
}

pub(crate) use weaken::{both, fence_seq_cst, step, strong};

#[cfg(not(loom))]
pub(crate) use real::{spin, AtomicBool, AtomicU32, Ordering, UnsafeCell, Wake};

#[cfg(loom)]
pub(crate) use model::{spin, AtomicBool, AtomicU32, Ordering, UnsafeCell, Wake};

#[cfg(not(loom))]
mod real {
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use rustix::event::{eventfd, EventfdFlags};

    #[inline(always)]
    pub(crate) fn spin() {
        std::hint::spin_loop();
    }

    /// `std`'s cell with loom's interface.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        #[inline(always)]
        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// The event that a queue's thread sleeps on: an eventfd.
    #[derive(Debug)]
    pub(crate) struct Wake(OwnedFd);

    impl Wake {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
        }

        /// Makes it readable.
        pub(crate) fn set(&self) {
            // Fails only if the counter is full, and then it is readable.
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }

        /// Makes it unreadable; returns how often it was set.
        pub(crate) fn clear(&self) -> u32 {
            let mut count = [0; 8];
            match rustix::io::read(&self.0, &mut count) {
                Ok(_) => u32::try_from(u64::from_ne_bytes(count)).unwrap_or(u32::MAX),
                Err(_) => 0,
            }
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub(crate) fn spin() {
        loom::thread::yield_now();
    }

    /// An eventfd without a kernel. It orders only what a poll of a real one orders: sleep and
    /// wake-up.
    #[derive(Debug)]
    pub(crate) struct Wake {
        set: Mutex<u32>,
        woken: Condvar,
    }

    impl Wake {
        pub(crate) fn new() -> std::io::Result<Self> {
            Ok(Self { set: Mutex::new(0), woken: Condvar::new() })
        }

        pub(crate) fn set(&self) {
            *self.set.lock().expect("no model panics here") += 1;
            self.woken.notify_all();
        }

        pub(crate) fn clear(&self) -> u32 {
            std::mem::take(&mut *self.set.lock().expect("no model panics here"))
        }

        pub(crate) fn is_set(&self) -> bool {
            *self.set.lock().expect("no model panics here") > 0
        }

        /// As `poll`: sleeps until it is readable.
        pub(crate) fn sleep(&self) {
            let mut set = self.set.lock().expect("no model panics here");
            while *set == 0 {
                set = self.woken.wait(set).expect("no model panics here");
            }
        }
    }
}
