//! Refusals of pages that do not compress, while the machine is short of memory.
//!
//! Storing such a page frees no memory. A client that swaps keeps a refused page and tries another
//! one, which may compress. If hardly any does, refusals do harm: the kernel takes pages that it
//! could write for memory that it can free, tries them again and again, and ends no program. So the
//! number of refusals follows the number of pages that are stored compressed; beyond it pages are
//! stored as they are, until there is no memory for them and the kernel ends a program.

use crate::stats::sum;
use crate::store::Store;
use crate::sync::{AtomicU64, Ordering};

/// Refusals for each page that was stored compressed since the last look.
const EACH: u64 = 4;

/// Refusals between two looks in any case.
const LEAST: u64 = 64;

#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// Pages that had no place in the part of the limit for such pages.
    asked: AtomicU64,
    /// Up to this value of `asked` they are refused.
    most: AtomicU64,
    /// Pages stored compressed until the last look.
    stored: AtomicU64,
}

impl Store {
    /// Whether a write of a page that does not compress is to fail: see
    /// [`Options::whole_part`](crate::Options::whole_part).
    pub(crate) fn refuses_whole(&self) -> bool {
        let limit = self.heap.regions.limit();
        let beyond = self.options.whole_part > 0
            && limit < u64::MAX
            && self.is_short()
            && sum(&self.counters, |c| &c.huge) >= limit / self.options.whole_part;
        let Refusals { asked, most, .. } = &self.refusals;
        beyond && asked.fetch_add(1, Ordering::Relaxed) < most.load(Ordering::Relaxed)
    }

    /// Allows refusals until the next call, which is the keeper's.
    pub(crate) fn allow_refusals(&self) {
        let Refusals { asked, most, stored } = &self.refusals;
        let now = sum(&self.counters, |c| &c.stored);
        let more = now.wrapping_sub(stored.swap(now, Ordering::Relaxed));
        let allowed = LEAST + more.saturating_mul(EACH);
        most.store(asked.load(Ordering::Relaxed).saturating_add(allowed), Ordering::Relaxed);
    }
}
