//! zstd's compression contexts in memory of a fixed size ("static" contexts). With such a context
//! zstd never allocates, and returns an error when it would have to.
#![expect(unsafe_code, reason = "zstd's static contexts, which the safe bindings leave out")]

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use zstd_safe::get_error_name;
use zstd_sys as sys;

use crate::{Codec, SettingsError};

/// Covers the alignment of zstd's allocations. Otherwise zstd's estimate is exact.
pub(crate) const SLACK: usize = 1024;

/// A compression context for frames without magic number, content size, checksum and dictionary
/// id.
pub(crate) struct Fixed {
    context: NonNull<sys::ZSTD_CCtx>,
    _memory: Memory,
}

// SAFETY: the context lives in memory of its own and has no thread affinity.
unsafe impl Send for Fixed {}

impl Fixed {
    /// Creates a context of `level` in `bytes` bytes of memory.
    pub(crate) fn new(level: i32, bytes: usize) -> Result<Self, SettingsError> {
        let failed = |reason| SettingsError::Context { codec: Codec::Zstd, level, reason };
        let memory = Memory::new(bytes);
        // SAFETY: the memory is aligned, of this length, ours alone, and lives as long as the
        // context.
        let context = unsafe { sys::ZSTD_initStaticCCtx(memory.start(), memory.bytes()) };
        let context = NonNull::new(context).ok_or_else(|| failed("too little memory"))?;
        let mut this = Self { context, _memory: memory };
        // ZSTD_c_format: ZSTD_f_zstd1_magicless.
        this.set(sys::ZSTD_cParameter::ZSTD_c_experimentalParam2, 1).map_err(failed)?;
        for flag in [
            sys::ZSTD_cParameter::ZSTD_c_contentSizeFlag,
            sys::ZSTD_cParameter::ZSTD_c_checksumFlag,
            sys::ZSTD_cParameter::ZSTD_c_dictIDFlag,
        ] {
            this.set(flag, 0).map_err(failed)?;
        }
        this.set(sys::ZSTD_cParameter::ZSTD_c_compressionLevel, level).map_err(failed)?;
        Ok(this)
    }

    /// Bytes of memory for units of at most `largest` bytes at `level`.
    pub(crate) fn memory_for(level: i32, largest: usize) -> usize {
        // zstd has a table of parameters for each of these sizes, and for all larger ones.
        let sizes = [16 << 10, 128 << 10, 256 << 10].map(|size: usize| size.min(largest));
        let needed = sizes.into_iter().chain([largest]).map(|size| {
            // SAFETY: takes and returns only numbers.
            let params = unsafe { sys::ZSTD_getCParams(level, size as u64, 0) };
            // SAFETY: as above.
            unsafe { sys::ZSTD_estimateCCtxSize_usingCParams(params) }
        });
        (needed.max().unwrap_or(0) + SLACK).next_multiple_of(8)
    }

    fn set(&mut self, parameter: sys::ZSTD_cParameter, value: c_int) -> Result<(), &'static str> {
        // SAFETY: the context is valid, and ours alone.
        checked(unsafe { sys::ZSTD_CCtx_setParameter(self.as_ptr(), parameter, value) }).map(drop)
    }

    /// Bytes of memory.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self._memory.bytes()
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::ZSTD_CCtx {
        self.context.as_ptr()
    }

    /// Compresses into `out`, and returns zstd's result: a length or an error.
    pub(crate) fn compress(&mut self, plain: &[u8], out: &mut [u8]) -> usize {
        let (to, room) = (out.as_mut_ptr().cast(), out.len());
        let (from, len) = (plain.as_ptr().cast(), plain.len());
        // SAFETY: the context is valid, as is a dictionary that it refers to; both buffers have the
        // lengths given, and do not overlap.
        unsafe { sys::ZSTD_compress2(self.as_ptr(), to, room, from, len) }
    }
}

/// The value of a result of zstd, or the error's name.
pub(crate) fn checked(result: usize) -> Result<usize, &'static str> {
    // SAFETY: takes and returns only numbers.
    if unsafe { sys::ZSTD_isError(result) } == 0 {
        Ok(result)
    } else {
        Err(get_error_name(result))
    }
}

/// Memory for zstd, aligned to 8 bytes.
pub(crate) struct Memory {
    start: NonNull<u64>,
    words: usize,
}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Self {
        let words = vec![0_u64; bytes.div_ceil(8)].into_boxed_slice();
        let len = words.len();
        Self { start: NonNull::from(Box::leak(words)).cast(), words: len }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words * 8
    }

    pub(crate) fn start(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let words = ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.words);
        // SAFETY: pointer and length are those of the box that `new` leaked, and it is freed once.
        drop(unsafe { Box::from_raw(words) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Decoder, Encoder, Settings};

    /// Words of a small vocabulary, in an order that repeats late.
    fn plain(len: usize) -> Vec<u8> {
        let mut seed = 1_u64;
        let words = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ["page ", "table ", "slot ", "queue ", "of ", "and ", "7f"][(seed >> 40) as usize % 7]
        });
        words.flat_map(str::bytes).take(len).collect()
    }

    #[test]
    fn one_context_replaces_a_context_for_each_size() {
        for level in [-5, 1, 3, 9, 14, 19] {
            let settings = Settings::new(Codec::Zstd, Some(level)).unwrap();
            let mut limited = Encoder::with_limit(settings, 64 << 10).unwrap();
            let mut other = Encoder::new(settings).unwrap();
            let mut decoder = Decoder::new();
            let (mut coded, mut coded_too) = (vec![0; 128 << 10], vec![0; 128 << 10]);
            for pages in [1, 16, 2, 4, 3, 15, 1, 8, 16, 1, 5] {
                let plain = plain(pages * 4096);
                let encoded = limited.encode(&plain, &mut coded);
                assert_eq!(encoded, other.encode(&plain, &mut coded_too), "{level} {pages}");
                assert_eq!(coded[..encoded.len], coded_too[..encoded.len], "{level} {pages}");
                let mut back = vec![0; plain.len()];
                let unit = &coded[..encoded.len];
                decoder.decode_payload(encoded.codec, unit, &mut back).unwrap();
                assert_eq!(back, plain, "{level} {pages}");
            }
            // Longer than the limit: compressed or not, but never wrong.
            let long = plain(128 << 10);
            let encoded = limited.encode(&long, &mut coded);
            if encoded.codec != Codec::Raw {
                let mut back = vec![0; long.len()];
                decoder.decode_payload(encoded.codec, &coded[..encoded.len], &mut back).unwrap();
                assert_eq!(back, long);
            }
        }
    }
}
