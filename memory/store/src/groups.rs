//! The records of groups: which have memory, which are free.
//!
//! Their area in the file is sparse. The thread that makes a group adds memory a page at a time;
//! pages behind the last group are freed again.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::inject;
use crate::layout::RECORDS_A_PAGE;
use crate::map::Map;
use crate::record::Record;
use crate::regions::{Full, Regions};
use crate::superblock;
use crate::sync::{AtomicU64, Ordering};

pub(crate) struct Groups {
    /// Pages of records that have memory. Changes under the lock of `free`; a thread with a
    /// reference to a group sees at least the pages up to that group's.
    pages: AtomicU64,
    /// The number of groups.
    taken: AtomicU64,
    free: Mutex<Free>,
}

struct Free {
    /// Where the search for a free record starts.
    next: usize,
    /// The next group's stamp.
    stamp: u64,
}

impl Groups {
    pub(crate) fn new() -> Self {
        let free = Mutex::new(Free { next: 0, stamp: 1 });
        Self { pages: AtomicU64::new(0), taken: AtomicU64::new(0), free }
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        // No panic interrupts an update under this lock.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The records that have memory.
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

    /// Takes a free record, with `parts` references, and returns its number.
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
        // A record that is just being freed may be counted as free before it can be taken: `Full`,
        // try later.
        let at = find(after).map(|at| at + from).or_else(|| find(before)).ok_or(Full)?;
        free.next = at + 1;
        free.stamp = stamp + 1;
        self.taken.fetch_add(1, Ordering::Relaxed);
        u32::try_from(at).map_err(|_| Full)
    }

    /// Frees a record whose last reference the caller dropped.
    pub(crate) fn put(&self, record: &Record) {
        record.free();
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }

    /// Gives one more page of records memory.
    fn grow(&self, map: &Map, regions: &Regions) -> Result<(), Full> {
        let pages = self.pages.load(Ordering::Relaxed);
        if pages >= map.layout().record_pages() {
            return Err(Full);
        }
        // Before the memory is there, so that a server that takes over counts all that may be
        // there.
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

    /// Frees the memory of records behind the last group, unless another thread takes a record at
    /// this moment: it may ask the kernel for memory meanwhile. The kernel may wait for a write to
    /// this store, the write for the keeper, and so the keeper must not wait here.
    pub(crate) fn shrink(&self, map: &Map, regions: &Regions) -> u64 {
        let mut free = match self.free.try_lock() {
            Ok(free) => free,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
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

    /// For recovery: adopts the memory of the records, and clears their reference counts.
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

    /// For recovery: counts one more page of this group; `false` if the number cannot be right.
    pub(crate) fn count(&self, map: &Map, group: u32) -> bool {
        let Some(record) = self.record(map, group) else { return false };
        let mut free = self.lock();
        if !record.is_taken() {
            record.set(1, free.stamp);
            free.stamp += 1;
            self.taken.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        // A damaged table may have more entries of a group than a group has pages.
        let more = record.parts() < 0x1000;
        if more {
            record.set(record.parts() + 1, record.stamp());
        }
        more
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{Options, Store};
    use std::sync::{mpsc, Arc};
    use std::thread;
    use std::time::Duration;

    /// Regression: the keeper waited for a thread that took a record. That thread waited for memory
    /// from the kernel, the kernel for a write to this store, and the write for the keeper.
    #[test]
    fn the_keeper_does_not_wait_for_a_thread_that_takes_a_record() {
        let store = Store::create(1000, Options::default()).unwrap();
        let taking = store.heap.groups.lock();
        let (said, heard) = mpsc::channel();
        let kept = Arc::clone(&store);
        let keeper = thread::spawn(move || said.send(kept.trim_records()));
        // Only a hang takes longer.
        assert_eq!(heard.recv_timeout(Duration::from_secs(300)), Ok(0));
        drop(taking);
        keeper.join().unwrap().unwrap();
    }
}
