//! Buffers of large requests, lent to the device while it uses them.
#![expect(unsafe_code, reason = "the device gets the buffers as addresses")]

use std::ops::Range;

use device::Buffer;

/// A fixed number of buffers of one size.
///
/// Ownership rule: a lent buffer belongs to the device, and this module makes no reference to it.
/// The other buffers belong to this module. A buffer that is lent when this value is dropped is
/// never freed.
#[derive(Debug)]
pub(crate) struct Slices {
    memory: Vec<Slice>,
    len: usize,
}

#[derive(Debug)]
struct Slice {
    /// From a `Box<[u8]>` of `len` bytes.
    start: *mut u8,
    lent: bool,
}

// SAFETY: the memory is owned, except lent buffers, which the device may use on any thread.
unsafe impl Send for Slices {}

impl Slices {
    pub(crate) fn new(number: usize, len: usize) -> Self {
        let slice = || Slice {
            start: Box::into_raw(vec![0_u8; len].into_boxed_slice()).cast(),
            lent: false,
        };
        Self { memory: (0..number).map(|_| slice()).collect(), len }
    }

    /// Lends a part of buffer `number` for a request, until [`give_back`](Self::give_back).
    ///
    /// # Panics
    ///
    /// If the buffer is lent already, or has no such part.
    pub(crate) fn lend(&mut self, number: usize, part: Range<usize>) -> Buffer {
        let slice = &mut self.memory[number];
        assert!(!slice.lent, "slice {number} is lent");
        assert!(part.start <= part.end && part.end <= self.len, "{part:?} of {}", self.len);
        slice.lent = true;
        // SAFETY: the result is within the allocation, as was just asserted.
        let start = unsafe { slice.start.add(part.start) };
        // SAFETY: the allocation is initialised and stays until `give_back`, which connections call
        // when the request is complete; by the ownership rule nothing here accesses it until then.
        unsafe { Buffer::new(start, part.len()) }
    }

    /// Takes buffer `number` back. Call it when the buffer's request is complete, and not before.
    pub(crate) fn give_back(&mut self, number: usize) {
        self.memory[number].lent = false;
    }

    pub(crate) fn is_lent(&self, number: usize) -> bool {
        self.memory[number].lent
    }

    /// # Panics
    ///
    /// If the buffer is lent.
    pub(crate) fn bytes(&self, number: usize) -> &[u8] {
        let slice = &self.memory[number];
        assert!(!slice.lent, "slice {number} is lent");
        // SAFETY: `len` initialised bytes, ours by the ownership rule, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(slice.start, self.len) }
    }

    /// # Panics
    ///
    /// If the buffer is lent.
    pub(crate) fn bytes_mut(&mut self, number: usize) -> &mut [u8] {
        let slice = &self.memory[number];
        assert!(!slice.lent, "slice {number} is lent");
        // SAFETY: `len` initialised bytes, ours by the ownership rule, borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(slice.start, self.len) }
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        for slice in self.memory.iter().filter(|slice| !slice.lent) {
            let bytes = std::ptr::slice_from_raw_parts_mut(slice.start, self.len);
            // SAFETY: the memory came from a box of this length, and is not lent.
            drop(unsafe { Box::from_raw(bytes) });
        }
    }
}

/// Runs a request on `bytes` that is complete when `run` returns.
pub(crate) fn borrowed<R>(bytes: &mut [u8], run: impl FnOnce(Buffer) -> R) -> R {
    // SAFETY: initialised bytes, borrowed exclusively until `run` returns; the request is complete
    // by then, which the callers in this crate ensure.
    run(unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) })
}
