//! The whole VM as QEMU's mapped-ram file, whose pages lie at fixed places.
//!
//! ```text
//!  header, configuration, RAM │ for each block: name, length, header │ bitmap │ gap │ its pages │
//!  end of RAM, devices, description
//! ```
//!
//! Zero pages are holes in the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use image::{Block, Content, Extent, Image};

use crate::runs::Runs;
use crate::units_in_order::UnitsInOrder;
use crate::{wire, PlayError};

/// The version of a block's header.
const VERSION: u32 = 1;
/// Bytes of a block's header: version, page size, and the places of bitmap and pages.
const HEADER: u64 = 28;
/// Pages begin at multiples of this, as in QEMU's files.
const ALIGN: u64 = 1 << 20;
/// Bytes of a bitmap, or of same-filled pages, that are written at a time.
const PIECE: usize = 1 << 16;
/// In blocks of at most this many bytes, zero pages are marked as stored. QEMU does not touch a
/// page that is not marked: it has filled ROMs and tables itself, perhaps from newer files.
const SMALL: u64 = 64 << 20;

/// Writes all of `image` to `file`, which must be empty, with `threads` decompression threads;
/// returns the length of the file. Each unit is checked before any of its bytes are written, and
/// the device state, without which QEMU runs nothing, comes last.
///
/// # Errors
///
/// A damaged unit, or an error of `file`.
pub fn mapped_ram(image: &Arc<Image>, file: &File, threads: usize) -> Result<u64, PlayError> {
    let mut out = Out { file, at: 0 };
    let page_size = image.shape().page_size() as u64;
    let state = image.state();
    let mut buffer = state.configuration.clone();
    wire::capability(&mut buffer, "mapped-ram");
    wire::begin_ram(&mut buffer, image);
    let mut places = Vec::new();
    for block in &image.index().blocks {
        let len = block.pages * page_size;
        wire::block(&mut buffer, &block.name, len);
        let bitmap = out.at + buffer.len() as u64 + HEADER;
        let pages = (bitmap + block.pages.div_ceil(64) * 8).next_multiple_of(ALIGN);
        buffer.extend(VERSION.to_be_bytes());
        for number in [page_size, bitmap, pages] {
            buffer.extend(number.to_be_bytes());
        }
        out.put(&mut buffer)?;
        out.bitmap(block, bitmap, len <= SMALL)?;
        places.push(pages);
        out.at = pages + len;
    }
    pages(image, &out, &places, threads)?;
    wire::end_of_section(&mut buffer, state.ram_section);
    buffer.extend_from_slice(&state.early);
    wire::end_of_ram(&mut buffer, state.ram_section);
    buffer.extend_from_slice(&state.devices);
    wire::end_of_stream(&mut buffer, &state.description);
    out.put(&mut buffer)?;
    Ok(out.at)
}

/// Writes all pages that are not zero. `places` are the offsets of the blocks' pages in the file.
fn pages(
    image: &Arc<Image>,
    out: &Out<'_>,
    places: &[u64],
    threads: usize,
) -> Result<(), PlayError> {
    let page_size = image.shape().page_size();
    let runs = Runs::new(image);
    let mut ahead = UnitsInOrder::new(image, threads)?;
    while let Some(unit) = ahead.next(|number| !runs.of(number).is_empty())? {
        for run in runs.of(unit.number) {
            let count = |pages: u64| usize::try_from(pages).expect("in a unit") * page_size;
            let first = count(run.slot % image.shape().unit_pages());
            let at = places[run.block] + run.page * page_size as u64;
            out.write(&unit.bytes()[first..first + count(run.pages)], at)?;
        }
    }
    for (block, place) in image.index().blocks.iter().zip(places) {
        for Extent { first, pages, content } in &block.extents {
            let Content::Filled(word) = content else { continue };
            let piece = word.repeat(PIECE / word.len());
            let mut at = place + first * page_size as u64;
            let end = at + pages * page_size as u64;
            while at < end {
                let len = (end - at).min(PIECE as u64);
                out.write(&piece[..usize::try_from(len).expect("a piece")], at)?;
                at += len;
            }
        }
    }
    Ok(())
}

struct Out<'a> {
    file: &'a File,
    /// The offset of the stream's next byte.
    at: u64,
}

impl Out<'_> {
    /// Writes the buffer as the stream's next bytes, and empties it.
    fn put(&mut self, buffer: &mut Vec<u8>) -> Result<(), PlayError> {
        self.write(buffer, self.at)?;
        self.at += buffer.len() as u64;
        buffer.clear();
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), PlayError> {
        let written = self.file.write_all_at(bytes, at);
        written.map_err(|source: io::Error| PlayError::Io { what: "write the file", source })
    }

    /// Writes a block's bitmap. With `whole` the bits of zero pages are set too. Pieces without set
    /// bits are left as holes.
    fn bitmap(&self, block: &Block, place: u64, whole: bool) -> Result<(), PlayError> {
        const BITS: u64 = 8 * PIECE as u64;
        let mut piece = vec![0; PIECE];
        let mut base = 0;
        let write = |piece: &mut [u8], base: u64| {
            if let Some(last) = piece.iter().rposition(|&byte| byte != 0) {
                self.write(&piece[..=last], place + base / 8)?;
                piece.fill(0);
            }
            Ok::<(), PlayError>(())
        };
        for Extent { first, pages, content } in &block.extents {
            let (mut from, end) = (*first, first + pages);
            if *content == Content::Zero && !whole {
                continue;
            }
            while from < end {
                if from >= base + BITS {
                    write(&mut piece, base)?;
                    base = from / BITS * BITS;
                }
                let to = end.min(base + BITS);
                let bit = |page: u64| usize::try_from(page - base).expect("in a piece");
                set_bits(&mut piece, bit(from), bit(to));
                from = to;
            }
        }
        write(&mut piece, base)
    }
}

/// Sets bits `from` to `to - 1`, the least significant bit of a byte first.
fn set_bits(bits: &mut [u8], mut from: usize, to: usize) {
    while from < to {
        if from.is_multiple_of(8) && to - from >= 8 {
            let bytes = (to - from) / 8;
            bits[from / 8..from / 8 + bytes].fill(0xff);
            from += 8 * bytes;
        } else {
            bits[from / 8] |= 1 << (from % 8);
            from += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bit_of_a_range_is_set_and_no_other() {
        for from in 0..20 {
            for to in from..=40 {
                let mut bits = [0; 5];
                set_bits(&mut bits, from, to);
                let is_set = |bit: usize| bits[bit / 8] >> (bit % 8) & 1 == 1;
                assert!((0..40).all(|bit| is_set(bit) == (from..to).contains(&bit)), "{from} {to}");
            }
        }
    }
}
