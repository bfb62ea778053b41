//! The parts of a table: numbers of 32 bits ([`varint`]), and bits.

use crate::{Layout, Table, TableError, TABLE_ROOM};
use std::ops::Range;

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

/// A run of pages in a table.
pub(crate) struct Run<'a> {
    /// The pages in the chunk, with the bytes between them.
    pub(crate) bytes: Range<usize>,
    /// Bytes from one page to the next.
    pub(crate) stride: usize,
    pub(crate) slot: u32,
    pub(crate) pages: u64,
    /// A bit for each page: whether it is a difference.
    bits: &'a [u8],
    /// Where the run begins in the table.
    at: usize,
}

impl Run<'_> {
    pub(crate) fn is_difference(&self, page: usize) -> bool {
        self.bits[page / 8] >> (page % 8) & 1 != 0
    }

    /// Whether the run lies in the seed, whose `pages` pages have the slots from `base` on.
    ///
    /// # Errors
    /// A part of the run lies in the seed and a part does not; a page of it is no difference.
    pub(crate) fn check_seed(&self, (base, pages): (u32, u32)) -> Result<(), TableError> {
        let end = u64::from(base) + u64::from(pages);
        if self.slot < base || u64::from(self.slot) + self.pages > end {
            let slots = usize::try_from(end).unwrap_or(usize::MAX);
            return Err(TableError::Slots { pages: self.pages, slot: self.slot, slots });
        }
        let mut all = 0..usize::try_from(self.pages).unwrap_or(0);
        match all.all(|page| self.is_difference(page)) {
            true => Ok(()),
            false => Err(TableError::Seed { slot: self.slot, at: self.at }),
        }
    }
}

/// The runs of a table, each within the chunk.
pub(crate) struct Runs<'a> {
    reader: Reader<'a>,
    plain_len: usize,
    page_size: usize,
    layout: Layout,
    /// Offset behind the last page.
    at: u64,
    /// The slot behind the last page's.
    slot: u32,
}

impl<'a> Runs<'a> {
    pub(crate) fn new(table: Table<'a>, plain_len: usize, page_size: usize) -> Self {
        let Table { bytes, layout } = table;
        Self { reader: Reader::new(bytes), plain_len, page_size, layout, at: 0, slot: 0 }
    }

    /// The next run; `None` at the end of the table.
    pub(crate) fn next(&mut self) -> Result<Option<Run<'a>>, TableError> {
        if self.reader.is_empty() {
            return Ok(None);
        }
        let begin = self.reader.at;
        let broken = TableError::Broken { at: begin, len: self.reader.table.len() };
        let gap = self.reader.varint().ok_or(broken)?;
        let pages = u64::from(self.reader.varint().ok_or(broken)?);
        let step = self.reader.signed().ok_or(broken)?;
        let between = self.layout.between();
        let stride = between + self.page_size;
        let from = self.at + u64::from(gap);
        let end = from + (pages * stride as u64).saturating_sub(between as u64);
        let (first, last) = match (usize::try_from(from), usize::try_from(end)) {
            (Ok(first), Ok(last)) if pages > 0 && last <= self.plain_len => (first, last),
            _ => return Err(TableError::Pages { pages, from, len: self.plain_len }),
        };
        let slot = self.slot.wrapping_add(step.cast_unsigned());
        // At most the number of pages in the chunk, as checked above.
        let n = usize::try_from(pages).unwrap_or(0);
        let bits = self.reader.bytes(n.div_ceil(8)).ok_or(broken)?;
        if n % 8 > 0 && bits[n / 8] >> (n % 8) != 0 {
            return Err(TableError::Bits { pages, at: begin });
        }
        self.at = end;
        // The caller checks that the run's slots exist, so this is a slot or one past the last.
        self.slot = slot.wrapping_add(u32::try_from(n).unwrap_or(0));
        Ok(Some(Run { bytes: first..last, stride, slot, pages, bits, at: begin }))
    }
}
