//! libdeflate's decoder of gzip members, which tells where a member ends; the safe bindings do not.
#![expect(unsafe_code, reason = "a function of the C library that the safe bindings leave out")]

use std::ptr::NonNull;

use libdeflate_sys as sys;

/// A decoder; owned by one thread.
pub(crate) struct Decoder(NonNull<sys::libdeflate_decompressor>);

// SAFETY: the library's decoders have no thread affinity.
unsafe impl Send for Decoder {}

impl Decoder {
    /// # Panics
    ///
    /// If there is no memory for the decoder.
    pub(crate) fn new() -> Self {
        // SAFETY: takes no arguments.
        let decoder = unsafe { sys::libdeflate_alloc_decompressor() };
        Self(NonNull::new(decoder).expect("there is memory"))
    }

    /// Decodes the member with which `bytes` begin into the front of `plain`, and checks the CRC
    /// and the length at the member's end. Returns the member's length, and that of its plain
    /// bytes.
    pub(crate) fn decode(
        &mut self,
        bytes: &[u8],
        plain: &mut [u8],
    ) -> Result<(usize, usize), &'static str> {
        let (mut read, mut written) = (0, 0);
        // SAFETY: the decoder is valid and ours alone; both buffers have the lengths given, and do
        // not overlap; the library writes both numbers.
        let result = unsafe {
            sys::libdeflate_gzip_decompress_ex(
                self.0.as_ptr(),
                bytes.as_ptr().cast(),
                bytes.len(),
                plain.as_mut_ptr().cast(),
                plain.len(),
                &raw mut read,
                &raw mut written,
            )
        };
        match result {
            sys::libdeflate_result_LIBDEFLATE_SUCCESS => Ok((read, written)),
            sys::libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE => {
                Err("it has more bytes than it states")
            }
            _ => Err("its data, its CRC or its length is damaged"),
        }
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // SAFETY: the decoder is ours, and freed once.
        unsafe { sys::libdeflate_free_decompressor(self.0.as_ptr()) };
    }
}
