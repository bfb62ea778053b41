//! zstd frames that continue from chunk to chunk: a *history*.
//!
//! Each part is what zstd flushes for one chunk. It may refer to the chunks before it in the same
//! history, as far back as the window goes, so a part decodes only behind all parts before it.
//!
//! ```text
//!  HistoryEncoder::encode(chunk) ──► PartHeader { history, begins, number } + bytes
//!                                              │ in the order of `number`
//!  HistoryDecoder::decode(bytes, out) ◄────────┘ reset where a frame begins
//! ```
//!
//! # What fails
//!
//! Encoding never does: for a chunk that does not get smaller the result is `None`, and the next
//! part begins a new frame. Decoding fails on every part that does not give exactly the stated
//! bytes; then no later part of the history can be decoded.
//!
//! # Limits
//!
//! The encoder has its window, some 300 KiB of buffers and its tables. The decoder has the window
//! that the frame asks for and some 400 KiB; a frame that asks for a larger window than the agreed
//! one is refused before anything is allocated for it.

use std::ops::RangeInclusive;

use zstd_safe::{
    get_error_name, CCtx, CParameter, DCtx, DParameter, FrameFormat, InBuffer, OutBuffer,
    ResetDirective,
};
use zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;

use crate::{Codec, DecodeError, SettingsError};

/// The smallest and the largest window of a history, as powers of two: two chunks, and the largest
/// that zstd's own decoder accepts by default.
pub const HISTORY_WINDOWS: RangeInclusive<u8> = 20..=27;

/// The levels of zstd for which a history pays: below, the next level without one saves more bytes
/// for less CPU time.
pub const HISTORY_LEVELS: RangeInclusive<i32> = 3..=19;

/// The first bytes of a part: where it belongs.
///
/// | offset | size | field |
/// |--:|--:|---|
/// | 0 | 2 | history |
/// | 2 | 1 | 1: a frame begins, and refers to nothing before it; else 0 |
/// | 3 | 1 | zero |
/// | 4 | 4 | number of the part in its history: 0, 1, 2 ... |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartHeader {
    /// The history.
    pub history: u16,
    /// A frame begins.
    pub begins: bool,
    /// Number of the part in its history, over all frames.
    pub number: u32,
}

impl PartHeader {
    /// Length on the wire.
    pub const LEN: usize = 8;

    /// The bytes on the wire, big-endian.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..2].copy_from_slice(&self.history.to_be_bytes());
        bytes[2] = u8::from(self.begins);
        bytes[4..].copy_from_slice(&self.number.to_be_bytes());
        bytes
    }

    /// Reads the first [`PartHeader::LEN`] bytes.
    ///
    /// # Errors
    ///
    /// Fewer bytes, or bytes that no encoder writes; the text says which.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let Some(&[h0, h1, begins, zero, n0, n1, n2, n3]) = bytes.first_chunk::<{ Self::LEN }>()
        else {
            return Err(format!(
                "a part of a history has {} bytes, less than a header",
                bytes.len()
            ));
        };
        if begins > 1 || zero != 0 {
            return Err(format!("the header of a part has {begins:#x} and {zero:#x} as flags"));
        }
        Ok(Self {
            history: u16::from_be_bytes([h0, h1]),
            begins: begins == 1,
            number: u32::from_be_bytes([n0, n1, n2, n3]),
        })
    }
}

/// Compresses the chunks of one history, one after the other; owned by one thread.
pub struct HistoryEncoder {
    context: CCtx<'static>,
    history: u16,
    /// The next part begins a frame.
    begins: bool,
    /// Number of the next part; `None` when there are no more numbers.
    number: Option<u32>,
}

impl HistoryEncoder {
    /// An encoder of zstd `level` for `history`, whose parts refer back 2^`window_log` bytes.
    ///
    /// # Errors
    ///
    /// [`SettingsError::Context`] if zstd refuses the settings or has no memory.
    pub fn new(history: u16, level: i32, window_log: u8) -> Result<Self, SettingsError> {
        let failed = |reason| SettingsError::Context { codec: Codec::Zstd, level, reason };
        let mut context = CCtx::try_create().ok_or_else(|| failed("out of memory"))?;
        for parameter in parameters(level, window_log) {
            context.set_parameter(parameter).map_err(|code| failed(get_error_name(code)))?;
        }
        Ok(Self { context, history, begins: true, number: Some(0) })
    }

