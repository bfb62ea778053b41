//! Size and cost of each candidate for a class, from noisy observations that age.
//!
//! Sizes vary from chunk to chunk by a fifth and more; the relation between candidates hardly does.
//! So a class has one *level*, the size and cost that zstd 1 has or would have, which every
//! observation of any candidate updates quickly. Each candidate has a *relation* to the level:
//! size = level ^ power, cost = level * multiple. When the data changes, chunks encoded with the
//! candidate in use update the estimates of all candidates at once.
//!
//! The belief in a relation is a weighted mean of three sources: the candidate's own observations,
//! by their number; those of candidates like it, since the levels of zstd deviate from their priors
//! together; and the prior. Observations age as chunks pass. So a candidate whose few observations
//! were bad by chance returns to what its likes suggest, and is tried again as soon as that makes
//! it worth trying. Without that it would be believed bad for ever: a candidate that looks bad gets
//! no chunks, and without chunks no better observations.
//!
//! A level and the relations to it could drift together unnoticed. So they are pinned: over the
//! candidates observed, the relations are on (geometric) average the priors.

use crate::config::{first_guess, Prior};
use crate::Class;

/// Sizes and costs outside these ranges are an error of a caller or of a clock, and would spoil the
/// estimates.
const SIZES: (f64, f64) = (1e-4, 1.0);
const COSTS: (f64, f64) = (1e-4, 1e4);
/// Chunks after which an observation counts for a third, in level and in relation.
const LEVEL_MEMORY: f64 = 96.0;
const RELATION_MEMORY: f64 = 48.0;
/// Chunks of a class after which the number of observations counts for a third: estimates age.
const AGE: f64 = 192.0;
/// The number of observations for which the prior counts in a belief.
const PRIOR_WORTH: f64 = 3.0;
/// Of a class's first chunks, the number after which an observation of a relation counts for a
/// half: it compares the chunk with a level that rests on as few.
const LEVEL_KNOWN: f64 = 4.0;
/// Candidates whose usual costs differ by this factor (e to this power) share a third of the
/// observations of either.
const LIKE: f64 = 0.7;

/// Size and cost of a candidate; both per plain byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    /// CPU ns.
    pub(crate) cost: f64,
    /// Encoded bytes.
    pub(crate) size: f64,
}

/// A moving mean that resists single outliers, and follows a jump after three.
#[derive(Clone, Copy, Debug)]
struct Level {
    mean: f64,
    variance: f64,
    seen: f64,
    /// Values in a row that were outliers on the same side, and their sum.
    run: f64,
    run_sum: f64,
}

impl Level {
    fn new(guess: f64) -> Self {
        Self { mean: guess, variance: 0.0, seen: 0.0, run: 0.0, run_sum: 0.0 }
    }

    /// Adds `value`, from a chunk of `weight` (0 to 1) of a full one; true if the mean jumped.
    fn take(&mut self, value: f64, weight: f64) -> bool {
        let far = 4.0 * self.variance.sqrt() + 0.05 * self.mean;
        let mut away = value - self.mean;
        if self.seen >= 8.0 && away.abs() > far {
            if (away < 0.0) != (self.run_sum < 0.0) {
                (self.run, self.run_sum) = (0.0, 0.0);
            }
            self.run += 1.0;
            self.run_sum += away;
            if self.run >= 3.0 {
                self.mean += self.run_sum / self.run;
                (self.seen, self.run, self.run_sum) = (3.0, 0.0, 0.0);
                return true;
            }
            away = far.copysign(away);
        } else {
            (self.run, self.run_sum) = (0.0, 0.0);
        }
        self.seen = (self.seen + weight).min(LEVEL_MEMORY);
        let gain = weight / self.seen.max(1.0);
        self.mean += gain * away;
        self.variance += gain * (away * away - self.variance);
        false
    }
}

/// One candidate in one class.
#[derive(Clone, Copy, Debug)]
struct Relation {
    prior: Prior,
    /// Observations, weighted by age and by how well the level was known.
    seen: f64,
    /// By its own observations, size is the level to this power; for raw, the size itself.
    power: f64,
    /// By its own observations, cost is this multiple of the level; for raw, the cost itself.
    multiple: f64,
}

