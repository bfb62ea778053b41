//! The only file that names atomics, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed`, every fence and most steps of the protocols in
//! `workers.rs`, `workers/work.rs` and `results.rs` have a [`Site`], which the models take away
//! with `WEAKEN_PIPELINE` (crate `weaken`; `WEAKEN` is the ring's, which the models use).

weaken::sites! {
    "WEAKEN_PIPELINE",
    /// A place where the proof depends on an ordering, a fence or a step of the protocol.
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
        /// `Workers::wake_idle`: between the claim of an idle worker and the look whether it
        /// sleeps.
        WakeFence,
        /// `Workers::place`: a job that went to a worker with others to do wakes an idle one.
        WakesIdle,
        /// `Workers::place`: a job whose worker has become busy wakes an idle one too.
        ChecksBusy,
        /// `Workers::place`: a worker that was chosen and gets no job looks again.
        ReturnsChoice,
        /// `Workers::idle_wait`: a worker that was chosen and takes another job wakes an idle one.
        PassesChoice,
        /// `Results::finish_one`: the output is in the ring.
        DoneRelease,
        /// `Results::wait_finished`: all outputs are in the ring.
        DoneAcquire,
        /// `Results::close`: items that were pushed before it can still be popped.
        CloseRelease,
        /// `Results::pop_until`: finds the items that were pushed before the close.
        CloseAcquire,
    }
}

pub(crate) use weaken::{step, strong};

#[cfg(not(loom))]
pub(crate) use real::{
    fence, fence_behind, yield_now, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, BeforeFence,
    Ordering,
};

#[cfg(loom)]
pub(crate) use model::{
    fence, fence_behind, yield_now, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, BeforeFence,
    Ordering,
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
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use loom::thread::yield_now;
    use ring::Fenced;
    use weaken::{remains, Remains};

    use super::Site;

    /// Holds the fence of a weakened site: executed before the change instead of behind it.
    pub(crate) struct BeforeFence(Option<Fenced>);

    impl BeforeFence {
        pub(crate) fn new(site: Site) -> Self {
            Self((remains(site) != Remains::All).then(Fenced::new))
        }
    }

    pub(crate) fn fence(site: Site) {
        match remains(site) {
            Remains::All => drop(Fenced::new()),
            Remains::AcqRel => loom::sync::atomic::fence(Ordering::AcqRel),
            Remains::Nothing => {}
        }
    }

    pub(crate) fn fence_behind(site: Site, before: BeforeFence) -> Fenced {
        match before.0 {
            Some(early) => {
                if remains(site) == Remains::AcqRel {
                    loom::sync::atomic::fence(Ordering::AcqRel);
                }
                early
            }
            None => Fenced::new(),
        }
    }
}
