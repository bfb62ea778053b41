//! The header of a unit: 20 bytes that describe its payload and let a receiver check the result.

use twox_hash::XxHash3_64;

use crate::{Codec, Encoded, MAX_PLAIN};

/// The checksum of a unit's plain bytes: XXH3, 64 bits, seed 0.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The header of a unit: on the wire [`UnitHeader::LEN`] bytes, big-endian.
///
/// | offset | size | field |
/// |--:|--:|---|
/// | 0 | 1 | codec |
/// | 1 | 3 | zero |
/// | 4 | 4 | plain length in bytes |
/// | 8 | 4 | payload length in bytes |
/// | 12 | 8 | checksum of the plain bytes |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitHeader {
    /// The encoding of the payload.
    pub codec: Codec,
    /// Length of the plain bytes, at most [`MAX_PLAIN`].
    pub plain_len: u32,
    /// Length of the payload: the plain length for [`Codec::Raw`], 8 for [`Codec::SameFilled`],
    /// less than the plain length for all others.
    pub payload_len: u32,
    /// The [`checksum`] of the plain bytes, or of the bytes that these encode: see
    /// [`Decoder::decode_unverified`](crate::Decoder::decode_unverified).
    pub checksum: u64,
}

impl UnitHeader {
    /// Length on the wire.
    pub const LEN: usize = 20;

    /// Describes the result of [`Encoder::encode`](crate::Encoder::encode) on `plain`. Reads all of
    /// `plain` once for the checksum.
    ///
    /// # Panics
    ///
    /// If `plain` is longer than [`MAX_PLAIN`], or `encoded` is longer than `plain`.
    pub fn of(plain: &[u8], encoded: Encoded) -> Self {
        assert!(plain.len() <= MAX_PLAIN && encoded.len <= plain.len());
        let len32 = |len: usize| u32::try_from(len).expect("at most MAX_PLAIN, checked above");
        Self {
            codec: encoded.codec,
            plain_len: len32(plain.len()),
            payload_len: len32(encoded.len),
            checksum: checksum(plain),
        }
    }

    /// The bytes on the wire.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.codec.to_wire();
        bytes[4..8].copy_from_slice(&self.plain_len.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.payload_len.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.checksum.to_be_bytes());
        bytes
    }

    /// Reads the first [`UnitHeader::LEN`] bytes. The lengths returned are bounded: the plain
    /// length by [`MAX_PLAIN`], the payload length by the plain length.
    ///
    /// # Errors
    ///
    /// There are fewer bytes than a header has, or no encoder writes such a header.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HeaderError> {
        let Some(bytes) = bytes.first_chunk::<{ Self::LEN }>() else {
            return Err(HeaderError::Short(bytes.len()));
        };
        let [codec, r0, r1, r2, p0, p1, p2, p3, c0, c1, c2, c3, sum @ ..] = *bytes;
        if [r0, r1, r2] != [0; 3] {
            return Err(HeaderError::Reserved([r0, r1, r2]));
        }
        let header = Self {
            codec: Codec::from_wire(codec).ok_or(HeaderError::Codec(codec))?,
            plain_len: u32::from_be_bytes([p0, p1, p2, p3]),
            payload_len: u32::from_be_bytes([c0, c1, c2, c3]),
            checksum: u64::from_be_bytes(sum),
        };
        header.check()?;
        Ok(header)
    }

    /// Whether an encoder can have written these lengths.
    ///
    /// # Errors
    ///
    /// The plain length is above [`MAX_PLAIN`], or the codec never has such a payload length.
    pub fn check(&self) -> Result<(), HeaderError> {
        let Self { codec, plain_len, payload_len, .. } = *self;
        if usize::try_from(plain_len).map_or(true, |len| len > MAX_PLAIN) {
            return Err(HeaderError::TooLong { codec, plain_len });
        }
        let fits = match codec {
            Codec::Raw => payload_len == plain_len,
            Codec::SameFilled => payload_len == 8 && plain_len > 8 && plain_len.is_multiple_of(8),
            Codec::Lz4 | Codec::Zlib | Codec::Zstd | Codec::DeflateQz => {
                (1..plain_len).contains(&payload_len)
            }
        };
        if fits {
            Ok(())
        } else {
            Err(HeaderError::Payload { codec, plain_len, payload_len })
        }
    }
}

