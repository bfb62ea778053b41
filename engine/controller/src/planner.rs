//! The measurements, and the plan for each class that is made from them.

mod decision;
mod exploration;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use codec::{Codec, Settings};

use crate::choice::Observation;
use crate::config::{prior, Config, Prior};
use crate::estimate::{Estimates, Point};
use crate::explain::Decision;
use crate::flow::{Flow, Worked};
use crate::mix::{best, hull, Limits, Mix, Pair};
use crate::plan::{number, parts, Plan};
use crate::Class;

/// The measurements, and the plans made from them.
#[derive(Debug)]
pub(crate) struct Planner {
    config: Config,
    candidates: Vec<Settings>,
    estimates: [Estimates; Class::COUNT],
    weights: [f64; Class::COUNT],
    chunks: f64,
    /// Plain bytes of a usual chunk.
    chunk_bytes: f64,
    pub(crate) flow: Flow,
    /// The candidate in use until something is known of the link.
    start: usize,
    since_plan: u32,
    pub(crate) now: Duration,
    mix: Option<Mix>,
    pub(crate) log: VecDeque<Decision>,
    /// Decisions that were ever logged.
    pub(crate) decisions: u64,
}

/// Observations from one plan to the next.
const PLAN_EVERY: u32 = 8;
/// Chunks after which an observation of a class's share counts for a third.
const WEIGHT_MEMORY: f64 = 32.0;
/// A class with less than this share of the chunks is planned for as if it were about to get all.
/// When the data changes, all chunks get the plan made for the few
/// (`a_rare_class_is_planned_for_as_if_all_chunks_had_it`), as far as the other classes can
/// afford it (`rare_data_costs_no_more_than_bytes_are_worth_to_the_rest`).
const RARE: f64 = 0.1;
/// Where a QEMU holds up link and codec threads, encoding a chunk may take this share of the
/// longest time. The session's window of 15 ms lies between the codec threads and a QEMU that
/// pauses, and time spent encoding is lost afterwards
/// (`a_slow_destination_behind_a_narrow_link_is_kept_busy`, `pauses`).
const HURRY: f64 = 0.4;
/// `HURRY` applies when a QEMU held them up at more than this share of the last looks.
const HELD: f64 = 0.25;
/// The least share of a core that a codec thread is assumed to get while it encodes a chunk: a low
/// one is a matter of moments, and all candidates would seem too slow.
const LEAST_GRANTED: f64 = 0.5;
/// Codec threads that get less than the second share of their cores compete for them, and do so
/// fully below the first.
const SCARCE: (f64, f64) = (0.8, 0.95);
/// A process that uses this share of its cores, and more, competes with itself only. At the other
/// share, and less, it competes with other processes only.
const FILLED: f64 = 0.9;
const HALF: f64 = 0.7;
/// The share of the codec threads' cores that is left to other processes where they compete, if
/// that lengthens the migration by this factor at most.
const RESERVE: f64 = 0.2;
const HARDLY_LONGER: f64 = 1.05;
/// A mix that takes less CPU time may take this share longer than the fastest. The last percents of
/// a migration's time cost most: behind a link, zstd 3 sends 5 % less than zstd 1 for half as much
/// CPU time again.
const SLACK: f64 = 0.02;
/// A candidate that saves less than this share of the bytes is not used.
const WORTH: f64 = 0.01;
/// Where a QEMU is the bottleneck, the link gets this share of its time to transmit: a QEMU is not
/// slow all the time, and a link that was planned full would then be the bottleneck.
const MARGIN: f64 = 0.6;
/// Decisions stored for `explain`.
const LOG: usize = 256;

impl Planner {
    /// Creates a planner without observations, for at least one candidate.
    pub(crate) fn new(config: Config, candidates: Vec<Settings>) -> Self {
        let priors: Vec<Prior> = candidates.iter().map(|&settings| prior(settings)).collect();
        // The cheapest that compresses: the choice that loses little on a slow link and not much on
        // a fast one.
        let start = (0..candidates.len())
            .filter(|&at| candidates[at].codec() != Codec::Raw)
            .min_by(|&a, &b| priors[a].cost.total_cmp(&priors[b].cost))
            .unwrap_or(0);
        let flow = Flow::new(config.workers, config.max_cpu, config.other_ns_per_byte);
        Self {
            estimates: Class::ALL.map(|class| Estimates::new(class, &priors)),
            weights: [0.0, 1.0, 0.0, 0.0],
            chunks: 0.0,
            chunk_bytes: config.chunk_bytes as f64,
            flow,
            start,
            since_plan: 0,
            now: Duration::ZERO,
            mix: None,
            log: VecDeque::new(),
            decisions: 0,
            candidates,
            config,
        }
    }

