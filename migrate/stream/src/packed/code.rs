//! Variable-length integers, written into and read from bounded slices.

use super::UnpackError;

/// Writes into a slice; `None` when it is full.
pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut [u8]) -> Self {
        Writer { out, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Option<()> {
        self.out.get_mut(self.len..self.len + bytes.len())?.copy_from_slice(bytes);
        self.len += bytes.len();
        Some(())
    }

    /// LEB128: seven bits a byte, low ones first, the top bit set on all but the last.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to seven bits")]
    pub(crate) fn varint(&mut self, mut value: u64) -> Option<()> {
        while value >= 0x80 {
            *self.out.get_mut(self.len)? = value as u8 | 0x80;
            self.len += 1;
            value >>= 7;
        }
        *self.out.get_mut(self.len)? = value as u8;
        self.len += 1;
        Some(())
    }

    #[inline]
    pub(crate) fn signed(&mut self, value: i64) -> Option<()> {
        // Zigzag: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
        self.varint(((value << 1) ^ (value >> 63)).cast_unsigned())
    }
}

/// Reads from a slice; errors carry the offset from its start.
#[derive(Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, pos: 0 }
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pos == self.bytes.len()
    }

    #[inline]
    pub(crate) fn bytes(&mut self, n: usize) -> Result<&'a [u8], UnpackError> {
        let end = self.pos.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or(UnpackError::StructureEnds { at: self.pos })?;
        let bytes = &self.bytes[self.pos..end];
        self.pos = end;
        Ok(bytes)
    }

    #[inline]
    pub(crate) fn varint(&mut self) -> Result<u64, UnpackError> {
        let at = self.pos;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.bytes.get(self.pos).ok_or(UnpackError::StructureEnds { at })?;
            self.pos += 1;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(UnpackError::Varint { at })
    }

    #[inline]
    pub(crate) fn signed(&mut self) -> Result<i64, UnpackError> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    /// A varint that must fit 32 bits.
    pub(crate) fn varint32(&mut self) -> Result<u32, UnpackError> {
        let at = self.pos;
        u32::try_from(self.varint()?).map_err(|_| UnpackError::Varint { at })
    }
}
