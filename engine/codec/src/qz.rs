//! QATzip's gzip-ext members: the format in which QAT, QATzip, QEMU's `qatzip` method and platen's
//! own software exchange deflate.
//!
//! A payload is a sequence of members. Each is a gzip member (RFC 1952), so `gunzip` reads it as
//! well:
//!
//! | offset | size | field |
//! |--:|--:|---|
//! | 0 | 4 | 1f 8b 08 04: gzip, deflate, an extra field and nothing else |
//! | 4 | 6 | time, hints and system: written 0, 0 and ff, not looked at |
//! | 10 | 6 | extra field of 12 bytes: 'Q' 'Z', 8 bytes |
//! | 16 | 4 | plain length, little-endian, as all of it |
//! | 20 | 4 | length of the deflate stream, n |
//! | 24 | n | the deflate stream |
//! | 24 + n | 4 | CRC-32 of the plain bytes |
//! | 28 + n | 4 | plain length again |
//!
//! # Sizes
//!
//! A device compresses pieces. QATzip submits [`MEMBER_PLAIN`] bytes at a time, and accepts no more
//! per member when it decompresses on a device, so platen writes members of that size. QATzip's
//! software path writes ONE member for a whole call, however long. This module reads such a member;
//! no device does.
//!
//! # What fails
//!
//! [`members`] checks all headers, footers and lengths before it returns the first member. It
//! neither reads past the payload nor promises more than the plain length requested. Only decoding
//! shows whether a deflate stream is valid.

/// The most plain bytes in a member that platen writes: QATzip's default hardware buffer size.
pub const MEMBER_PLAIN: usize = 64 << 10;

/// Length of a member's header.
pub const HEADER_LEN: usize = 24;

/// Length of a member's footer.
pub const FOOTER_LEN: usize = 8;

/// Bytes of a member besides its deflate stream.
pub const MEMBER_OVERHEAD: usize = HEADER_LEN + FOOTER_LEN;

/// gzip's CRC-32, for checking a device's output.
pub fn crc32(bytes: &[u8]) -> u32 {
    libdeflater::crc32(bytes)
}

/// The header of a member of `plain_len` bytes whose deflate stream has `deflate_len`.
pub fn header(plain_len: u32, deflate_len: u32) -> [u8; HEADER_LEN] {
    let mut bytes = *b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x0c\0QZ\x08\0\0\0\0\0\0\0\0\0";
    bytes[16..20].copy_from_slice(&plain_len.to_le_bytes());
    bytes[20..].copy_from_slice(&deflate_len.to_le_bytes());
    bytes
}

/// The footer of a member of `plain_len` bytes with that CRC-32.
pub fn footer(crc32: u32, plain_len: u32) -> [u8; FOOTER_LEN] {
    let mut bytes = [0; FOOTER_LEN];
    bytes[..4].copy_from_slice(&crc32.to_le_bytes());
    bytes[4..].copy_from_slice(&plain_len.to_le_bytes());
    bytes
}

/// Writes a member around a deflate stream that a device made to the front of `out`, and returns
/// the member's length. If it does not fit, returns `None` and leaves `out` unchanged.
pub fn write_member(out: &mut [u8], deflate: &[u8], crc32: u32, plain_len: u32) -> Option<usize> {
    let body = out.get_mut(HEADER_LEN..)?.get_mut(..deflate.len() + FOOTER_LEN)?;
    body[..deflate.len()].copy_from_slice(deflate);
    seal(out, deflate.len(), crc32, plain_len)
}

/// Writes header and footer around the deflate stream already in `out`.
fn seal(out: &mut [u8], deflate_len: usize, crc32: u32, plain_len: u32) -> Option<usize> {
    let member = out.get_mut(..MEMBER_OVERHEAD + deflate_len)?;
    let (head, body) = member.split_first_chunk_mut()?;
    let (_, foot) = body.split_last_chunk_mut()?;
    *head = header(plain_len, u32::try_from(deflate_len).ok()?);
    *foot = footer(crc32, plain_len);
    Some(member.len())
}

/// Compresses `plain` into members in `out`; `None` if they do not fit there.
pub(crate) fn compress(
    deflate: &mut libdeflater::Compressor,
    plain: &[u8],
    out: &mut [u8],
) -> Option<usize> {
    let mut at = 0;
    for piece in plain.chunks(MEMBER_PLAIN) {
        let space = out.get_mut(at..)?;
        let end = space.len().checked_sub(FOOTER_LEN)?;
        let body = space.get_mut(HEADER_LEN..end)?;
        let len = deflate.deflate_compress(piece, body).ok()?;
        at += seal(space, len, crc32(piece), u32::try_from(piece.len()).ok()?)?;
    }
    Some(at)
}

