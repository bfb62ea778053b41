//! The best mix of candidates, given each one's cost and size and the capacities available.
//!
//! Each chunk of class k may use any of its candidates, which are points (cost, size) per plain
//! byte. Giving each candidate a share of the chunks reaches every point in the convex hull of
//! these points, and only the hull's lower left edge matters: from the cheapest candidate on, each
//! step to the next vertex trades CPU time for bytes at a worse rate than the step before. All
//! classes together reach the weighted (Minkowski) sum of their hulls: the same steps, sorted by
//! that rate. `Step`s in this order form the chain.
//!
//! Time per plain byte is the longest of the times of the link, the codec threads, the cores and
//! QEMU. Each is linear in (cost, size) and grows with both, so the minimum over all mixes lies on
//! the chain. Along the chain the maximum of the linear functions is convex, so its minimum is at a
//! vertex or where two of them cross within a step. So at most one class is split, between two
//! neighbouring vertices: the point where the link and the codec threads finish at the same time.

use crate::estimate::Point;
use crate::Class;

/// The capacities available, from which follows the time for a plain byte at a mix of cost c and
/// size s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes that the link transmits in a ns.
    pub(crate) link: f64,
    /// Cores of the codec threads.
    pub(crate) workers: f64,
    /// Cores shared by all work, and the CPU ns a plain byte of the work besides encoding.
    pub(crate) cores: Option<(f64, f64)>,
    /// Time that QEMU, at either end, takes for a plain byte in any case, ns; 0: not known.
    pub(crate) floor: f64,
    /// Share of the floor's time that the codec threads may spend on saving bytes.
    pub(crate) idle_use: f64,
}

impl Limits {
    fn link_time(&self, at: Point) -> f64 {
        at.size / self.link
    }

    /// Time the CPU takes for a plain byte, ns.
    pub(crate) fn cpu_time(&self, at: Point) -> f64 {
        let shared = self.cores.map_or(0.0, |(cores, other)| (at.cost + other) / cores);
        shared.max(at.cost / self.workers)
    }

    /// Time for a plain byte, ns.
    pub(crate) fn time(&self, at: Point) -> f64 {
        self.link_time(at).max(self.cpu_time(at)).max(self.floor)
    }

    /// The share of the step from `from` to `to` at which time is least; the smallest of several.
    fn best_share(&self, from: Point, to: Point) -> f64 {
        let rows = |at: Point| {
            let (cores, other) = self.cores.unwrap_or((f64::INFINITY, 0.0));
            [self.link_time(at), at.cost / self.workers, (at.cost + other) / cores]
        };
        let (start, end) = (rows(from), rows(to));
        let mut best = (self.time(from), 0.0);
        let mut consider = |share: f64| {
            let time = self.time(between(from, to, share));
            if share.is_finite() && time < best.0 * (1.0 - 1e-12) {
                best = (time, share);
            }
        };
        // The shares need not come in ascending order: the strict comparison above prefers the
        // first of equals, and equals occur only on a plateau caused by the floor.
        for row in &mut [(0, 1), (0, 2)] {
            let gap = |rows: &[f64; 3]| rows[row.0] - rows[row.1];
            let share = gap(&start) / (gap(&start) - gap(&end));
            if (0.0..=1.0).contains(&share) {
                consider(share);
            }
        }
        let to_floor = (start[0] - self.floor) / (start[0] - end[0]);
        if (0.0..=1.0).contains(&to_floor) {
            consider(to_floor);
        }
        consider(1.0);
        best.1
    }
}

/// The point a share of the way from `from` to `to`.
fn between(from: Point, to: Point, share: f64) -> Point {
    Point {
        cost: from.cost + share * (to.cost - from.cost),
        size: from.size + share * (to.size - from.size),
    }
}

/// Two neighbouring candidates of one class, and how the class's chunks are divided between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pair {
    /// The cheaper one.
    pub(crate) low: usize,
    /// The one that saves more.
    pub(crate) high: usize,
    /// Share of the chunks that get `high`.
    pub(crate) share: f64,
}

/// The best mix: a pair for each class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    pub(crate) pairs: [Pair; Class::COUNT],
    /// Cost and size over all classes.
    pub(crate) at: Point,
    /// Bytes that the next step saves for a ns of CPU time: infinite where only CPU time counts, 0
    /// where only bytes do.
    pub(crate) price: f64,
    /// It goes beyond the least time, only to save bytes.
    pub(crate) idle_used: bool,
}

