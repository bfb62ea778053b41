//! Counters, by the names of zram's `mm_stat`.

use crate::layout::DICTIONARIES;
use crate::object::dictionary_of;
use crate::sync::{AtomicU64, Ordering};

/// A store's counters, with zram's names and meanings. They are read while other threads work, so
/// they need not agree exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of the stored pages, same-filled ones included: 4096 each.
    pub orig_data_size: u64,
    /// Bytes of the stored objects.
    pub compr_data_size: u64,
    /// Bytes of the file's memory: superblock, slot table (zram does not count its own), slabs with
    /// their states, and ready slabs.
    pub mem_used_total: u64,
    /// The limit of `mem_used_total` in bytes; 0 for none.
    pub mem_limit: u64,
    /// The maximum of `mem_used_total` since this server took the store.
    pub mem_used_max: u64,
    /// Same-filled pages, which need no memory.
    pub same_pages: u64,
    /// Pages of memory freed by compaction.
    pub pages_compacted: u64,
    /// Pages stored uncompressed.
    pub huge_pages: u64,
    /// Pages stored uncompressed since this server took the store over, removed ones included.
    pub huge_pages_since: u64,
    /// Bytes of `mem_used_total` in ready slabs.
    pub mem_ready: u64,
    /// Pages compressed in groups.
    pub grouped_pages: u64,
    /// Groups.
    pub groups: u64,
    /// Pages on the backing device; they count in `orig_data_size`.
    pub bd_count: u64,
}

/// One worker's counters, which it alone writes. Single counters may wrap below zero, because a
/// worker may discard what another stored. Only sums are meaningful.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub(crate) pages: AtomicU64,
    pub(crate) same: AtomicU64,
    pub(crate) huge: AtomicU64,
    pub(crate) huge_since: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) grouped: AtomicU64,
    pub(crate) groups: AtomicU64,
    pub(crate) backed: AtomicU64,
    /// Pages whose objects were made with each dictionary.
    pub(crate) dictionary: [AtomicU64; DICTIONARIES],
    /// Objects freed; tells the keeper whether compaction can gain anything.
    pub(crate) freed: AtomicU64,
    /// Pages written that take less than a page.
    pub(crate) stored: AtomicU64,
}

/// Adds to a counter that only this thread writes.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    let value = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(value, Ordering::Relaxed);
}

/// Subtracts from a counter that only this thread writes.
#[inline]
pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    add(counter, n.wrapping_neg());
}

/// The sum of one counter over all workers.
pub(crate) fn sum(all: &[Counters], counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
    all.iter().fold(0, |sum: u64, one| sum.wrapping_add(counter(one).load(Ordering::Relaxed)))
}

/// Adds to the counter of the dictionary that this tag names, if any.
#[inline]
pub(crate) fn count_dictionary(counters: &Counters, tag: u8, n: u64) {
    if let Some(place) = dictionary_of(tag) {
        add(&counters.dictionary[place], n);
    }
}

/// Sets the counters of recovered pages.
pub(crate) fn set_dictionaries(counters: &Counters, pages: [u64; DICTIONARIES]) {
    for (counter, pages) in counters.dictionary.iter().zip(pages) {
        counter.store(pages, Ordering::Relaxed);
    }
}