impl Relation {
    fn is_raw(&self) -> bool {
        self.prior.power == 0.0
    }

    /// Logarithms of power and multiple over those of the prior.
    fn deviation(&self) -> [f64; 2] {
        [(self.power / self.prior.power).ln(), (self.multiple / self.prior.cost).ln()]
    }

    /// Adds an observation of a candidate that compresses, at these levels of size and cost.
    fn learn(&mut self, seen: Point, [size, cost]: [f64; 2], weight: f64) {
        self.seen += weight;
        let gain = weight / self.seen.clamp(1.0, RELATION_MEMORY);
        let expected = size.powf(self.power);
        let by_power = expected * size.ln();
        let off = (seen.size - expected) * by_power / (by_power * by_power + 0.02);
        self.power = (self.power + gain * off.clamp(-1.0, 1.0))
            .clamp(self.prior.power / 3.0, self.prior.power * 3.0);
        let off = seen.cost / (cost * self.multiple) - 1.0;
        // A delay caused by the machine (an interrupt, a cold cache) is not the codec's.
        self.multiple = (self.multiple * (1.0 + gain * off.clamp(-1.0, 2.0)))
            .clamp(self.prior.cost / 8.0, self.prior.cost * 8.0);
    }

    /// The share of the observations of `other` that counts for this candidate too.
    fn likeness(&self, other: &Self) -> f64 {
        (-(self.prior.cost / other.prior.cost).ln().abs() / LIKE).exp()
    }
}

/// The candidates in one class.
#[derive(Debug)]
pub(crate) struct Estimates {
    size: Level,
    cost: Level,
    relations: Vec<Relation>,
    /// Observations of candidates that compress, weighted by age, and all that there were.
    compressed: f64,
    ever: f64,
    /// Chunks since the last such observation.
    since: f64,
}

impl Estimates {
    pub(crate) fn new(class: Class, priors: &[Prior]) -> Self {
        let (size, cost) = first_guess(class);
        let relation = |prior: &Prior| {
            let (power, multiple) =
                if prior.power == 0.0 { (1.0, RAW_COST) } else { (prior.power, prior.cost) };
            Relation { prior: *prior, seen: 0.0, power, multiple }
        };
        Self {
            size: Level::new(size),
            cost: Level::new(cost),
            relations: priors.iter().map(relation).collect(),
            compressed: 0.0,
            ever: 0.0,
            since: 0.0,
        }
    }

    /// Adds an observation of `candidate`, from a chunk of `weight` (0 to 1) of a full one. True if
    /// the class's level jumped.
    pub(crate) fn take(&mut self, candidate: usize, seen: Point, weight: f64) -> bool {
        if candidate >= self.relations.len() {
            return false;
        }
        let seen = Point { cost: clamp(seen.cost, COSTS), size: clamp(seen.size, SIZES) };
        for relation in &mut self.relations {
            relation.seen *= 1.0 - weight / AGE;
        }
        self.compressed *= 1.0 - weight / AGE;
        let (power, multiple) = self.belief(candidate);
        let relation = &mut self.relations[candidate];
        if relation.is_raw() {
            // A raw chunk is no evidence about the other candidates.
            relation.seen += weight;
            let gain = weight / (relation.seen + PRIOR_WORTH).min(RELATION_MEMORY);
            relation.power += gain * (seen.size - relation.power);
            relation.multiple += gain * (seen.cost - relation.multiple);
            self.since += weight;
            return false;
        }
        self.compressed += weight;
        self.ever += weight;
        self.since = 0.0;
        // Both from the previous estimates, in steps that are unbiased: the goal is the mean of the
        // sizes, not of their logarithms.
        let level = self.size.mean;
        let expected = level.powf(power);
        let slope = power * level.powf(power - 1.0);
        let like_zstd_1 = clamp(level + (seen.size - expected) / slope.max(0.2), SIZES);
        let cost = clamp(seen.cost / multiple, COSTS);
        let known = self.size.seen / (self.size.seen + LEVEL_KNOWN);
        relation.learn(seen, [level, self.cost.mean], weight * known);
        let jumped = self.cost.take(cost, weight) | self.size.take(like_zstd_1, weight);
        self.pin();
        jumped
    }

