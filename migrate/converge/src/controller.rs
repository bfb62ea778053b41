//! The state machine that decides on a migration's end.

use crate::decision::{Stuck, Why};
use crate::forecast::{first_throttle, fixed, needs, Stall, COUNTED_ON, SLOWED};
use crate::limits::{Limits, Postcopy};
use crate::passes::{Passes, Window};
use crate::rates::{Flow, Rates};
use crate::sample::{Phase, Sample};
use crate::step::{Action, Step};
use crate::switchover::{threshold, whole, Switchover, LONGEST, MILLISECOND};
use std::time::Duration;

/// QEMU applies a new throttle at every second synchronisation, the first one at the fourth. A
/// throttle that it has not applied for this long and at so many synchronisations is given up.
const APPLIED: (Duration, u64) = (Duration::from_secs(20), 5);
/// The number of steps after which a slowed guest that does not converge changes to postcopy, if
/// that is allowed.
const STEPS: u32 = 3;
/// The largest factor by which QEMU's own bandwidth is assumed to be too small.
const MOST_FACTOR: u32 = 16;
/// A migration that stalls for this long, with everything that is allowed, does not converge.
const CERTAIN: Duration = Duration::from_secs(5);
/// A migration that stalls for this long is reported, whatever is still being tried.
const REPORTED: Duration = Duration::from_secs(45);
/// Ends a migration.
#[derive(Debug)]
pub struct Controller {
    limits: Limits,
    /// Whether QEMU has avail-switchover-bandwidth.
    has_bandwidth: bool,
    rates: Rates,
    passes: Passes,
    /// The longest downtime now: the operator may change it.
    max: Duration,
    /// The downtime wanted now.
    goal: Duration,
    set: Option<Switchover>,
    /// The factor by which QEMU's own bandwidth is assumed to be too small.
    factor: u32,
    /// QEMU's downtime-limit, unless another client has set it; `None` if that is not known.
    limit: Option<Duration>,
    /// `limit` before the last [`Action::StopAt`].
    former_limit: Option<Duration>,
    /// The requested throttle, per cent.
    throttle: u8,
    /// The time of a request that QEMU has not applied yet, and the synchronisations before it.
    awaits_throttle: Option<(Duration, u64)>,
    /// Whether QEMU has refused a throttle.
    refuses_throttle: bool,
    /// Throttles that QEMU has applied, or that were given up.
    steps: u32,
    /// The time since which the migration has stalled.
    stalled: Option<Duration>,
    /// When the rest first did not shrink.
    first_flat: Option<Duration>,
    last_window: Option<Window>,
    /// Whether the last window shows by itself that the rest does not shrink.
    outruns: bool,
    is_reported: bool,
    is_postcopy: bool,
    is_late: bool,
    is_cancelled: bool,
}

impl Controller {
    /// Creates a controller. `limit` is QEMU's downtime-limit; `has_bandwidth` tells whether QEMU
    /// has the parameter avail-switchover-bandwidth.
    pub fn new(limits: Limits, limit: Duration, has_bandwidth: bool) -> Self {
        let max = limits.max_downtime.clamp(MILLISECOND, LONGEST);
        Self {
            limits,
            has_bandwidth,
            rates: Rates::default(),
            passes: Passes::default(),
            max,
            goal: (max / 2).max(MILLISECOND),
            set: None,
            factor: 1,
            limit: Some(limit),
            former_limit: None,
            throttle: 0,
            awaits_throttle: None,
            refuses_throttle: false,
            steps: 0,
            stalled: None,
            first_flat: None,
            last_window: None,
            outruns: false,
            is_reported: false,
            is_postcopy: false,
            is_late: false,
            is_cancelled: false,
        }
    }

    /// The longest downtime allowed now.
    pub fn max_downtime(&self) -> Duration {
        self.max
    }

    /// Records that an action of the last step was not done.
    pub fn not_done(&mut self, action: Action) {
        match action {
            Action::StopAt(_) => (self.set, self.limit) = (None, self.former_limit),
            // QEMU will not do this later either.
            Action::StartPostcopy => {
                self.is_postcopy = false;
                self.limits.postcopy = Postcopy::Never;
            }
            // The next remedy is due.
            Action::Throttle(_) => (self.awaits_throttle, self.refuses_throttle) = (None, true),
            Action::Cancel => {}
        }
    }

