//! One cache for all multifd channels of a VM.
//!
//! QEMU sends a page on any channel, so a channel needs the versions that other channels have sent.
//! Nothing orders the chunks of two channels but their SYNC packets: what a channel sends behind
//! its k-th SYNC follows everything that any channel sends before its own k-th. So a chunk counts
//! its *epoch*, the SYNCs of its channel before it, and two rules make both caches equal:
//!
//! * The sender puts a slot into the table of a chunk only if every table so far with that slot had
//!   a lower epoch.
//! * The receiver applies a table of epoch k once every channel has had its k-th SYNC.
//!
//! Then both ends change each slot in the order of epochs. The receiver waits only for chunks of
//! lower epochs, as QEMU does at its barriers.

use crate::cache::SEGMENT;
use crate::output::Output;
use crate::{Counts, Known, Layout};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The slots of one end.
#[derive(Debug)]
pub struct ChannelCache {
    segments: Vec<Mutex<Segment>>,
    slots: usize,
    page_size: usize,
}

/// At most [`SEGMENT`] slots.
#[derive(Debug)]
pub(crate) struct Segment {
    slots: usize,
    /// Empty until one of the slots is used.
    pages: Vec<u8>,
    /// Sender: a use for each slot, once one was used.
    uses: Vec<Use>,
    is_closed: bool,
}

/// The sender's knowledge of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// The number of the last page that this slot is for, plus 1; 0 without one.
    page: u64,
    /// The epoch of the last table that has the slot, plus 1; 0 without one.
    after: u64,
    /// Whether the slot holds that page.
    holds: bool,
}

impl ChannelCache {
    /// Creates as many slots of `page_size` bytes (a power of two, at least 8) as fit into `bytes`.
    /// Memory is allocated as the slots are used.
    pub fn new(bytes: u64, page_size: usize) -> Self {
        let slots = crate::slots(bytes, page_size) as usize;
        let segment = |first| {
            let slots = SEGMENT.min(slots - first);
            Mutex::new(Segment { slots, pages: Vec::new(), uses: Vec::new(), is_closed: false })
        };
        let segments = (0..slots).step_by(SEGMENT).map(segment).collect();
        Self { segments, slots, page_size }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// Frees the memory. From now on a sender stores no page, and a receiver has no slots.
    pub fn close(&self) {
        for segment in &self.segments {
            let mut segment = segment.lock().unwrap_or_else(PoisonError::into_inner);
            (segment.pages, segment.uses) = (Vec::new(), Vec::new());
            segment.is_closed = true;
        }
    }

    /// The segment of a slot, which must exist.
    pub(crate) fn segment(&self, slot: usize) -> MutexGuard<'_, Segment> {
        self.segments[slot / SEGMENT].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of pages, out of `places`, that have consecutive numbers and consecutive slots of
    /// one segment; at least 1. And the first page's number and slot.
    fn run(&self, places: &[u64]) -> (usize, u64, usize) {
        let number = |place: u64| place / self.page_size as u64;
        let first = number(places[0]);
        let slot = usize::try_from(first % self.slots as u64).unwrap_or(0);
        let most = (SEGMENT - slot % SEGMENT).min(self.slots - slot);
        let follow = places.iter().zip(first..).take(most);
        let n = follow.take_while(|(place, expected)| number(**place) == *expected).count();
        (n.max(1), first, slot)
    }
}

impl Segment {
    /// The page of a slot, which is zeros at first; `None` without memory for it, and once the
    /// cache is closed.
    pub(crate) fn page(&mut self, slot: usize, page_size: usize) -> Option<&mut [u8]> {
        if self.is_closed {
            return None;
        }
        if self.pages.is_empty() {
            self.pages.try_reserve_exact(self.slots * page_size).ok()?;
            self.pages.resize(self.slots * page_size, 0);
        }
        let at = slot % SEGMENT * page_size;
        Some(&mut self.pages[at..at + page_size])
    }

    /// The use of a slot; `None` once the cache is closed.
    fn used(&mut self, slot: usize) -> Option<&mut Use> {
        if self.is_closed {
            return None;
        }
        if self.uses.is_empty() {
            self.uses.resize(self.slots, Use::default());
        }
        self.uses.get_mut(slot % SEGMENT)
    }

    /// Whether this page was the last one sent of those for this slot.
    fn was_sent(&mut self, number: u64, slot: usize) -> bool {
        self.used(slot).is_some_and(|used| used.page == number + 1)
    }
}

/// The sender of one channel.
#[derive(Debug)]
pub struct ChannelSender {
    /// The cache of all channels, from the time on when it may be used.
    cache: Option<Arc<ChannelCache>>,
    /// The first slot of the seed.
    base: u32,
    page_size: usize,
}

impl ChannelSender {
    /// Creates a sender whose tables refer only to the seed of the session, whose slots begin at
    /// `base`, until it gets a cache.
    pub fn new(base: u32, page_size: usize) -> Self {
        Self { cache: None, base, page_size }
    }

