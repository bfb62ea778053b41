//! The hull of each class, and the chain of their steps.

use super::limits::{between, Limits};
use crate::estimate::Point;
use crate::Class;

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
    /// Whether the mix goes beyond the least time, only to save bytes.
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

/// A step that saves less is not worth idle CPU time.
const WORTH: f64 = 0.01;
/// A class with a smaller share of the chunks counts as absent: rounding would hide the gain of its
/// steps, and a step without gain ends the chain for all steps behind it.
const NO_WEIGHT: f64 = 1e-6;

/// The steps of all classes, cheapest byte first, from the cheapest mix on.
pub(super) struct Chain {
    start: Point,
    steps: Vec<Step>,
}

impl Chain {
    pub(super) fn new(
        hulls: &[Vec<(usize, Point)>; Class::COUNT],
        weights: &[f64; Class::COUNT],
    ) -> Self {
        let mut start = Point { cost: 0.0, size: 0.0 };
        let mut steps = Vec::new();
        for (class, (hull, weight)) in hulls.iter().zip(weights).enumerate() {
            let weight = if *weight < NO_WEIGHT { 0.0 } else { *weight };
            start.cost += weight * hull[0].1.cost;
            start.size += weight * hull[0].1.size;
            for (vertex, pair) in hull.windows(2).enumerate() {
                let cost = pair[1].1.cost - pair[0].1.cost;
                let size = pair[1].1.size - pair[0].1.size;
                let to_add = Point { cost: weight * cost, size: weight * size };
                let saves = -size / pair[0].1.size;
                steps.push(Step { class, vertex, to_add, buys: -size / cost.max(1e-12), saves });
            }
        }
        // The sort is stable, and a hull's steps are in descending order already: they stay in
        // order.
        steps.sort_by(|a, b| b.buys.total_cmp(&a.buys));
        Self { start, steps }
    }

    /// The first mix that takes at most `enough` ns a byte, or the one that takes least.
    pub(super) fn walk(
        &self,
        hulls: &[Vec<(usize, Point)>; Class::COUNT],
        limits: &Limits,
        enough: f64,
    ) -> Mix {
        let mut at = self.start;
        let mut pairs = [Pair { low: 0, high: 0, share: 0.0 }; Class::COUNT];
        for (pair, hull) in pairs.iter_mut().zip(hulls) {
            *pair = Pair { low: hull[0].0, high: hull[0].0, share: 0.0 };
        }
        let mut price = f64::INFINITY;
        let mut idle_used = false;
        for step in &self.steps {
            let to = Point { cost: at.cost + step.to_add.cost, size: at.size + step.to_add.size };
            let mut share = limits.best_share(at, to);
            let slow = |share: f64| limits.time(between(at, to, share)) > enough;
            // Along the chain the time falls to its minimum.
            if share > 0.0 && !slow(share) {
                share = if slow(0.0) { share.min(bisect(0.0, slow)) } else { 0.0 };
            }
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
            let (low, high) = (hull[step.vertex].0, hull[step.vertex + 1].0);
            pairs[step.class] = Pair { low, high, share };
            at = between(at, to, share);
            price = step.buys;
            if share < 1.0 {
                break;
            }
        }
        if self.steps.last().is_some_and(|last| last.buys >= price) {
            let complete = pairs.iter().zip(hulls).all(|(pair, hull)| {
                hull.len() == 1 || (pair.high == hull[hull.len() - 1].0 && pair.share >= 1.0)
            });
            if complete {
                price = 0.0;
            }
        }
        Mix { pairs, at, price, idle_used }
    }
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