/// Why bytes are not the header of a unit. The sender or the link is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// There are fewer bytes than a header has.
    #[error("unit header of {0} bytes, expected {len}", len = UnitHeader::LEN)]
    Short(usize),
    /// This version does not know the codec.
    #[error("unknown unit codec {0}")]
    Codec(u8),
    /// Reserved bytes are not zero.
    #[error("reserved bytes of a unit header are {0:02x?}, expected zero")]
    Reserved([u8; 3]),
    /// The unit states more plain bytes than any unit has.
    #[error("{codec} unit of {plain_len} bytes, at most {MAX_PLAIN} are allowed")]
    TooLong {
        /// The codec stated.
        codec: Codec,
        /// The plain length stated.
        plain_len: u32,
    },
    /// This codec never has such a payload length for this plain length.
    #[error("{codec} unit of {plain_len} bytes cannot have {payload_len} bytes of payload")]
    Payload {
        /// The codec stated.
        codec: Codec,
        /// The plain length stated.
        plain_len: u32,
        /// The payload length stated.
        payload_len: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: UnitHeader = UnitHeader {
        codec: Codec::Zstd,
        plain_len: 4096,
        payload_len: 1575,
        checksum: 0x0102_0304,
    };

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = HEADER.to_bytes();
        assert_eq!(bytes, [4, 0, 0, 0, 0, 0, 16, 0, 0, 0, 6, 39, 0, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(UnitHeader::from_bytes(&bytes), Ok(HEADER));
    }

    #[test]
    fn short_reserved_and_unknown_are_refused() {
        let bytes = HEADER.to_bytes();
        for len in 0..UnitHeader::LEN {
            assert_eq!(UnitHeader::from_bytes(&bytes[..len]), Err(HeaderError::Short(len)));
        }
        for (at, error) in [
            (0, HeaderError::Codec(0x84)),
            (1, HeaderError::Reserved([0x80, 0, 0])),
            (2, HeaderError::Reserved([0, 0x80, 0])),
            (3, HeaderError::Reserved([0, 0, 0x80])),
        ] {
            let mut bad = bytes;
            bad[at] |= 0x80;
            assert_eq!(UnitHeader::from_bytes(&bad), Err(error));
        }
    }

    #[test]
    fn only_lengths_that_an_encoder_writes_are_accepted() {
        let ok = |codec, plain_len, payload_len| {
            UnitHeader { codec, plain_len, payload_len, checksum: 0 }.check().is_ok()
        };
        assert!(ok(Codec::Raw, 0, 0) && ok(Codec::Raw, 1 << 20, 1 << 20));
        assert!(!ok(Codec::Raw, (1 << 20) + 1, (1 << 20) + 1));
        assert!(!ok(Codec::Raw, 4096, 4095) && !ok(Codec::Raw, 4096, 4097));
        assert!(ok(Codec::SameFilled, 16, 8) && ok(Codec::SameFilled, 1 << 20, 8));
        assert!(!ok(Codec::SameFilled, 8, 8) && !ok(Codec::SameFilled, 20, 8));
        assert!(!ok(Codec::SameFilled, 0, 8) && !ok(Codec::SameFilled, 4096, 16));
        for codec in [Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
            assert!(ok(codec, 4096, 1) && ok(codec, 4096, 4095));
            assert!(!ok(codec, 4096, 0) && !ok(codec, 4096, 4096) && !ok(codec, 0, 0));
            assert!(!ok(codec, u32::MAX, 100));
        }
    }
}