    /// Compresses `plain` into the front of `out`, header included, and returns the length: less
    /// than that of `plain`. `None` if it does not get smaller; then the history has no part for
    /// `plain`.
    pub fn encode(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        let number = self.number?;
        let room = out.len().min(plain.len().saturating_sub(1));
        let (header, payload) = out.get_mut(..room)?.split_at_mut_checked(PartHeader::LEN)?;
        let mut input = InBuffer::around(plain);
        let mut output = OutBuffer::around(payload);
        let left = self.context.compress_stream2(&mut output, &mut input, ZSTD_e_flush);
        let len = output.pos();
        if left != Ok(0) || input.pos() < plain.len() {
            self.restart();
            return None;
        }
        let part = PartHeader { history: self.history, begins: self.begins, number };
        header.copy_from_slice(&part.to_bytes());
        self.begins = false;
        self.number = number.checked_add(1);
        Some(PartHeader::LEN + len)
    }

    /// Begins a new frame with the next part.
    fn restart(&mut self) {
        self.begins = true;
        // Refused by no version of zstd: it ends the frame, and keeps parameters and memory.
        if self.context.reset(ResetDirective::SessionOnly).is_err() {
            self.number = None;
        }
    }
}

/// The settings of an encoder: the level's own, but for the window.
///
/// On 61 MiB of a guest's memory and with two histories of 4 MiB, bytes and CPU time against zstd 1
/// in units: level 6 with a history 0.872 and 5.4, levels 7 and 9 in units 0.908 and 5.1, 0.902 and
/// 5.9. The tables of a level bound how far back it finds matches: windows of 8 to 128 MiB gain at
/// most 2 % more up to level 9, with long-distance matching or without. A frame of its own with
/// the last 1 MiB as its prefix takes 1.3 to 1.6 times the CPU time, as zstd indexes the prefix
/// again for each chunk.
fn parameters(level: i32, window_log: u8) -> [CParameter; 6] {
    [
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
        CParameter::CompressionLevel(level),
        CParameter::WindowLog(window_log.into()),
    ]
}

/// Decodes the parts of one history in their order.
pub struct HistoryDecoder {
    context: DCtx<'static>,
}

