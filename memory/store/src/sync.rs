//! The only file that names atomics, so that loom's can stand in for them.
//!
//! Every ordering stronger than `Relaxed` and every fence of the protocols in `slot.rs` and
//! `slab.rs` is written through a [`Site`]. In a normal build the site vanishes. Under `--cfg loom`
//! the environment variable `WEAKEN=<site>` takes that one ordering or fence away,
//! `WEAKEN=<site>AcqRel` leaves an acquire and release fence of it, and a model must then fail.

/// A place where the proof rests on an ordering, a fence or a step of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name the sites"))]
pub enum Site {
    /// `Slot::pin`: the object's bytes are there.
    PinAcquire,
    /// `Slot::unpin`: the reader is done with the bytes.
    UnpinRelease,
    /// `Slot::publish`: the new object's bytes are there.
    PublishRelease,
    /// `Slot::publish`: every reader of the old object is done with it.
    PublishAcquire,
    /// `Slot::publish`: a pinned object is waited for.
    PublishWaits,
    /// `Slot::relocate`: the object's bytes are at the new place.
    MoveRelease,
    /// `Slot::relocate`: every reader before is done with the old place.
    MoveAcquire,
    /// `Slot::relocate`: another reader's pin keeps the object where it is.
    MoveAlone,
    /// `Slab::release`: whoever had the object is done with its bytes.
    FreeRelease,
    /// `Slab::claim`: whoever had the object before is done with its bytes.
    ClaimAcquire,
    /// `Slab::is_empty`: whoever had an object of the slab is done with its bytes.
    EmptyAcquire,
    /// `Slab::settle`: between the slab's new state and looking at its objects.
    SettleFence,
    /// `Slab::release`: between freeing the object and looking at the slab's state.
    FreeFence,
    /// `Record::take`: whoever had the record is done with it.
    TakeAcquire,
    /// `Record::free`: the record is done with.
    FreeRecordRelease,
    /// `Record::leave`: whoever left before is done with the group.
    LeaveAcquire,
    /// `Record::leave`: we are done with the group.
    LeaveRelease,
    /// `Slot::load_backed`: the object's bytes are on the backing device.
    BackedAcquire,
    /// `fence_read`: between reading a block and looking at the entry again.
    ReadAcquire,
    /// `fence_write`: between taking a block and writing it.
    WriteRelease,
    /// `Blocks::take`: no entry names the block any more.
    TakeBlockAcquire,
    /// `Blocks::leave`: the entry does not name the block any more.
    LeaveBlockRelease,
}

/// To be passed between reading a block of the backing device and looking at the entry that named
/// it again.
#[inline(always)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models pass it"))]
pub fn fence_read() {
    fence_one(Site::ReadAcquire, Ordering::Acquire);
}

/// To be passed between taking a block of the backing device and writing it.
#[inline(always)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models pass it"))]
pub fn fence_write() {
    fence_one(Site::WriteRelease, Ordering::Release);
}

#[cfg(not(loom))]
pub(crate) use real::{
    fence_one, fence_seq_cst, relax, step, strong, AtomicU32, AtomicU64, AtomicU8, Ordering,
};

#[cfg(loom)]
pub(crate) use model::{
    fence_one, fence_seq_cst, relax, step, strong, AtomicU32, AtomicU64, AtomicU8, Ordering,
};

#[cfg(not(loom))]
mod real {
    use std::sync::atomic::fence;
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

    #[inline(always)]
    pub(crate) fn fence_seq_cst(_: Site) {
        fence(Ordering::SeqCst);
    }

    #[inline(always)]
    pub(crate) fn fence_one(_: Site, ordering: Ordering) {
        fence(ordering);
    }

    /// Waits a little for a thread that holds an object: it copies 4 KiB at most.
    #[cold]
    pub(crate) fn relax(tries: &mut u32) {
        if *tries < 64 {
            std::hint::spin_loop();
        } else if *tries < 128 {
            // It is not running, or has to share our CPU.
            std::thread::yield_now();
        } else {
            // A thread of real time that yields does so to its like only.
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        *tries = tries.saturating_add(1);
    }
}

#[cfg(loom)]
mod model {
    use std::sync::OnceLock;

    use loom::sync::atomic::fence;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    use super::Site;

    impl Site {
        /// All of them, in the order of the table that `scripts/loom` prints.
        pub const ALL: [Site; 22] = [
            Site::PinAcquire,
            Site::UnpinRelease,
            Site::PublishRelease,
            Site::PublishAcquire,
            Site::PublishWaits,
            Site::MoveRelease,
            Site::MoveAcquire,
            Site::MoveAlone,
            Site::FreeRelease,
            Site::ClaimAcquire,
            Site::EmptyAcquire,
            Site::SettleFence,
            Site::FreeFence,
            Site::TakeAcquire,
            Site::FreeRecordRelease,
            Site::LeaveAcquire,
            Site::LeaveRelease,
            Site::BackedAcquire,
            Site::ReadAcquire,
            Site::WriteRelease,
            Site::TakeBlockAcquire,
            Site::LeaveBlockRelease,
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

    /// `AcqRel` is asked for by two sites together: each takes its half away.
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

    pub(crate) fn fence_one(site: Site, ordering: Ordering) {
        if weakened() != Some((site, false)) {
            fence(ordering);
        }
    }

    pub(crate) fn relax(_: &mut u32) {
        loom::thread::yield_now();
    }
}

/// The ordering of a read-modify-write that needs both halves, each with its own site.
#[inline(always)]
pub(crate) fn both(acquire: Site, release: Site) -> Ordering {
    let acquires = matches!(strong(acquire, Ordering::Acquire), Ordering::Acquire);
    let releases = matches!(strong(release, Ordering::Release), Ordering::Release);
    match (acquires, releases) {
        (true, true) => Ordering::AcqRel,
        (true, false) => Ordering::Acquire,
        (false, true) => Ordering::Release,
        (false, false) => Ordering::Relaxed,
    }
}
