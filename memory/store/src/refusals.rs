//! Refusals of pages that do not compress, while the machine is short of memory.
//!
//! Storing such a page frees no memory. A client that swaps keeps a refused page and tries another
//! one, which may compress. If hardly any does, refusals do harm: the kernel takes pages that it
//! could write for memory that it can free, tries them again and again, and ends no program. So the
//! number of refusals follows the number of pages that are stored compressed; beyond it pages are
//! stored as they are, until there is no memory for them and the kernel ends a program.

use crate::sync::{AtomicU64, Ordering};

/// Refusals for each page that was stored compressed since the last look.
const EACH: u64 = 4;

/// Refusals between two looks in any case.
const LEAST: u64 = 64;

#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// Pages that had no place in the part of the limit for such pages.
    asked: AtomicU64,
    /// Pages are refused while `asked` is below this number.
    most: AtomicU64,
    /// Pages stored compressed until the last look.
    stored: AtomicU64,
}

impl Refusals {
    /// Asks for a refusal. Returns whether another one is allowed.
    pub(crate) fn ask(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) < self.most.load(Ordering::Relaxed)
    }

    /// Allows refusals until the next call. `stored`: pages stored compressed so far.
    pub(crate) fn allow(&self, stored: u64) {
        let Self { asked, most, stored: before } = self;
        let more = stored.wrapping_sub(before.swap(stored, Ordering::Relaxed));
        let allowed = LEAST + more.saturating_mul(EACH);
        most.store(asked.load(Ordering::Relaxed).saturating_add(allowed), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn refusals_follow_the_pages_that_compress() {
        let refusals = Refusals::default();
        let refused = |asked: u64| (0..asked).filter(|_| refusals.ask()).count() as u64;
        assert_eq!(refused(100), 0);
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
}
