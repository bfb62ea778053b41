//! Unpacking: turns a peer's bytes into plain bytes, or returns an error.

use super::code::Reader;
use super::error::UnpackError;
use super::format::{op, FORMAT, HEAD_LEN, MAX_CHUNK};
use super::header;
use crate::layout::{is_page_size, multifd_header_len};
use crate::token::{PAGE_FLAGS, ZERO_FLAGS, ZERO_RECORD_LEN};

/// Unpacks a chunk. `out.len()` is the exact number of plain bytes.
///
/// The old contents of `out` do not matter. After an error they are unspecified.
///
/// # Errors
///
/// For any `packed`, the result is the plain bytes or an [`UnpackError`]. The two lengths bound the
/// time, and nothing is allocated.
pub fn unpack(packed: &[u8], out: &mut [u8]) -> Result<(), UnpackError> {
    if out.len() > MAX_CHUNK {
        return Err(UnpackError::PlainTooLong { len: out.len() });
    }
    let short = |need| UnpackError::Short { len: packed.len(), need };
    let (head, rest) = packed.split_first_chunk::<HEAD_LEN>().ok_or(short(HEAD_LEN))?;
    let [format, shift, r0, r1, s @ .., l0, l1, l2, l3] = *head;
    let reserved = u16::from_be_bytes([r0, r1]);
    let page_size = 1usize.checked_shl(u32::from(shift)).filter(|&size| is_page_size(size));
    let page_size = page_size.filter(|_| format == FORMAT && reserved == 0);
    let page_size = page_size.ok_or(UnpackError::Format { format, shift, reserved })?;
    let structure = u32::from_be_bytes(s) as usize;
    let literals = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
    let need = HEAD_LEN.saturating_add(structure).saturating_add(literals);
    let (structure, rest) = rest.split_at_checked(structure).ok_or(short(need))?;
    let (literals, bodies) = rest.split_at_checked(literals).ok_or(short(need))?;
    let mut unpacker = Unpacker {
        reader: Reader::new(structure),
        literals,
        bodies,
        out,
        pos: 0,
        page_size,
        shift: u32::from(shift),
        cursor: 0,
        header: None,
    };
    while !unpacker.reader.is_empty() {
        unpacker.operation()?;
    }
    let plain = unpacker.out.len() - unpacker.pos;
    let (literals, bodies) = (unpacker.literals.len(), unpacker.bodies.len());
    if (plain, literals, bodies) != (0, 0, 0) {
        return Err(UnpackError::LeftOver { plain, literals, bodies });
    }
    Ok(())
}

struct Unpacker<'a> {
    reader: Reader<'a>,
    /// The literals not used yet.
    literals: &'a [u8],
    bodies: &'a [u8],
    out: &'a mut [u8],
    /// Plain bytes written so far.
    pos: usize,
    page_size: usize,
    shift: u32,
    cursor: u64,
    /// Offset of the last multifd header in `out`.
    header: Option<usize>,
}

/// The current operation, for errors.
#[derive(Clone, Copy)]
struct At {
    op: u8,
    at: usize,
}