    /// Moves the common part of all relations into the levels.
    fn pin(&mut self) {
        let (mut weights, mut powers, mut multiples) = (1e-9, 0.0, 0.0);
        for relation in self.relations.iter().filter(|relation| !relation.is_raw()) {
            let weight = relation.seen.min(RELATION_MEMORY);
            weights += weight;
            powers += weight * (relation.power / relation.prior.power).ln();
            multiples += weight * (relation.multiple / relation.prior.cost).ln();
        }
        let (power, multiple) = ((powers / weights).exp(), (multiples / weights).exp());
        for relation in self.relations.iter_mut().filter(|relation| !relation.is_raw()) {
            if relation.seen > 0.0 {
                relation.power /= power;
                relation.multiple /= multiple;
            }
        }
        self.size.mean = clamp(self.size.mean.powf(power), SIZES);
        self.cost.mean = clamp(self.cost.mean * multiple, COSTS);
    }

    /// Power and multiple of a candidate: from its own observations as far as there are any, then
    /// from those of similar candidates, then from the prior.
    fn belief(&self, candidate: usize) -> (f64, f64) {
        let own = &self.relations[candidate];
        if own.is_raw() {
            return (own.power, own.multiple);
        }
        let (mut weights, mut like) = (PRIOR_WORTH, [0.0; 2]);
        for (at, other) in self.relations.iter().enumerate() {
            if at != candidate && !other.is_raw() {
                let weight = own.likeness(other) * other.seen.min(RELATION_MEMORY);
                weights += weight;
                like = sum(like, weight, other.deviation());
            }
        }
        let like = like.map(|sum| sum / weights);
        let share = own.seen / (own.seen + PRIOR_WORTH);
        let [power, multiple] = sum(like.map(|like| like * (1.0 - share)), share, own.deviation());
        (own.prior.power * power.exp(), own.prior.cost * multiple.exp())
    }

    /// The expected size and cost of `candidate` for the next chunk.
    pub(crate) fn point(&self, candidate: usize) -> Point {
        let (power, multiple) = self.belief(candidate);
        if self.relations[candidate].is_raw() {
            return Point { cost: multiple, size: power };
        }
        Point {
            cost: clamp(self.cost.mean * multiple, COSTS),
            size: clamp(self.size.mean.powf(power), SIZES),
        }
    }

    /// The best size and cost of `candidate` that the observations so far allow.
    pub(crate) fn at_best(&self, candidate: usize) -> Point {
        let point = self.point(candidate);
        let doubt = 1.0 / (1.0 + self.seen(candidate));
        // The whole class may have changed while it was sent raw: exploring will show.
        let level = if self.since > 24.0 { 0.1 } else { 0.04 / (1.0 + self.compressed) };
        let size = point.size.powf(1.0 + 0.25 * doubt) * (1.0 - level);
        Point { cost: point.cost * (1.0 - 0.45 * doubt), size }
    }

    /// Observations of `candidate`, weighted by age.
    pub(crate) fn seen(&self, candidate: usize) -> f64 {
        self.relations[candidate].seen
    }

    /// Observations of candidates that compress, whatever their age.
    pub(crate) fn ever(&self) -> f64 {
        self.ever
    }
}

/// CPU ns a plain byte for raw chunks before the first observation: the codec thread does hardly
/// anything.
const RAW_COST: f64 = 0.02;

/// `sum` and `share` of `more`.
fn sum(sum: [f64; 2], share: f64, more: [f64; 2]) -> [f64; 2] {
    [sum[0] + share * more[0], sum[1] + share * more[1]]
}

/// `value` within `range`; the low end for NaN.
fn clamp(value: f64, (low, high): (f64, f64)) -> f64 {
    // `max` and `min` drop a NaN, `clamp` would return it.
    value.max(low).min(high)
}

#[cfg(test)]
mod tests;
