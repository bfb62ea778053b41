//! The time that the rest of a migration would take, and the changes that would end one that
//! stalls.

use crate::decision::{Remedy, Stuck};
use crate::limits::{Limits, Postcopy};
use crate::rates::Flow;
use crate::sample::Sample;
use std::time::Duration;

/// The part of the drain rate on which the controller relies.
pub(crate) const COUNTED_ON: f64 = 0.9;
/// The device state's time before it was measured: a guess.
const DEVICE: Duration = Duration::from_millis(25);
/// The drain rate has to exceed a slowed guest's dirtying by this factor.
const ROOM: f64 = 0.8;
/// The least and the most per cent by which a guest is slowed; QEMU allows 99.
pub(crate) const SLOWED: (u8, u8) = (20, 99);

/// The time that is spent whatever number of bytes is left.
pub(crate) fn fixed(flow: Flow) -> Duration {
    flow.delay + DEVICE
}

/// The downtime that `left` bytes would take.
pub(crate) fn needs(left: u64, flow: Flow) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
    let seconds = left as f64 / flow.drain;
    fixed(flow) + Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
}

/// The downtime that `left` bytes of pages take at `drain` bytes per second, with bytes under way
/// for `delay` and a device state of usual size.
pub fn downtime_for(left: u64, drain: f64, delay: Duration) -> Duration {
    needs(left, Flow::steady(drain, delay))
}

/// Per cent by which the guest has to be slowed for its dirtying to stay behind the drain rate.
pub(crate) fn first_throttle(flow: Flow, sample: &Sample) -> u8 {
    let share = sample.dirty_rate.map_or(0.0, |dirty| 1.0 - ROOM * flow.drain / dirty);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "20 to 99; `max` takes the number that is none as 20"
    )]
    let percent = (100.0 * share).max(f64::from(SLOWED.0)).min(f64::from(SLOWED.1)) as u8;
    percent
}

/// A migration that stalls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stall<'a> {
    pub(crate) limits: &'a Limits,
    /// The longest downtime now.
    pub(crate) max: Duration,
    /// Bytes left after the last synchronisation.
    pub(crate) left: u64,
    /// The most bytes that were left after any synchronisation.
    pub(crate) highest: u64,
    pub(crate) flow: Flow,
    pub(crate) sample: &'a Sample,
}

impl Stall<'_> {
    pub(crate) fn describe(self) -> Stuck {
        let Self { limits, max, left, flow, sample, .. } = self;
        let fixed = fixed(flow);
        let mut would = vec![Remedy::Downtime(self.downtime_needed())];
        if !limits.throttle && fixed < max {
            would.push(Remedy::Throttle(first_throttle(flow, sample)));
        }
        if limits.postcopy == Postcopy::Never {
            would.push(Remedy::Postcopy);
        }
        if let Some(drain) = self.drain_needed() {
            would.push(Remedy::Link(flow.wire * (drain / flow.drain).max(1.0 / ROOM)));
        }
        Stuck {
            left,
            drain: flow.drain,
            wire: flow.wire,
            dirty: sample.dirty_rate,
            needs: needs(left, flow),
            fixed,
            max,
            throttle: sample.throttle,
            would,
        }
    }

    /// The downtime with which the migration would end, to 50 ms. More is left when QEMU stops
    /// earlier: as much as ever was.
    fn downtime_needed(&self) -> Duration {
        const STEP: u128 = 50;
        let fixed = fixed(self.flow);
        let most = needs(self.highest.max(self.left), self.flow).saturating_sub(fixed);
        let longest = fixed + most.mul_f64(1.05 / COUNTED_ON);
        let ms = longest.as_millis().div_ceil(STEP) * STEP;
        Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX))
    }

    /// Per cent by which a guest that is slowed by `now` has to be slowed next. The value follows
    /// from the guest's writes, in steps that are neither too small nor too large.
    pub(crate) fn next_throttle(&self, now: u8) -> u8 {
        let rest = f64::from(SLOWED.1.saturating_sub(now));
        let speed = 1.0 - f64::from(now) / 100.0;
        let wanted = self.writes().map_or(0.0, |writes| {
            100.0 * (1.0 - speed * ROOM * self.flow.drain / writes) - f64::from(now)
        });
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 79; `max` takes the number that is none as the least"
        )]
        let more = wanted.max(rest / 4.0).min(rest * 3.0 / 5.0).ceil() as u8;
        now.saturating_add(more).min(SLOWED.1)
    }

    /// Bytes of pages that the guest writes to per second, approximately.
    fn writes(&self) -> Option<f64> {
        /// The most of the working set that counts as dirty at a time: beyond that the measured
        /// rate is no evidence.
        const DIRTY: f64 = 0.95;
        #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
        let share = self.left as f64 / self.highest.max(1) as f64;
        // QEMU's rate leaves out writes to pages that are dirty already. These pages are a large
        // part of the working set, which is about the most that was ever left.
        Some(self.sample.dirty_rate? / (1.0 - share.min(DIRTY)))
    }

    /// The drain rate with which the migration would end.
    fn drain_needed(&self) -> Option<f64> {
        let time = self.max.saturating_sub(fixed(self.flow));
        #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
        let all_at_once = self.highest as f64 / (COUNTED_ON * time.as_secs_f64());
        (!time.is_zero()).then_some(all_at_once.min(self.writes()? / ROOM))
    }
}
