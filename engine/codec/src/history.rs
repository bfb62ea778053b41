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
//! Encoding never fails. For a chunk that does not get smaller the result is `None`, and the next
//! part begins a new frame. Decoding fails on every part that does not give exactly the stated
//! bytes. Then no later part of the history can be decoded.
//!
//! # Limits
//!
//! The encoder has its window, some 300 KiB of buffers (1.5 MiB from level 16 on) and its tables:
//! up to 10 MiB, from level 10 on up to 16 times the window and at most 80 MiB. The decoder has the
//! window for which the frame asks, and some 400 KiB. A frame that asks for a larger window than
//! the agreed one is refused before memory for it is allocated.

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

/// The levels of zstd for which a history pays. Below them, the next level without a history saves
/// more bytes for less CPU time.
pub const HISTORY_LEVELS: RangeInclusive<i32> = 3..=19;

/// The first bytes of a part, which state its place.
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
    /// Whether a frame begins.
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
    /// There are fewer bytes, or no encoder writes them; the text says which.
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
    /// Creates an encoder of zstd `level` for `history`, whose parts refer back 2^`window_log`
    /// bytes.
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

    /// Compresses `plain` into the front of `out`, header included, and returns the length, which
    /// is less than that of `plain`. Returns `None` if `plain` does not get smaller; then the
    /// history has no part for it.
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
        // No version of zstd refuses this. The reset ends the frame, and keeps parameters and
        // memory.
        if self.context.reset(ResetDirective::SessionOnly).is_err() {
            self.number = None;
        }
    }
}

/// The plain bytes that zstd expects of a history: more than any window. Without a number zstd
/// gives a level its full tables (80 MiB for level 19) whatever the window is. With a number they
/// reach as far back as the window does. On 10 MiB of programs with windows of 1 to 4 MiB that
/// costs at most
/// 0.04 % of the bytes.
const STREAM: u32 = 1 << 28;

/// The settings of an encoder: the level's own, except for the window, and for tables that would
/// reach beyond it.
///
/// On 61 MiB of a guest's memory and with two histories of 4 MiB, bytes and CPU time against zstd 1
/// in units: level 6 with a history 0.872 and 5.4, levels 7 and 9 in units 0.908 and 5.1, 0.902 and
/// 5.9. The tables of a level bound how far back it finds matches: windows of 8 to 128 MiB gain at
/// most 2 % more up to level 9, with long-distance matching or without. A frame of its own with
/// the last 1 MiB as its prefix takes 1.3 to 1.6 times the CPU time, as zstd indexes the prefix
/// again for each chunk.
fn parameters(level: i32, window_log: u8) -> [CParameter; 7] {
    [
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
        CParameter::CompressionLevel(level),
        CParameter::WindowLog(window_log.into()),
        CParameter::SrcSizeHint(STREAM),
    ]
}

/// Decodes the parts of one history in their order.
pub struct HistoryDecoder {
    context: DCtx<'static>,
}

impl HistoryDecoder {
    /// Creates a decoder for windows of at most 2^`window_log` bytes.
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
    /// The part does not decode to exactly `out.len()` bytes. The decoder is then of no use until a
    /// frame begins.
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
        // zstd keeps bytes that do not fit, and would return them with the next part.
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
mod tests;