    /// Sets the cache that the channels share, or takes it away.
    pub fn set_cache(&mut self, cache: Option<Arc<ChannelCache>>) {
        self.cache = cache.filter(|cache| cache.slots > 0);
    }

    /// Begins with the first `len` bytes of `chunk`, before which its channel had `epoch` SYNCs;
    /// the table is written behind these bytes, as far as there is room. `known` are the pages of
    /// the destination's seed. `stores_new`: pages are stored that were not sent before.
    pub fn begin<'a>(
        &'a self,
        (chunk, len): (&'a mut [u8], usize),
        known: Option<&'a Known>,
        (epoch, stores_new): (u64, bool),
    ) -> ChannelPass<'a> {
        let form = (self.page_size, Layout::Bodies);
        let out = Output::new(chunk, len, form, (known, self.base));
        ChannelPass { sender: self, epoch, stores_new, out }
    }
}

/// The processing of one chunk.
pub struct ChannelPass<'a> {
    sender: &'a ChannelSender,
    epoch: u64,
    stores_new: bool,
    out: Output<'a>,
}

impl ChannelPass<'_> {
    /// Adds `count` pages from byte `at` on, which lie at the addresses `places` of the VM;
    /// `u64::MAX`, or none, for a page whose address is not known.
    pub fn bodies(&mut self, at: usize, count: usize, places: &[u64]) {
        let page = self.sender.page_size;
        let place = |i: usize| places.get(i).copied().unwrap_or(u64::MAX);
        let mut begin = 0;
        for i in 0..count {
            if let Some(slot) = self.find(at + i * page, place(i)) {
                self.cached(at + begin * page, places.get(begin..i).unwrap_or_default());
                self.out.seed_run(at + i * page, slot, 1);
                begin = i + 1;
            }
        }
        let rest = begin..count.min(places.len()).max(begin);
        self.cached(at + begin * page, places.get(rest).unwrap_or_default());
    }

    /// The slot of the page at byte `at`, if the seed has it. A page that was sent before has
    /// changed since then.
    fn find(&mut self, at: usize, place: u64) -> Option<u32> {
        if !self.out.has_seed() {
            return None;
        }
        if let Some(cache) = self.sender.cache.as_ref().filter(|_| place != u64::MAX) {
            let (_, number, slot) = cache.run(&[place]);
            if cache.segment(slot).was_sent(number, slot) {
                return None;
            }
        }
        self.out.find(at)
    }

    /// Adds the pages that are to be stored, from byte `at` on.
    fn cached(&mut self, mut at: usize, mut places: &[u64]) {
        let Some(cache) = self.sender.cache.as_ref() else {
            return;
        };
        while let Some(first) = places.first() {
            let n = if *first == u64::MAX {
                1
            } else {
                let (n, number, slot) = cache.run(places);
                let mut segment = cache.segment(slot);
                self.store(&mut segment, at, (number, slot, n));
                n
            };
            at += n * cache.page_size;
            places = &places[n..];
        }
    }

    /// Stores those of `n` pages that may be stored. All slots are of this segment.
    fn store(&mut self, segment: &mut Segment, at: usize, (number, slot, n): (u64, usize, usize)) {
        let page = self.sender.page_size;
        let mut i = 0;
        while i < n {
            let rest = (number + i as u64..).zip(slot + i..slot + n);
            let run = rest.take_while(|&(number, slot)| self.may_store(segment, number, slot));
            let run = run.count();
            if run == 0 {
                self.note_sent(segment, number + i as u64, slot + i);
                i += 1;
                continue;
            }
            if !self.out.has_room(run) || segment.page(slot, page).is_none() {
                return;
            }
            let first_slot = u32::try_from(slot + i).unwrap_or(u32::MAX);
            let bits = self.out.head(at + i * page, first_slot, run);
            for j in 0..run {
                let (number, slot) = (number + (i + j) as u64 + 1, slot + i + j);
                let Some(used) = segment.used(slot) else { continue };
                let is_former = used.page == number && used.holds;
                *used = Use { page: number, after: self.epoch + 1, holds: true };
                let Some(old) = segment.page(slot, page) else { continue };
                self.out.page((bits, j), at + (i + j) * page, old, is_former);
            }
            i += run;
        }
    }

    /// Whether a page may be stored.
    fn may_store(&self, segment: &mut Segment, number: u64, slot: usize) -> bool {
        let is_later = segment.used(slot).is_some_and(|used| used.after <= self.epoch);
        is_later && (self.stores_new || segment.was_sent(number, slot))
    }

    /// Remembers that a page that is not stored was sent.
    fn note_sent(&self, segment: &mut Segment, number: u64, slot: usize) {
        if let Some(used) = segment.used(slot).filter(|used| used.after <= self.epoch) {
            (used.page, used.holds) = (number + 1, false);
        }
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
