//! Packing: one pass writes the structure, a second copies literals and bodies.

use pages::same_filled;

use super::code::{Reader, Writer};
use super::format::{op, FORMAT, HEAD_LEN, MAX_CHUNK};
use super::header;
use crate::cursor::be64;
use crate::layout::{is_page_size, multifd_header_len};
use crate::token::{Token, PAGE_FLAGS, ZERO_FLAGS, ZERO_RECORD_LEN};

/// Packs one feed: `bytes`, and the `tokens` that cover them, at `page_size`.
///
/// Returns the length written to the front of `out`. Returns `None` if the result does not fit into
/// `out`, for more than [`MAX_CHUNK`] bytes, or if the tokens do not belong to the bytes. The
/// caller then sends `bytes` raw. Every byte that a token stands for is compared with the result of
/// [`unpack`](crate::unpack), and copied at most once; nothing is allocated.
pub fn pack(bytes: &[u8], tokens: &[Token], page_size: usize, out: &mut [u8]) -> Option<usize> {
    if bytes.len() > MAX_CHUNK || !is_page_size(page_size) || out.len() < HEAD_LEN {
        return None;
    }
    let (head, room) = out.split_at_mut(HEAD_LEN);
    let mut packer = Packer {
        bytes,
        pos: 0,
        page_size,
        shift: page_size.trailing_zeros(),
        cursor: 0,
        header: None,
        pending: 0,
        literals: 0,
        structure: Writer::new(room),
    };
    for token in tokens {
        packer.token(*token)?;
    }
    packer.flush_literals()?;
    if packer.pos != bytes.len() {
        return None;
    }
    let (structure, literals) = (packer.structure.len(), packer.literals);
    head[0] = FORMAT;
    head[1] = u8::try_from(packer.shift).ok()?;
    head[2..4].fill(0);
    head[4..8].copy_from_slice(&u32::try_from(structure).ok()?.to_be_bytes());
    head[8..12].copy_from_slice(&u32::try_from(literals).ok()?.to_be_bytes());
    let (structure_bytes, room) = room.split_at_mut(structure);
    let (literals, bodies) = room.split_at_mut_checked(literals)?;
    let bodies = copy(bytes, page_size, structure_bytes, literals, bodies)?;
    Some(HEAD_LEN + structure + literals.len() + bodies)
}

struct Packer<'a> {
    bytes: &'a [u8],
    /// Offset in `bytes` up to which tokens have been processed.
    pos: usize,
    page_size: usize,
    shift: u32,
    /// The next expected address.
    cursor: u64,
    /// Offset of the last multifd header.
    header: Option<usize>,
    /// Literal bytes before `pos` that belong to no operation yet.
    pending: usize,
    literals: usize,
    structure: Writer<'a>,
}

