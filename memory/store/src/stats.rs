//! Counters, by the names of zram's `mm_stat`.

use crate::layout::DICTIONARIES;
use crate::object::dictionary_of;
use crate::sync::{AtomicU64, Ordering};

/// What a store holds and what it costs, by zram's names and in zram's meaning; taken while others
/// work, so that the numbers need not fit each other to the last page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of the pages stored, same-filled ones among them: 4096 each.
    pub orig_data_size: u64,
    /// Bytes of the objects stored.
    pub compr_data_size: u64,
    /// Bytes of memory that the file has: superblock, slot table (zram leaves its own out), slabs
    /// with their states, and those that are ready and not yet used.
    pub mem_used_total: u64,
    /// Bytes that it may have; 0 for any number.
    pub mem_limit: u64,
    /// The most that `mem_used_total` has been since this server has had the store.
    pub mem_used_max: u64,
    /// Pages that are one word over and over, and need no memory.
    pub same_pages: u64,
    /// Pages of memory that compaction has given back.
    pub pages_compacted: u64,
    /// Pages stored as they are.
    pub huge_pages: u64,
    /// Pages stored as they are since this server has had the store, gone ones among them.
    pub huge_pages_since: u64,
    /// Bytes of `mem_used_total` in slabs that are ready for what comes next.
    pub mem_ready: u64,
    /// Pages that are compressed with others, in groups.
    pub grouped_pages: u64,
    /// Groups.
    pub groups: u64,
    /// Pages on the backing device; they count in `orig_data_size`.
    pub bd_count: u64,
}

/// One worker's share of the counters. It alone writes them; they may go below zero, since it may
/// discard what another stored. Only sums mean anything.
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
    /// Pages made with each dictionary.
    pub(crate) dictionary: [AtomicU64; DICTIONARIES],
    /// Objects freed, for compaction to know when to look.
    pub(crate) freed: AtomicU64,
}

/// Adds to a counter of one's own.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    let value = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(value, Ordering::Relaxed);
}

/// Takes from a counter of one's own.
#[inline]
pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    add(counter, n.wrapping_neg());
}

/// The sum of one counter over all workers.
pub(crate) fn sum(all: &[Counters], counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
    all.iter().fold(0, |sum: u64, one| sum.wrapping_add(counter(one).load(Ordering::Relaxed)))
}

/// Adds to the counter of the dictionary that this tag names, if it names one.
#[inline]
pub(crate) fn count_dictionary(counters: &Counters, tag: u8, n: u64) {
    if let Some(place) = dictionary_of(tag) {
        add(&counters.dictionary[place], n);
    }
}

/// As the counters of what there was already.
pub(crate) fn set_dictionaries(counters: &Counters, pages: [u64; DICTIONARIES]) {
    for (counter, pages) in counters.dictionary.iter().zip(pages) {
        counter.store(pages, Ordering::Relaxed);
    }
}
