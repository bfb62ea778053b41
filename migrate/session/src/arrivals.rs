//! The frames of one stream and direction that have arrived (W11): each is accepted once, from the
//! first link that delivers it in full.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// How far a frame may be ahead of the bytes written to QEMU (W11).
pub(crate) const WINDOW: u64 = 1024;

/// Frame `seq` uses cell `seq % WINDOW`, which holds one more than the sequence number last
/// accepted there, or 0. One lap later another frame uses the cell: by then the first was written
/// to QEMU, so nothing looks it up any more.
///
/// The cells are allocated with the first frame: most sessions use few of their 264 streams.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(OnceLock<Box<[AtomicU64]>>);

impl Arrivals {
    fn cell(&self, seq: u64) -> &AtomicU64 {
        let cells = self.0.get_or_init(|| (0..WINDOW).map(|_| AtomicU64::new(0)).collect());
        // Below 1024.
        &cells[usize::try_from(seq % WINDOW).unwrap_or(0)]
    }

    /// Whether `seq` has not arrived yet. Everything below `written` has; `seq` is less than
    /// [`WINDOW`] beyond it.
    pub(crate) fn expects(&self, seq: u64, written: u64) -> bool {
        seq >= written && self.cell(seq).load(Ordering::Relaxed) <= seq
    }

    /// Records `seq`; false when another link delivered it first. Relaxed is enough: one exchange
    /// decides between two links, and the sink's own queues order everything that follows.
    pub(crate) fn take(&self, seq: u64, written: u64) -> bool {
        let newer = |last: u64| (last <= seq).then_some(seq + 1);
        seq >= written
            && seq < u64::MAX
            && self.cell(seq).fetch_update(Ordering::Relaxed, Ordering::Relaxed, newer).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_frame_is_accepted_once_in_any_order() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let arrivals = Arrivals::default();
        let mut model = HashSet::new();
        // Writing never passes arriving, and may lag behind it.
        let (mut arrived, mut written) = (0, 0);
        for _ in 0..40_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let seq = (written + state % WINDOW).saturating_sub(state >> 60);
            assert_eq!(arrivals.expects(seq, written), !model.contains(&seq), "{seq}");
            assert_eq!(arrivals.take(seq, written), model.insert(seq), "{seq}");
            while model.contains(&arrived) {
                arrived += 1;
            }
            if state & 0x700 == 0 {
                written += (state >> 32) % (arrived - written + 1);
            }
        }
        assert!(written > 1000, "{written}");
    }

    #[test]
    fn of_two_links_that_deliver_a_frame_at_once_one_is_accepted() {
        let arrivals = Arrivals::default();
        let taken: u64 = std::thread::scope(|scope| {
            let count = || (0..WINDOW).filter(|seq| arrivals.take(*seq, 0)).count() as u64;
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(count)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(taken, WINDOW);
    }
}