/// The vertices of the lower left edge of the hull of `points`, cheapest first.
pub(crate) fn hull(points: &[(usize, Point)]) -> Vec<(usize, Point)> {
    let mut points = points.to_vec();
    points.sort_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost).then(a.size.total_cmp(&b.size)));
    let mut edge: Vec<(usize, Point)> = Vec::with_capacity(points.len());
    for (candidate, point) in points {
        if edge.last().is_some_and(|(_, last)| point.size >= last.size) {
            continue;
        }
        while let [.., (_, a), (_, b)] = edge[..] {
            // b lies on or above the line from a to the new point: no mix needs it.
            let above = (b.size - a.size) * (point.cost - a.cost)
                >= (point.size - a.size) * (b.cost - a.cost);
            if !above {
                break;
            }
            edge.pop();
        }
        edge.push((candidate, point));
    }
    edge
}

struct Step {
    class: usize,
    /// The vertex that the step starts from.
    vertex: usize,
    to_add: Point,
    buys: f64,
    /// Share of the bytes of a chunk that the step saves.
    saves: f64,
}

/// A step that saves less does not justify idle CPU time.
const WORTH: f64 = 0.01;
/// A class with a smaller share of the chunks counts as absent: rounding would hide the gain of its
/// steps, and a step without gain ends the chain for all steps behind it.
const NO_WEIGHT: f64 = 1e-6;

/// Finds the best mix for classes with these hulls (none empty) and these weights (sum 1).
pub(crate) fn best(
    hulls: &[Vec<(usize, Point)>; Class::COUNT],
    weights: &[f64; Class::COUNT],
    limits: &Limits,
) -> Mix {
    let mut at = Point { cost: 0.0, size: 0.0 };
    let mut steps = Vec::new();
    for (class, (hull, weight)) in hulls.iter().zip(weights).enumerate() {
        let weight = if *weight < NO_WEIGHT { 0.0 } else { *weight };
        at.cost += weight * hull[0].1.cost;
        at.size += weight * hull[0].1.size;
        for (vertex, pair) in hull.windows(2).enumerate() {
            let cost = pair[1].1.cost - pair[0].1.cost;
            let size = pair[1].1.size - pair[0].1.size;
            let to_add = Point { cost: weight * cost, size: weight * size };
            let saves = -size / pair[0].1.size;
            steps.push(Step { class, vertex, to_add, buys: -size / cost.max(1e-12), saves });
        }
    }
    // The sort is stable, and a hull's steps are in descending order already: they stay in order.
    steps.sort_by(|a, b| b.buys.total_cmp(&a.buys));
    let mut pairs = [Pair { low: 0, high: 0, share: 0.0 }; Class::COUNT];
    for (pair, hull) in pairs.iter_mut().zip(hulls) {
        *pair = Pair { low: hull[0].0, high: hull[0].0, share: 0.0 };
    }
    let mut price = f64::INFINITY;
    let mut idle_used = false;
    for step in &steps {
        let to = Point { cost: at.cost + step.to_add.cost, size: at.size + step.to_add.size };
        let mut share = limits.best_share(at, to);
        // The link is not the bottleneck any more: idle CPU time may save bytes.
        if step.saves >= WORTH
            && limits.floor > 0.0
            && limits.time(between(at, to, share)) <= limits.floor * (1.0 + 1e-9)
        {
            let fits = |share: f64| {
                limits.cpu_time(between(at, to, share)) <= limits.floor * limits.idle_use
            };
            let more = if fits(1.0) { 1.0 } else { bisect(share, fits) };
            idle_used |= more > share;
            share = more;
        }
        if share <= 0.0 {
            // A class without chunks takes its steps at no cost, and follows the others' price.
            if step.to_add.cost > 0.0 || step.to_add.size < 0.0 {
                break;
            }
            share = 1.0;
        }
        let hull = &hulls[step.class];
        pairs[step.class] = Pair { low: hull[step.vertex].0, high: hull[step.vertex + 1].0, share };
        at = between(at, to, share);
        price = step.buys;
        if share < 1.0 {
            break;
        }
    }
    if steps.last().is_some_and(|last| last.buys >= price) {
        let complete = pairs.iter().zip(hulls).all(|(pair, hull)| {
            hull.len() == 1 || (pair.high == hull[hull.len() - 1].0 && pair.share >= 1.0)
        });
        if complete {
            price = 0.0;
        }
    }
    Mix { pairs, at, price, idle_used }
}

