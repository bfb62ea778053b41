//! Page codecs: independent, bounded, checksummed units of compressed bytes.
//!
//! A *unit* is what one worker makes of one batch of pages: a [`UnitHeader`] (codec, plain length,
//! payload length, checksum of the plain bytes) and a payload. No unit needs another one to be
//! decoded, so units may be made, sent and decoded in any order by any number of threads.
//!
//! ```text
//!            plain bytes ──► Encoder::encode ──► Encoded { codec, len } ┐
//!                 │                                 payload in `out`    ├─► UnitHeader::of ──► wire
//!                 └──────────────────────────────── or `plain` itself   ┘
//!
//!  wire ──► UnitHeader::from_bytes ──► Decoder::decode(header, payload, out) ──► plain bytes
//! ```
//!
//! One [`Encoder`] or [`Decoder`] belongs to one thread and owns every context and scratch buffer;
//! after the first call for a codec neither `encode` nor `decode` allocates from Rust.
//!
//! What fails: encoding never does. A batch that no codec makes smaller comes back as
//! [`Codec::Raw`], and then the caller sends the plain bytes. Decoding fails on every unit whose
//! header, payload or checksum is not what an encoder writes; all of it is hostile input, so
//! nothing there panics, and the work and the bytes written are bounded by the stated plain length.
//! After a failed decode the output buffer holds no particular bytes.
//!
//! Single pages may be compressed with a [`Dictionary`]; who keeps them says with which.
//!
//! Limits: a unit holds at most [`MAX_PLAIN`] bytes (1 MiB: 256 pages of 4 KiB) and its payload is
//! never longer than its plain bytes. The 64-bit checksum finds accidents, not forgery: a peer that
//! can write the stream can write its checksums.

mod decode;
mod dictionary;
mod encode;
mod fill;
pub mod qz;
mod settings;
mod unit;
mod zstd;

pub use decode::{DecodeError, Decoder};
pub use dictionary::{train, Dictionary, DictionaryError, MAX_DICTIONARY};
pub use encode::{Encoded, Encoder};
pub use fill::same_filled;
pub use settings::{Settings, SettingsError};
pub use unit::{checksum, HeaderError, UnitHeader};

use std::fmt;
use std::str::FromStr;

/// The most plain bytes one unit may hold: 256 pages of 4 KiB.
///
/// Twice the batch of 128 pages that the engine forms, so that a batch of 64 KiB pages still has
/// 16 of them. Both ends size their scratch by it.
pub const MAX_PLAIN: usize = 1 << 20;

/// How the payload of a unit is to be read. The number is the byte on the wire.
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
    /// Reads the byte on the wire; `None` for a codec this version does not know.
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

    /// The name users type and reports print; [`Codec::Raw`] is "none".
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

/// A codec name that is none of those that can be asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown codec \"{0}\", expected one of none, lz4, zlib, zstd, qatzip")]
pub struct UnknownCodec(String);

impl FromStr for Codec {
    type Err = UnknownCodec;

    /// Reads the name of a codec that can be asked for: none, lz4, zlib, zstd or qatzip.
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
    fn names_that_can_be_asked_for_parse_back() {
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
