//! Memory that the device can reach, of a fixed size per session, used again and never freed.

#![expect(
    unsafe_code,
    reason = "memory of the C library, as slices; each block says why that is sound"
)]

use std::ptr::NonNull;

use codec::MAX_PLAIN;

use crate::abi::PINNED_MEM;
use crate::library::Calls;

/// What one session needs: our copies, since the device must not read memory that changes, nor go on
/// writing to memory of ours after we have given up on it.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// What goes in, at most a unit.
    pub(crate) input: Pinned,
    /// What comes out. More than a unit, since `qzMaxCompressedLength` counts the headers of one
    /// member only (an operator's precedence), and data may grow.
    pub(crate) output: Pinned,
}

impl Buffers {
    /// Bytes in all.
    pub(crate) const BYTES: usize = INPUT + OUTPUT;

    /// `None` if the library has no such memory. Only for when a device is known to be there:
    /// without one QATzip gives memory all the same.
    pub(crate) fn new(calls: &Calls) -> Option<Self> {
        Some(Self { input: Pinned::new(calls, INPUT)?, output: Pinned::new(calls, OUTPUT)? })
    }
}

const INPUT: usize = MAX_PLAIN;
/// Per piece, QATzip's own bound: 9/8 of the plain bytes and 1 KiB; and its header and footer.
const OUTPUT: usize = MAX_PLAIN / 8 * 9 + MAX_PLAIN / codec::qz::MEMBER_PLAIN * (1024 + 64);

/// A piece of pinned memory; it is never freed (see `QatZip::spare`).
#[derive(Debug)]
pub(crate) struct Pinned {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: memory like any other, and `Pinned` is its only owner.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(calls: &Calls, len: usize) -> Option<Self> {
        // SAFETY: plain arguments: bytes, NUMA node 0, pinned.
        let start = unsafe { (calls.malloc)(len, 0, PINNED_MEM) };
        let start = NonNull::new(start.cast::<u8>())?;
        // SAFETY: `len` fresh bytes that nobody else knows of.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Some(Self { start, len })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes, initialised, borrowed from their only owner; the device writes there
        // only during a call that holds a mutable borrow, or after an error, when nobody reads any
        // more (the session is given up with its buffers).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
