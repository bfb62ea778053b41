//! The cost that storing pages, and looking them up in a seed, may have while neither gains
//! anything.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The part of the sender's CPU time that storing pages for the first time may take: one in this
/// many. The receiver stores the same pages at the same cost, and otherwise works less than half as
/// much as the sender, so that is 3 % of both ends' time.
const PART: u32 = 50;

/// CPU time spent on pages that may never be sent again, and on look-ups of pages that the seed
/// does not have. All streams of a source share it.
///
/// A page has to be stored when it is sent first, or the second time brings no difference. On an
/// idle guest nothing is sent twice, and most of the cost is memory that is touched first: 0.6 CPU
/// seconds a GiB at either end, a tenth of what zstd 1 takes.
#[derive(Debug, Default)]
pub struct Budget {
    /// Nanoseconds. Only the number counts, so `Relaxed` is enough.
    spent: AtomicU64,
}

impl Budget {
    /// Whether pages may be stored that were not sent before, of `used` CPU time in all.
    pub fn allows(&self, used: Duration) -> bool {
        let spent = Duration::from_nanos(self.spent.load(Ordering::Relaxed));
        spent.saturating_mul(PART) <= used
    }

    /// Counts the CPU time for a chunk without differences. With differences a chunk pays for
    /// itself.
    pub fn spend(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let add = |spent: u64| Some(spent.saturating_add(time));
        let _ = self.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever chunks cost, no more than the part and one chunk is spent.
        #[test]
        fn no_more_than_the_budget_is_spent(
            chunks in prop::collection::vec((0_u64..5_000_000, 0_u64..500_000), 1..200),
        ) {
            let (budget, mut used) = (Budget::default(), Duration::ZERO);
            let (mut spent, mut dearest) = (Duration::ZERO, Duration::ZERO);
            for (work, store) in chunks {
                let (work, store) = (Duration::from_nanos(work), Duration::from_nanos(store));
                used += work;
                dearest = dearest.max(store);
                if budget.allows(used) {
                    budget.spend(store);
                    spent += store;
                }
            }
            prop_assert!(spent <= used / PART + dearest, "{spent:?} of {used:?}");
        }
    }

    #[test]
    fn pages_that_fit_are_all_stored() {
        let budget = Budget::default();
        for chunk in 1..100 {
            assert!(budget.allows(Duration::from_millis(chunk)));
            budget.spend(Duration::from_micros(19));
        }
        assert!(budget.allows(Duration::from_secs(1)));
        budget.spend(Duration::from_millis(20));
        assert!(!budget.allows(Duration::from_secs(1)));
        assert!(budget.allows(Duration::from_secs(2)));
        budget.spend(Duration::MAX);
        assert!(!budget.allows(Duration::from_secs(1 << 30)));
    }
}
