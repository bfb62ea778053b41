//! The bytes of pages that a guest dirties within a time.

/// A pass: the time between two synchronisations of the dirty log, and the bytes of pages that were
/// dirtied in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// Seconds.
    pub seconds: f64,
    /// Bytes of distinct pages.
    pub bytes: f64,
}

/// The bytes of distinct pages that a guest dirties within a time: never less for a longer time.
#[derive(Clone, Debug, PartialEq)]
pub struct DirtyCurve {
    /// The points, ascending in both fields, without the origin.
    points: Vec<Pass>,
    /// Bytes of all pages.
    most: f64,
}

impl DirtyCurve {
    /// Fits the non-decreasing curve that is closest to the passes (least squares). `most` is the
    /// bytes of all pages. Passes without a time, or with figures that are no numbers, are ignored.
    pub fn new(passes: &[Pass], most: f64) -> Self {
        let mut sorted: Vec<Pass> = passes
            .iter()
            .copied()
            .filter(|pass| pass.seconds > 0.0 && pass.seconds.is_finite())
            .filter(|pass| pass.bytes.is_finite() && pass.bytes >= 0.0)
            .map(|pass| Pass { bytes: pass.bytes.min(most), ..pass })
            .collect();
        sorted.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        // Adjacent violators are pooled: (passes in the pool, their mean).
        let mut pools: Vec<(f64, Pass)> = Vec::new();
        for pass in sorted {
            let mut pool = (1.0, pass);
            while let Some(&(count, last)) = pools.last() {
                if last.bytes < pool.1.bytes {
                    break;
                }
                pools.pop();
                let all = count + pool.0;
                let mean = |a: f64, b: f64| (count * a + pool.0 * b) / all;
                let seconds = mean(last.seconds, pool.1.seconds);
                pool = (all, Pass { seconds, bytes: mean(last.bytes, pool.1.bytes) });
            }
            pools.push(pool);
        }
        Self { points: pools.into_iter().map(|(_, mean)| mean).collect(), most }
    }

    /// The points of the curve, ascending.
    pub fn points(&self) -> &[Pass] {
        &self.points
    }

    /// Bytes dirtied within `seconds`: 0 without any pass.
    pub fn within(&self, seconds: f64) -> f64 {
        let mut before = Pass { seconds: 0.0, bytes: 0.0 };
        if seconds <= 0.0 {
            return 0.0;
        }
        for &point in &self.points {
            if seconds <= point.seconds {
                let share = (seconds - before.seconds) / (point.seconds - before.seconds);
                return before.bytes + share * (point.bytes - before.bytes);
            }
            before = point;
        }
        // Beyond the last point, new pages are dirtied at the rate of the curve's second half.
        let half = before.seconds / 2.0;
        let rate = if half > 0.0 { (before.bytes - self.within(half)) / half } else { 0.0 };
        (before.bytes + rate * (seconds - before.seconds)).min(self.most)
    }

    /// Bytes a second at which the guest dirties pages at first, when few are dirty.
    pub fn rate(&self) -> f64 {
        const SHORT: f64 = 0.1;
        self.within(SHORT) / SHORT
    }

    /// Bytes of the pages among which the guest's writes fall: those of the longest pass.
    pub(crate) fn working_set(&self) -> f64 {
        self.points.last().map_or(0.0, |point| point.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pass(seconds: f64, bytes: f64) -> Pass {
        Pass { seconds, bytes }
    }

    #[test]
    fn between_passes_the_curve_is_straight_and_beyond_them_it_goes_on() {
        let curve = DirtyCurve::new(&[pass(4.0, 160.0), pass(1.0, 100.0), pass(2.0, 120.0)], 1e3);
        assert_eq!(curve.points().len(), 3);
        assert_eq!(
            [0.0, 0.5, 1.0, 1.5, 4.0].map(|t| curve.within(t)),
            [0.0, 50.0, 100.0, 110.0, 160.0]
        );
        // 20 a second from 2 s to 4 s, and never more than there is.
        assert!((curve.within(6.0) - 200.0).abs() < 1e-9);
        assert_eq!(curve.within(1e6), 1e3);
        assert_eq!(curve.rate(), 100.0);
        assert_eq!(curve.working_set(), 160.0);
    }

    #[test]
    fn one_pass_is_a_rate_and_none_is_a_guest_that_writes_nothing() {
        let curve = DirtyCurve::new(&[pass(2.0, 10.0)], 1e3);
        assert_eq!((curve.within(1.0), curve.within(10.0)), (5.0, 50.0));
        assert_eq!(DirtyCurve::new(&[], 1e3).within(5.0), 0.0);
    }

    #[test]
    fn noise_is_pooled() {
        let curve = DirtyCurve::new(&[pass(1.0, 12.0), pass(1.1, 8.0), pass(2.0, 20.0)], 1e3);
        assert_eq!(curve.points().len(), 2);
        assert!((curve.within(1.05) - 10.0).abs() < 1e-9);
    }

    proptest! {
        /// A longer time never has fewer dirty pages, whatever was measured.
        #[test]
        fn the_curve_never_falls(
            passes in prop::collection::vec((-1.0..100.0_f64, -1e3..1e9_f64), 0..40),
            times in prop::collection::vec(0.0..1000.0_f64, 2..20),
        ) {
            let passes: Vec<_> = passes.iter().map(|&(t, b)| pass(t, b)).collect();
            let curve = DirtyCurve::new(&passes, 1e8);
            let mut times = times;
            times.sort_by(f64::total_cmp);
            let bytes: Vec<_> = times.iter().map(|&time| curve.within(time)).collect();
            prop_assert!(bytes.windows(2).all(|pair| pair[0] <= pair[1] + 1e-6), "{bytes:?}");
            prop_assert!(bytes.iter().all(|bytes| (0.0..=1e8).contains(bytes)), "{bytes:?}");
        }
    }
}
