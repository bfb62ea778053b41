//! The tokeniser's classification of bytes.

use crate::layout::multifd_header_len;

/// A run of bytes of one kind. The tokens of one feed cover its bytes exactly and in order.
///
/// Counts and lengths are never zero. `first` is the whole first `u64` of the first record (address
/// and flags); record `i` of the run has `first + i * page_size` (wrapping).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Token {
    /// `len` bytes without known structure.
    Raw {
        /// Length in bytes.
        len: u32,
    },
    /// Main channel: `count` records of 8 bytes (flags PAGE and CONTINUE, nothing else) and a page.
    Pages {
        /// First record's `u64`.
        first: u64,
        /// Number of records.
        count: u32,
    },
    /// `count` bare page bodies: after a named page record, or the payload of a multifd packet.
    Bodies {
        /// Number of pages.
        count: u32,
    },
    /// Main channel: `count` zero-page records of 9 bytes (flags ZERO and CONTINUE, fill 0).
    ZeroRun {
        /// First record's `u64`.
        first: u64,
        /// Number of records.
        count: u32,
    },
    /// One whole multifd RAM packet header of [`multifd_header_len`] bytes with plausible fields.
    MultifdHeader,
    /// Main channel: the last `len` (1 to 8) bytes of one multifd barrier marker.
    ///
    /// `len` is 8 unless the end of a feed split the marker: its first bytes then ended that feed
    /// as `Raw`, and this token opens the next one. One token is one marker.
    Barrier {
        /// Bytes of the marker in this feed.
        len: u8,
    },
}

impl Token {
    /// Bytes that this token covers, in a stream with pages of `page_size` bytes.
    pub fn len(&self, page_size: usize) -> usize {
        let times = |count: u32, unit: usize| (count as usize).saturating_mul(unit);
        match *self {
            Token::Raw { len } => len as usize,
            Token::Pages { count, .. } => times(count, 8 + page_size),
            Token::Bodies { count } => times(count, page_size),
            Token::ZeroRun { count, .. } => times(count, ZERO_RECORD_LEN),
            Token::MultifdHeader => multifd_header_len(page_size),
            Token::Barrier { len } => usize::from(len),
        }
    }
}

/// Main-channel record flags, in the low bits of its `u64`.
pub(crate) const FLAG_ZERO: u64 = 0x02;
pub(crate) const FLAG_MEM_SIZE: u64 = 0x04;
pub(crate) const FLAG_PAGE: u64 = 0x08;
pub(crate) const FLAG_EOS: u64 = 0x10;
pub(crate) const FLAG_CONTINUE: u64 = 0x20;
pub(crate) const FLAG_XBZRLE: u64 = 0x40;
pub(crate) const FLAG_COMPRESS_PAGE: u64 = 0x100;
pub(crate) const FLAG_FLUSH: u64 = 0x200;

/// The flags of every record of a [`Token::Pages`].
pub(crate) const PAGE_FLAGS: u64 = FLAG_PAGE | FLAG_CONTINUE;
/// The flags of every record of a [`Token::ZeroRun`].
pub(crate) const ZERO_FLAGS: u64 = FLAG_ZERO | FLAG_CONTINUE;
/// A zero-page record of a known block: the `u64` and the fill byte.
pub(crate) const ZERO_RECORD_LEN: usize = 9;
