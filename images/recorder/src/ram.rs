//! Parses the RAM sections: the block table and page records.

use std::io::{Read, Seek};

use image::RamBlock;

use crate::mapped::{self, Region};
use crate::source::{refused, unknown, Source};
use crate::target::Target;
use crate::{RecordError, Sink};

// Flags in the low bits of a record's address word (`RAM_SAVE_FLAG_*`).
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;
const XBZRLE: u64 = 0x40;
const COMPRESS_PAGE: u64 = 0x100;
const FLUSH: u64 = 0x200;

/// Maximum number of blocks in a table; an image has the same limit.
const MAX_BLOCKS: usize = 4096;

/// State of the parser across RAM sections.
#[derive(Debug)]
pub(crate) struct Ram {
    page_size: usize,
    /// Bitwise OR of the page sizes of all blocks, from POSTCOPY_ADVISE; 0 without that command.
    pub(crate) host_pages: u64,
    blocks: Vec<RamBlock>,
    /// In a mapped-ram file, the places of the blocks' pages.
    regions: Option<Vec<Region>>,
    /// The block of the last page record; a record with [`CONTINUE`] does not repeat its name.
    current: Option<usize>,
    /// The record that is a barrier between main channel and multifd channels.
    barrier: Option<Barrier>,
    /// Barriers read.
    pub(crate) barriers: u64,
    /// Whether the last section of RAM ended with a barrier, without a page behind it.
    pub(crate) at_barrier: bool,
    pub(crate) pages: u64,
    pub(crate) zeros: u64,
    /// Whether there was a [`FLUSH`].
    pub(crate) flushes: bool,
}

/// The record with which QEMU marks barriers. The first section has one or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Barrier {
    /// QEMU 8.1 and later: [`FLUSH`].
    Flush,
    /// QEMU up to 8.0, and its machine types: the end of each section.
    EndOfSection,
}

impl Ram {
    pub(crate) fn new(page_size: usize, mapped_ram: bool) -> Self {
        Self {
            page_size,
            host_pages: 0,
            blocks: Vec::new(),
            regions: mapped_ram.then(Vec::new),
            current: None,
            barrier: None,
            barriers: 0,
            at_barrier: false,
            pages: 0,
            zeros: 0,
            flushes: false,
        }
    }

    /// Whether the pages lie outside the stream.
    pub(crate) fn is_mapped(&self) -> bool {
        self.regions.is_some()
    }

    /// Passes the pages outside the stream to `sink`, and returns their number.
    pub(crate) fn mapped_pages<F: Read + Seek, S: Sink>(
        &self,
        file: &mut F,
        sink: &mut S,
    ) -> Result<u64, RecordError<S::Error>> {
        let Some(regions) = &self.regions else { return Ok(0) };
        mapped::pages(file, self.page_size, &self.blocks, regions, sink)
    }

    /// Whether as many pages were received as the block table has: QEMU's background-snapshot sends
    /// each page once.
    pub(crate) fn is_complete(&self) -> bool {
        let page = self.page_size as u64;
        let total: u64 = self.blocks.iter().map(|block| block.len / page).sum();
        total > 0 && self.pages + self.zeros == total
    }

