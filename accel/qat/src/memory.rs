//! Pinned memory, which the device may read and write.

#![expect(unsafe_code, reason = "allocation by libusdm")]

use crate::load::Api;
use std::ptr::NonNull;

/// Alignment, in bytes, that suffices for every structure of the interface.
pub(crate) const ALIGN: usize = 64;

/// Memory of libusdm: pinned, and each allocation is contiguous for the device.
///
/// Zeroed at first. The owner must not drop it while a device may still write to it: see `Channel`.
#[derive(Debug)]
pub(crate) struct Pinned {
    api: &'static Api,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an allocation has no thread affinity, and libusdm's functions are thread-safe.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `len` bytes near NUMA node `node`; `None` when the pinned memory is exhausted.
    pub(crate) fn new(api: &'static Api, len: usize, node: i32) -> Option<Self> {
        // SAFETY: no preconditions; at most 150 KiB is ever requested, far below the 64 MiB limit.
        let start = unsafe { (api.mem_alloc)(len, node, ALIGN) };
        let start = NonNull::new(start.cast::<u8>())?;
        // SAFETY: the allocation is `len` bytes and no other code has it yet.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Some(Self { api, start, len })
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut start = self.start.as_ptr().cast();
        // SAFETY: `start` came from `mem_alloc` and is freed once; the owner made sure the device
        // is done with it.
        unsafe { (self.api.mem_free)(&raw mut start) };
    }
}
