//! Pieces: an engine's input and output.

use crate::counters::Reason;

/// The most plain bytes of a piece, which also sizes the intermediate buffers.
pub const MAX_PIECE: usize = 64 << 10;

/// The operation on a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Compresses plain bytes to a raw deflate stream.
    Compress,
    /// Decompresses a raw deflate stream to its plain bytes.
    Decompress {
        /// The exact length of the plain bytes.
        plain_len: usize,
    },
}

/// A piece that is done.
#[derive(Debug, Clone, Copy)]
pub struct Finished<'a> {
    /// The raw deflate stream, or the plain bytes. A stream can be longer than its plain bytes; the
    /// caller decides on the next step.
    pub bytes: &'a [u8],
    /// CRC-32 (as in gzip) of the plain bytes, computed by this CPU.
    pub crc32: u32,
    /// The producer of the result: the device or software.
    pub by: By,
}

/// The producer of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The device.
    Device,
    /// libdeflate on this CPU.
    Software(Reason),
}

/// The bytes are no deflate stream of the stated plain length. The sender is at fault. libdeflate
/// decides that, not the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes are no deflate stream of {plain_len} plain bytes")]
pub struct BadData {
    /// Bytes of the data.
    pub len: usize,
    /// The stated length of the plain bytes.
    pub plain_len: usize,
}
