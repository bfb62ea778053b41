//! Sections of RAM: the block table and page records.

use std::io::Read;

use image::RamBlock;

use crate::source::{refused, unknown, Source};
use crate::{RecordError, Sink};

// Flags in the low bits of a record's first word.
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;
const XBZRLE: u64 = 0x40;
const COMPRESS_PAGE: u64 = 0x100;
const FLUSH: u64 = 0x200;

/// Most blocks of a table; an image takes no more either.
const MAX_BLOCKS: usize = 4096;

/// What is known of RAM.
#[derive(Debug)]
pub(crate) struct Ram {
    page_size: usize,
    /// POSTCOPY_ADVISE: the page sizes of all blocks, or'ed; 0 without one.
    pub(crate) host_pages: u64,
    blocks: Vec<RamBlock>,
    /// The block of the last record that named one.
    current: Option<usize>,
    pub(crate) pages: u64,
    pub(crate) zeros: u64,
}

impl Ram {
    pub(crate) fn new(page_size: usize) -> Self {
        Self { page_size, host_pages: 0, blocks: Vec::new(), current: None, pages: 0, zeros: 0 }
    }

    /// Whether the block table was read.
    pub(crate) fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Reads the body of a section, to its end mark.
    pub(crate) fn body<R: Read, S: Sink>(
        &mut self,
        source: &mut Source<R>,
        sink: &mut S,
    ) -> Result<(), RecordError<S::Error>> {
        let mask = self.page_size as u64 - 1;
        loop {
            let at = source.at();
            let word = source.u64()?;
            let (flags, address) = (word & mask, word & !mask);
            match flags {
                EOS if address == 0 => return Ok(()),
                FLUSH if address == 0 => continue,
                MEM_SIZE if self.blocks.is_empty() => {
                    self.table(source, address)?;
                    sink.blocks(self.page_size, &self.blocks).map_err(RecordError::Sink)?;
                    continue;
                }
                _ => {}
            }
            let kind = flags & !CONTINUE;
            match kind {
                ZERO | PAGE => {}
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

    /// Reads the block table, of `total` bytes of RAM.
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
            let host_page = self.host_page(source, left == 0)?;
            self.blocks.push(RamBlock { name, len, host_page });
        }
        if self.blocks.is_empty() {
            return Err(unknown(source.at(), "a block table without blocks"));
        }
        Ok(())
    }

    /// The page size of a block: an extra word with postcopy on, where the block's pages are larger
    /// than the host's smallest. Its first byte is zero, and that of a name's length is not; behind
    /// the last block the next record follows, whose flags are not zero.
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
