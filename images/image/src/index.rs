//! The index: units, block table, and the place of each page.

use std::collections::HashSet;

use codec::UnitHeader;
use varint::{unzigzag, zigzag};

use crate::extents::{join, Content, Extent};
use crate::layout::{HEADER_LEN, MAX_BLOCKS, MAX_INDEX, MAX_RAM};
use crate::{Damage, Shape};

/// Place and checksum of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitEntry {
    /// The number of the unit's file: 0 for an image in one file, else the number of the pack in
    /// the save's table.
    pub file: u32,
    /// Pages in the unit.
    pub pages: u32,
    /// Offset of the unit's first byte in the file.
    pub offset: u64,
    /// Stored length of header and payload, bytes.
    pub len: u32,
    /// Checksum of the stored bytes.
    pub checksum: u64,
}

/// A RAM block and its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// QEMU's name for the block.
    pub name: String,
    /// Length in guest pages.
    pub pages: u64,
    /// Host page size of the block, bytes; 0 if the stream did not state it.
    pub host_page: u64,
    /// Extents that cover all pages of the block, in order and without gaps.
    pub extents: Vec<Extent>,
}

impl Block {
    /// Content of page `page`; `None` past the end of the block.
    pub fn content(&self, page: u64) -> Option<Content> {
        let behind = self.extents.partition_point(|extent| extent.first <= page);
        let extent = self.extents[..behind].last()?;
        (page < self.pages).then(|| extent.content.plus(page - extent.first))
    }
}

/// The whole index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Slots in use.
    pub slots: u64,
    /// The units, by number.
    pub units: Vec<UnitEntry>,
    /// The RAM blocks, in QEMU's order.
    pub blocks: Vec<Block>,
}

impl Index {
    /// Number of pages in all units.
    pub fn pages(&self) -> u64 {
        self.units.iter().map(|unit| u64::from(unit.pages)).sum()
    }

    /// Number of pages in unit `unit`; 0 if there is no such unit.
    pub fn unit_pages(&self, unit: u64) -> u64 {
        let entry = usize::try_from(unit).ok().and_then(|unit| self.units.get(unit));
        entry.map_or(0, |entry| entry.pages.into())
    }

    /// Encodes the index; `None` if it exceeds the limits.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        put(&mut out, self.slots);
        for unit in &self.units {
            put(&mut out, u64::from(unit.len));
            out.extend(unit.checksum.to_be_bytes());
        }
        put_blocks(&mut out, &self.blocks)?;
        (out.len() as u64 <= MAX_INDEX).then_some(out)
    }

    /// Decodes the index of a file whose units end at `units_end`.
    pub(crate) fn from_bytes(bytes: &[u8], shape: Shape, units_end: u64) -> Result<Self, Damage> {
        let mut cursor = Cursor::new(bytes);
        let slots = cursor.number("no number of slots")?;
        let units = read_units(&mut cursor, shape, slots, units_end)?;
        let blocks = read_blocks(&mut cursor, shape, slots)?;
        Ok(Self { slots, units, blocks })
    }
}

/// Appends the block table and the extents; `None` if a name is too long.
pub(crate) fn put_blocks(out: &mut Vec<u8>, blocks: &[Block]) -> Option<()> {
    put(out, blocks.len() as u64);
    let mut expected = 0;
    for block in blocks {
        out.push(u8::try_from(block.name.len()).ok()?);
        out.extend(block.name.as_bytes());
        put(out, block.pages);
        put(out, block.host_page);
        for extent in &block.extents {
            let head = extent.pages * 4;
            match extent.content {
                Content::Zero => put(out, head),
                Content::Filled(word) => {
                    put(out, head + 1);
                    out.extend(word);
                }
                Content::Slot(slot) => {
                    put(out, head + 2);
                    put(out, zigzag(slot.wrapping_sub(expected).cast_signed()));
                    expected = slot + extent.pages;
                }
            }
        }
    }
    Some(())
}

/// Reads the block table and the extents, up to the end of the index. Slots are below `slots`.
pub(crate) fn read_blocks(
    cursor: &mut Cursor<'_>,
    shape: Shape,
    slots: u64,
) -> Result<Vec<Block>, Damage> {
    let count = cursor.number("no number of blocks")?;
    if count > MAX_BLOCKS as u64 {
        return Err(cursor.bad("too many blocks"));
    }
    let mut blocks: Vec<Block> = Vec::new();
    let mut names = HashSet::new();
    let (mut expected, mut ram) = (0, 0_u64);
    for _ in 0..count {
        let block = read_block(cursor, shape, slots, &mut expected, &mut ram)?;
        if !names.insert(block.name.clone()) {
            return Err(cursor.bad("a block twice"));
        }
        blocks.push(block);
    }
    cursor.end()?;
    Ok(blocks)
}

