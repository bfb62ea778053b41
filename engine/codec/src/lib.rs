//! Page codecs: independent, bounded, checksummed units of compressed bytes.
//!
//! A *unit* is the compressed form of one batch of pages: a [`UnitHeader`] (codec, plain length,
//! payload length, checksum) and a payload. The checksum is that of the plain bytes, or of the
//! bytes that these encode (units of packed chunks, W10 of `docs/wire.md`;
//! [`Decoder::decode_unverified`]). No unit depends on another, so any number of threads may
//! encode, send and decode units in any order.
//!
//! ```text
//!            plain bytes ──► Encoder::encode ──► Encoded { codec, len } ┐
//!                 │                                 payload in `out`    ├─► UnitHeader::of ──► wire
//!                 └──────────────────────────────── or `plain` itself   ┘
//!
//!  wire ──► UnitHeader::from_bytes ──► Decoder::decode(header, payload, out) ──► plain bytes
//! ```
//!
//! One [`Encoder`] or [`Decoder`] belongs to one thread and owns every context and scratch buffer.
//! After the first call for a codec neither `encode` nor `decode` allocates from Rust.
//!
//! # What fails
//!
//! Encoding never fails. For a batch that no codec makes smaller it returns [`Codec::Raw`], and the
//! caller sends the plain bytes. Decoding fails on every unit whose header, payload or checksum no
//! encoder writes. Its input is hostile: it never panics, and the stated plain length bounds its
//! work and the bytes it writes. After a failed decode the contents of the output buffer are
//! unspecified.
//!
//! A single page may be compressed with a [`Dictionary`]; the caller records which one. Units whose
//! payload is a part of a *history* do depend on others: see [`HistoryEncoder`].
//!
//! # Limits
//!
//! A unit holds at most [`MAX_PLAIN`] bytes (1 MiB: 256 pages of 4 KiB), and its payload is never
//! longer than its plain bytes. The 64-bit checksum detects accidents, not forgery: a peer that can
//! write the stream can write its checksums.

mod decode;
mod dictionary;
mod encode;
mod fill;
mod fixed;
mod history;
mod lz4;
pub mod qz;
mod settings;
mod unit;
mod zstd;

pub use decode::{DecodeError, Decoder};
pub use dictionary::{train, Dictionary, DictionaryError, MAX_DICTIONARY};
pub use encode::{Deflate, Deflated, Encoded, Encoder};
pub use fill::same_filled;
pub use history::{HistoryDecoder, HistoryEncoder, PartHeader, HISTORY_LEVELS, HISTORY_WINDOWS};
pub use settings::{Settings, SettingsError};
pub use unit::{checksum, HeaderError, UnitHeader};

use std::fmt;
use std::str::FromStr;

/// The most plain bytes that one unit may hold: 256 pages of 4 KiB.
///
/// Twice the engine's batch of 128 pages, so that a batch of 64 KiB pages still holds 16. Both ends
/// size their scratch buffers by it.
pub const MAX_PLAIN: usize = 1 << 20;

/// The encoding of a unit's payload. The number is the byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// The payload is the plain bytes.
    Raw = 0,
    /// The payload is one 8-byte word, repeated to the plain length.
    SameFilled = 1,
    /// An LZ4 block (no frame, no length).
    Lz4 = 2,
    /// A raw DEFLATE stream (RFC 1951): zlib without its header and Adler-32, both of which the
    /// unit header makes redundant.
    Zlib = 3,
    /// A zstd frame (RFC 8878) without magic number, content size, checksum or dictionary id.
    Zstd = 4,
    /// DEFLATE in QATzip's gzip-ext members: see [`qz`].
    DeflateQz = 5,
}

impl Codec {
    /// Reads the byte on the wire; `None` for a codec that this version does not know.
    pub fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Raw),
            1 => Some(Self::SameFilled),
            2 => Some(Self::Lz4),
            3 => Some(Self::Zlib),
            4 => Some(Self::Zstd),
            5 => Some(Self::DeflateQz),
            _ => None,
        }
    }

    /// The byte on the wire.
    pub fn to_wire(self) -> u8 {
        self as u8
    }

    /// The name in options and reports; [`Codec::Raw`] is "none".
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "none",
            Self::SameFilled => "same-filled",
            Self::Lz4 => "lz4",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::DeflateQz => "qatzip",
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of a codec that cannot be selected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown codec \"{0}\", expected one of none, lz4, zlib, zstd, qatzip")]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    /// Parses the name of a selectable codec: none, lz4, zlib, zstd or qatzip.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "none" => Ok(Self::Raw),
            "lz4" => Ok(Self::Lz4),
            "zlib" => Ok(Self::Zlib),
            "zstd" => Ok(Self::Zstd),
            "qatzip" => Ok(Self::DeflateQz),
            other => Err(UnknownCodec(other.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wire_byte_names_one_codec_or_none() {
        for byte in 0..=u8::MAX {
            match Codec::from_wire(byte) {
                Some(codec) => assert_eq!(codec.to_wire(), byte),
                None => assert!(byte >= 6, "{byte} should be known"),
            }
        }
    }

    #[test]
    fn codec_names_parse_back() {
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
            assert_eq!(codec.name().parse(), Ok(codec));
        }
        let error = "same-filled".parse::<Codec>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown codec \"same-filled\", expected one of none, lz4, zlib, zstd, qatzip"
        );
    }
}
