//! The table's numbers: LEB128 varints (seven bits a byte, low ones first, 32 bits in all), and zigzag for signed ones.

use crate::TABLE_ROOM;

/// The longest head of a run: gap, pages, step.
pub(crate) const RUN_HEAD: usize = 15;

pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    /// Into the first [`TABLE_ROOM`] bytes of `out`, or what there is.
    pub(crate) fn new(out: &'a mut [u8]) -> Self {
        let room = out.len().min(TABLE_ROOM);
        Self { out: &mut out[..room], len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn room(&self) -> usize {
        self.out.len() - self.len
    }

    pub(crate) fn byte(&mut self, byte: u8) {
        self.out[self.len] = byte;
        self.len += 1;
    }

    #[allow(clippy::cast_possible_truncation, reason = "masked to seven bits")]
    pub(crate) fn varint(&mut self, mut value: u32) {
        while value >= 0x80 {
            self.byte(value as u8 | 0x80);
            value >>= 7;
        }
        self.byte(value as u8);
    }

    pub(crate) fn signed(&mut self, value: i32) {
        self.varint(((value << 1) ^ (value >> 31)).cast_unsigned());
    }

    /// Where the next `n` bytes are, zeros for now.
    pub(crate) fn reserve(&mut self, n: usize) -> usize {
        let at = self.len;
        self.out[at..at + n].fill(0);
        self.len += n;
        at
    }

    pub(crate) fn at(&mut self, at: usize) -> &mut u8 {
        &mut self.out[at]
    }
}

/// Reads a table; every failure is the offset at which it is.
pub(crate) struct Reader<'a> {
    table: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(table: &'a [u8]) -> Self {
        Self { table, at: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.table.len()
    }

    pub(crate) fn varint(&mut self) -> Option<u32> {
        let mut value = 0_u64;
        for shift in (0..35).step_by(7) {
            let byte = *self.table.get(self.at)?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).ok();
            }
        }
        None
    }

    pub(crate) fn signed(&mut self) -> Option<i32> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n)?;
        let bytes = self.table.get(self.at..end)?;
        self.at = end;
        Some(bytes)
    }
}