    /// Records an observation. Returns true when a new plan is due.
    pub(crate) fn observe(&mut self, observation: &Observation) -> bool {
        let Observation { choice, plain, encoded, cpu_ns, wall_ns } = *observation;
        let worked = Worked { cpu_ns: cpu_ns as f64, wall_ns: wall_ns.max(cpu_ns) as f64 };
        self.flow.worked(worked);
        if plain == 0 || choice.candidate() >= self.candidates.len() {
            return false;
        }
        let bytes = plain as f64;
        let weight = (bytes / self.config.chunk_bytes as f64).clamp(1.0 / 64.0, 1.0);
        self.chunks = (self.chunks + weight).min(WEIGHT_MEMORY);
        let gain = weight / self.chunks.max(1.0);
        for (class, share) in self.weights.iter_mut().enumerate() {
            let here = if class == choice.class as usize { 1.0 } else { 0.0 };
            *share += gain * (here - *share);
        }
        self.chunk_bytes += 0.05 * (bytes - self.chunk_bytes);
        let seen = Point { cost: cpu_ns as f64 / bytes, size: encoded as f64 / bytes };
        let estimates = &mut self.estimates[choice.class as usize];
        let jumped = estimates.take(choice.candidate(), seen, weight);
        self.since_plan += 1;
        jumped || choice.explore || self.since_plan >= PLAN_EVERY
    }

    fn limits(&self) -> Limits {
        Limits {
            link: self.flow.link.unwrap_or(f64::MAX).max(1e-9),
            workers: self.flow.cores().max(1e-3),
            cores: self
                .config
                .cores
                .filter(|cores| cores.is_finite() && *cores > 0.0)
                .map(|cores| (cores, self.flow.other)),
            floor: MARGIN * self.flow.floor,
            idle_use: self.flow.idle_use() / MARGIN,
            slack: self.slack(),
        }
    }

    /// The share by which a mix may take longer where that saves CPU time.
    fn slack(&self) -> f64 {
        if self.flow.again {
            return 0.0;
        }
        // The times predicted do not hold the pauses of a QEMU.
        SLACK * (1.0 - self.flow.held / HELD).max(0.0)
    }

    /// The candidates of a class that may be chosen, with their estimated sizes and costs.
    fn points(&self, class: usize) -> Vec<(usize, Point)> {
        let points = (0..self.candidates.len())
            .map(|candidate| (candidate, self.estimates[class].point(candidate)));
        let raw = self.candidates.iter().position(|settings| settings.codec() == Codec::Raw);
        let raw = raw.map(|raw| self.estimates[class].point(raw).size);
        // A candidate that hardly shrinks the data is not worth its CPU time.
        let points = points.filter(|(candidate, point)| {
            self.candidates[*candidate].codec() == Codec::Raw
                || raw.is_none_or(|raw| point.size < (1.0 - WORTH) * raw)
        });
        let (short, long): (Vec<_>, Vec<_>) = points.partition(|(_, point)| self.is_short(*point));
        if short.is_empty() {
            let cheapest = long.into_iter().min_by(|a, b| a.1.cost.total_cmp(&b.1.cost));
            return cheapest.into_iter().collect();
        }
        short
    }

    /// The candidate of a class while nothing is known.
    fn start(&self, class: Class) -> usize {
        let raw = self.candidates.iter().position(|settings| settings.codec() == Codec::Raw);
        raw.filter(|_| class == Class::Dense).unwrap_or(self.start)
    }

    fn is_short(&self, point: Point) -> bool {
        // Behind a QEMU that takes bytes in bursts, chunks that are still being encoded are missing
        // from its window.
        let hurry = if self.flow.held > HELD { HURRY } else { 1.0 };
        let time = point.cost * self.chunk_bytes.max(65536.0);
        // Codec threads that share their cores take longer for the same work: at least with zstd 7
        // and 9 that emptied the window again and again.
        let shared = time / self.flow.granted.max(LEAST_GRANTED);
        time <= hurry * self.config.longest_encode_ns && shared <= self.config.longest_encode_ns
    }

    /// The share of the codec threads' cores to plan with, if little is lost by that. Where other
    /// processes compete for the cores (the peer's relay on the same host, QEMU's vCPUs), codec
    /// threads that use all they can get take CPU time from those that QEMU and the migration need.
    fn room(&self) -> f64 {
        let Some(cores) = self.config.cores.filter(|cores| cores.is_finite() && *cores > 0.0)
        else {
            return 1.0;
        };
        let granted = ((self.flow.granted - SCARCE.0) / (SCARCE.1 - SCARCE.0)).clamp(0.0, 1.0);
        // A process that fills its cores competes with itself, which `Limits::cores` covers.
        let others = ((FILLED - self.flow.own / cores) / (FILLED - HALF)).clamp(0.0, 1.0);
        1.0 - RESERVE * (1.0 - granted) * others
    }

