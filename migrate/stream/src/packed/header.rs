//! Multifd RAM packet headers, encoded as their fields and the ascending runs of their offsets.
//!
//! QEMU collects the pages of a packet in ascending order, then partitions the offsets in place
//! into normal and zero pages with two cursors. The runs and one bit a page suffice to repeat the
//! partition. [`encode`] repeats it too, and refuses a header that it does not reproduce.

use super::code::{Reader, Writer};
use super::error::UnpackError;
use crate::cursor::{be32, be64};
use crate::layout::{
    multifd_header_len, MAX_PAGE_SIZE, MIN_PAGE_SIZE, MULTIFD_FIXED_LEN as FIXED_LEN,
    MULTIFD_PACKET_SIZE,
};

/// Longest header: the smallest pages have the most offsets.
const MAX_HEADER_LEN: usize = multifd_header_len(MIN_PAGE_SIZE);
const MAX_OFFSETS: usize = MULTIFD_PACKET_SIZE / MIN_PAGE_SIZE;
const _: () = assert!(multifd_header_len(MAX_PAGE_SIZE) > FIXED_LEN);

/// Reserved bytes and block id are those of the previous header.
const SAME_ID: u8 = 0x01;
/// `next_packet_size` is `normal_pages` pages.
const PLAIN_SIZE: u8 = 0x02;
/// Offsets behind those of the pages are zero; otherwise they are the previous header's.
const ZERO_TAIL: u8 = 0x04;
const KNOWN: u8 = SAME_ID | PLAIN_SIZE | ZERO_TAIL;

/// Marks the offset of a zero page; offsets are multiples of the page size, so the bit is free.
const ZERO: u64 = 1;

/// Start of the reserved bytes that SAME_ID covers.
const ID_FROM: usize = 36;

/// Writes code that reproduces `header` exactly, given `before`, the previous header in the chunk
/// (zeros when there is none). `None` when the code does not fit or does not exist. `cursor` is the
/// next expected offset, and is updated.
pub(crate) fn encode(
    header: &[u8],
    before: Option<&[u8]>,
    shift: u32,
    cursor: &mut u64,
    code: &mut Writer<'_>,
) -> Option<()> {
    let capacity = MULTIFD_PACKET_SIZE >> shift;
    let zeros = [0; MAX_HEADER_LEN];
    let before_bytes = before.unwrap_or(&zeros[..header.len()]);
    let (normal, zero) = (be32(header, 16), be32(header, 32));
    let used = usize::try_from(u64::from(normal) + u64::from(zero)).ok()?;
    if header.len() != FIXED_LEN + 8 * capacity || used > capacity {
        return None;
    }
    let (offsets, tail) = header[FIXED_LEN..].split_at(8 * used);
    let mut bits = 0;
    if before.is_some() && header[ID_FROM..FIXED_LEN] == before_bytes[ID_FROM..FIXED_LEN] {
        bits |= SAME_ID;
    }
    let payload = be32(header, 20);
    if u64::from(payload) == u64::from(normal) << shift {
        bits |= PLAIN_SIZE;
    }
    if tail != &before_bytes[FIXED_LEN + 8 * used..] {
        if tail.iter().any(|&b| b != 0) {
            return None;
        }
        bits |= ZERO_TAIL;
    }
    let mut sorted = [0; MAX_OFFSETS];
    let pages = &mut sorted[..used];
    read_pages(offsets, normal, shift, pages)?;

    code.bytes(&[bits])?;
    code.varint(u64::from(be32(header, 8)))?;
    code.varint(u64::from(be32(header, 12)))?;
    code.varint(u64::from(normal))?;
    code.varint(u64::from(zero))?;
    code.signed(be64(&header[24..]).wrapping_sub(be64(&before_bytes[24..])).cast_signed())?;
    if bits & PLAIN_SIZE == 0 {
        code.varint(u64::from(payload))?;
    }
    if bits & SAME_ID == 0 {
        let id = &header[ID_FROM..FIXED_LEN];
        let len = id.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        code.varint(len as u64)?;
        code.bytes(&id[..len])?;
    }
    let end = encode_runs(pages, *cursor, shift, code)?;
    if normal > 0 && zero > 0 {
        for group in pages.chunks(8) {
            let byte =
                group.iter().rev().fold(0, |byte, page| byte << 1 | u8::from(page & ZERO != 0));
            code.bytes(&[byte])?;
        }
    }
    *cursor = end;
    Some(())
}

/// Reads the offsets of a header, `normal` ones first, and puts them in the order of the code; zero
/// pages have the bit [`ZERO`] set. `None` if an offset is no multiple of the page size.
fn read_pages(offsets: &[u8], normal: u32, shift: u32, pages: &mut [u64]) -> Option<()> {
    let mut low_bits = 0;
    for (i, (page, offset)) in pages.iter_mut().zip(offsets.chunks_exact(8)).enumerate() {
        *page = be64(offset);
        low_bits |= *page;
        *page |= if i < normal as usize { 0 } else { ZERO };
    }
    if low_bits & ((1 << shift) - 1) != 0 {
        return None;
    }
    if normal == 0 && !pages.is_empty() {
        // The result of QEMU's partition for zero pages only.
        pages.rotate_right(1);
    } else if pages.len() > normal as usize {
        pages.sort_unstable();
    }
    Some(())
}

