//! The reserved address range of the pinned memory, and its tables.

#![expect(unsafe_code, reason = "reserves, opens and closes memory")]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

pub(super) const PAGE: usize = 4096;
/// Address space for pinned memory, only reserved.
pub(super) const SPAN: usize = 16 << 30;
pub(super) const PAGES: usize = SPAN / PAGE;

/// Largest alignment of the real library.
pub(super) const MAX_ALIGN: usize = 4 << 20;

/// The reserved range and its two tables.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) base: NonNull<u8>,
    /// By page of the range: page of the IOVA space + 1 in the upper half, number of valid bytes in
    /// the lower half.
    pub(super) forward: &'static [AtomicU64],
    /// By page of the IOVA space: page of the range + 1.
    pub(super) reverse: &'static [AtomicU32],
}

// SAFETY: the base is an address that is dereferenced only after the checks of `resolve`; the
// tables are atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn reserve() -> Option<Self> {
        let range = reserve(SPAN + MAX_ALIGN, libc::PROT_NONE)?;
        let aligned = range.as_ptr() as usize;
        let skip = aligned.next_multiple_of(MAX_ALIGN) - aligned;
        let forward = reserve(PAGES * size_of::<AtomicU64>(), libc::PROT_READ | libc::PROT_WRITE)?;
        let reverse = reserve(PAGES * size_of::<AtomicU32>(), libc::PROT_READ | libc::PROT_WRITE)?;
        // As in the real library: a forked child must not share memory that a device writes to.
        // SAFETY: the range is ours.
        unsafe { libc::madvise(range.as_ptr().cast(), SPAN + MAX_ALIGN, libc::MADV_DONTFORK) };
        Some(Self {
            // SAFETY: the reservation is larger than the span by one alignment.
            base: unsafe { range.add(skip) },
            // SAFETY: fresh zero pages of that size, never unmapped; zero is a valid atomic.
            forward: unsafe { std::slice::from_raw_parts(forward.as_ptr().cast(), PAGES) },
            // SAFETY: as above.
            reverse: unsafe { std::slice::from_raw_parts(reverse.as_ptr().cast(), PAGES) },
        })
    }

    pub(super) fn open(&self, offset: usize, bytes: usize) -> bool {
        // SAFETY: the run lies in the reserved range.
        let start = unsafe { self.base.add(offset) };
        // SAFETY: as above, and the run is in no allocation, so nothing uses it.
        let result = unsafe {
            libc::mprotect(start.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE)
        };
        result == 0
    }

    pub(super) fn close(&self, offset: usize, bytes: usize) {
        // SAFETY: the run lies in the reserved range.
        let start = unsafe { self.base.add(offset) };
        // Mapped anew instead of protected: the pages return to the system, and a later use starts
        // with zeros. SAFETY: the run was this allocation's; a later access by its former user has
        // to fault.
        let mapped = unsafe {
            libc::mmap(
                start.as_ptr().cast(),
                bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        assert!(mapped != libc::MAP_FAILED, "a run of the reserved range can be mapped again");
        // SAFETY: as above; the new mapping lost the advice.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
    }
}

fn reserve(bytes: usize, protection: i32) -> Option<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (mapped != libc::MAP_FAILED).then(|| NonNull::new(mapped.cast())).flatten()
}
