//! The course of a migration, pass by pass, as a model.
//!
//! QEMU sends what its bitmap shows. Once less than a threshold is left it synchronises the dirty
//! log, and stops the VM if still less is left. So with a drain rate r, a pass from L bytes takes
//! (L - threshold) / r. The pages that the guest has dirtied in that time are dirty then, except
//! for those that were still dirty. A pass takes no less than [`ITERATION`], because QEMU looks at
//! the threshold no more often.

use crate::best::Best;
use crate::curve::DirtyCurve;

/// QEMU sends pages for up to this many seconds between two looks at the threshold.
const ITERATION: f64 = 0.05;
/// Seconds before the first page and between the last one and the end, beside the downtime. With an
/// idle guest of 1200 MiB and links of 2.5 to 10 Gbit/s QEMU took 0.33 s longer than the link had
/// to (docs/figures.md), of which 0.1 s are for the zeros.
const START: f64 = 0.2;
/// A pass makes progress if it leaves at most this part of the bytes left before.
const LESS: f64 = 0.98;
/// Passes, and seconds, without progress after which the migration counts as stalled.
const FLAT: (u32, f64) = (4, 2.0);
/// The passes, and the seconds, after which the model gives a migration up.
const MOST: (u32, f64) = (100_000, 7.0 * 86_400.0);

/// The guest's part in a migration. Bytes are bytes of pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Guest {
    /// Bytes of RAM.
    pub ram: f64,
    /// Bytes of pages with data in the first pass; the others are zeros.
    pub data: f64,
    /// Bytes of pages with data per second that QEMU writes if nothing makes it wait.
    pub source: f64,
    /// Seconds in which QEMU finds in the first pass that pages are zeros. It sends next to nothing
    /// meanwhile.
    pub zeros: f64,
    /// CPU seconds for these pages at the source and at the destination.
    pub zeros_cpu: [f64; 2],
    /// The part of the pages sent again that has data.
    pub data_share: f64,
    /// The guest's dirtying.
    pub curve: DirtyCurve,
}

impl Guest {
    /// The same guest, slowed down by `percent`.
    pub(crate) fn slowed(&self, percent: u8) -> Self {
        let speed = 1.0 - f64::from(percent) / 100.0;
        let points: Vec<_> = self.curve.points().to_vec();
        let slower: Vec<_> = points
            .iter()
            .map(|one| crate::Pass { seconds: one.seconds / speed.max(0.01), ..*one })
            .collect();
        Self { curve: DirtyCurve::new(&slower, self.ram), ..self.clone() }
    }
}

/// The method's part in a migration.
#[derive(Clone, Debug, PartialEq)]
pub struct Course {
    /// How pages of the first pass drain.
    pub first: Best,
    /// How pages sent again drain.
    pub again: Best,
    /// Bytes on the link for each page of zeros, over the bytes of a page.
    pub zero: f64,
    /// Bytes left at which QEMU stops the VM. The second threshold, and later ones, apply after the
    /// migration has made no progress with those before.
    pub thresholds: Vec<f64>,
    /// Seconds of downtime that are spent whatever is left.
    pub fixed: f64,
}

/// How a migration ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    /// The migration converges.
    Completes,
    /// The migration does not converge: this many bytes of pages are left after each pass.
    Never {
        /// Bytes of pages.
        left: f64,
    },
}

/// The forecast of one migration. If the migration does not converge, the forecast covers its first
/// passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// How the migration ends.
    pub end: End,
    /// Seconds, downtime included.
    pub seconds: f64,
    /// Seconds for which the VM stands still; if the migration does not converge, those that the
    /// rest would take.
    pub downtime: f64,
    /// Bytes on the link, without headers.
    pub bytes: f64,
    /// CPU seconds at the source.
    pub cpu: f64,
    /// CPU seconds at the destination; 0 where nothing is known of it.
    pub cpu_there: f64,
    /// Passes.
    pub passes: u32,
}