impl HistoryDecoder {
    /// A decoder for windows of at most 2^`window_log` bytes.
    ///
    /// # Errors
    ///
    /// There is no memory, or zstd has no such window; the text says which.
    pub fn new(window_log: u8) -> Result<Self, &'static str> {
        let mut context = DCtx::try_create().ok_or("no memory for a history's decoder")?;
        for parameter in [
            DParameter::Format(FrameFormat::Magicless),
            DParameter::WindowLogMax(window_log.into()),
        ] {
            context.set_parameter(parameter).map_err(get_error_name)?;
        }
        Ok(Self { context })
    }

    /// Decodes the bytes behind the header of a part into all of `out`; `begins` is the header's.
    ///
    /// # Errors
    ///
    /// Every part that does not decode to exactly `out.len()` bytes. The decoder is of no use then
    /// until a frame begins.
    pub fn decode(&mut self, begins: bool, part: &[u8], out: &mut [u8]) -> Result<(), DecodeError> {
        let plain_len = u32::try_from(out.len()).unwrap_or(u32::MAX);
        let bad = |reason| DecodeError::Payload { codec: Codec::Zstd, plain_len, reason };
        if begins {
            self.context
                .reset(ResetDirective::SessionOnly)
                .map_err(|code| bad(get_error_name(code)))?;
        }
        let (mut input, expected) = (InBuffer::around(part), out.len());
        let mut output = OutBuffer::around(out);
        loop {
            let before = (input.pos(), output.pos());
            self.step(&mut output, &mut input).map_err(bad)?;
            let now = (input.pos(), output.pos());
            if now == (part.len(), expected) {
                break;
            }
            if now == before {
                return Err(if now.1 == expected {
                    bad("decodes to more bytes")
                } else {
                    let got = now.1;
                    DecodeError::Length { codec: Codec::Zstd, expected: plain_len, got }
                });
            }
        }
        // zstd keeps what does not fit, and would give it to the next part.
        let mut one = [0];
        let mut more = OutBuffer::around(&mut one[..]);
        self.step(&mut more, &mut InBuffer::around(&[])).map_err(bad)?;
        if more.pos() > 0 {
            return Err(bad("decodes to more bytes"));
        }
        Ok(())
    }

    fn step(
        &mut self,
        output: &mut OutBuffer<'_, [u8]>,
        input: &mut InBuffer<'_>,
    ) -> Result<(), &'static str> {
        self.context.decompress_stream(output, input).map(drop).map_err(get_error_name)
    }

    /// Bytes of memory that the decoder has.
    pub fn memory(&self) -> usize {
        self.context.sizeof()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunks of which each repeats much of those before it.
    fn chunks(count: usize, len: usize) -> Vec<Vec<u8>> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        let stock: Vec<u8> = std::iter::repeat_with(&mut random).flatten().take(64 << 10).collect();
        (0..count)
            .map(|_| {
                let mut chunk = Vec::with_capacity(len + 4096);
                while chunk.len() < len {
                    let at = usize::from(u16::from_le_bytes([random()[0], random()[1]]));
                    let end = (at + 700).min(stock.len());
                    chunk.extend_from_slice(&stock[at..end]);
                    chunk.extend_from_slice(&random());
                }
                chunk.truncate(len);
                chunk
            })
            .collect()
    }

    fn encoded(encoder: &mut HistoryEncoder, chunk: &[u8]) -> (PartHeader, Vec<u8>) {
        let mut out = vec![0; chunk.len()];
        let len = encoder.encode(chunk, &mut out).expect("it shrinks");
        let header = PartHeader::from_bytes(&out[..len]).unwrap();
        (header, out[PartHeader::LEN..len].to_vec())
    }

    #[test]
    fn parts_decode_in_order_and_refer_to_those_before() {
        for (level, window) in [(3, 20), (6, 22), (9, 22), (19, 20)] {
            let chunks = chunks(12, 200_000);
            let mut encoder = HistoryEncoder::new(7, level, window).unwrap();
            let mut decoder = HistoryDecoder::new(window).unwrap();
            let mut out = vec![0; 200_000];
            let mut lens = Vec::new();
            for (number, chunk) in (0_u32..).zip(&chunks) {
                let (header, part) = encoded(&mut encoder, chunk);
                let expected = PartHeader { history: 7, begins: number == 0, number };
                assert_eq!(header, expected);
                decoder.decode(header.begins, &part, &mut out).unwrap();
                assert!(out == *chunk, "level {level}, part {number}");
                lens.push(part.len());
            }
            // The stock is in the window by then.
            assert!(lens[11] * 2 < lens[0], "level {level}: {lens:?}");
        }
    }

    #[test]
    fn what_does_not_shrink_begins_a_new_frame_with_the_next_number() {
        let chunks = chunks(3, 100_000);
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .take(100_000)
        .collect();
        let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
        let mut decoder = HistoryDecoder::new(20).unwrap();
        let mut out = vec![0; 100_000];
        for (chunk, begins, number) in [(&chunks[0], true, 0), (&chunks[1], false, 1)] {
            let (header, part) = encoded(&mut encoder, chunk);
            assert_eq!((header.begins, header.number), (begins, number));
            decoder.decode(begins, &part, &mut out).unwrap();
        }
        assert_eq!(encoder.encode(&noise, &mut out), None);
        assert_eq!(encoder.encode(&[], &mut out), None);
        // Nor is there a part for a chunk whose part has no room.
        let (_, part) = encoded(&mut HistoryEncoder::new(0, 6, 20).unwrap(), &chunks[2]);
        let room = PartHeader::LEN + part.len() - 1;
        assert_eq!(encoder.encode(&chunks[2], &mut out[..room]), None);
        let (header, part) = encoded(&mut encoder, &chunks[2]);
        assert_eq!((header.begins, header.number), (true, 2));
        // Even a decoder that knows nothing of the frame before reads it.
        HistoryDecoder::new(20).unwrap().decode(true, &part, &mut out).unwrap();
        assert!(out == chunks[2]);
    }

    #[test]
    fn a_part_that_is_missing_cut_or_of_another_length_is_refused() {
        let chunks = chunks(4, 50_000);
        let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
        let parts: Vec<_> = chunks.iter().map(|chunk| encoded(&mut encoder, chunk).1).collect();
        let fresh = || {
            let mut decoder = HistoryDecoder::new(20).unwrap();
            decoder.decode(true, &parts[0], &mut vec![0; 50_000]).unwrap();
            decoder
        };
        let mut out = vec![0; 50_000];
        fresh().decode(false, &parts[1], &mut out).unwrap();
        // Without the part before, it gives other bytes or none.
        let skipped = fresh().decode(false, &parts[3], &mut out);
        assert!(skipped.is_err() || out != chunks[3]);
        assert!(HistoryDecoder::new(20).unwrap().decode(false, &parts[1], &mut out).is_err());
        for cut in [0, 1, 2, parts[1].len() / 2, parts[1].len() - 1] {
            let error = fresh().decode(false, &parts[1][..cut], &mut out).unwrap_err();
            assert!(error.to_string().contains("expected 50000"), "cut at {cut}: {error}");
        }
        let error = fresh().decode(false, &parts[1], &mut out[..49_999]).unwrap_err();
        assert!(error.to_string().contains("decodes to more bytes"), "{error}");
        let error = fresh().decode(false, &parts[1], &mut vec![0; 50_001]).unwrap_err();
        assert!(error.to_string().contains("50000 bytes, expected 50001"), "{error}");
    }

    #[test]
    fn a_larger_window_than_agreed_is_refused_without_memory_for_it() {
        let chunk = &chunks(1, 100_000)[0];
        let (_, part) = encoded(&mut HistoryEncoder::new(0, 6, 24).unwrap(), chunk);
        let mut decoder = HistoryDecoder::new(22).unwrap();
        assert!(decoder.decode(true, &part, &mut vec![0; 100_000]).is_err());
        assert!(decoder.memory() < 1 << 20, "{} bytes", decoder.memory());
        HistoryDecoder::new(24).unwrap().decode(true, &part, &mut vec![0; 100_000]).unwrap();
    }

    #[test]
    fn any_bytes_are_refused_or_decoded_within_bounds() {
        let chunks = chunks(2, 30_000);
        let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
        let parts: Vec<_> = chunks.iter().map(|chunk| encoded(&mut encoder, chunk).1).collect();
        let mut out = vec![0; 30_000];
        for at in (0..parts[1].len()).step_by(7) {
            let mut decoder = HistoryDecoder::new(20).unwrap();
            decoder.decode(true, &parts[0], &mut out).unwrap();
            let mut bad = parts[1].clone();
            bad[at] ^= 1 << (at % 8);
            let _ = decoder.decode(false, &bad, &mut out);
            assert!(decoder.memory() < 3 << 20);
            // A frame that begins makes it whole again.
            decoder.decode(true, &parts[0], &mut out).unwrap();
            assert!(out == chunks[0]);
        }
    }

    #[test]
    fn the_layout_of_the_header_is_the_documented_one() {
        let header = PartHeader { history: 0x0102, begins: true, number: 0x0304_0506 };
        assert_eq!(header.to_bytes(), [1, 2, 1, 0, 3, 4, 5, 6]);
        assert_eq!(PartHeader::from_bytes(&header.to_bytes()), Ok(header));
        assert!(PartHeader::from_bytes(&[0; 7]).unwrap_err().contains("7 bytes"));
        assert!(PartHeader::from_bytes(&[0, 0, 2, 0, 0, 0, 0, 0]).unwrap_err().contains("0x2"));
        assert!(PartHeader::from_bytes(&[0, 0, 1, 9, 0, 0, 0, 0]).unwrap_err().contains("0x9"));
    }
}
