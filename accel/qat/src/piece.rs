//! What an engine is given and what it delivers: pieces.

use crate::counters::Reason;

/// Largest piece an engine takes, plain bytes: what intermediate buffers are made for.
pub const MAX_PIECE: usize = 64 << 10;

/// What to do with a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Plain bytes to a raw deflate stream.
    Compress,
    /// A raw deflate stream to its plain bytes.
    Decompress {
        /// How many they are, exactly.
        plain_len: usize,
    },
}

/// A piece that is done.
#[derive(Debug, Clone, Copy)]
pub struct Finished<'a> {
    /// The raw deflate stream, or the plain bytes. A stream can be longer than its plain bytes: up
    /// to the caller then.
    pub bytes: &'a [u8],
    /// CRC-32 (as in gzip) of the plain bytes, computed by this CPU.
    pub crc32: u32,
    /// Who did it.
    pub by: By,
}

/// Who did a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The device.
    Device,
    /// libdeflate on this CPU.
    Software(Reason),
}

/// Bytes that are no deflate stream of the stated plain length. The sender's fault; libdeflate is
/// the judge, not the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes are no deflate stream of {plain_len} plain bytes")]
pub struct BadData {
    /// Bytes of the data.
    pub len: usize,
    /// What they were to become.
    pub plain_len: usize,
}