    /// Whether the block table was read.
    pub(crate) fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Reads the body of a section, up to and including [`EOS`].
    pub(crate) fn body<R: Read, T: Target>(
        &mut self,
        source: &mut Source<R>,
        sink: &mut T,
    ) -> Result<(), RecordError<T::Error>> {
        let mask = self.page_size as u64 - 1;
        self.at_barrier = false;
        loop {
            let at = source.at();
            let word = source.u64()?;
            let (flags, address) = (word & mask, word & !mask);
            match flags {
                EOS if address == 0 => return self.may_be_barrier(Barrier::EndOfSection, at, sink),
                FLUSH if address == 0 => {
                    self.flushes = true;
                    self.may_be_barrier(Barrier::Flush, at, sink)?;
                    continue;
                }
                MEM_SIZE if self.blocks.is_empty() => {
                    self.table(source, address)?;
                    sink.blocks(self.page_size, &self.blocks).map_err(RecordError::Sink)?;
                    continue;
                }
                _ => {}
            }
            let kind = flags & !CONTINUE;
            match kind {
                ZERO | PAGE if !self.is_mapped() => {}
                XBZRLE => {
                    return Err(refused("xbzrle is on: turn it off (migrate-set-capabilities)"))
                }
                COMPRESS_PAGE => {
                    return Err(refused("compress is on: turn it off (migrate-set-capabilities)"));
                }
                _ => return Err(unknown(at, format!("a record of RAM with flags {flags:#x}"))),
            }
            if flags & CONTINUE == 0 {
                let name = source.name()?;
                let found = self.blocks.iter().position(|block| block.name == name);
                self.current = Some(found.ok_or_else(|| {
                    unknown(
                        at,
                        format!(
                            "a page of block '{}', which is not in the block table",
                            name.escape_default()
                        ),
                    )
                })?);
            }
            let block = self.current.ok_or_else(|| unknown(at, "a page of no block"))?;
            if address >= self.blocks[block].len {
                let RamBlock { name, len, .. } = &self.blocks[block];
                let name = name.escape_default();
                return Err(unknown(
                    at,
                    format!("page {address:#x} of block '{name}' of {len} bytes"),
                ));
            }
            let page = address / self.page_size as u64;
            self.at_barrier = false;
            if kind == PAGE {
                let bytes = source.take(self.page_size)?;
                sink.page(block, page, bytes).map_err(RecordError::Sink)?;
                self.pages += 1;
            } else {
                let fill = source.u8()?;
                if fill != 0 {
                    return Err(unknown(at, format!("a zero page that is filled with {fill}")));
                }
                sink.zero(block, page).map_err(RecordError::Sink)?;
                self.zeros += 1;
            }
        }
    }

    /// Passes the barrier that `kind`, read at offset `at`, is in a multifd migration.
    fn may_be_barrier<T: Target>(
        &mut self,
        kind: Barrier,
        at: u64,
        target: &mut T,
    ) -> Result<(), RecordError<T::Error>> {
        if !target.is_multifd() {
            return Ok(());
        }
        match (*self.barrier.get_or_insert(kind), kind) {
            (Barrier::Flush, Barrier::EndOfSection) => return Ok(()),
            (Barrier::EndOfSection, Barrier::Flush) => {
                return Err(unknown(at, "two kinds of barriers for multifd"));
            }
            _ => {}
        }
        target.barrier(at)?;
        self.barriers += 1;
        self.at_barrier = true;
        Ok(())
    }

    /// Reads the block table for `total` bytes of RAM.
    fn table<R: Read, E>(
        &mut self,
        source: &mut Source<R>,
        total: u64,
    ) -> Result<(), RecordError<E>> {
        let mut left = total;
        while left > 0 {
            let at = source.at();
            let name = source.name()?;
            let len = source.u64()?;
            left = left.checked_sub(len).ok_or_else(|| {
                unknown(
                    at,
                    format!("blocks of more than the {total} bytes that the table announces"),
                )
            })?;
            if name.is_empty() || self.blocks.len() == MAX_BLOCKS {
                return Err(unknown(at, "a block without a name, or more than 4096 blocks"));
            }
            let mut block = RamBlock { name, len, host_page: 0 };
            match &mut self.regions {
                // QEMU refuses mapped-ram together with postcopy-ram.
                Some(regions) => regions.push(mapped::header(source, &block, self.page_size)?),
                None => block.host_page = self.host_page(source, left == 0)?,
            }
            self.blocks.push(block);
        }
        if self.blocks.is_empty() {
            return Err(unknown(source.at(), "a block table without blocks"));
        }
        Ok(())
    }

    /// Reads the page size of a block; 0 if the stream does not state it. With postcopy-ram on,
    /// QEMU sends it as an extra word for blocks with pages larger than the host's smallest. Its
    /// bytes tell it apart: the word begins with a zero byte, and the next block's name length is
    /// not zero. After the last block a record follows, whose flags are not zero.
    fn host_page<R: Read, E>(
        &self,
        source: &mut Source<R>,
        last: bool,
    ) -> Result<u64, RecordError<E>> {
        if self.host_pages == 0 || (!last && source.peek(1)? != [0]) {
            return Ok(0);
        }
        let word = u64::from_be_bytes(source.peek(8)?.try_into().expect("8 bytes"));
        let size = word.is_power_of_two() && word & self.host_pages != 0 && word > 4096;
        if size {
            source.take(8)?;
            return Ok(word);
        }
        if last {
            Ok(0)
        } else {
            Err(unknown(source.at(), format!("a block with pages of {word} bytes")))
        }
    }
}
