//! The atomics of the mailbox, named only here, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed` and every step on which the mailbox's guarantees depend
//! has a [`Site`], which the models take away with `WEAKEN` (crate `weaken`).

weaken::sites! {
    "WEAKEN",
    /// A place where the proof depends on an ordering or a step of the protocol.
    pub(crate) enum Site {
        /// `Mailbox::deliver` sets the bit: publishes the library's writes before the callback.
        DoneRelease,
        /// `Mailbox::take_done` takes the bit: sees the library's writes before the callback.
        DoneAcquire,
        /// `Mailbox::event` counts a restart: publishes the new state.
        RestartRelease,
        /// `Mailbox::events` reads the count: sees the state of the restart.
        RestartAcquire,
        /// `Mailbox::deliver`: exactly one of a request's callbacks claims it.
        Claim,
        /// `Mailbox::expect`: distinguishes the slot's next request from the last.
        Generation,
        /// `Mailbox::give_up`: either the request is given up, or its callback has come.
        GiveUp,
    }
}

pub(crate) use weaken::{step, strong};

#[cfg(not(loom))]
pub(crate) use real::{exchange, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(loom)]
pub(crate) use model::{exchange, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    use super::Site;

    /// Replaces `from` by `to`; returns whether `word` was `from`.
    #[inline(always)]
    pub(crate) fn exchange(_: Site, word: &AtomicU64, from: u64, to: u64) -> bool {
        word.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    use super::{step, Site};

    /// Weakened: loads first and stores then, so that another thread's store may come between.
    pub(crate) fn exchange(site: Site, word: &AtomicU64, from: u64, to: u64) -> bool {
        if step(site) {
            return word.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        }
        let is_from = word.load(Ordering::Relaxed) == from;
        if is_from {
            word.store(to, Ordering::Relaxed);
        }
        is_from
    }
}
