//! The dirtying of a guest at times between the measured ones.

use forecast::{DirtyCurve, Pass};

/// Times of the curve's points, seconds.
const TIMES: [f64; 12] = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
/// The curve extends to this many times the longest measured time.
const BEYOND: f64 = 4.0;
/// The bounds of the search for the curve's bend: rates as parts of the working set per second.
const RATES: (f64, f64) = (1e-4, 30.0);

/// The curve of a guest that writes to random pages of a working set, through the measured passes
/// of the shortest and the longest time; `most`: bytes of RAM.
///
/// After t seconds it has dirtied `set (1 - exp(-rate t))`. Two times tell both numbers. Where the
/// longer time has as much as the shorter one, all of the set was written to in the shorter: the
/// rate is then at least 3 a second, which is what counts.
pub(crate) fn curve(passes: &[Pass], most: f64) -> DirtyCurve {
    let is_known = |pass: &&Pass| pass.seconds > 0.0 && pass.bytes > 0.0;
    let mut known: Vec<Pass> = passes.iter().filter(is_known).copied().collect();
    known.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (Some(short), Some(long)) = (known.first(), known.last()) else {
        return DirtyCurve::new(&[], most);
    };
    let until = BEYOND * long.seconds;
    let rate = rate(*short, *long);
    let grown = |seconds: f64| -(-rate * seconds).exp_m1();
    let set = long.bytes / grown(long.seconds);
    let of = |seconds: &f64| Pass { seconds: *seconds, bytes: (set * grown(*seconds)).min(most) };
    let times = TIMES.iter().filter(|seconds| **seconds <= until);
    DirtyCurve::new(&times.map(of).collect::<Vec<_>>(), most)
}

/// The rate at which the two passes lie on one curve.
fn rate(short: Pass, long: Pass) -> f64 {
    let relation = long.bytes / short.bytes;
    let at = |rate: f64| (-rate * long.seconds).exp_m1() / (-rate * short.seconds).exp_m1();
    let (mut low, mut high) = RATES;
    if long.seconds <= short.seconds || relation >= at(low) {
        return low;
    }
    for _ in 0..60 {
        let middle = (low * high).sqrt();
        if at(middle) > relation {
            low = middle;
        } else {
            high = middle;
        }
    }
    // Far beyond the bend the measured figures cannot distinguish rates.
    low.min(3.0 / short.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pass(seconds: f64, bytes: f64) -> Pass {
        Pass { seconds, bytes }
    }

    #[test]
    fn two_times_tell_set_and_rate() {
        let (set, rate) = (48e6, 0.33);
        let of = |t: f64| pass(t, set * (1.0 - f64::exp(-rate * t)));
        let curve = curve(&[of(1.0), of(5.0)], 1e9);
        for t in [0.1, 0.5, 2.0, 8.0, 16.0] {
            let (is, should) = (curve.within(t), of(t).bytes);
            assert!((is / should - 1.0).abs() < 0.05, "{t} s: {is} and {should}");
        }
    }

    #[test]
    fn steady_growth_stays_steady_and_a_full_set_is_full_at_once() {
        let steady = curve(&[pass(1.0, 10e6), pass(5.0, 50e6)], 1e9);
        assert!((steady.within(0.1) / 1e6 - 1.0).abs() < 0.01);
        let full = curve(&[pass(1.0, 10e6), pass(5.0, 10e6)], 1e9);
        assert!(full.within(1.0) > 9e6 && full.within(20.0) < 10.6e6);
        assert!(full.rate() > 20e6);
    }

    #[test]
    fn one_time_is_a_rate_and_none_is_an_idle_guest() {
        let one = curve(&[pass(2.0, 20e6)], 1e9);
        assert!((one.within(1.0) / 10e6 - 1.0).abs() < 0.01);
        assert!(curve(&[pass(1.0, 0.0)], 1e9).within(9.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn any_figures_give_a_curve_within_ram(
            passes in prop::collection::vec((-1.0..1e3_f64, -1.0..1e12_f64), 0..5), t in 0.0..1e4_f64,
        ) {
            let passes: Vec<_> = passes.into_iter().map(|(t, b)| pass(t, b)).collect();
            let bytes = curve(&passes, 1e9).within(t);
            prop_assert!((0.0..=1e9).contains(&bytes), "{bytes}");
        }
    }
}