    /// Records that QEMU has not answered an action of the last step in time: it may do it later.
    pub fn unanswered(&mut self, action: Action) {
        match action {
            // QEMU's next answer shows its limit, whichever it is. It is no operator's.
            Action::StopAt(_) => (self.set, self.limit) = (None, None),
            Action::Cancel => self.is_cancelled = false,
            Action::StartPostcopy => self.not_done(action),
            // The samples show whether QEMU applies it.
            Action::Throttle(_) => {}
        }
    }

    /// Decides after an observation.
    pub fn step(&mut self, sample: &Sample) -> Step {
        let mut step = Step::default();
        if self.is_cancelled || sample.phase == Phase::Over {
            return step;
        }
        self.check_deadline(sample, &mut step);
        if sample.phase != Phase::Precopy || self.is_cancelled || self.is_postcopy {
            return step;
        }
        self.check_operator(sample, &mut step);
        self.check_throttle(sample);
        self.rates.push(sample);
        let window = self.passes.push(sample);
        self.last_window = window.or(self.last_window);
        if let Postcopy::After(after) = self.limits.postcopy {
            if sample.at >= after {
                self.start_postcopy(sample, Why::PostcopyAfter { after }, &mut step);
                return step;
            }
        }
        let Some(flow) = self.rates.flow() else {
            self.hold(sample, &mut step);
            return step;
        };
        if let Some(window) = window {
            self.judge(window, flow, sample, &mut step);
        }
        self.report_in_time(flow, sample, &mut step);
        if !self.is_postcopy {
            self.choose_moment(flow, sample, &mut step);
        }
        step
    }

    fn check_deadline(&mut self, sample: &Sample, step: &mut Step) {
        let Some(after) = self.limits.deadline.filter(|after| sample.at >= *after) else { return };
        if sample.phase.may_be_cancelled() {
            self.is_cancelled = true;
            step.actions.push(Action::Cancel);
            step.note(sample, Why::Deadline { after });
        } else if !self.is_late {
            self.is_late = true;
            step.note(sample, Why::TooLate { after });
        }
    }

    /// Adopts a downtime-limit that another client has set.
    fn check_operator(&mut self, sample: &Sample, step: &mut Step) {
        let Some(there) = sample.downtime_limit else { return };
        if *self.limit.get_or_insert(there) == there {
            return;
        }
        self.limit = Some(there);
        self.max = there.clamp(MILLISECOND, LONGEST);
        self.goal = self.max;
        (self.set, self.is_reported) = (None, false);
        (self.stalled, self.first_flat) = (None, None);
        self.passes.restart(sample);
        step.note(sample, Why::LimitChanged { max: self.max });
    }

    /// The settings for the time in which no rate is known. The caller may set them before the
    /// migration begins: QEMU could stop the VM before the first observation.
    pub fn held(&mut self) -> Switchover {
        let downtime_limit = whole((self.max / 20).max(MILLISECOND));
        let held = Switchover { downtime_limit, bandwidth: None };
        self.former_limit = self.limit;
        (self.set, self.limit) = (Some(held), Some(downtime_limit));
        held
    }

    fn hold(&mut self, sample: &Sample, step: &mut Step) {
        if self.set.is_none() {
            let held = self.held();
            step.actions.push(Action::StopAt(held));
            step.note(sample, Why::Held { limit: held.downtime_limit });
        }
    }

    /// Acts on a window in which the rest did not shrink.
    fn judge(&mut self, window: Window, flow: Flow, sample: &Sample, step: &mut Step) {
        // QEMU counts a page once in a pass. For a guest that writes faster than pages drain, QEMU
        // therefore reports about the drain rate.
        let outruns = sample.dirty_rate.is_some_and(|dirty| dirty >= COUNTED_ON * flow.drain);
        let is_certain = outruns && (window.flat > 0 || !window.is_second);
        self.outruns = is_certain;
        if window.flat == 0 && !is_certain {
            (self.stalled, self.factor) = (None, 1);
            return;
        }
        self.first_flat.get_or_insert(window.since);
        let needs = needs(window.left, flow);
        if self.goal < self.max {
            let from = self.goal;
            let enough = needs.mul_f64(1.1 / COUNTED_ON).max(from.mul_f64(1.5));
            self.goal = whole(if needs <= self.max { enough.min(self.max) } else { self.max });
            let to = self.goal;
            step.note(sample, Why::Raised { from, to, left: window.left, needs });
            // A drain rate that varies, or a calm moment of the guest, may still make the downtime
            // sufficient.
            return;
        }
        if !is_certain && window.flat < 2 {
            return;
        }
        self.stalled.get_or_insert(sample.at);
        if !self.has_bandwidth
            && self.factor < MOST_FACTOR
            && threshold(self.goal, flow) > window.left
        {
            self.factor *= 2;
            step.note(sample, Why::Underestimated { left: window.left, factor: self.factor });
            return;
        }
        // A downtime that is spent before the first page cannot be reached by slowing the guest.
        if self.limits.throttle && !self.refuses_throttle && fixed(flow) < self.max {
            if self.awaits_throttle.is_some() {
                return;
            }
            let may_turn = self.limits.postcopy == Postcopy::WhenNeeded && self.steps >= STEPS;
            if self.throttle < SLOWED.1 && !may_turn {
                self.slow_down(window, flow, sample, step);
                return;
            }
        }
        let stuck = self.stall(window, flow, sample).describe();
        match self.limits.postcopy {
            Postcopy::WhenNeeded => {
                self.start_postcopy(sample, Why::PostcopyNeeded(stuck), step);
            }
            Postcopy::Never if window.flat >= 2 && is_past(self.stalled, CERTAIN, sample) => {
                self.report(stuck, sample, step);
            }
            Postcopy::Never => {}
            // The migration ends at that time.
            Postcopy::After(_) => {}
        }
    }