impl Packer<'_> {
    fn token(&mut self, token: Token) -> Option<()> {
        let len = token.len(self.page_size);
        let bytes = self.bytes.get(self.pos..)?.get(..len)?;
        match token {
            Token::Raw { .. } | Token::Barrier { .. } => self.pending += len,
            Token::ZeroRun { first, count } => {
                let mut expected = first;
                for record in bytes.chunks_exact(ZERO_RECORD_LEN) {
                    if be64(record) != expected || record[8] != 0 {
                        return None;
                    }
                    expected = expected.wrapping_add(self.page_size as u64);
                }
                self.operation(op::ZEROS, u64::from(count))?;
                self.address(first, ZERO_FLAGS, u64::from(count))?;
            }
            Token::Pages { first, .. } => self.bodies(bytes, Some(first))?,
            Token::Bodies { .. } => self.bodies(bytes, None)?,
            Token::MultifdHeader => self.multifd_header(bytes)?,
        }
        self.pos += len;
        Some(())
    }

    fn operation(&mut self, op: u64, n: u64) -> Option<()> {
        self.flush_literals()?;
        self.structure.varint(n << 3 | op)
    }

    fn flush_literals(&mut self) -> Option<()> {
        if self.pending > 0 {
            self.structure.varint((self.pending as u64) << 3 | op::LITERAL)?;
            self.literals += self.pending;
            self.pending = 0;
        }
        Some(())
    }

    /// Writes the position of `count` records from `first` on, relative to the expected address.
    fn address(&mut self, first: u64, flags: u64, count: u64) -> Option<()> {
        let address = first.wrapping_sub(flags);
        if address & (self.page_size as u64 - 1) != 0 {
            return None;
        }
        self.structure.signed(address.wrapping_sub(self.cursor).cast_signed() >> self.shift)?;
        self.cursor = address.wrapping_add(count << self.shift);
        Some(())
    }

    /// Writes page bodies, each behind its record's `u64` if there is a `first`. Runs of one fill
    /// word become operations of their own.
    fn bodies(&mut self, bytes: &[u8], first: Option<u64>) -> Option<()> {
        let head = if first.is_some() { 8 } else { 0 };
        let step = self.page_size as u64;
        let mut expected = first.unwrap_or(0);
        let mut run: (u64, Option<u64>, u64) = (0, None, expected);
        for record in bytes.chunks_exact(head + self.page_size) {
            if head > 0 && be64(record) != expected {
                return None;
            }
            let fill = same_filled(&record[head..]);
            if run.0 > 0 && fill != run.1 {
                self.body_run(run, first.is_some())?;
                run.0 = 0;
            }
            if run.0 == 0 {
                run = (0, fill, expected);
            }
            run.0 += 1;
            expected = expected.wrapping_add(step);
        }
        self.body_run(run, first.is_some())
    }

    fn body_run(&mut self, run: (u64, Option<u64>, u64), records: bool) -> Option<()> {
        let (count, fill, first) = run;
        if count == 0 {
            return Some(());
        }
        let op = match (records, fill) {
            (true, None) => op::PAGES,
            (true, Some(_)) => op::FILLED_PAGES,
            (false, None) => op::BODIES,
            (false, Some(_)) => op::FILLED_BODIES,
        };
        self.operation(op, count)?;
        if records {
            self.address(first, PAGE_FLAGS, count)?;
        }
        match fill {
            Some(word) => self.structure.varint(word),
            None => Some(()),
        }
    }

    fn multifd_header(&mut self, bytes: &[u8]) -> Option<()> {
        let before = self.header.map(|at| &self.bytes[at..at + bytes.len()]);
        let mut code = [0; 512];
        let mut writer = Writer::new(&mut code);
        let mut cursor = self.cursor;
        let coded = header::encode(bytes, before, self.shift, &mut cursor, &mut writer);
        let len = writer.len();
        let good = coded.is_some()
            && header::regenerates(bytes, before, self.shift, self.cursor, &code[..len]);
        if good {
            self.operation(op::HEADER, len as u64)?;
            self.structure.bytes(&code[..len])?;
            self.cursor = cursor;
        } else {
            self.operation(op::LITERAL_HEADER, 1)?;
            self.literals += bytes.len();
        }
        self.header = Some(self.pos);
        Some(())
    }
}

/// Copies literals and bodies of `bytes` as the structure describes. Returns the bytes of bodies
/// written, or `None` when they do not fit.
fn copy(
    bytes: &[u8],
    page_size: usize,
    structure: &[u8],
    literals: &mut [u8],
    bodies: &mut [u8],
) -> Option<usize> {
    let mut reader = Reader::new(structure);
    let (mut from, mut literal, mut body) = (0, 0, 0);
    while !reader.is_empty() {
        let code = reader.varint().ok()?;
        let n = usize::try_from(code >> 3).ok()?;
        match code & 7 {
            op::LITERAL | op::LITERAL_HEADER => {
                let n = if code & 7 == op::LITERAL { n } else { multifd_header_len(page_size) };
                literals.get_mut(literal..literal + n)?.copy_from_slice(&bytes[from..from + n]);
                (literal, from) = (literal + n, from + n);
            }
            op::PAGES => {
                reader.varint().ok()?;
                let to = bodies.get_mut(body..body + n * page_size)?;
                let records = bytes[from..].chunks_exact(8 + page_size);
                for (to, record) in to.chunks_exact_mut(page_size).zip(records) {
                    to.copy_from_slice(&record[8..]);
                }
                (body, from) = (body + n * page_size, from + n * (8 + page_size));
            }
            op::FILLED_PAGES => {
                reader.varint().ok()?;
                reader.varint().ok()?;
                from += n * (8 + page_size);
            }
            op::BODIES => {
                let len = n * page_size;
                bodies.get_mut(body..body + len)?.copy_from_slice(&bytes[from..from + len]);
                (body, from) = (body + len, from + len);
            }
            op::FILLED_BODIES => {
                reader.varint().ok()?;
                from += n * page_size;
            }
            op::ZEROS => {
                reader.varint().ok()?;
                from += n * ZERO_RECORD_LEN;
            }
            _ => {
                reader.bytes(n).ok()?;
                from += multifd_header_len(page_size);
            }
        }
    }
    Some(body)
}

/// Whether packing alone, without a codec, more than halves a feed, estimated from its tokens (4
/// KiB pages assumed). Same-filled pages do not count: finding them needs the bytes.
pub fn worth_packing_without_codec(tokens: &[Token]) -> bool {
    let (mut runs, mut all) = (0, 0);
    for token in tokens {
        let len = token.len(4096);
        all += len;
        if let Token::ZeroRun { count, .. } = token {
            // A run costs a few bytes of structure; a single record saves hardly any.
            runs += len - (*count as usize).min(1) * 5;
        } else if matches!(token, Token::MultifdHeader) {
            runs += len - 64;
        }
    }
    runs * 2 > all
}
