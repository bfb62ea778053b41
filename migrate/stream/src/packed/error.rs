//! The errors of unpacking.

use super::format::MAX_CHUNK;

/// Why a packed chunk is invalid. The peer that sent it, or the link, is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// There are fewer bytes than the fixed head and the lengths in it require.
    #[error("packed chunk of {len} bytes is shorter than its head says ({need})")]
    Short {
        /// Bytes given.
        len: usize,
        /// Bytes needed.
        need: usize,
    },
    /// The format is unknown, or no stream has this page size.
    #[error("packed chunk of format {format}, page size 2^{shift}, reserved {reserved:#06x}")]
    Format {
        /// First byte.
        format: u8,
        /// Second byte: log2 of the page size.
        shift: u8,
        /// Third and fourth byte, which must be 0.
        reserved: u16,
    },
    /// The plain length requested exceeds the limit of a chunk.
    #[error("plain length {len} exceeds {MAX_CHUNK}")]
    PlainTooLong {
        /// Plain bytes requested.
        len: usize,
    },
    /// The structure ends inside an operation.
    #[error("structure ends inside the operation at {at}")]
    StructureEnds {
        /// Offset in the structure (or in a header's code).
        at: usize,
    },
    /// A number is too long or too large.
    #[error("number out of range at {at} of the structure")]
    Varint {
        /// Offset in the structure (or in a header's code).
        at: usize,
    },
    /// An operation has length zero.
    #[error("empty operation {op} at {at} of the structure")]
    Empty {
        /// Operation number.
        op: u8,
        /// Offset in the structure.
        at: usize,
    },
    /// An operation makes more bytes than the chunk has room for.
    #[error("operation {op} at {at} of the structure makes {len} bytes where {room} are left")]
    Overrun {
        /// Operation number.
        op: u8,
        /// Offset in the structure.
        at: usize,
        /// Bytes that the operation would make.
        len: u64,
        /// Plain bytes left.
        room: usize,
    },
    /// An operation needs more literals or bodies than there are.
    #[error("operation {op} at {at} of the structure wants {len} bytes of {left}")]
    Starved {
        /// Operation number.
        op: u8,
        /// Offset in the structure.
        at: usize,
        /// Bytes that it needs.
        len: usize,
        /// Literal or body bytes left.
        left: usize,
    },
    /// The code of a multifd header is invalid.
    #[error("multifd header code at {at}: {what}")]
    Header {
        /// Offset in the header's code.
        at: usize,
        /// The defect.
        what: &'static str,
    },
    /// The structure ended before all bytes were used or made.
    #[error("left over: {plain} plain bytes, {literals} of literals, {bodies} of bodies")]
    LeftOver {
        /// Plain bytes not written.
        plain: usize,
        /// Literal bytes not used.
        literals: usize,
        /// Body bytes not used.
        bodies: usize,
    },
}
