//! The controller: a plan that readers look up without a lock, and the measurements behind it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use codec::Settings;

use crate::choice::{Choice, Observation};
use crate::config::{Config, MAX_CANDIDATES};
use crate::explain::Decision;
use crate::flow::Signals;
use crate::plan::Plan;
use crate::planner::Planner;
use crate::Class;

/// Chooses the settings for each chunk. Shared by readers, codec threads and the thread that ticks.
#[derive(Debug)]
pub struct Controller {
    candidates: Vec<Settings>,
    /// Packed plans, see [`Plan`]. Relaxed: each is one word, and no other data depends on it.
    plans: [AtomicU64; Class::COUNT],
    /// Chunks chosen for so far, to spread candidates evenly. Relaxed.
    counts: [AtomicU32; Class::COUNT],
    stopped: AtomicBool,
    planner: Mutex<Planner>,
}

impl Controller {
    /// Creates a controller without observations. It ignores duplicate candidates and candidates
    /// beyond [`MAX_CANDIDATES`]. If no candidate is given, zstd 1 is the only one.
    pub fn new(mut config: Config) -> Self {
        let mut candidates: Vec<Settings> = Vec::new();
        for settings in &config.candidates {
            if candidates.len() < MAX_CANDIDATES && !candidates.contains(settings) {
                candidates.push(*settings);
            }
        }
        if candidates.is_empty() {
            candidates.push(Settings::default());
        }
        let share = Some(config.explore_share).filter(|share| share.is_finite());
        config.explore_share = share.unwrap_or(0.02).clamp(1e-4, 0.5);
        config.chunk_bytes = config.chunk_bytes.max(1);
        let planner = Planner::new(config, candidates.clone());
        let this = Self {
            candidates,
            plans: Default::default(),
            counts: Default::default(),
            stopped: AtomicBool::new(false),
            planner: Mutex::new(planner),
        };
        this.lock().plan(&this.plans);
        this
    }

    /// The settings for a chunk of `class`. The call takes two atomic operations.
    pub fn choose(&self, class: Class) -> Choice {
        let number = class as usize;
        let plan = Plan::unpack(self.plans[number].load(Ordering::Relaxed));
        let count = self.counts[number].fetch_add(1, Ordering::Relaxed);
        if plan.period > 0 && count % u32::from(plan.period) == u32::from(plan.period) - 1 {
            return Choice { candidate: plan.explore, class, explore: true };
        }
        // `high` each time that count times share passes a whole number: the most even spread.
        let share = u64::from(plan.share) + u64::from(plan.share == u16::MAX);
        let passes = |count: u64| (count * share) >> 16;
        let count = u64::from(count);
        let candidate = if passes(count + 1) > passes(count) { plan.high } else { plan.low };
        Choice { candidate, class, explore: false }
    }

    /// The settings of `choice`.
    pub fn settings(&self, choice: &Choice) -> Settings {
        self.candidates[choice.candidate()]
    }

    /// The candidates, by number.
    pub fn candidates(&self) -> &[Settings] {
        &self.candidates
    }

    /// Records the outcome for a chunk. Takes a lock briefly; every eighth call makes a new plan
    /// (some microseconds).
    pub fn observe(&self, observation: &Observation) {
        let mut planner = self.lock();
        if planner.observe(observation) && !self.stopped.load(Ordering::Relaxed) {
            planner.plan(&self.plans);
        }
    }

    /// Updates the estimates of the flow; call it every 25 to 100 ms, and every 10 ms until it
    /// [knows the link](Self::knows_link). `now`: time since any fixed moment.
    pub fn tick(&self, now: Duration, signals: &Signals) {
        let mut planner = self.lock();
        planner.now = planner.now.max(now);
        if planner.flow.tick(now, signals) && !self.stopped.load(Ordering::Relaxed) {
            planner.plan(&self.plans);
        }
    }

    /// Whether the plans rest on an estimate of the link. Until then each chunk gets the cheapest
    /// candidate that compresses, which is wrong for most links.
    pub fn knows_link(&self) -> bool {
        self.lock().flow.is_known()
    }

    /// Records that the VM has stopped: from now on each class gets the one candidate with which a
    /// chunk is encoded and sent soonest, and nothing explores.
    pub fn stopped(&self) {
        // Set under the lock: otherwise a plan in the making could replace this one.
        let mut planner = self.lock();
        if !self.stopped.swap(true, Ordering::Relaxed) {
            planner.plan_for_the_end(&self.plans);
        }
    }

    /// Whether [`stopped`](Self::stopped) was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// The number of decisions so far, and the stored ones after the first `known`.
    pub fn explain_after(&self, known: u64) -> (u64, Vec<Decision>) {
        let planner = self.lock();
        let fresh = usize::try_from(planner.decisions.saturating_sub(known)).unwrap_or(usize::MAX);
        let skip = planner.log.len().saturating_sub(fresh);
        (planner.decisions, planner.log.iter().skip(skip).cloned().collect())
    }

    /// The current decision, whether or not it changed anything.
    pub fn current(&self) -> Decision {
        let planner = self.lock();
        planner.decision(self.stopped.load(Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, Planner> {
        // No panic can happen here between two changes that depend on each other.
        self.planner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