impl Unpacker<'_> {
    fn operation(&mut self) -> Result<(), UnpackError> {
        let at = self.reader.pos();
        let code = self.reader.varint()?;
        let (op, n) = (code & 7, code >> 3);
        let here = At { op: (code & 7).to_le_bytes()[0], at };
        if n == 0 {
            return Err(UnpackError::Empty { op: here.op, at });
        }
        let page = self.page_size;
        match op {
            op::LITERAL => {
                let to = self.pos;
                let n = self.room(here, n, 1)?;
                let from = take(&mut self.literals, here, n)?;
                self.out[to..to + n].copy_from_slice(from);
            }
            op::PAGES => {
                let first = self.address(PAGE_FLAGS, n)?;
                let to = self.pos;
                let len = self.room(here, n, 8 + page)?;
                let bodies = take(&mut self.bodies, here, len / (8 + page) * page)?;
                let records = self.out[to..to + len].chunks_exact_mut(8 + page);
                let mut value = first;
                for (record, body) in records.zip(bodies.chunks_exact(page)) {
                    record[..8].copy_from_slice(&value.to_be_bytes());
                    record[8..].copy_from_slice(body);
                    value = value.wrapping_add(page as u64);
                }
            }
            op::FILLED_PAGES => {
                let first = self.address(PAGE_FLAGS, n)?;
                let word = self.reader.varint()?.to_le_bytes();
                let to = self.pos;
                let len = self.room(here, n, 8 + page)?;
                let mut value = first;
                for record in self.out[to..to + len].chunks_exact_mut(8 + page) {
                    record[..8].copy_from_slice(&value.to_be_bytes());
                    fill(&mut record[8..], word);
                    value = value.wrapping_add(page as u64);
                }
            }
            op::BODIES => {
                let to = self.pos;
                let len = self.room(here, n, page)?;
                let from = take(&mut self.bodies, here, len)?;
                self.out[to..to + len].copy_from_slice(from);
            }
            op::FILLED_BODIES => {
                let word = self.reader.varint()?.to_le_bytes();
                let to = self.pos;
                let len = self.room(here, n, page)?;
                fill(&mut self.out[to..to + len], word);
            }
            op::ZEROS => {
                let mut value = self.address(ZERO_FLAGS, n)?;
                let to = self.pos;
                let len = self.room(here, n, ZERO_RECORD_LEN)?;
                for record in self.out[to..to + len].chunks_exact_mut(ZERO_RECORD_LEN) {
                    record[..8].copy_from_slice(&value.to_be_bytes());
                    record[8] = 0;
                    value = value.wrapping_add(page as u64);
                }
            }
            _ => self.multifd_header(here, n)?,
        }
        Ok(())
    }

    fn multifd_header(&mut self, here: At, n: u64) -> Result<(), UnpackError> {
        let to = self.pos;
        let literal = u64::from(here.op) == op::LITERAL_HEADER;
        if literal && n != 1 {
            return Err(UnpackError::Varint { at: here.at });
        }
        let len = self.room(here, 1, multifd_header_len(self.page_size))?;
        let (done, room) = self.out.split_at_mut(to);
        let out = &mut room[..len];
        if literal {
            out.copy_from_slice(take(&mut self.literals, here, len)?);
        } else {
            let before = self.header.map(|at| &done[at..at + len]);
            let code = self.reader.bytes(usize::try_from(n).unwrap_or(usize::MAX))?;
            let mut code = Reader::new(code);
            header::decode(&mut code, before, self.shift, &mut self.cursor, out)?;
            if !code.is_empty() {
                return Err(UnpackError::Header { at: code.pos(), what: "code goes on" });
            }
        }
        self.header = Some(to);
        Ok(())
    }

    /// Claims `n` units of plain bytes; returns their length.
    fn room(&mut self, here: At, n: u64, unit: usize) -> Result<usize, UnpackError> {
        let room = self.out.len() - self.pos;
        let len = n.saturating_mul(unit as u64);
        let fits = usize::try_from(len).ok().filter(|&len| len <= room);
        let fits = fits.ok_or(UnpackError::Overrun { op: here.op, at: here.at, len, room })?;
        self.pos += fits;
        Ok(fits)
    }

    /// The value of the first of `n` records.
    fn address(&mut self, flags: u64, n: u64) -> Result<u64, UnpackError> {
        let step = self.reader.signed()?.cast_unsigned() << self.shift;
        let address = self.cursor.wrapping_add(step);
        self.cursor = address.wrapping_add(n << self.shift);
        Ok(address.wrapping_add(flags))
    }
}

fn take<'a>(from: &mut &'a [u8], here: At, len: usize) -> Result<&'a [u8], UnpackError> {
    let left = from.len();
    let starved = UnpackError::Starved { op: here.op, at: here.at, len, left };
    let (taken, rest) = from.split_at_checked(len).ok_or(starved)?;
    *from = rest;
    Ok(taken)
}

fn fill(bytes: &mut [u8], word: [u8; 8]) {
    if word == [word[0]; 8] {
        bytes.fill(word[0]);
    } else {
        bytes.chunks_exact_mut(8).for_each(|to| to.copy_from_slice(&word));
    }
}
