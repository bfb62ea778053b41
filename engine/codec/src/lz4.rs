//! LZ4 blocks by the C library, whose acceleration trades bytes for CPU time.
//!
//! The library keeps its table on the stack (16 KiB), so that neither direction allocates.
//!
//! Units of 512 KiB, thread CPU time in ns a plain byte (the least of 4 rounds, on an Intel Xeon
//! with other work beside it):
//!
//! | level | guest: ratio, encode, decode | heap | text |
//! |---|---|---|---|
//! | lz4_flex 0.14, safe | 2.22, 1.41, 0.42 | 2.07, 1.61, 0.39 | 1.58, 2.64, 0.35 |
//! | 1 | 2.23, 1.20, 0.24 | 2.08, 1.36, 0.24 | 1.58, 2.25, 0.26 |
//! | -1 | 2.16, 1.11, 0.24 | 2.01, 1.27, 0.23 | 1.50, 2.07, 0.26 |
//! | -3 | 2.05, 1.03, 0.23 | 1.90, 1.17, 0.23 | 1.37, 1.77, 0.26 |
//! | -7 | 1.93, 0.90, 0.22 | 1.79, 1.03, 0.22 | 1.23, 1.34, 0.28 |
//! | -15 | 1.72, 0.73, 0.21 | 1.54, 0.82, 0.21 | 1.11, 0.85, 0.22 |
//! | -31 | 1.54, 0.55, 0.17 | 1.32, 0.59, 0.16 | 1.04, 0.48, 0.12 |
//! | zstd -20 | 1.64, 0.80, 0.29 | 1.49, 0.89, 0.32 | 1.14, 1.06, 0.32 |
//! | zstd -10 | 1.89, 1.02, 0.35 | 1.76, 1.18, 0.43 | 1.28, 1.64, 0.44 |
//! | zstd -5 | 2.18, 1.30, 0.44 | 2.00, 1.43, 0.49 | 1.45, 2.20, 0.52 |
//! | zstd -3 | 2.35, 1.42, 0.47 | 2.17, 1.57, 0.52 | 1.59, 2.58, 0.58 |
//! | zstd 1 | 3.03, 2.02, 0.72 | 2.75, 2.28, 0.78 | 2.45, 3.64, 0.82 |
//!
//! So lz4 beats the levels of zstd below -3 everywhere, and a mix of lz4 1 and zstd 1 beats zstd
//! -3. Room for the longest possible block, in place of one byte less than the plain bytes, changes
//! the times by less than 2 % in either direction.
#![expect(unsafe_code, reason = "the functions of the C library")]

use std::ffi::c_int;

/// Compresses into `out`; `None` if the block does not fit. Level 1 and 0 are the library's
/// default, level -n has acceleration n + 1, as in lz4's frames.
pub(crate) fn compress(level: i32, plain: &[u8], out: &mut [u8]) -> Option<usize> {
    let acceleration = 1 - level.min(0);
    let (len, room) = (c_int::try_from(plain.len()).ok()?, c_int::try_from(out.len()).ok()?);
    let (from, to) = (plain.as_ptr().cast(), out.as_mut_ptr().cast());
    // SAFETY: both buffers have the lengths given and do not overlap; the library writes at most
    // `room` bytes.
    let written = unsafe { lz4_sys::LZ4_compress_fast(from, to, len, room, acceleration) };
    usize::try_from(written).ok().filter(|written| *written > 0)
}

/// Decompresses into `out` and returns the number of bytes written; `None` if the payload is not a
/// block, or decodes to more bytes.
pub(crate) fn decompress(payload: &[u8], out: &mut [u8]) -> Option<usize> {
    let (len, room) = (c_int::try_from(payload.len()).ok()?, c_int::try_from(out.len()).ok()?);
    let (from, to) = (payload.as_ptr().cast(), out.as_mut_ptr().cast());
    // SAFETY: as above. For any payload the library reads at most `len` bytes of it, and of `out`
    // only what it has written.
    let written = unsafe { lz4_sys::LZ4_decompress_safe(from, to, len, room) };
    usize::try_from(written).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_level_makes_longer_blocks_and_zero_is_the_default() {
        let mut seed = 1_u64;
        let words = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            [0, 0x7f12_3456_7000 | seed >> 52, seed >> 44][(seed >> 40) as usize % 3].to_le_bytes()
        });
        let plain: Vec<u8> = words.flatten().take(100_000).collect();
        let mut out = vec![0; plain.len()];
        let mut len = |level| compress(level, &plain, &mut out).expect("it shrinks");
        let lens = [1, 0, -1, -7, -31].map(&mut len);
        assert_eq!(lens[0], lens[1]);
        assert!(lens[1..].is_sorted_by(|a, b| a < b), "{lens:?}");
        // A block that does not fit is none, not a part of one.
        let room = lens[0] - 1;
        assert_eq!(compress(1, &plain, &mut out[..room]), None);
    }
}