    /// Makes a plan for each class.
    pub(crate) fn plan(&mut self, plans: &[AtomicU64; Class::COUNT]) {
        self.since_plan = 0;
        let limits = self.limits();
        let hulls = [0, 1, 2, 3].map(|class| hull(&self.points(class)));
        let mut mix = best(&hulls, &self.weights, &limits);
        let frugal = Limits { workers: self.room() * limits.workers, ..limits };
        let less = best(&hulls, &self.weights, &frugal);
        if limits.time(less.at) <= HARDLY_LONGER * limits.time(mix.at) {
            mix = less;
        }
        let known = self.flow.is_known();
        if !known {
            // A delivery takes a round trip, and the first look comes after some 10 ms.
            mix.pairs = Class::ALL.map(|class| {
                let start = self.start(class);
                Pair { low: start, high: start, share: 0.0 }
            });
        }
        for (class, plan) in plans.iter().enumerate() {
            let mut own = mix;
            if known && self.weights[class] < RARE {
                // Beside the others' bytes its own hardly count, so any candidate would do: but not
                // for all of the data.
                let mut weights = [0.0; Class::COUNT];
                weights[class] = 1.0;
                own = best(&hulls, &weights, &limits);
                // While it is rare it uses CPU time of the others: no more than bytes are worth to
                // them.
                if self.cost(class, &mix.pairs[class]) < self.cost(class, &own.pairs[class]) {
                    own = mix;
                }
                mix.pairs[class] = own.pairs[class];
            }
            let Pair { low, high, share } = own.pairs[class];
            let (explore, period) = self.exploration(class, &own, &limits).unwrap_or((low, 0));
            let word = Plan {
                low: number(low),
                high: number(high),
                share: parts(share),
                explore: number(explore),
                period,
            };
            plan.store(word.pack(), Ordering::Relaxed);
        }
        self.mix = Some(mix);
        let (now, bottleneck) = (self.now, self.flow.bottleneck);
        let news = |last: &Decision| last.differs(now, bottleneck, mix.at.size, mix.at.cost);
        if self.log.back().is_none_or(news) {
            self.record(self.decision(false));
        }
    }

    /// CPU ns for a plain byte of `class` with these two.
    fn cost(&self, class: usize, pair: &Pair) -> f64 {
        let cost = |candidate: usize| self.estimates[class].point(candidate).cost;
        cost(pair.low) + pair.share * (cost(pair.high) - cost(pair.low))
    }

    /// Plans, for each class, the candidate with which one chunk arrives soonest: encoded with all
    /// codec threads, then sent. The two steps do not overlap, since little is left with which they
    /// could.
    pub(crate) fn plan_for_the_end(&mut self, plans: &[AtomicU64; Class::COUNT]) {
        let limits = self.limits();
        let mut pairs = [Pair { low: 0, high: 0, share: 0.0 }; Class::COUNT];
        let mut at = Point { cost: 0.0, size: 0.0 };
        for class in 0..Class::COUNT {
            let soonest = self.points(class).into_iter().min_by(|(_, a), (_, b)| {
                let time = |point: &Point| point.size / limits.link + point.cost / limits.workers;
                time(a).total_cmp(&time(b))
            });
            // Before anything is known of the link, the start candidate stays.
            let soonest = soonest.filter(|_| self.flow.is_known());
            let candidate =
                soonest.map_or(self.start(Class::ALL[class]), |(candidate, _)| candidate);
            pairs[class] = Pair { low: candidate, high: candidate, share: 0.0 };
            let point = self.estimates[class].point(candidate);
            at.cost += self.weights[class] * point.cost;
            at.size += self.weights[class] * point.size;
            let all = number(candidate);
            let plan = Plan { low: all, high: all, share: 0, explore: all, period: 0 };
            plans[class].store(plan.pack(), Ordering::Relaxed);
        }
        self.mix = Some(Mix { pairs, at, price: f64::INFINITY, idle_used: false });
        let decision = self.decision(true);
        self.record(decision);
    }

    fn record(&mut self, decision: Decision) {
        if self.log.len() >= LOG {
            self.log.pop_front();
        }
        self.log.push_back(decision);
        self.decisions += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planner(cores: Option<f64>, own: f64, granted: f64) -> Planner {
        let config = Config { cores, ..Config::new(2) };
        let candidates = config.candidates.clone();
        let mut planner = Planner::new(config, candidates);
        (planner.flow.own, planner.flow.granted) = (own, granted);
        planner
    }

    #[test]
    fn cores_are_left_to_other_processes_only_where_these_compete() {
        let room = |cores, own, granted| planner(cores, own, granted).room();
        assert!((room(Some(2.0), 1.0, 0.6) - 0.8).abs() < 1e-9);
        assert!((room(Some(2.0), 1.0, 1.0) - 1.0).abs() < 1e-9, "nobody competes");
        assert!((room(Some(2.0), 1.9, 0.6) - 1.0).abs() < 1e-9, "the process fills its cores");
        assert!((room(None, 1.0, 0.6) - 1.0).abs() < 1e-9, "the cores are not known");
    }

    #[test]
    fn a_chunk_that_takes_long_on_shared_cores_is_not_encoded_so_slowly() {
        // 7.3 ms of CPU time for a chunk.
        let slow = Point { cost: 14.0, size: 0.3 };
        assert!(planner(None, 0.0, 1.0).is_short(slow));
        assert!(!planner(None, 0.0, 0.6).is_short(slow));
        // However short cores are for a moment, the usual candidates stay.
        let usual = Point { cost: 3.5, size: 0.35 };
        let mut starved = planner(None, 0.0, 0.1);
        starved.flow.held = 1.0;
        assert!(starved.is_short(usual));
    }
}
