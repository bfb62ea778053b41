//! Contexts of zstd, set up for units: no magic number, no content size, no checksum, no dictionary
//! id. The unit header makes all of them redundant.
//!
//! # Parameters of level 1 for long units
//!
//! QEMU's multifd compresses each channel as one stream, so that a packet of 128 pages may refer to
//! the packets before it; our units are independent. For sources above 256 KiB zstd's level 1 looks
//! for matches of at least 7 bytes, below for 6. Using 6 throughout costs 4 % of CPU time over
//! level 1 and more than makes up for the lost history. The streams, which copy each page into a
//! window first, cost 16 to 20 % over level 1.
//!
//! Units of 128 pages, zstd 1.5.7. Thread CPU time is a multiple of plain level 1's (2.0 to 2.2
//! s/GiB to encode and 0.75 to 0.81 s/GiB to decode on an AMD EPYC with other work beside it).
//! Medians of 5 rounds at 878dfcff, for guest memory, a heap and all distinct pages:
//!
//! | | guest: ratio, encode, decode | heap | all |
//! |---|---|---|---|
//! | QEMU's streams, 2 channels | 2.691, 1.17, 1.13 | 2.733, 1.16, 1.16 | 2.937, 1.18, 1.15 |
//! | plain level 1 | 2.678, 1.00, 1.00 | 2.717, 1.00, 1.00 | 2.921, 1.00, 1.00 |
//! | hashLog 13, minMatch 6 | 2.693, 0.96, 1.02 | 2.718, 0.95, 1.02 | 2.923, 0.96, 1.03 |
//! | hashLog 13, minMatch 5 | 2.737, 1.03, 1.05 | 2.742, 1.02, 1.05 | 2.957, 1.05, 1.08 |
//! | hashLog 14, minMatch 6: ours | 2.731, 1.04, 1.03 | 2.759, 1.03, 1.02 | 2.969, 1.04, 1.03 |
//! | hashLog 14, minMatch 5 | 2.774, 1.11, 1.06 | 2.779, 1.10, 1.06 | 2.999, 1.13, 1.08 |
//! | level 2 | 2.786, 1.32, 1.03 | 2.818, 1.31, 1.03 | 3.023, 1.29, 1.04 |
//! | ours with header and checksum | 2.730, 1.05, 1.07 | 2.759, 1.05, 1.08 | 2.969, 1.07, 1.08 |
//!
//! Rejected, compared with ours: smaller blocks (16 to 64 KiB: +0.2 to +0.9 % ratio for
//! +2 to +15 % to encode and +4 to +18 % to decode), a wider search step (-3.6 % ratio, -5 % time),
//! dfast with the same table (+1 % ratio, +15 % time).

use zstd_safe::{CCtx, CParameter, FrameFormat, ResetDirective};

use crate::dictionary::contexts::Context;
use crate::dictionary::Dictionary;
use crate::{Codec, SettingsError, MAX_PLAIN};

/// Compression contexts, one per class of unit sizes, all at one level.
///
/// zstd shrinks a context whose last 128 units needed less than a third of its memory, and
/// allocates again for the next long unit. Batches of all sizes come mixed, so each context sees
/// only sizes that need about the same memory: nothing is allocated after the first unit of a
/// class.
pub(crate) struct Compressor {
    level: i32,
    classes: [Class; CLASSES.len()],
}

struct Class {
    context: CCtx<'static>,
    /// The level that `context` is set to; `None` if setting it failed half-way.
    level: Option<i32>,
}

impl Compressor {
    /// Makes a context for each class of sizes.
    pub(crate) fn new(level: i32) -> Result<Self, SettingsError> {
        let failed = |reason| SettingsError::Context { codec: Codec::Zstd, level, reason };
        let mut classes = Vec::with_capacity(CLASSES.len());
        for largest in CLASSES {
            let mut context = CCtx::try_create().ok_or_else(|| failed("out of memory"))?;
            set_up(&mut context, level, largest)
                .map_err(|code| failed(zstd_safe::get_error_name(code)))?;
            classes.push(Class { context, level: Some(level) });
        }
        let classes = classes.try_into().unwrap_or_else(|_| unreachable!("one for each class"));
        Ok(Self { level, classes })
    }

    /// Uses `level` from the next unit on; each context is updated when it is next used.
    pub(crate) fn set_level(&mut self, level: i32) {
        self.level = level;
    }

    /// Compresses into `out`; `None` if the result does not fit.
    pub(crate) fn compress(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        let number = CLASSES.iter().position(|&largest| plain.len() <= largest)?;
        let class = &mut self.classes[number];
        if class.level != Some(self.level) {
            class.level = None;
            set_up(&mut class.context, self.level, CLASSES[number]).ok()?;
            class.level = Some(self.level);
        }
        class.context.compress2(out, plain).ok()
    }
}

