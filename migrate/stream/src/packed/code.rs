//! Variable-length integers, written into and read from bounded slices.

use super::error::UnpackError;
use varint::Broken;

/// Writes into a slice; returns `None` when it is full.
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

    #[inline]
    pub(crate) fn varint(&mut self, value: u64) -> Option<()> {
        self.len += varint::put(value, &mut self.out[self.len..])?;
        Some(())
    }

    #[inline]
    pub(crate) fn signed(&mut self, value: i64) -> Option<()> {
        self.varint(varint::zigzag(value))
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
        let read = varint::get(&self.bytes[at..]).map_err(|broken| match broken {
            Broken::Ends => UnpackError::StructureEnds { at },
            Broken::TooLarge => UnpackError::Varint { at },
        });
        let (value, len) = read?;
        self.pos += len;
        Ok(value)
    }

    #[inline]
    pub(crate) fn signed(&mut self) -> Result<i64, UnpackError> {
        Ok(varint::unzigzag(self.varint()?))
    }

    /// Reads a varint that must fit 32 bits.
    pub(crate) fn varint32(&mut self) -> Result<u32, UnpackError> {
        let at = self.pos;
        u32::try_from(self.varint()?).map_err(|_| UnpackError::Varint { at })
    }
}
