//! The sender's half: chooses each page's slot, and which pages go as a difference.

use crate::cache::Cache;
use crate::output::Output;
use crate::table::RUN_HEAD;
use crate::{Counts, Known, Layout, RECORD_HEAD, TABLE_ROOM};

/// The sender of one stream, for the stream's whole life.
#[derive(Debug)]
pub struct Sender {
    cache: Cache,
    /// The first slot of the seed.
    base: u32,
    /// The page number in each slot, plus 1: a zeroed vector takes no memory until it is used.
    owners: Vec<u64>,
    /// Whether the cache is used.
    caches: bool,
    /// Whether pages are stored that were not sent before.
    stores_new: bool,
    /// One more than the highest page number so far. QEMU sends all pages in ascending order first:
    /// a lower number is a page that is sent again, whether or not it is in the cache.
    highest: u64,
    /// Whether a page was processed.
    is_used: bool,
}

impl Sender {
    /// Creates a sender with `bytes` of cache, for pages of `page_size` bytes (a power of two, at
    /// least 8).
    pub fn new(bytes: u64, page_size: usize) -> Self {
        let cache = Cache::new(bytes, page_size);
        let owners = vec![0; cache.slots()];
        let base = u32::try_from(cache.slots()).unwrap_or(u32::MAX);
        Self { cache, base, owners, caches: true, stores_new: true, highest: 0, is_used: false }
    }

    /// Creates a sender without a cache, for a stream whose tables refer only to the seed of the
    /// session, whose slots begin at `base`.
    pub fn without_cache(base: u32, page_size: usize) -> Self {
        Self { base, ..Self::new(0, page_size) }
    }

    /// Whether there is a cache, and no page was processed yet.
    pub fn has_cache_unused(&self) -> bool {
        self.cache.slots() > 0 && !self.is_used
    }

    /// Whether to use the cache; at first it is used.
    pub fn use_cache(&mut self, wanted: bool) {
        self.caches = wanted;
    }

    /// Whether to store pages that were not sent before; at first they are. Pages sent again are
    /// stored in any case.
    pub fn store_new(&mut self, wanted: bool) {
        self.stores_new = wanted;
    }

    /// Whether page `number` was sent before, as far as slot and order show.
    fn is_known(&self, number: u64, slot: usize) -> bool {
        number < self.highest || self.owners[slot] == number + 1
    }

    /// The number of pages, out of `n` from `number` and `slot` on, that are all stored or all not;
    /// and which of the two.
    fn alike(&self, number: u64, slot: usize, n: usize) -> (usize, bool) {
        if self.stores_new {
            return (n, true);
        }
        let known = self.is_known(number, slot);
        let alike = (number..).zip(slot..slot + n);
        (alike.take_while(|&(number, slot)| self.is_known(number, slot) == known).count(), known)
    }

    /// Begins with the first `len` bytes of `chunk`; the table is written behind them, as far as
    /// there is room. `known` are the pages of the destination's seed.
    pub fn begin<'a>(
        &'a mut self,
        chunk: &'a mut [u8],
        len: usize,
        known: Option<&'a Known>,
    ) -> Pass<'a> {
        let form = (self.cache.page_size(), Layout::Records);
        let out = Output::new(chunk, len, form, (known, self.base));
        Pass { sender: self, out }
    }
}

/// The processing of one chunk.
pub struct Pass<'a> {
    sender: &'a mut Sender,
    out: Output<'a>,
}

impl Pass<'_> {
    /// Adds `count` records from byte `at` on. Each is [`RECORD_HEAD`] bytes and a page; the pages
    /// have consecutive addresses from `address` on. Records come in the order of the chunk.
    pub fn records(&mut self, at: usize, address: u64, count: usize) {
        self.sender.is_used = true;
        let stride = RECORD_HEAD + self.sender.cache.page_size();
        let number = address / self.sender.cache.page_size() as u64;
        // The pages from `begin` on are not in the table yet. `run` is a run of pages of the seed:
        // its first page, and that page's slot.
        let (mut begin, mut run) = (0, None::<(usize, u32)>);
        for i in 0..=count {
            // A page that is sent again has changed.
            let is_new = i < count && number.saturating_add(i as u64) >= self.sender.highest;
            let slot = if is_new { self.out.find(at + i * stride + RECORD_HEAD) } else { None };
            if let Some((first, first_slot)) = run {
                let next = u32::try_from(i - first).ok().and_then(|n| first_slot.checked_add(n));
                if slot.is_some() && slot == next {
                    continue;
                }
                self.out.seed_run(at + first * stride + RECORD_HEAD, first_slot, i - first);
                (begin, run) = (i, None);
            }
            if let Some(slot) = slot {
                self.runs(at + begin * stride, number.saturating_add(begin as u64), i - begin);
                run = Some((i, slot));
            }
        }
        self.runs(at + begin * stride, number.saturating_add(begin as u64), count - begin);
        self.sender.highest = self.sender.highest.max(number.saturating_add(count as u64));
    }

    /// Adds `count` pages from byte `at` on, without bytes between them: those of a multifd packet,
    /// which has the addresses elsewhere. Only the seed knows such pages.
    pub fn bodies(&mut self, at: usize, count: usize) {
        self.sender.is_used = true;
        let page = self.sender.cache.page_size();
        for body in (at..).step_by(page).take(count) {
            if let Some(slot) = self.out.find(body) {
                self.out.seed_run(body, slot, 1);
            }
        }
    }

    /// Adds the pages that are to be stored, from number `address` on.
    fn runs(&mut self, at: usize, address: u64, count: usize) {
        let page = self.sender.cache.page_size();
        let slots = self.sender.cache.slots();
        if slots == 0 || !self.sender.caches {
            return;
        }
        let (mut at, mut address, mut left) = (at, address, count);
        while left > 0 {
            // Consecutive pages have consecutive slots, up to the last slot.
            let slot = usize::try_from(address % slots as u64).unwrap_or(0);
            let n = left.min(slots - slot).min((TABLE_ROOM - RUN_HEAD) * 8);
            let (n, stored) = self.sender.alike(address, slot, n);
            if stored && (!self.out.has_room(n) || !self.run(at, address, slot, n)) {
                return;
            }
            at += n * (RECORD_HEAD + page);
            address += n as u64;
            left -= n;
        }
    }

    /// Adds a run of pages. Returns false, without an effect, when there is no memory for it.
    fn run(&mut self, at: usize, address: u64, slot: usize, n: usize) -> bool {
        let page = self.sender.cache.page_size();
        if (slot..slot + n).any(|slot| self.sender.cache.page(slot).is_none()) {
            return false;
        }
        let body = at + RECORD_HEAD;
        let bits = self.out.head(body, u32::try_from(slot).unwrap_or(u32::MAX), n);
        for i in 0..n {
            let owner = &mut self.sender.owners[slot + i];
            let Some(old) = self.sender.cache.page(slot + i) else { continue };
            let number = address + i as u64 + 1;
            let is_former = std::mem::replace(owner, number) == number;
            self.out.page((bits, i), body + i * (RECORD_HEAD + page), old, is_former);
        }
        true
    }

    /// The part of the pages looked up in the seed that the seed does not have; 0 if none was
    /// looked up.
    pub fn unknown(&self) -> f64 {
        self.out.unknown()
    }

    /// Returns the table's length and its counts.
    pub fn finish(self) -> (usize, Counts) {
        self.out.finish()
    }
}