fn read_units(
    cursor: &mut Cursor<'_>,
    shape: Shape,
    slots: u64,
    units_end: u64,
) -> Result<Vec<UnitEntry>, Damage> {
    let count = shape.units(slots);
    // An entry has at least 9 bytes. This check bounds the allocation below.
    if count > (cursor.bytes.len() / 9) as u64 {
        return Err(cursor.bad("more units than the index has room for"));
    }
    let mut units = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    let mut offset = HEADER_LEN as u64;
    for _ in 0..count {
        let (len, checksum) = read_unit(cursor, shape)?;
        let before = units.len() as u64 * shape.unit_pages();
        let pages = u32::try_from((slots - before).min(shape.unit_pages())).unwrap_or(u32::MAX);
        units.push(UnitEntry { file: 0, pages, offset, len, checksum });
        offset += u64::from(len);
    }
    if offset != units_end {
        return Err(cursor.bad("units that do not end where the state begins"));
    }
    Ok(units)
}

/// Reads stored length and checksum of a unit.
pub(crate) fn read_unit(cursor: &mut Cursor<'_>, shape: Shape) -> Result<(u32, u64), Damage> {
    let len = cursor.number("no length of a unit")?;
    let fits =
        (UnitHeader::LEN as u64 + 1..=(UnitHeader::LEN + shape.unit_bytes()) as u64).contains(&len);
    let (Ok(stored), true) = (u32::try_from(len), fits) else {
        return Err(cursor.bad("a unit of another length than any has"));
    };
    Ok((stored, u64::from_be_bytes(cursor.array("no checksum of a unit")?)))
}

fn read_block(
    cursor: &mut Cursor<'_>,
    shape: Shape,
    slots: u64,
    expected: &mut u64,
    ram: &mut u64,
) -> Result<Block, Damage> {
    let [len] = cursor.array("no name of a block")?;
    let name = cursor.take(usize::from(len), "no name of a block")?;
    let name = std::str::from_utf8(name).map_err(|_| cursor.bad("a name that is not UTF-8"))?;
    let name = name.to_owned();
    let pages = cursor.number("no length of a block")?;
    let bytes = pages.checked_mul(shape.page_size() as u64);
    let total = bytes.and_then(|bytes| ram.checked_add(bytes)).filter(|&sum| sum <= MAX_RAM);
    *ram = total.ok_or_else(|| cursor.bad("more RAM than the limit"))?;
    let host_page = cursor.number("no page size of a block")?;
    if host_page != 0 && !(host_page.is_power_of_two() && host_page >= shape.page_size() as u64) {
        return Err(cursor.bad("a page size of a block that no host has"));
    }
    let mut extents = Vec::new();
    let mut first = 0;
    while first < pages {
        let head = cursor.number("no extent")?;
        let (run, kind) = (head / 4, head % 4);
        if run == 0 || run > pages - first {
            return Err(cursor.bad("an extent that does not fit its block"));
        }
        let content = match kind {
            0 => Content::Zero,
            1 => Content::Filled(cursor.array("no word of an extent")?),
            2 => {
                let step = unzigzag(cursor.number("no slot of an extent")?);
                let slot = expected.wrapping_add_signed(step);
                match slot.checked_add(run).filter(|&end| end <= slots) {
                    Some(end) => *expected = end,
                    None => return Err(cursor.bad("a slot that does not exist")),
                }
                Content::Slot(slot)
            }
            _ => return Err(cursor.bad("an extent of an unknown kind")),
        };
        join(&mut extents, first, run, content);
        first += run;
    }
    Ok(Block { name, pages, host_page, extents })
}

pub(crate) fn put(out: &mut Vec<u8>, value: u64) {
    let mut bytes = [0; varint::LONGEST];
    let len = varint::put(value, &mut bytes).expect("room for the longest");
    out.extend_from_slice(&bytes[..len]);
}

/// Reads the parts of an index.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The number of bytes that are not read yet. It bounds any count of elements in them.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Fails if there are more bytes.
    pub(crate) fn end(&self) -> Result<(), Damage> {
        match self.left() {
            0 => Ok(()),
            _ => Err(self.bad("more bytes than it describes")),
        }
    }

    pub(crate) fn bad(&self, what: &'static str) -> Damage {
        Damage::IndexForm { what, at: self.at }
    }

    pub(crate) fn number(&mut self, what: &'static str) -> Result<u64, Damage> {
        let (value, len) = varint::get(&self.bytes[self.at..]).map_err(|_| self.bad(what))?;
        self.at += len;
        Ok(value)
    }

    fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], Damage> {
        let bytes = self.bytes.get(self.at..self.at + len).ok_or_else(|| self.bad(what))?;
        self.at += len;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Damage> {
        Ok(self.take(N, what)?.try_into().expect("as long as asked for"))
    }
}

#[cfg(test)]
mod tests;