    /// Ignores measurements from before QEMU applies a throttle: they are no evidence about it.
    fn check_throttle(&mut self, sample: &Sample) {
        let Some((since, syncs)) = self.awaits_throttle else { return };
        let is_late = sample.at.saturating_sub(since) >= APPLIED.0
            && sample.syncs.saturating_sub(syncs) >= APPLIED.1;
        if sample.throttle >= self.throttle || is_late {
            self.awaits_throttle = None;
            self.steps += 1;
            self.passes.restart(sample);
        }
    }

    fn slow_down(&mut self, window: Window, flow: Flow, sample: &Sample, step: &mut Step) {
        let percent = match self.throttle {
            0 => first_throttle(flow, sample),
            now => self.stall(window, flow, sample).next_throttle(now),
        };
        self.throttle = percent;
        self.awaits_throttle = Some((sample.at, sample.syncs));
        step.actions.push(Action::Throttle(percent));
        let (dirty, drain) = (sample.dirty_rate, flow.drain);
        step.note(sample, Why::Throttled { percent, dirty, drain });
    }

    fn start_postcopy(&mut self, sample: &Sample, why: Why, step: &mut Step) {
        self.is_postcopy = true;
        step.actions.push(Action::StartPostcopy);
        step.note(sample, why);
    }

    /// Reports a migration that has stalled for long.
    fn report_in_time(&mut self, flow: Flow, sample: &Sample, step: &mut Step) {
        let Some(window) = self.last_window else { return };
        let is_flat = window.flat > 0 || self.outruns;
        let is_time = is_flat && is_past(self.first_flat, REPORTED, sample);
        if is_time && !matches!(self.limits.postcopy, Postcopy::After(_)) {
            let stuck = self.stall(window, flow, sample).describe();
            self.report(stuck, sample, step);
        }
    }

    fn report(&mut self, stuck: Stuck, sample: &Sample, step: &mut Step) {
        if !self.is_reported {
            self.is_reported = true;
            step.note(sample, Why::Stuck(stuck));
        }
    }

    /// Sets QEMU's threshold for the downtime wanted.
    fn choose_moment(&mut self, flow: Flow, sample: &Sample, step: &mut Step) {
        let (goal, fixed, drain) = (self.goal, fixed(flow), flow.drain);
        let own = (!self.has_bandwidth).then_some(self.factor);
        let Some((wanted, left)) = Switchover::for_downtime(goal, flow, own) else { return };
        if self.set.is_some_and(|set| set.is_near(wanted)) {
            return;
        }
        self.set(wanted, step);
        step.note(sample, Why::StopAt { goal, fixed, drain, left });
    }

    fn stall<'a>(&'a self, window: Window, flow: Flow, sample: &'a Sample) -> Stall<'a> {
        let (limits, max, left) = (&self.limits, self.max, window.left);
        Stall { limits, max, left, highest: self.passes.highest(), flow, sample }
    }

    fn set(&mut self, wanted: Switchover, step: &mut Step) {
        self.former_limit = self.limit;
        (self.set, self.limit) = (Some(wanted), Some(wanted.downtime_limit));
        step.actions.push(Action::StopAt(wanted));
    }
}

/// Whether this time has passed.
fn is_past(since: Option<Duration>, time: Duration, sample: &Sample) -> bool {
    since.is_some_and(|since| sample.at.saturating_sub(since) >= time)
}
