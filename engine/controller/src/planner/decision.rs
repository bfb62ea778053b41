//! States the current plans, with the figures behind them.

use super::Planner;
use crate::estimate::Point;
use crate::explain::{Candidate, ClassMix, Decision};
use crate::mix::Mix;
use crate::Class;

impl Planner {
    fn classes(&self, mix: &Mix) -> Vec<ClassMix> {
        let used = Class::ALL.into_iter().zip(&self.weights).zip(&mix.pairs);
        used.filter(|((_, weight), _)| **weight >= 0.01)
            .map(|((class, weight), pair)| {
                let part = |candidate: usize, share| (self.candidates[candidate], share);
                let mut parts = vec![part(pair.low, 1.0 - pair.share), part(pair.high, pair.share)];
                parts.retain(|(_, share)| *share > 0.0);
                ClassMix { class, weight: *weight, parts, candidates: Vec::new() }
            })
            .collect()
    }

    /// The current plans with the figures behind them.
    pub(crate) fn decision(&self, stopped: bool) -> Decision {
        let limits = self.limits();
        let mut classes = Vec::new();
        let mut at = Point { cost: 0.0, size: 0.0 };
        if let Some(mix) = &self.mix {
            at = mix.at;
            classes = self.classes(mix);
            for class in &mut classes {
                let estimates = &self.estimates[class.class as usize];
                class.candidates = (0..self.candidates.len())
                    .map(|candidate| {
                        let point = estimates.point(candidate);
                        Candidate {
                            settings: self.candidates[candidate],
                            size: point.size,
                            cost_ns: point.cost,
                            observations: estimates.seen(candidate),
                        }
                    })
                    .collect();
            }
        }
        Decision {
            at: self.now,
            bottleneck: self.flow.bottleneck,
            stopped,
            drain_bytes_per_s: self.flow.link.filter(|_| self.flow.measured).map(|link| link * 1e9),
            cores: limits.workers,
            busy_share: self.flow.busy,
            used_cores: self.flow.used,
            qemu_bytes_per_s: (self.flow.floor > 0.0).then(|| 1e9 / self.flow.floor),
            encoded_share: at.size,
            encode_ns: at.cost,
            link_ns: at.size / limits.link,
            cpu_ns: limits.cpu_time(at),
            idle_used: self.mix.is_some_and(|mix| mix.idle_used),
            classes,
        }
    }
}
