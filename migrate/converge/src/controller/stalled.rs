//! The steps against a rest that does not shrink: downtime, a slower guest, postcopy, or a report.

use super::Controller;
use crate::decision::{Stuck, Why};
use crate::forecast::{first_throttle, fixed, needs, Stall, COUNTED_ON, SLOWED};
use crate::limits::Postcopy;
use crate::passes::Window;
use crate::rates::Flow;
use crate::sample::Sample;
use crate::step::{Action, Step};
use crate::switchover::{threshold, whole};
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

impl Controller {
    /// Acts on a window in which the rest did not shrink.
    pub(super) fn judge(&mut self, window: Window, flow: Flow, sample: &Sample, step: &mut Step) {
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
    pub(super) fn check_throttle(&mut self, sample: &Sample) {
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

    /// Reports a migration that has stalled for long.
    pub(super) fn report_in_time(&mut self, flow: Flow, sample: &Sample, step: &mut Step) {
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

    fn stall<'a>(&'a self, window: Window, flow: Flow, sample: &'a Sample) -> Stall<'a> {
        let (limits, max, left) = (&self.limits, self.max, window.left);
        Stall { limits, max, left, highest: self.passes.highest(), flow, sample }
    }
}

/// Whether this time has passed.
fn is_past(since: Option<Duration>, time: Duration, sample: &Sample) -> bool {
    since.is_some_and(|since| sample.at.saturating_sub(since) >= time)
}
