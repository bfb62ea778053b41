//! gzip members.
//!
//! A member that this module writes states its own length in an extra field (RFC 1952, 2.3.1.1), as
//! members of BGZF do. Other programs skip the field.

use std::io::Write;

use libdeflater::{CompressionLvl, Compressor, Crc};

use crate::member::Decoder;
use crate::source::Source;
use crate::zstd::{copy, StreamError};

/// The levels that this module writes.
pub(crate) const LEVELS: (i32, i32) = (1, 12);

/// Plain bytes of a member: many times deflate's window.
pub(crate) const UNIT: usize = 1 << 20;

/// Magic number, deflate, FEXTRA; no time; no extra flags; Unix; 8 bytes of extra fields.
const HEAD: [u8; 12] = [0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 3, 8, 0];
/// The extra field of 4 bytes: the member's length.
const FIELD: [u8; 4] = [b'P', b'L', 4, 0];
const HEAD_LEN: usize = HEAD.len() + FIELD.len() + 4;
/// CRC and plain length.
const TAIL_LEN: usize = 8;

/// Creates a context that compresses.
pub(crate) fn packer(level: i32) -> Compressor {
    Compressor::new(CompressionLvl::new(level).unwrap_or_default())
}

/// Makes one member of `plain`.
pub(crate) fn pack(
    context: &mut Compressor,
    plain: &[u8],
    frame: &mut Vec<u8>,
) -> Result<(), String> {
    let room = context.deflate_compress_bound(plain.len());
    frame.resize(HEAD_LEN + room + TAIL_LEN, 0);
    let body = &mut frame[HEAD_LEN..HEAD_LEN + room];
    let len = context.deflate_compress(plain, body).map_err(|error| error.to_string())?;
    frame.truncate(HEAD_LEN + len);
    let mut crc = Crc::new();
    crc.update(plain);
    frame.extend(crc.sum().to_le_bytes());
    let number = |len: usize| u32::try_from(len).expect("a unit is short").to_le_bytes();
    frame.extend(number(plain.len()));
    let whole = number(frame.len());
    frame[..HEAD.len()].copy_from_slice(&HEAD);
    frame[HEAD.len()..HEAD.len() + FIELD.len()].copy_from_slice(&FIELD);
    frame[HEAD_LEN - 4..HEAD_LEN].copy_from_slice(&whole);
    Ok(())
}

/// As [`crate::zstd::measure`].
pub(crate) fn measure(bytes: &[u8]) -> Option<(usize, u64)> {
    let head = bytes.get(..HEAD_LEN)?;
    if head[..HEAD.len()] != HEAD || head[HEAD.len()..HEAD_LEN - 4] != FIELD {
        return None;
    }
    let number = |at: &[u8]| at.try_into().map(u32::from_le_bytes).ok();
    let len = number(&head[HEAD_LEN - 4..])? as usize;
    let plain = number(bytes.get(..len)?.get(HEAD_LEN..)?.last_chunk::<4>()?)?;
    Some((len, plain.into()))
}

/// Whether `bytes` begin a member that states its length, or may with more bytes.
pub(crate) fn may_state_its_length(bytes: &[u8]) -> bool {
    let head = bytes.len().min(HEAD.len());
    bytes[..head] == HEAD[..head]
}

/// Decodes a whole member into `plain`, which has the member's plain length.
///
/// The stated length of the member has no checksum of its own. With a larger one the member would
/// end early, and the members behind it would be lost.
pub(crate) fn unpack(decoder: &mut Decoder, frame: &[u8], plain: &mut [u8]) -> Result<(), String> {
    match decoder.decode(frame, plain)? {
        (read, _) if read != frame.len() => {
            Err(format!("it ends at its byte {read}, and states {} bytes", frame.len()))
        }
        (_, len) if len != plain.len() => {
            Err(format!("{len} bytes where it states {}", plain.len()))
        }
        _ => Ok(()),
    }
}

/// Decodes the next member piece by piece; returns the number of plain bytes.
pub(crate) fn stream(source: &mut Source<'_>, output: &mut dyn Write) -> Result<u64, StreamError> {
    copy(&mut flate2::bufread::GzDecoder::new(source), output)
}
