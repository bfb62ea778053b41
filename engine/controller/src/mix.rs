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

mod chain;
mod limits;

use chain::Chain;
pub(crate) use chain::{hull, Mix, Pair};
pub(crate) use limits::Limits;

use crate::estimate::Point;
use crate::Class;

/// A mix may take longer by a share of the time if it saves this many times that share of the CPU
/// time.
const BARGAIN: f64 = 8.0;

/// Finds the best mix for classes with these hulls (none empty) and these weights (sum 1). It is
/// the fastest, or one that takes at most [`Limits::slack`] longer and much less CPU time
/// ([`BARGAIN`]).
pub(crate) fn best(
    hulls: &[Vec<(usize, Point)>; Class::COUNT],
    weights: &[f64; Class::COUNT],
    limits: &Limits,
) -> Mix {
    let chain = Chain::new(hulls, weights);
    let fastest = chain.walk(hulls, limits, 0.0);
    if limits.slack <= 0.0 {
        return fastest;
    }
    let least = limits.time(fastest.at);
    let cheaper = chain.walk(hulls, limits, least * (1.0 + limits.slack));
    let work = |at: Point| at.cost + limits.cores.map_or(0.0, |(_, other)| other);
    let saved = 1.0 - work(cheaper.at) / work(fastest.at).max(1e-12);
    let lost = limits.time(cheaper.at) / least - 1.0;
    if saved >= BARGAIN * lost {
        // Exploring goes by what bytes are worth to the fastest: a candidate that would be better
        // must not be left out because time is left.
        Mix { price: fastest.price, ..cheaper }
    } else {
        fastest
    }
}

#[cfg(test)]
mod tests;
