//! Refusals of pages that do not compress, while the machine is short of memory.
//!
//! Storing such a page frees no memory. A client that swaps keeps a refused page and tries another
//! one, which may compress. If hardly any does, refusals do harm: the kernel takes pages that it
//! could write for memory that it can free, tries them again and again, and ends no program. So the
//! number of refusals follows the number of pages that are stored compressed; beyond it pages are
//! stored as they are, until there is no memory for them and the kernel ends a program. No refusal
//! is allowed for time that passes: a slow machine tries fewer pages in it, and all would be
//! refused.
//!
//! None is refused while such pages leave memory for a backing device.

use std::sync::atomic::AtomicBool;

use crate::sync::{AtomicU64, Ordering};

/// Refusals for each page that was stored compressed since the last look.
const EACH: u64 = 4;

/// The most refusals between two looks that no page stored compressed has allowed.
const LEAST: u64 = 64;

/// Pages stored as they are that allow one such refusal.
const STORED: u64 = 2;

#[derive(Debug)]
pub(crate) struct Refusals {
    /// Pages that had no place in the part of the limit for such pages.
    asked: AtomicU64,
    /// Pages are refused while `asked` is below this number.
    most: AtomicU64,
    /// Pages stored compressed until the last look.
    stored: AtomicU64,
    /// Whether pages stored as they are are written back.
    written_back: AtomicBool,
}

impl Default for Refusals {
    fn default() -> Self {
        Self {
            asked: AtomicU64::new(0),
            most: AtomicU64::new(LEAST),
            stored: AtomicU64::new(0),
            written_back: AtomicBool::new(false),
        }
    }
}

impl Refusals {
    /// Refuses no page while `written_back`.
    pub(crate) fn expect(&self, written_back: bool) {
        self.written_back.store(written_back, Ordering::Relaxed);
    }

    /// Whether pages are refused at all.
    pub(crate) fn is_off(&self) -> bool {
        self.written_back.load(Ordering::Relaxed)
    }

    /// Asks for a refusal. Returns whether another one is allowed.
    pub(crate) fn ask(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) < self.most.load(Ordering::Relaxed)
    }

    /// Allows refusals until the next call. `stored`: pages stored compressed so far.
    pub(crate) fn allow(&self, stored: u64) {
        let Self { asked, most, stored: before, .. } = self;
        let more = stored.wrapping_sub(before.swap(stored, Ordering::Relaxed));
        let (asked, last) = (asked.load(Ordering::Relaxed), most.load(Ordering::Relaxed));
        // Beyond `last` pages were stored as they are; up to it refusals are left.
        let (whole, left) = (asked.saturating_sub(last), last.saturating_sub(asked));
        let least = LEAST.min(left.saturating_add(whole / STORED));
        let allowed = least.saturating_add(more.saturating_mul(EACH));
        most.store(asked.saturating_add(allowed), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn refusals_follow_the_pages_that_compress() {
        let refusals = Refusals::default();
        let refused = |asked: u64| (0..asked).filter(|_| refusals.ask()).count() as u64;
        assert_eq!(refused(1000), LEAST);
        refusals.allow(0);
        assert_eq!(refused(1000), LEAST);
        // Nothing compresses: a few for each look, and the others are stored.
        refusals.allow(0);
        assert_eq!(refused(1000), LEAST);
        refusals.allow(10);
        assert_eq!(refused(1000), LEAST + 10 * EACH);
        // A larger number of looks brings no more than the last one.
        refusals.allow(20);
        refusals.allow(20);
        assert_eq!(refused(1000), LEAST);
    }

    /// Regression: all were refused for ever, though none compressed.
    #[test]
    fn a_machine_that_tries_few_pages_between_two_looks_stores_most_of_them() {
        for tried in [1, 10, 63] {
            let refusals = Refusals::default();
            let mut refused = 0;
            for _ in 0..300 {
                refusals.allow(0);
                refused += (0..tried).filter(|_| refusals.ask()).count() as u64;
            }
            assert!(refused <= LEAST + 300 * tried / 2, "{refused} of {}", 300 * tried);
        }
    }
}
