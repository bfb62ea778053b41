//! The atomics of the mailbox, named here only, so that loom's can stand in for them.
//!
//! Every ordering stronger than `Relaxed` and every step that the mailbox's promises rest on is
//! written through a
//! [`Site`]. In a normal build the site vanishes. Under `--cfg loom` the environment variable `WEAKEN=<site>` takes that
//! one away, and a model must then fail: what nobody misses is either not needed or not tested.

/// A place where the proof rests on an ordering or a step of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// `Mailbox::deliver` sets the bit: what the library wrote before the callback is there.
    DoneRelease,
    /// `Mailbox::take_done` takes the bit: what the library wrote before the callback is seen.
    DoneAcquire,
    /// `Mailbox::event` counts a restart: the state that it brought is there.
    RestartRelease,
    /// `Mailbox::events` reads the count: the state that the restart brought is seen.
    RestartAcquire,
    /// `Mailbox::deliver`: one callback of those that come for a request claims it.
    Claim,
    /// `Mailbox::expect`: the slot's next request is told from the one before.
    Generation,
    /// `Mailbox::give_up`: either the request is given up, or its callback has come.
    GiveUp,
}

#[cfg(not(loom))]
pub(crate) use real::{exchange, step, strong, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(loom)]
pub(crate) use model::{exchange, step, strong, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    use super::Site;

    #[inline(always)]
    pub(crate) const fn strong(_: Site, ordering: Ordering) -> Ordering {
        ordering
    }

    #[inline(always)]
    pub(crate) const fn step(_: Site) -> bool {
        true
    }

    /// Whether `word` was `from`; it is `to` then.
    #[inline(always)]
    pub(crate) fn exchange(_: Site, word: &AtomicU64, from: u64, to: u64) -> bool {
        word.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(loom)]
mod model {
    use std::sync::OnceLock;

    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    use super::Site;

    const SITES: [Site; 7] = [
        Site::DoneRelease,
        Site::DoneAcquire,
        Site::RestartRelease,
        Site::RestartAcquire,
        Site::Claim,
        Site::Generation,
        Site::GiveUp,
    ];

    /// What `WEAKEN` names.
    fn weakened() -> Option<Site> {
        static WEAKEN: OnceLock<Option<Site>> = OnceLock::new();
        *WEAKEN.get_or_init(|| {
            let name = std::env::var("WEAKEN").ok()?;
            let site = SITES.into_iter().find(|site| format!("{site:?}") == name);
            Some(site.unwrap_or_else(|| panic!("WEAKEN={name} is not known")))
        })
    }

    pub(crate) fn strong(site: Site, ordering: Ordering) -> Ordering {
        if step(site) {
            ordering
        } else {
            Ordering::Relaxed
        }
    }

    pub(crate) fn step(site: Site) -> bool {
        weakened() != Some(site)
    }

    /// Taken away: looks first and writes then, and another may come between.
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