/// Writes runs of pages, each with its distance from the offset `expected`; returns the offset
/// behind the last run.
fn encode_runs(pages: &[u64], mut expected: u64, shift: u32, code: &mut Writer<'_>) -> Option<u64> {
    let step = 1u64 << shift;
    let mut left = pages;
    while let Some(first) = left.first().map(|page| page & !ZERO) {
        let mut next = first;
        let run = left.iter().take_while(|&&page| {
            let same = page & !ZERO == next;
            next = next.wrapping_add(if same { step } else { 0 });
            same
        });
        let run = run.count();
        code.signed(first.wrapping_sub(expected).cast_signed() >> shift)?;
        code.varint(run as u64 - 1)?;
        expected = next;
        left = &left[run..];
    }
    Some(expected)
}

/// Reproduces a header in `out`, whose length is a header's; the inverse of [`encode`].
pub(crate) fn decode(
    code: &mut Reader<'_>,
    before: Option<&[u8]>,
    shift: u32,
    cursor: &mut u64,
    out: &mut [u8],
) -> Result<(), UnpackError> {
    let at = code.pos();
    let bad = |what| UnpackError::Header { at, what };
    let capacity = MULTIFD_PACKET_SIZE >> shift;
    let bits = code.bytes(1)?[0];
    if bits & !KNOWN != 0 {
        return Err(bad("unknown bits"));
    }
    let flags = code.varint32()?;
    let alloc = code.varint32()?;
    let normal = code.varint32()?;
    let zero = code.varint32()?;
    let used = usize::try_from(u64::from(normal) + u64::from(zero)).unwrap_or(usize::MAX);
    if used > capacity {
        return Err(bad("more pages than a packet holds"));
    }
    let packet = before.map_or(0, |b| be64(&b[24..])).wrapping_add(code.signed()?.cast_unsigned());
    let payload = match bits & PLAIN_SIZE {
        // At most a packet's capacity of pages, which is 512 KiB.
        0 => code.varint32()?,
        _ => normal << shift,
    };
    out[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    for (at, value) in [(8, flags), (12, alloc), (16, normal), (20, payload), (32, zero)] {
        out[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    out[24..32].copy_from_slice(&packet.to_be_bytes());
    let id = &mut out[ID_FROM..FIXED_LEN];
    if bits & SAME_ID == 0 {
        let len = usize::try_from(code.varint()?).unwrap_or(usize::MAX);
        if len > id.len() {
            return Err(bad("block id too long"));
        }
        id[..len].copy_from_slice(code.bytes(len)?);
        id[len..].fill(0);
    } else {
        id.copy_from_slice(&before.ok_or(bad("no header before"))?[ID_FROM..FIXED_LEN]);
    }

    let mut sorted = [0; MAX_OFFSETS];
    let pages = &mut sorted[..used];
    decode_runs(code, at, shift, cursor, pages)?;
    if normal > 0 && zero > 0 {
        let bitmap = code.bytes(used.div_ceil(8))?;
        for (i, page) in pages.iter_mut().enumerate() {
            *page |= u64::from(bitmap[i / 8] >> (i % 8) & 1);
        }
        partition(pages);
    } else if zero > 0 {
        pages.iter_mut().for_each(|page| *page |= ZERO);
        partition(pages);
    }
    let (offsets, tail) = out[FIXED_LEN..].split_at_mut(8 * used);
    for (offset, page) in offsets.chunks_exact_mut(8).zip(pages.iter()) {
        offset.copy_from_slice(&(page & !ZERO).to_be_bytes());
    }
    match before {
        Some(before) if bits & ZERO_TAIL == 0 => {
            tail.copy_from_slice(&before[FIXED_LEN + 8 * used..]);
        }
        _ => tail.fill(0),
    }
    Ok(())
}

/// Reads runs of pages as [`encode_runs`] writes them, until `pages` is full. `cursor` is the next
/// expected offset, and is updated; `at` is where the header's code begins, for errors.
fn decode_runs(
    code: &mut Reader<'_>,
    at: usize,
    shift: u32,
    cursor: &mut u64,
    pages: &mut [u64],
) -> Result<(), UnpackError> {
    let mut filled = 0;
    while filled < pages.len() {
        let mut offset = cursor.wrapping_add(code.signed()?.cast_unsigned() << shift);
        let run = usize::try_from(code.varint()?).unwrap_or(usize::MAX);
        let what = "runs exceed the pages";
        let run = pages[filled..].get_mut(..=run).ok_or(UnpackError::Header { at, what })?;
        filled += run.len();
        for page in run {
            *page = offset;
            offset = offset.wrapping_add(1 << shift);
        }
        *cursor = offset;
    }
    Ok(())
}

/// QEMU's two-cursor partition: moves zero pages to the end, in the order that QEMU leaves them in.
fn partition(pages: &mut [u64]) {
    let (mut i, mut end) = (0, pages.len());
    while i < end {
        if pages[i] & ZERO != 0 {
            end -= 1;
            pages.swap(i, end);
        } else {
            i += 1;
        }
    }
}

/// Whether `code`, as written by [`encode`], reproduces `header`.
pub(crate) fn regenerates(
    header: &[u8],
    before: Option<&[u8]>,
    shift: u32,
    mut cursor: u64,
    code: &[u8],
) -> bool {
    let mut out = [0; MAX_HEADER_LEN];
    let Some(out) = out.get_mut(..header.len()) else { return false };
    let mut reader = Reader::new(code);
    decode(&mut reader, before, shift, &mut cursor, out).is_ok()
        && reader.is_empty()
        && out == header
}