/// The largest share from `low` up for which `fits` holds, if it holds for `low`; else `low`.
fn bisect(low: f64, fits: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (low, 1.0);
    if !fits(low) {
        return low;
    }
    for _ in 0..30 {
        let middle = f64::midpoint(low, high);
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(link: f64, workers: f64) -> Limits {
        Limits { link, workers, cores: None, floor: 0.0, idle_use: 0.75 }
    }

    /// All chunks in one class.
    fn one(points: &[(f64, f64)], limits: &Limits) -> Mix {
        let points: Vec<_> = points
            .iter()
            .enumerate()
            .map(|(at, &(cost, size))| (at, Point { cost, size }))
            .collect();
        let edge = hull(&points);
        best(&[edge.clone(), edge.clone(), edge.clone(), edge], &[1.0, 0.0, 0.0, 0.0], limits)
    }

    #[test]
    fn a_mix_leaves_neither_link_nor_cpu_idle() {
        // 1 byte/ns and 1 core: raw takes 1 ns by the link, the codec 2 ns of CPU.
        let mix = one(&[(0.0, 1.0), (2.0, 0.5)], &limits(1.0, 1.0));
        // s = 1 - f/2 = 2 f = c.
        assert!((mix.pairs[0].share - 0.4).abs() < 1e-9, "{mix:?}");
        assert!((mix.at.cost - mix.at.size).abs() < 1e-9);
        // CPU to spare: all chunks. No CPU: none.
        assert_eq!(one(&[(0.0, 1.0), (2.0, 0.5)], &limits(0.1, 1.0)).pairs[0].share, 1.0);
        assert_eq!(one(&[(0.01, 1.0), (2.0, 0.5)], &limits(1e3, 1.0)).pairs[0].share, 0.0);
    }

    #[test]
    fn a_class_that_has_almost_disappeared_does_not_stop_the_others() {
        let best_first =
            hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 0.1, size: 0.1 })]);
        let other =
            hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 2.0, size: 0.5 })]);
        let none = hull(&[(0, Point { cost: 0.0, size: 1.0 })]);
        // Shares shrink with each chunk of another class, and never reach 0.
        for gone in [0.0, 1e-300, 1e-30, 1e-14, 1e-12, 1e-9, 1e-5] {
            let hulls = [best_first.clone(), other.clone(), none.clone(), none.clone()];
            let mix = best(&hulls, &[gone, 1.0 - gone, 0.0, 0.0], &limits(0.1, 2.0));
            assert_eq!((mix.pairs[1].high, mix.pairs[1].share), (1, 1.0), "{gone}: {mix:?}");
        }
    }

    #[test]
    fn the_class_that_gains_most_is_compressed_first() {
        let cheap =
            hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 0.5, size: 0.1 })]);
        let dear =
            hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 2.0, size: 0.6 })]);
        let none = hull(&[(0, Point { cost: 0.0, size: 1.0 })]);
        let hulls = [dear, cheap, none.clone(), none];
        let mix = best(&hulls, &[0.5, 0.5, 0.0, 0.0], &limits(1.5, 1.0));
        assert_eq!((mix.pairs[1].high, mix.pairs[1].share), (1, 1.0));
        assert!(mix.pairs[0].share > 0.0 && mix.pairs[0].share < 0.3, "{mix:?}");
    }

    #[test]
    fn idle_cpu_saves_bytes_only_beside_a_floor() {
        let points = [(0.0, 1.0), (1.0, 0.5), (4.0, 0.45)];
        let fast = Limits { floor: 2.0, ..limits(10.0, 1.0) };
        let mix = one(&points, &fast);
        // 0.75 of 2 ns: all of the second step, and 1/6 of the step to the third.
        assert!(mix.idle_used && (mix.at.cost - 1.5).abs() < 1e-6, "{mix:?}");
        let none = Limits { floor: 0.0, ..fast };
        assert!(one(&points, &none).at.cost < 0.1);
    }

    proptest! {
        /// Against a search through all pairs of points in fine steps, including dominated points.
        #[test]
        fn no_other_mix_is_faster(
            points in prop::collection::vec((0.001_f64..20.0, 0.01_f64..1.0), 1..12),
            link in 0.001_f64..20.0,
            workers in 0.1_f64..64.0,
            cores in prop::option::of((0.5_f64..64.0, 0.0_f64..2.0)),
        ) {
            let limits = Limits { cores, ..limits(link, workers) };
            let mix = one(&points, &limits);
            let time = limits.time(mix.at);
            for a in &points {
                for b in &points {
                    for step in 0..=50 {
                        let share = f64::from(step) / 50.0;
                        let from = Point { cost: a.0, size: a.1 };
                        let to = Point { cost: b.0, size: b.1 };
                        let other = limits.time(between(from, to, share));
                        prop_assert!(time <= other * (1.0 + 1e-9), "{mix:?} {time} against {other}");
                    }
                }
            }
            let pair = mix.pairs[0];
            let (low, high) = (points[pair.low], points[pair.high]);
            let there = low.0 + pair.share * (high.0 - low.0);
            prop_assert!((there - mix.at.cost).abs() < 1e-9);
        }

        #[test]
        fn a_faster_link_never_asks_for_more_cpu(
            points in prop::collection::vec((0.001_f64..20.0, 0.01_f64..1.0), 1..12),
            link in 0.001_f64..20.0,
            faster in 1.0_f64..50.0,
            workers in 0.1_f64..64.0,
        ) {
            let slow = one(&points, &limits(link, workers));
            let fast = one(&points, &limits(link * faster, workers));
            prop_assert!(fast.at.cost <= slow.at.cost * (1.0 + 1e-9) + 1e-12);
        }
    }
}
