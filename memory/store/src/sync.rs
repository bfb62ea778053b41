//! The only file that names atomics, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed` and every fence of the protocols in `slot.rs` and
//! `slab.rs` has a [`Site`], which costs nothing in a normal build. Under `--cfg loom` the
//! environment variable `WEAKEN=<site>` removes that one ordering or fence, and
//! `WEAKEN=<site>AcqRel` weakens a SeqCst fence to AcqRel; a model must then fail.

/// A place where the proof depends on an ordering, a fence or a step of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name the sites"))]
pub enum Site {
    /// `Slot::pin`: the object's bytes are written.
    PinAcquire,
    /// `Slot::unpin`: the reader is done with the bytes.
    UnpinRelease,
    /// `Slot::publish`: the new object's bytes are written.
    PublishRelease,
    /// `Slot::publish`: every reader of the old object is done with it.
    PublishAcquire,
    /// `Slot::publish`: waits for pins.
    PublishWaits,
    /// `Slot::relocate`: the object's bytes are written to the new place.
    MoveRelease,
    /// `Slot::relocate`: every earlier reader is done with the old place.
    MoveAcquire,
    /// `Slot::relocate`: not while another reader has a pin.
    MoveAlone,
    /// `Slab::release`: the object's last user is done with its bytes.
    FreeRelease,
    /// `Slab::claim`: the object's last user is done with its bytes.
    ClaimAcquire,
    /// `Slab::is_empty`: the last users of all objects are done with their bytes.
    EmptyAcquire,
    /// `Slab::settle`: between the change of role and the look at the objects.
    SettleFence,
    /// `Slab::release`: between freeing the object and the look at the role.
    FreeFence,
    /// `Record::take`: the record's last user is done with it.
    TakeAcquire,
    /// `Record::free`: the record is done with.
    FreeRecordRelease,
    /// `Record::leave`: every earlier user is done with the group.
    LeaveAcquire,
    /// `Record::leave`: we are done with the group.
    LeaveRelease,
    /// `Slot::load_backed`: the object's bytes are on the backing device.
    BackedAcquire,
    /// `fence_read`: between reading a block and comparing the entry again.
    ReadAcquire,
    /// `fence_write`: between taking a block and writing it.
    WriteRelease,
    /// `Blocks::take`: no entry names the block any more.
    TakeBlockAcquire,
    /// `Blocks::leave`: the entry does not name the block any more.
    LeaveBlockRelease,
}

/// Required between reading a block of the backing device and comparing its entry again.
#[inline(always)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models pass it"))]
pub fn fence_read() {
    fence_one(Site::ReadAcquire, Ordering::Acquire);
}

/// Required between taking a block of the backing device and writing it.
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

    /// Waits a little for a thread that pins an object: it copies at most 4 KiB.
    #[cold]
    pub(crate) fn relax(tries: &mut u32) {
        if *tries < 64 {
            std::hint::spin_loop();
        } else if *tries < 128 {
            // That thread is not running, or shares our CPU.
            std::thread::yield_now();
        } else {
            // The yield of a real-time thread lets only threads of its own priority run.
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

    /// The value of `WEAKEN`: a site, and whether an AcqRel fence remains.
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

    /// Two sites share an `AcqRel`: each weakens its half.
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
