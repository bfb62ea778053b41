//! The state machine that decides on a migration's end.

mod stalled;

use crate::decision::Why;
use crate::forecast::fixed;
use crate::limits::{Limits, Postcopy};
use crate::passes::{Passes, Window};
use crate::rates::{Flow, Rates};
use crate::sample::{Phase, Sample};
use crate::step::{Action, Step};
use crate::switchover::{whole, Switchover, LONGEST, MILLISECOND};
use std::time::Duration;

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

    /// The settings for the time in which no rate is known. The caller sets them before the
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

    fn start_postcopy(&mut self, sample: &Sample, why: Why, step: &mut Step) {
        self.is_postcopy = true;
        step.actions.push(Action::StartPostcopy);
        step.note(sample, why);
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

    fn set(&mut self, wanted: Switchover, step: &mut Step) {
        self.former_limit = self.limit;
        (self.set, self.limit) = (Some(wanted), Some(wanted.downtime_limit));
        step.actions.push(Action::StopAt(wanted));
    }
}
