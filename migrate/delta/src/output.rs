//! The output of a sender: the chunk with differences, and the table.

use crate::table::{Writer, RUN_HEAD};
use crate::{Counts, Known, Layout};

pub(crate) struct Output<'a> {
    pub(crate) plain: &'a mut [u8],
    pub(crate) table: Writer<'a>,
    counts: Counts,
    /// The pages of the destination's seed.
    known: Option<&'a Known>,
    /// The first slot of the seed.
    base: u32,
    /// Pages whose hash was computed.
    hashed: u64,
    page_size: usize,
    layout: Layout,
    /// Offset behind the last page in the table.
    at: usize,
    /// The slot behind the last page's.
    slot: u32,
}

impl<'a> Output<'a> {
    /// Begins with the first `len` bytes of `chunk`; the table goes behind them.
    pub(crate) fn new(
        chunk: &'a mut [u8],
        len: usize,
        (page_size, layout): (usize, Layout),
        (known, base): (Option<&'a Known>, u32),
    ) -> Self {
        let (plain, table) = chunk.split_at_mut(len);
        let (table, counts) = (Writer::new(table), Counts::default());
        let (at, slot, hashed) = (0, 0, 0);
        Self { plain, table, counts, known, base, hashed, page_size, layout, at, slot }
    }

    /// Whether there is a seed.
    pub(crate) fn has_seed(&self) -> bool {
        self.known.is_some()
    }

    /// The slot of the page at byte `at`, if the seed has it.
    pub(crate) fn find(&mut self, at: usize) -> Option<u32> {
        let known = self.known?;
        self.hashed += 1;
        let number = known.find(&self.plain[at..at + self.page_size])?;
        self.base.checked_add(number)
    }

    /// The part of the pages looked up in the seed that the seed does not have; 0 if none was
    /// looked up.
    pub(crate) fn unknown(&self) -> f64 {
        match self.hashed {
            0 => 0.0,
            hashed => 1.0 - self.counts.seeded as f64 / hashed as f64,
        }
    }

    /// Whether the table has room for a run of `n` pages.
    pub(crate) fn has_room(&self, n: usize) -> bool {
        self.table.room() >= RUN_HEAD + n.div_ceil(8)
    }

    /// Writes the head of a run of `n` pages from byte `body` on, up to its bits, and returns the
    /// offset of these. Requires [room](Self::has_room).
    pub(crate) fn head(&mut self, body: usize, slot: u32, n: usize) -> usize {
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        self.table.varint(number(body - self.at));
        self.table.varint(number(n));
        // Both are below 2^32, and so is their difference modulo 2^32.
        self.table.signed(slot.wrapping_sub(self.slot).cast_signed());
        self.at = body + n * self.stride() - self.layout.between();
        self.slot = slot.wrapping_add(number(n));
        self.table.reserve(n.div_ceil(8))
    }

    /// Adds a run of pages of the seed, whose bodies become zeros, as far as there is room.
    pub(crate) fn seed_run(&mut self, body: usize, slot: u32, n: usize) {
        if !self.has_room(n) {
            return;
        }
        let bits = self.head(body, slot, n);
        for i in 0..n {
            *self.table.at(bits + i / 8) |= 1 << (i % 8);
            let from = body + i * self.stride();
            self.plain[from..from + self.page_size].fill(0);
        }
        self.counts.seeded += n as u64;
    }

    /// Puts page `i` of the run with these `bits`, at byte `from` of the chunk, into a slot that
    /// holds `old`: as a difference if `old` is this page's former version and has not changed
    /// much.
    pub(crate) fn page(
        &mut self,
        (bits, i): (usize, usize),
        from: usize,
        old: &mut [u8],
        is_former: bool,
    ) {
        let new = &mut self.plain[from..from + self.page_size];
        if is_former && changed(new, old) <= self.page_size / 8 / CHANGED {
            *self.table.at(bits + i / 8) |= 1 << (i % 8);
            difference(new, old);
            self.counts.deltas += 1;
        } else {
            old.copy_from_slice(new);
        }
        self.counts.stored += 1;
    }

    /// Bytes from one page of a run to the next.
    pub(crate) fn stride(&self) -> usize {
        self.layout.between() + self.page_size
    }

    /// Returns the table's length and its counts.
    pub(crate) fn finish(self) -> (usize, Counts) {
        (self.table.len(), self.counts)
    }
}

/// A page goes as a difference while at most one in this many of its words has changed. For pages
/// that a real guest changed within 10 s (4460 pages) and 60 s (2048 pages), zstd 1 gives 5.85 and
/// 4.22 MB without differences. With differences for up to a quarter of the words it gives 3.02 and
/// 3.83 MB, for a half 2.77 and 3.81, for all pages 2.90 and 5.25 (`examples/threshold`).
const CHANGED: usize = 2;

/// Number of words that differ.
fn changed(new: &[u8], old: &[u8]) -> usize {
    new.chunks_exact(8).zip(old.chunks_exact(8)).filter(|(new, old)| new != old).count()
}

/// Puts the difference into `new`, and `new` into `old`.
fn difference(new: &mut [u8], old: &mut [u8]) {
    for (new, old) in new.iter_mut().zip(old) {
        let difference = *new ^ *old;
        *old = *new;
        *new = difference;
    }
}
