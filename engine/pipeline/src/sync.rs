//! The only file that names atomics, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed`, every fence and most steps of the protocols in
//! `workers.rs` and `results.rs` have a [`Site`], which costs nothing in a normal build. Under
//! `--cfg loom` the environment variable `WEAKEN_PIPELINE=<site>` takes that one away, and
//! `WEAKEN_PIPELINE=<site>AcqRel` weakens a SeqCst fence to AcqRel; a model must then fail.
//! (`WEAKEN` is the ring's, which the models use.)

/// A place where the proof depends on an ordering, a fence or a step of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// `Workers::close` finds the gate empty: all jobs are in their rings.
    GateAcquire,
    /// `Workers::close` seals the rings: they get no more jobs.
    SealRelease,
    /// A worker finds the rings sealed: it sees all jobs in them.
    SealAcquire,
    /// `Workers::place`: between the push of a job and the look for an idle worker.
    PlaceFence,
    /// `Workers::idle_wait`: between the `idle` flag and the last look into all rings.
    IdleFence,
    /// `Workers::idle_wait`: between the `busy` flag and the look into the worker's own ring.
    BusyFence,
    /// `Workers::wake_idle`: between the claim of an idle worker and the look whether it sleeps.
    WakeFence,
    /// `Workers::place`: a job that went to a worker with others to do wakes an idle one.
    WakesIdle,
    /// `Workers::place`: so does a job whose worker has become busy.
    ChecksBusy,
    /// `Workers::place`: a worker that was chosen and gets no job looks again.
    ReturnsChoice,
    /// `Workers::idle_wait`: a worker that was chosen and takes another job wakes an idle one.
    PassesChoice,
    /// `Results::finish_one`: the output is in the ring.
    DoneRelease,
    /// `Results::wait_finished`: all outputs are in the ring.
    DoneAcquire,
    /// `Results::close`: what was pushed before it stays to be popped.
    CloseRelease,
    /// `Results::pop_until`: finds the items that were pushed before the close.
    CloseAcquire,
}

#[cfg(not(loom))]
pub(crate) use real::{
    fence, fence_behind, step, strong, yield_now, AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
    BeforeFence, Ordering,
};

#[cfg(loom)]
pub(crate) use model::{
    fence, fence_behind, step, strong, yield_now, AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
    BeforeFence, Ordering,
};

/// Two cache lines: a counter that one side writes often must not cost the other side cache misses.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use std::thread::yield_now;

    use ring::Fenced;

    use super::Site;

    #[inline(always)]
    pub(crate) const fn strong(_: Site, ordering: Ordering) -> Ordering {
        ordering
    }

    #[inline(always)]
    pub(crate) const fn step(_: Site) -> bool {
        true
    }

    /// A place before the change that a fence follows.
    #[derive(Clone, Copy)]
    pub(crate) struct BeforeFence;

    impl BeforeFence {
        #[inline(always)]
        pub(crate) fn new(_: Site) -> Self {
            Self
        }
    }

    #[inline(always)]
    pub(crate) fn fence(_: Site) {
        let _ = Fenced::new();
    }

    /// The fence behind a change, for notifications.
    #[inline(always)]
    pub(crate) fn fence_behind(_: Site, _: BeforeFence) -> Fenced {
        Fenced::new()
    }
}

#[cfg(loom)]
mod model {
    use std::sync::OnceLock;

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::thread::yield_now;
    use ring::Fenced;

    use super::Site;

    const ALL: [Site; 15] = [
        Site::GateAcquire,
        Site::SealRelease,
        Site::SealAcquire,
        Site::PlaceFence,
        Site::IdleFence,
        Site::BusyFence,
        Site::WakeFence,
        Site::WakesIdle,
        Site::ChecksBusy,
        Site::ReturnsChoice,
        Site::PassesChoice,
        Site::DoneRelease,
        Site::DoneAcquire,
        Site::CloseRelease,
        Site::CloseAcquire,
    ];

    /// The value of `WEAKEN_PIPELINE`: a site, and whether an AcqRel fence remains.
    fn weakened() -> Option<(Site, bool)> {
        static WEAKEN: OnceLock<Option<(Site, bool)>> = OnceLock::new();
        *WEAKEN.get_or_init(|| {
            let name = std::env::var("WEAKEN_PIPELINE").ok()?;
            let (plain, acq_rel) = match name.strip_suffix("AcqRel") {
                Some(plain) => (plain, true),
                None => (&*name, false),
            };
            let site = ALL.into_iter().find(|site| format!("{site:?}") == plain);
            let site = site.unwrap_or_else(|| panic!("WEAKEN_PIPELINE={name} is not known"));
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

    /// Holds the fence of a weakened site: executed before the change instead of behind it.
    pub(crate) struct BeforeFence(Option<Fenced>);

    impl BeforeFence {
        pub(crate) fn new(site: Site) -> Self {
            let weak = weakened().is_some_and(|(weak, _)| weak == site);
            Self(weak.then(Fenced::new))
        }
    }

    pub(crate) fn fence(site: Site) {
        match weakened() {
            Some((weak, acq_rel)) if weak == site => {
                if acq_rel {
                    loom::sync::atomic::fence(Ordering::AcqRel);
                }
            }
            _ => drop(Fenced::new()),
        }
    }

    pub(crate) fn fence_behind(site: Site, before: BeforeFence) -> Fenced {
        match before.0 {
            Some(early) => {
                if weakened() == Some((site, true)) {
                    loom::sync::atomic::fence(Ordering::AcqRel);
                }
                early
            }
            None => Fenced::new(),
        }
    }
}
