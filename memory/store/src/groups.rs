//! The records of groups: which have memory, which are free.
//!
//! Their area in the file is sparse. Memory comes a page at a time, on the thread that makes a
//! group, and goes back from the end when there are no more groups in it.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::inject;
use crate::layout::RECORDS_A_PAGE;
use crate::map::Map;
use crate::record::Record;
use crate::regions::{Full, Regions};
use crate::superblock;
use crate::sync::{AtomicU64, Ordering};

pub(crate) struct Groups {
    /// Pages of records that have memory. Grows and shrinks with `free` locked; who has a part in a
    /// group sees it at least as large as that group needs.
    pages: AtomicU64,
    /// Groups there are.
    taken: AtomicU64,
    free: Mutex<Free>,
}

struct Free {
    /// Where to look first.
    next: usize,
    /// What the next group is told from others by.
    stamp: u64,
}

impl Groups {
    pub(crate) fn new() -> Self {
        let free = Mutex::new(Free { next: 0, stamp: 1 });
        Self { pages: AtomicU64::new(0), taken: AtomicU64::new(0), free }
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        // Nothing between two consistent states can panic.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that have memory.
    #[inline]
    pub(crate) fn records<'a>(&self, map: &'a Map) -> &'a [Record] {
        let pages = usize::try_from(self.pages.load(Ordering::Relaxed)).unwrap_or(0);
        map.records().get(..pages * RECORDS_A_PAGE).unwrap_or(&[])
    }

    /// The record of a group; `None` for a number that no group has.
    #[inline]
    pub(crate) fn record<'a>(&self, map: &'a Map, group: u32) -> Option<&'a Record> {
        self.records(map).get(group as usize)
    }

    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Takes a free record with `parts` parts, and gives its number.
    pub(crate) fn take(&self, map: &Map, regions: &Regions, parts: u32) -> Result<u32, Full> {
        let mut free = self.lock();
        let have = self.records(map).len();
        if self.taken() >= have as u64 {
            self.grow(map, regions)?;
            free.next = have;
        }
        let records = self.records(map);
        let (before, after) = records.split_at(free.next.min(records.len()));
        let from = before.len();
        let stamp = free.stamp;
        let find = |records: &[Record]| records.iter().position(|one| one.take(parts, stamp));
        // One that is just being freed is counted as free and cannot be taken yet: another time.
        let at = find(after).map(|at| at + from).or_else(|| find(before)).ok_or(Full)?;
        free.next = at + 1;
        free.stamp = stamp + 1;
        self.taken.fetch_add(1, Ordering::Relaxed);
        u32::try_from(at).map_err(|_| Full)
    }

    /// Says that a record whose last part the caller had is free.
    pub(crate) fn put(&self, record: &Record) {
        record.free();
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }

    /// Memory for one page more.
    fn grow(&self, map: &Map, regions: &Regions) -> Result<(), Full> {
        let pages = self.pages.load(Ordering::Relaxed);
        if pages >= map.layout().record_pages() {
            return Err(Full);
        }
        // First, so that a server that takes over counts what there may be.
        superblock::set_record_pages(map.superblock(), pages + 1);
        inject::step();
        if regions.grow_records(map, pages).is_err() {
            superblock::set_record_pages(map.superblock(), pages);
            return Err(Full);
        }
        inject::step();
        self.pages.store(pages + 1, Ordering::Relaxed);
        Ok(())
    }

    /// Gives the memory of records behind the last group back.
    pub(crate) fn shrink(&self, map: &Map, regions: &Regions) -> u64 {
        let mut free = self.lock();
        let pages = self.pages.load(Ordering::Relaxed);
        let last = self.records(map).iter().rposition(Record::is_taken);
        let needed = last.map_or(0, |last| last as u64 / RECORDS_A_PAGE as u64 + 1);
        if needed == pages {
            return 0;
        }
        self.pages.store(needed, Ordering::Relaxed);
        if !regions.shrink_records(map, needed, pages) {
            self.pages.store(pages, Ordering::Relaxed);
            return 0;
        }
        inject::step();
        superblock::set_record_pages(map.superblock(), needed);
        free.next = 0;
        pages - needed
    }

    /// For recovery: the records that may have memory are made to have some, and forget who had a
    /// part in them.
    pub(crate) fn adopt(&self, map: &Map, regions: &Regions) -> io::Result<()> {
        let pages = superblock::record_pages(map.superblock(), map.layout());
        regions.adopt_records(map, pages)?;
        self.pages.store(pages, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
        let free = self.lock();
        for record in self.records(map).iter().filter(|record| record.is_taken()) {
            record.free();
        }
        drop(free);
        Ok(())
    }

    /// For recovery: one more page is in this group; `false` if it is not there or cannot be.
    pub(crate) fn count(&self, map: &Map, group: u32) -> bool {
        let Some(record) = self.record(map, group) else { return false };
        let mut free = self.lock();
        if !record.is_taken() {
            record.set(1, free.stamp);
            free.stamp += 1;
            self.taken.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        // More than a group has are the work of damage.
        let more = record.parts() < 0x1000;
        if more {
            record.set(record.parts() + 1, record.stamp());
        }
        more
    }
}
