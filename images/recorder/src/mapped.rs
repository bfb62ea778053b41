//! The pages of a mapped-ram file, which lie at fixed places instead of in the stream.
//!
//! ```text
//!  table of blocks                                              stream goes on behind the last block
//!  name, length, header │ bitmap │ gap │ pages of the block │ name, length, header │ ...
//! ```
//!
//! The header states the places of bitmap and pages as offsets in the file, also if the stream does
//! not begin at the file's first byte. The bitmap has one bit for each page, least significant bit
//! first, in whole words of 64 bits. A page whose bit is clear is zero. Its place in the file may
//! have bytes of an earlier version of the page.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use image::RamBlock;

use crate::source::{unknown, Source};
use crate::{RecordError, Sink};

/// The version of the header.
const VERSION: u32 = 1;
/// Bytes of a bitmap that are read at a time.
const BITMAP_PIECE: usize = 8 << 10;
/// Bytes of pages that are read at a time; a multiple of each page size.
const PAGES_PIECE: usize = 1 << 20;

/// The places of a block's bitmap and pages in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    bitmap: u64,
    pages: u64,
}

/// Reads the header of `block`, and skips its bitmap and pages.
pub(crate) fn header<R: Read, E>(
    source: &mut Source<R>,
    block: &RamBlock,
    page_size: usize,
) -> Result<Region, RecordError<E>> {
    let at = source.at();
    let (version, size) = (source.u32()?, source.u64()?);
    let region = Region { bitmap: source.u64()?, pages: source.u64()? };
    let page = page_size as u64;
    let what = if version != VERSION {
        format!("has a mapped-ram header of version {version}, and platen reads version {VERSION}")
    } else if size != page {
        format!("has pages of {size} bytes in a guest with pages of {page_size}")
    } else if !block.len.is_multiple_of(page) {
        format!("has {} bytes, which are no whole pages", block.len)
    } else if region.bitmap < source.at() {
        format!("has its bitmap at {:#x}, before the end of its header", region.bitmap)
    } else {
        let bitmap_end = region.bitmap.checked_add(bitmap_len(block.len / page));
        let end = region.pages.checked_add(block.len);
        match (bitmap_end, end) {
            (Some(behind), Some(end))
                if region.pages >= behind && region.pages.is_multiple_of(page) =>
            {
                source.jump(end)?;
                return Ok(region);
            }
            _ => format!(
                "has its pages at {:#x}, which is in its bitmap at {:#x}, no multiple of the page \
                 size, or too high",
                region.pages, region.bitmap
            ),
        }
    };
    Err(unknown(at, format!("block '{}' {what}", block.name.escape_default())))
}

/// Passes the pages whose bits are set to `sink`, and returns their number. `regions` belong to
/// `blocks`, in the same order.
pub(crate) fn pages<F: Read + Seek, S: Sink>(
    file: &mut F,
    page_size: usize,
    blocks: &[RamBlock],
    regions: &[Region],
    sink: &mut S,
) -> Result<u64, RecordError<S::Error>> {
    let mut bits = vec![0; BITMAP_PIECE];
    let mut bytes = vec![0; PAGES_PIECE];
    let mut count = 0;
    for (nth, (block, region)) in blocks.iter().zip(regions).enumerate() {
        let total = block.len / page_size as u64;
        let mut first = 0;
        while first < total {
            let most = (total - first).min(8 * BITMAP_PIECE as u64);
            let most = usize::try_from(most).expect("bits of a piece");
            let bits = &mut bits[..most.div_ceil(64) * 8];
            let at = region.bitmap + first / 8;
            read_at(file, at, bits)?;
            let mut behind = 0;
            while let Some((begin, end)) = next_run(bits, behind) {
                if end > most {
                    let name = block.name.escape_default();
                    let page = first + end as u64 - 1;
                    let what = format!("a bit for page {page} of block '{name}' of {total} pages");
                    return Err(unknown(at, what));
                }
                let run = (first + begin as u64, first + end as u64);
                copy_run(file, page_size, region.pages, run, &mut bytes, |page, bytes| {
                    sink.page(nth, page, bytes)
                })?;
                count += (end - begin) as u64;
                behind = end;
            }
            first += most as u64;
        }
    }
    Ok(count)
}

/// Passes the pages of a run to `take`: from its first page up to the page behind the run,
/// exclusively.
fn copy_run<F: Read + Seek, E>(
    file: &mut F,
    page_size: usize,
    pages_at: u64,
    (mut first, end): (u64, u64),
    bytes: &mut [u8],
    mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), RecordError<E>> {
    while first < end {
        let many = (end - first).min((bytes.len() / page_size) as u64);
        let len = usize::try_from(many).expect("pages of a piece") * page_size;
        read_at(file, pages_at + first * page_size as u64, &mut bytes[..len])?;
        for (page, bytes) in (first..).zip(bytes[..len].chunks_exact(page_size)) {
            take(page, bytes).map_err(RecordError::Sink)?;
        }
        first += many;
    }
    Ok(())
}

fn read_at<F: Read + Seek, E>(
    file: &mut F,
    at: u64,
    bytes: &mut [u8],
) -> Result<(), RecordError<E>> {
    let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes));
    read.map_err(|source| match source.kind() {
        // The part of the stream behind the pages existed a moment ago.
        ErrorKind::UnexpectedEof => RecordError::Ends { at, during: "in the pages of its RAM" },
        _ => RecordError::Io { at, source },
    })
}

/// Bytes of the bitmap of a block with `pages` pages.
fn bitmap_len(pages: u64) -> u64 {
    pages.div_ceil(64) * 8
}

/// The first run of set bits at or behind bit `from`: its first bit, and the bit behind it.
fn next_run(bits: &[u8], from: usize) -> Option<(usize, usize)> {
    let begin = next(bits, from, true);
    (begin < 8 * bits.len()).then(|| (begin, next(bits, begin, false)))
}

/// The first bit at or behind `from` that is `set`; the number of bits if there is none.
fn next(bits: &[u8], mut from: usize, set: bool) -> usize {
    let without = if set { 0 } else { 0xff };
    while from < 8 * bits.len() {
        let byte = bits[from / 8];
        if byte == without {
            from = (from / 8 + 1) * 8;
        } else if (byte >> (from % 8) & 1 == 1) == set {
            return from;
        } else {
            from += 1;
        }
    }
    8 * bits.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_bits_are_those_that_a_count_finds() {
        for (bits, runs) in [
            (&[0, 0][..], &[][..]),
            (&[0xff, 0xff], &[(0, 16)]),
            (&[0b1000_0001, 0b11, 0, 0xff], &[(0, 1), (7, 10), (24, 32)]),
            (&[0b0101_0110], &[(1, 3), (4, 5), (6, 7)]),
        ] {
            let mut found = Vec::new();
            let mut behind = 0;
            while let Some(run) = next_run(bits, behind) {
                behind = run.1;
                found.push(run);
            }
            assert_eq!(found, runs, "{bits:?}");
        }
    }
}
