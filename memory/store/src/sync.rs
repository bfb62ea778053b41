//! The only file that names atomics, so that loom's can replace them.
//!
//! Every ordering stronger than `Relaxed` and every fence of the protocols in `slot.rs` and
//! `slab.rs` has a [`Site`], which the models take away with `WEAKEN` (crate `weaken`).

weaken::sites! {
    "WEAKEN",
    /// A place where the proof depends on an ordering, a fence or a step of the protocol.
    pub(crate) enum Site {
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
        /// `Slab::set_role`: between the change of role and the look at the objects.
        RoleFence,
        /// `Slab::release`: between freeing the object and the look at the role.
        FreeFence,
        /// `Record::take`: the record's last user is done with it.
        TakeAcquire,
        /// `Record::free`: the last user is done with the record.
        FreeRecordRelease,
        /// `Record::drop_part`: every earlier user is done with the group.
        DropAcquire,
        /// `Record::drop_part`: this user is done with the group.
        DropRelease,
        /// `Slot::load_backed`: the object's bytes are on the backing device.
        BackedAcquire,
        /// `fence_read`: between reading a block and comparing the entry again.
        ReadAcquire,
        /// `fence_write`: between taking a block and writing it.
        WriteRelease,
        /// `Blocks::take`: no entry names the block any more.
        TakeBlockAcquire,
        /// `Blocks::drop_hold`: the entry does not name the block any more.
        DropBlockRelease,
    }
}

/// Required between reading a block of the backing device and comparing its entry again.
#[inline(always)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models pass it"))]
pub fn fence_read() {
    weaken::fence(Site::ReadAcquire, Ordering::Acquire);
}

/// Required between taking a block of the backing device and writing it.
#[inline(always)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "the models pass it"))]
pub fn fence_write() {
    weaken::fence(Site::WriteRelease, Ordering::Release);
}

pub(crate) use weaken::{both, fence_seq_cst, step, strong};

#[cfg(not(loom))]
pub(crate) use real::{relax, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(loom)]
pub(crate) use model::{relax, AtomicU32, AtomicU64, AtomicU8, Ordering};

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    /// Waits a little for a thread that pins an object: it copies at most 4 KiB.
    #[cold]
    pub(crate) fn relax(tries: &mut u32) {
        if *tries < 64 {
            std::hint::spin_loop();
        } else if *tries < 128 {
            // The pinning thread is not running, or shares this CPU.
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
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};

    pub(crate) fn relax(_: &mut u32) {
        loom::thread::yield_now();
    }
}