/// Decodes all members of `payload` into exactly `out`.
pub(crate) fn decompress(
    inflate: &mut libdeflater::Decompressor,
    payload: &[u8],
    out: &mut [u8],
) -> Result<(), MemberError> {
    let mut rest = out;
    for member in members(payload, rest.len())? {
        let bad = |reason| MemberError { at: member.at, reason };
        let (piece, after) =
            rest.split_at_mut_checked(member.plain_len).ok_or_else(|| bad(LONGER_THAN_UNIT))?;
        rest = after;
        // The whole member, not only its stream: the library then finds the footer where the stream
        // really ends, and checks CRC-32 and length itself.
        let got = inflate.gzip_decompress(member.bytes, piece).map_err(|error| {
            use libdeflater::DecompressionError as E;
            bad(match error {
                E::BadData => "bad deflate stream, CRC-32 or length",
                E::InsufficientSpace => "decodes to more bytes than its header states",
            })
        })?;
        if got != member.plain_len {
            return Err(bad("decodes to fewer bytes than its header states"));
        }
    }
    Ok(())
}

/// The members of `payload`, which hold `plain_len` bytes in all.
///
/// # Errors
///
/// The payload is not a sequence of whole, non-empty members whose plain lengths add up to
/// `plain_len`.
pub fn members(payload: &[u8], plain_len: usize) -> Result<Members<'_>, MemberError> {
    let mut members = Members { payload, at: 0 };
    let mut left = plain_len;
    while let Some(member) = members.advance()? {
        left = left
            .checked_sub(member.plain_len)
            .ok_or(MemberError { at: member.at, reason: LONGER_THAN_UNIT })?;
    }
    if left > 0 {
        return Err(MemberError { at: members.at, reason: "the members end before the unit" });
    }
    Ok(Members { payload, at: 0 })
}

/// One member, with every length checked against the payload and the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// Where the member starts in the payload.
    pub at: usize,
    /// The raw deflate stream; not empty, not yet examined.
    pub deflate: &'a [u8],
    /// The length to which the member must decode: at least 1, and more than [`MEMBER_PLAIN`] from
    /// QATzip's software path.
    pub plain_len: usize,
    /// The CRC-32 that the decoded bytes must have.
    pub crc32: u32,
    /// The whole member.
    bytes: &'a [u8],
}

/// The members of a payload that [`members`] found valid.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    payload: &'a [u8],
    at: usize,
}

impl<'a> Members<'a> {
    fn advance(&mut self) -> Result<Option<Member<'a>>, MemberError> {
        let at = self.at;
        let rest = self.payload.get(at..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(None);
        }
        let member = split(rest, at).map_err(|reason| MemberError { at, reason })?;
        self.at += member.bytes.len();
        Ok(Some(member))
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Member<'a>;

    fn next(&mut self) -> Option<Member<'a>> {
        // `members` has checked the same bytes: no error remains to be lost.
        self.advance().ok().flatten()
    }
}

/// The member at the front of `bytes`.
fn split(bytes: &[u8], at: usize) -> Result<Member<'_>, &'static str> {
    let (head, body) = bytes.split_first_chunk::<HEADER_LEN>().ok_or("header cut short")?;
    let [0x1f, 0x8b, 8, flags, _, _, _, _, _, _, extra @ ..] = *head else {
        return Err("not a gzip member");
    };
    let [12, 0, b'Q', b'Z', 8, 0, p0, p1, p2, p3, d0, d1, d2, d3] = extra else {
        return Err("no QATzip extra field");
    };
    if flags != FEXTRA {
        return Err("fields that QATzip never writes");
    }
    let plain_len = u32::from_le_bytes([p0, p1, p2, p3]);
    let deflate_len = u32::from_le_bytes([d0, d1, d2, d3]);
    let (deflate, after) = usize::try_from(deflate_len)
        .ok()
        .and_then(|len| body.split_at_checked(len))
        .ok_or("compressed length runs past the end")?;
    let Some([c0, c1, c2, c3, l0, l1, l2, l3]) = after.first_chunk::<FOOTER_LEN>().copied() else {
        return Err("footer cut short");
    };
    if u32::from_le_bytes([l0, l1, l2, l3]) != plain_len {
        return Err("header and footer state different lengths");
    }
    if plain_len == 0 || deflate.is_empty() {
        return Err("empty");
    }
    Ok(Member {
        at,
        deflate,
        plain_len: usize::try_from(plain_len).map_err(|_| LONGER_THAN_UNIT)?,
        crc32: u32::from_le_bytes([c0, c1, c2, c3]),
        bytes: bytes.get(..MEMBER_OVERHEAD + deflate.len()).ok_or("footer cut short")?,
    })
}

/// The payload is not a sequence of valid members. The peer or the link is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("member at byte {at}: {reason}")]
pub struct MemberError {
    /// Where the member starts in the payload.
    pub at: usize,
    /// The defect.
    pub reason: &'static str,
}

/// The gzip flag of an extra field.
const FEXTRA: u8 = 4;
const LONGER_THAN_UNIT: &str = "more plain bytes than the unit has";

#[cfg(test)]
mod tests;
