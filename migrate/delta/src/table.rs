//! The parts of a table: numbers of 32 bits ([`varint`]), and bits.

use crate::TABLE_ROOM;

/// The longest head of a run: gap, pages, step.
pub(crate) const RUN_HEAD: usize = 15;

pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    /// Creates a table in the first [`TABLE_ROOM`] bytes of `out`, or in all of `out` if it is
    /// shorter.
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

    /// Requires [room](Self::room) for the number.
    pub(crate) fn varint(&mut self, value: u32) {
        let len = varint::put(value.into(), &mut self.out[self.len..]);
        self.len += len.expect("a run begins where there is room for it");
    }

    pub(crate) fn signed(&mut self, value: i32) {
        // zigzag of 32 bits fits 32 bits.
        self.varint(u32::try_from(varint::zigzag(value.into())).unwrap_or(u32::MAX));
    }

    /// Reserves the next `n` bytes, zeroed, and returns their offset.
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

/// Reads a table; `None` at an unreadable number or past the end.
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
        let (value, len) = varint::get(&self.table[self.at..]).ok()?;
        self.at += len;
        u32::try_from(value).ok()
    }

    pub(crate) fn signed(&mut self) -> Option<i32> {
        i32::try_from(varint::unzigzag(self.varint()?.into())).ok()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(n)?;
        let bytes = self.table.get(self.at..end)?;
        self.at = end;
        Some(bytes)
    }
}
