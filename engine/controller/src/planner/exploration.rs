//! Exploration: now and then a chunk tries a candidate that may be better than those in use.

use codec::Codec;

use super::Planner;
use crate::estimate::Point;
use crate::mix::{Limits, Mix, Pair};

/// At most one chunk in this many explores: while a class is new, and later.
const EXPLORE_NEW: f64 = 4.0;
const EXPLORE: f64 = 32.0;
/// Observations after which a class is no longer new.
const NEW: f64 = 24.0;
impl Planner {
    /// The candidate that the next exploring chunk of `class` tries, and how often.
    pub(super) fn exploration(
        &self,
        class: usize,
        mix: &Mix,
        limits: &Limits,
    ) -> Option<(usize, u16)> {
        let estimates = &self.estimates[class];
        let Pair { low, high, share } = mix.pairs[class];
        let (from, to) = (estimates.point(low), estimates.point(high));
        let mean = |from: f64, to: f64| from + share * (to - from);
        let now = Point { cost: mean(from.cost, to.cost), size: mean(from.size, to.size) };
        // A candidate can only matter if, at its best, it saves bytes below their current price.
        let worth = |point: Point| {
            if mix.price.is_finite() {
                point.size + mix.price * point.cost
            } else {
                point.cost
            }
        };
        let useful = (0..self.candidates.len()).filter(|&candidate| {
            let at_best = estimates.at_best(candidate);
            candidate != low
                && (candidate != high || share <= 0.0)
                && self.candidates[candidate].codec() != Codec::Raw
                && self.is_short(estimates.point(candidate))
                && worth(at_best) < worth(now) * (1.0 - 1e-6)
        });
        let rarest = useful.min_by(|&a, &b| estimates.seen(a).total_cmp(&estimates.seen(b)))?;
        let point = estimates.point(rarest);
        let time = limits.time(mix.at).max(1e-9);
        // The additional time of link and codec threads, compared with a usual chunk.
        let more = ((point.cost - now.cost) / (limits.workers * time))
            .max((point.size - now.size) / (limits.link * time))
            .max(0.0);
        let is_new = estimates.ever() < NEW;
        let (share, least) = if is_new {
            (2.0 * self.config.explore_share, EXPLORE_NEW)
        } else {
            // Well-known candidates can wait.
            (self.config.explore_share, EXPLORE * (1.0 + estimates.seen(rarest) / 8.0))
        };
        Some((rarest, period((more / share).max(least))))
    }
}

/// A number of chunks.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "4 to 8192; `as` saturates"
)]
fn period(chunks: f64) -> u16 {
    chunks.ceil().clamp(EXPLORE_NEW, 8192.0) as u16
}