/// Sets a context to `level`, for units of at most `largest` bytes.
fn set_up(
    context: &mut CCtx<'static>,
    level: i32,
    largest: usize,
) -> Result<(), zstd_safe::ErrorCode> {
    context.reset(ResetDirective::SessionAndParameters)?;
    for parameter in [
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
        CParameter::CompressionLevel(level),
        // See the figures above; zero is the level's own value.
        CParameter::MinMatch(if level == 1 && largest == MAX_PLAIN { 6 } else { 0 }),
    ] {
        context.set_parameter(parameter)?;
    }
    Ok(())
}

/// The largest unit of each class.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, MAX_PLAIN];

/// A decompression context.
pub(crate) struct Decompressor {
    context: Context,
}

impl Decompressor {
    pub(crate) fn new() -> Self {
        Self { context: Context::new() }
    }

    /// Decompresses into `out` and returns the number of bytes written. The window is `out` itself:
    /// nothing is allocated, whatever window the frame states.
    pub(crate) fn decompress(
        &mut self,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<usize, &'static str> {
        self.context.decompress(None, payload, out)
    }

    /// As [`decompress`](Self::decompress), for a frame that was made with a dictionary.
    pub(crate) fn decompress_with(
        &mut self,
        dictionary: &Dictionary,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<usize, &'static str> {
        self.context.decompress(Some(dictionary), payload, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of each context, in bytes.
    fn sizes(compressor: &Compressor) -> Vec<usize> {
        compressor.classes.iter().map(|class| class.context.sizeof()).collect()
    }

    #[test]
    fn after_one_unit_of_each_class_no_memory_is_allocated_or_freed() {
        let plain: Vec<u8> =
            (0..MAX_PLAIN as u64).map(|at| (at * at / 7).to_le_bytes()[0] & 0x1f).collect();
        let mut out = vec![0; MAX_PLAIN];
        for level in [-5, 1, 2, 3, 5, 9, 19] {
            let mut compressor = Compressor::new(level).unwrap();
            for largest in CLASSES {
                compressor.compress(&plain[..largest], &mut out).unwrap();
            }
            let before = sizes(&compressor);
            let pages = if level > 5 { [1, 2, 5, 17, 65] } else { [1, 2, 7, 33, 128] };
            for pages in pages {
                for _ in 0..if level > 5 && pages > 2 { 3 } else { 140 } {
                    compressor.compress(&plain[..pages << 12], &mut out).unwrap();
                }
                assert_eq!(sizes(&compressor), before, "level {level}, units of {pages} pages");
            }
        }
    }

    #[test]
    fn a_level_that_changes_with_each_unit_allocates_nothing_and_is_the_level_asked_for() {
        let plain: Vec<u8> =
            (0..MAX_PLAIN as u64).map(|at| (at * at / 7).to_le_bytes()[0] & 0x1f).collect();
        let mut out = vec![0; MAX_PLAIN];
        for levels in [[1, 3], [-5, 3], [9, 4], [4, 12]] {
            let alone = levels.map(|level| {
                Compressor::new(level).unwrap().compress(&plain[..1 << 19], &mut out).unwrap()
            });
            let mut compressor = Compressor::new(levels[0]).unwrap();
            compressor.set_level(levels[1]);
            for level in levels {
                compressor.set_level(level);
                compressor.compress(&plain[..1 << 19], &mut out).unwrap();
            }
            let before = sizes(&compressor);
            // Long stretches of one level with single units of the other, as `--codec auto` makes
            // them.
            for round in 0..300 {
                let number = usize::from(round % 150 == 149);
                compressor.set_level(levels[number]);
                let len = compressor.compress(&plain[..1 << 19], &mut out).unwrap();
                assert_eq!(len, alone[number], "level {}", levels[number]);
                assert_eq!(sizes(&compressor), before, "level {}", levels[number]);
            }
        }
    }

    #[test]
    fn the_decoder_allocates_nothing_for_any_frame() {
        let plain = vec![b'x'; MAX_PLAIN];
        let mut out = vec![0; MAX_PLAIN];
        let mut decompressor = Decompressor::new();
        let before = decompressor.context.sizeof();
        // A window of slightly less than 2 GiB, then a last, empty, raw block.
        let empty = [0, 0xa8, 1, 0, 0];
        assert_eq!(decompressor.decompress(&empty, &mut out), Ok(0));
        let len = Compressor::new(19).unwrap().compress(&plain, &mut out).unwrap();
        let payload = out[..len].to_vec();
        assert_eq!(decompressor.decompress(&payload, &mut out), Ok(MAX_PLAIN));
        assert!(out == plain);
        assert!(decompressor.decompress(&payload, &mut out[..MAX_PLAIN - 1]).is_err());
        assert_eq!(decompressor.context.sizeof(), before);
    }
}