/// Forecasts the migration of `guest` by the method of `course`.
pub fn forecast(guest: &Guest, course: &Course) -> Forecast {
    let share = guest.data_share.clamp(0.01, 1.0);
    // In bytes of pages, zeros included.
    let drain = (course.again.drain / share).max(1.0);
    let mut seconds = START + guest.zeros + guest.data / course.first.drain.max(1.0);
    let zeros = (guest.ram - guest.data).max(0.0);
    let mut bytes = guest.data * course.first.size + zeros * course.zero;
    let [zeros_here, zeros_there] = guest.zeros_cpu;
    let mut cpu = zeros_here + guest.data * course.first.cost / 1e9;
    let mut cpu_there = zeros_there + guest.data * course.first.cost_there / 1e9;
    let mut left = guest.curve.within(seconds);
    let mut passes = 1;
    // The fewest bytes left so far, and when they became fewer.
    let (mut fewest, mut since) = (left, (passes, seconds));
    let mut thresholds = course.thresholds.iter().copied();
    let mut threshold = thresholds.next().unwrap_or(0.0);
    let mut send = |sent: f64, bytes: &mut f64| {
        *bytes += sent * share * course.again.size + sent * (1.0 - share) * course.zero;
        cpu += sent * share * course.again.cost / 1e9;
        cpu_there += sent * share * course.again.cost_there / 1e9;
    };
    let end = loop {
        if left < threshold || left < 1.0 {
            break End::Completes;
        }
        let is_over = passes >= MOST.0 || seconds >= MOST.1;
        if is_over || (passes - since.0 >= FLAT.0 && seconds - since.1 >= FLAT.1) {
            match thresholds.next().filter(|_| !is_over) {
                Some(next) => threshold = next,
                None => break End::Never { left },
            }
            (fewest, since) = (left, (passes, seconds));
            continue;
        }
        let time = ((left - threshold) / drain).max(ITERATION.min(left / drain));
        let rest = (left - drain * time).max(0.0);
        let known = (rest / guest.curve.working_set().max(1.0)).min(1.0);
        let now = rest + guest.curve.within(time) * (1.0 - known);
        send(left - rest, &mut bytes);
        seconds += time;
        passes += 1;
        left = now;
        if left <= LESS * fewest {
            (fewest, since) = (left, (passes, seconds));
        }
    };
    let downtime = course.fixed + left / drain;
    if end == End::Completes {
        send(left, &mut bytes);
        seconds += downtime;
    }
    Forecast { end, seconds, downtime, bytes, cpu, cpu_there, passes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pass;
    use proptest::prelude::*;

    /// A guest of 1 GB that writes `rate` bytes of pages per second to random ones of `set` bytes.
    pub(super) fn guest(rate: f64, set: f64) -> Guest {
        let pass = |t: f64| Pass { seconds: t, bytes: set * (1.0 - (-rate * t / set).exp()) };
        let times = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
        Guest {
            ram: 1e9,
            data: 0.5e9,
            source: 1e9,
            zeros: 0.1,
            zeros_cpu: [0.0; 2],
            data_share: 1.0,
            curve: DirtyCurve::new(&times.map(pass), 1e9),
        }
    }

    fn course(drain: f64, downtime: f64) -> Course {
        let best = Best { drain, size: 0.5, cost: 2.0, cost_there: 1.0 };
        Course {
            first: best,
            again: best,
            zero: 0.002,
            thresholds: vec![drain * downtime],
            fixed: 0.02,
        }
    }

    #[test]
    fn an_idle_guest_takes_one_pass() {
        let idle = Guest { curve: DirtyCurve::new(&[], 1e9), ..guest(1.0, 1.0) };
        let seen = forecast(&idle, &course(100e6, 0.3));
        assert_eq!((seen.end, seen.passes), (End::Completes, 1));
        // 0.5 GB of data at 100 MB/s, half of them on the link, and 0.5 GB of zeros.
        assert!(
            (seen.seconds - 5.32).abs() < 1e-9 && (seen.downtime - 0.02).abs() < 1e-9,
            "{seen:?}"
        );
        assert!((seen.bytes - (0.25e9 + 1e6)).abs() < 1.0 && (seen.cpu - 1.0).abs() < 1e-9);
        assert!((seen.cpu_there - 0.5).abs() < 1e-9);
    }

    /// However fast the link is.
    #[test]
    fn zeros_take_their_time() {
        let idle = Guest { curve: DirtyCurve::new(&[], 1e9), ..guest(1.0, 1.0) };
        assert!((forecast(&idle, &course(1e12, 0.3)).seconds - 0.32).abs() < 1e-3);
    }

    #[test]
    fn a_guest_that_dirties_less_than_drains_converges_and_one_that_dirties_more_does_not() {
        let busy = guest(50e6, 200e6);
        let fits = forecast(&busy, &course(100e6, 0.3));
        assert_eq!(fits.end, End::Completes);
        assert!(fits.downtime < 0.32 && fits.passes > 1, "{fits:?}");
        let never = forecast(&busy, &course(25e6, 0.3));
        let End::Never { left } = never.end else { panic!("{never:?}") };
        // 50 (1 - x / 200) = 25 with x MB dirty on average, and a pass begins with more.
        assert!((80e6..180e6).contains(&left) && never.downtime > 3.0, "{never:?}");
    }

    /// Rewriting a small set again and again is no obstacle if the set fits into the downtime.
    #[test]
    fn a_small_working_set_converges_however_fast_it_is_written() {
        let small = guest(1e9, 2e6);
        assert_eq!(forecast(&small, &course(25e6, 0.3)).end, End::Completes);
        assert!(matches!(forecast(&small, &course(25e6, 0.05)).end, End::Never { .. }));
    }

    /// QEMU synchronises at its threshold, where pages that are still dirty do not become dirty
    /// again: more converges than with passes to the end.
    #[test]
    fn pages_that_are_dirty_already_do_not_count_again() {
        // Passes to the end stay at 5.9 MB, where 4.8 are allowed.
        let busy = guest(20e6, 16e6);
        assert_eq!(forecast(&busy, &course(16e6, 0.3)).end, End::Completes);
    }

    #[test]
    fn the_next_threshold_is_for_a_migration_that_does_not_get_on() {
        let small = guest(1e9, 2e6);
        let both = Course { thresholds: vec![1.25e6, 7.5e6], ..course(25e6, 0.0) };
        let seen = forecast(&small, &both);
        assert_eq!(seen.end, End::Completes);
        assert!(seen.downtime > 0.05, "{seen:?}");
    }

    #[test]
    fn a_slowed_guest_dirties_less() {
        let busy = guest(50e6, 200e6);
        let slow = busy.slowed(75);
        assert!((slow.curve.within(4.0) - busy.curve.within(1.0)).abs() < 1e6);
        assert_eq!(forecast(&slow, &course(25e6, 0.3)).end, End::Completes);
    }

    proptest! {
        /// A faster link never takes longer, and never turns a migration that ends into one that
        /// does not.
        #[test]
        fn a_faster_link_is_no_worse(
            rate in 1e5..1e9_f64, set in 1e5..5e8_f64, drain in 1e6..1e9_f64, factor in 1.2..8.0_f64,
        ) {
            let guest = guest(rate, set);
            let slow = forecast(&guest, &course(drain, 0.3));
            let fast = forecast(&guest, &course(drain * factor, 0.3));
            if slow.end == End::Completes {
                prop_assert_eq!(fast.end, End::Completes, "{:?} {:?}", slow, fast);
                prop_assert!(fast.seconds <= slow.seconds * 1.05 + 0.5, "{slow:?} {fast:?}");
            }
            prop_assert!(slow.seconds.is_finite() && slow.bytes >= guest.data * 0.5);
        }
    }
}
