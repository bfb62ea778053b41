//! Decodes a payload to exactly the plain bytes that its header promises, or returns an error.

use crate::fill::{fill, WORD};
use crate::{checksum, lz4, qz, zstd, Codec, Dictionary, HeaderError, UnitHeader};

/// Decompresses units of any codec; owned by one thread.
pub struct Decoder {
    /// For both codecs based on deflate.
    inflate: libdeflater::Decompressor,
    zstd: zstd::Decompressor,
}

impl Decoder {
    /// Creates a decoder for all codecs.
    ///
    /// # Panics
    ///
    /// If there is no memory for the decoder's contexts (about 200 KiB).
    pub fn new() -> Self {
        Self { inflate: libdeflater::Decompressor::new(), zstd: zstd::Decompressor::new() }
    }

    /// Decodes `payload` into all of `out`, and checks the result against the header's checksum.
    ///
    /// `out` may hold old bytes: none of them is part of an accepted unit. After an error its
    /// contents are unspecified.
    ///
    /// # Errors
    ///
    /// The unit does not decode to exactly the stated plain bytes, or the length of `out` or
    /// `payload` differs from the header's.
    pub fn decode(
        &mut self,
        header: &UnitHeader,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(), DecodeError> {
        self.decode_unverified(header, payload, out)?;
        header.verify_checksum(out)
    }

    /// Decodes `payload` into all of `out` without comparing the header's checksum. For a unit
    /// whose checksum covers the bytes that its plain bytes encode: the caller compares it
    /// ([`UnitHeader::verify_checksum`]). Otherwise as [`decode`](Self::decode).
    ///
    /// # Errors
    ///
    /// The errors of [`decode`](Self::decode), but for the checksum.
    pub fn decode_unverified(
        &mut self,
        header: &UnitHeader,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(), DecodeError> {
        header.check()?;
        let codec = header.codec;
        for (what, stated, got) in [
            ("payload", header.payload_len, payload.len()),
            ("output", header.plain_len, out.len()),
        ] {
            if usize::try_from(stated) != Ok(got) {
                return Err(DecodeError::Buffer { codec, what, stated, got });
            }
        }
        self.decode_payload(codec, payload, out)
    }

    /// Decodes a payload of `codec` into all of `out` without comparing a checksum of the plain
    /// bytes, for callers that keep a checksum of the payload. Otherwise as
    /// [`decode`](Self::decode).
    ///
    /// # Errors
    ///
    /// The payload does not decode to exactly `out.len()` bytes.
    pub fn decode_payload(
        &mut self,
        codec: Codec,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(), DecodeError> {
        let plain_len = u32::try_from(out.len()).unwrap_or(u32::MAX);
        if codec == Codec::Raw && payload.len() != out.len() {
            return Err(DecodeError::Length { codec, expected: plain_len, got: payload.len() });
        }
        let bad = |reason| DecodeError::Payload { codec, plain_len, reason };
        let got = match codec {
            Codec::Raw => {
                out.copy_from_slice(payload);
                out.len()
            }
            Codec::SameFilled => {
                let word = payload.first_chunk::<WORD>().ok_or_else(|| bad("short word"))?;
                fill(out, *word);
                out.len()
            }
            Codec::Lz4 => lz4::decompress(payload, out)
                .ok_or_else(|| bad("not an lz4 block, or one of more bytes"))?,
            Codec::Zlib => self.inflate.deflate_decompress(payload, out).map_err(|error| {
                use libdeflater::DecompressionError as E;
                bad(match error {
                    E::BadData => "not a deflate stream",
                    E::InsufficientSpace => "decodes to more bytes",
                })
            })?,
            Codec::Zstd => self.zstd.decompress(payload, out).map_err(bad)?,
            Codec::DeflateQz => {
                qz::decompress(&mut self.inflate, payload, out)
                    .map_err(|error| DecodeError::Member { codec, plain_len, error })?;
                out.len()
            }
        };
        if got != out.len() {
            return Err(DecodeError::Length { codec, expected: plain_len, got });
        }
        Ok(())
    }

    /// Decodes a payload of [`Codec::Zstd`] that was compressed with `dictionary`. Otherwise as
    /// [`decode_payload`](Self::decode_payload). A payload compressed with another dictionary gives
    /// other bytes, or an error.
    ///
    /// # Errors
    ///
    /// The payload does not decode to exactly `out.len()` bytes, or the dictionary is empty.
    pub fn decode_with(
        &mut self,
        dictionary: &Dictionary,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(), DecodeError> {
        let codec = Codec::Zstd;
        let plain_len = u32::try_from(out.len()).unwrap_or(u32::MAX);
        let bad = |reason| DecodeError::Payload { codec, plain_len, reason };
        let got = self.zstd.decompress_with(dictionary, payload, out).map_err(bad)?;
        if got != out.len() {
            return Err(DecodeError::Length { codec, expected: plain_len, got });
        }
        Ok(())
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl UnitHeader {
    /// Checks that `plain` matches this header, for callers that use a [`Codec::Raw`] payload in
    /// place instead of copying it with [`Decoder::decode`].
    ///
    /// # Errors
    ///
    /// The length or the checksum differs.
    pub fn verify(&self, plain: &[u8]) -> Result<(), DecodeError> {
        if usize::try_from(self.plain_len) != Ok(plain.len()) {
            let (codec, expected) = (self.codec, self.plain_len);
            return Err(DecodeError::Length { codec, expected, got: plain.len() });
        }
        self.verify_checksum(plain)
    }

    /// Compares the header's checksum with that of `bytes`. The length of `bytes` does not matter.
    ///
    /// # Errors
    ///
    /// The checksum differs.
    pub fn verify_checksum(&self, bytes: &[u8]) -> Result<(), DecodeError> {
        let got = checksum(bytes);
        if got == self.checksum {
            return Ok(());
        }
        let (codec, plain_len) = (self.codec, self.plain_len);
        Err(DecodeError::Checksum { codec, plain_len, expected: self.checksum, got })
    }
}

/// Why a unit could not be turned back into its plain bytes.
///
/// Bytes from a peer can cause all of these except [`DecodeError::Buffer`], which only a caller can
/// cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The header states lengths that no encoder writes.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The caller's buffer has another length than the header states.
    #[error("{codec} unit: {what} buffer of {got} bytes, the header says {stated}")]
    Buffer {
        /// The unit's codec.
        codec: Codec,
        /// Which buffer: "payload" or "output".
        what: &'static str,
        /// Length in the header.
        stated: u32,
        /// Length of the buffer.
        got: usize,
    },
    /// The codec cannot read the payload, or the payload decodes to more bytes than stated.
    #[error("{codec} unit of {plain_len} bytes: {reason}")]
    Payload {
        /// The unit's codec.
        codec: Codec,
        /// The plain length in the header.
        plain_len: u32,
        /// The codec's finding.
        reason: &'static str,
    },
    /// A member of a [`Codec::DeflateQz`] payload is invalid.
    #[error("{codec} unit of {plain_len} bytes: {error}")]
    Member {
        /// The unit's codec.
        codec: Codec,
        /// The plain length in the header.
        plain_len: u32,
        /// Which member, and what is wrong with it.
        error: qz::MemberError,
    },
    /// The payload decodes to fewer bytes than stated.
    #[error("{codec} unit decoded to {got} bytes, expected {expected}")]
    Length {
        /// The unit's codec.
        codec: Codec,
        /// The plain length in the header.
        expected: u32,
        /// The decoded length.
        got: usize,
    },
    /// The payload decodes to the right number of bytes, but their checksum is wrong.
    #[error("{codec} unit of {plain_len} bytes has checksum {got:016x}, expected {expected:016x}")]
    Checksum {
        /// The unit's codec.
        codec: Codec,
        /// The plain length in the header.
        plain_len: u32,
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the decoded bytes.
        got: u64,
    },
}
