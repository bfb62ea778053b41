//! QEMU's settings for the downtime wanted.

use crate::forecast::{fixed, COUNTED_ON};
use crate::rates::Flow;
use std::time::Duration;

/// The longest downtime-limit that QEMU accepts.
pub(crate) const LONGEST: Duration = Duration::from_millis(2_000_000);
pub(crate) const MILLISECOND: Duration = Duration::from_millis(1);

/// QEMU's settings that decide when it stops the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switchover {
    /// downtime-limit, whole milliseconds, at least 1.
    pub downtime_limit: Duration,
    /// avail-switchover-bandwidth, bytes per second; `None` where this QEMU has no such parameter
    /// or is to use its own measurement.
    pub bandwidth: Option<u64>,
}

impl Switchover {
    /// The settings for a downtime of `goal`, and the bytes of pages at which QEMU then stops the
    /// VM. `own`: QEMU uses its own bandwidth, which is too small by this factor. Returns `None`
    /// while QEMU's bandwidth is not known.
    pub(crate) fn for_downtime(
        goal: Duration,
        flow: Flow,
        own: Option<u32>,
    ) -> Option<(Self, u64)> {
        let left = threshold(goal, flow);
        #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
        let bytes = left as f64;
        let limit = whole(goal);
        let wanted = if let Some(factor) = own {
            let time = Duration::from_secs_f64((bytes / flow.bandwidth?).clamp(0.0, 1e6));
            Self { downtime_limit: whole(time.min(limit) * factor), bandwidth: None }
        } else {
            let bandwidth = to_u64(bytes / limit.as_secs_f64()).max(1);
            Self { downtime_limit: limit, bandwidth: Some(bandwidth) }
        };
        Some((wanted, left))
    }

    /// Whether `wanted` means nearly the same threshold. Rates vary: one that falls by a tenth
    /// makes the downtime longer, one that rises by less than a quarter changes little.
    pub(crate) fn is_near(self, wanted: Self) -> bool {
        let near = |set: u64, wanted: u64| match wanted.checked_sub(set) {
            Some(more) => more.saturating_mul(4) <= set,
            None => (set - wanted).saturating_mul(10) <= set,
        };
        let ms = |one: Self| u64::try_from(one.downtime_limit.as_millis()).unwrap_or(u64::MAX);
        match (self.bandwidth, wanted.bandwidth) {
            (Some(a), Some(b)) => self.downtime_limit == wanted.downtime_limit && near(a, b),
            (None, None) => near(ms(self), ms(wanted)),
            _ => false,
        }
    }
}

/// The bytes of pages for which a downtime of `goal` has time, at `drain` bytes per second and with
/// bytes under way for `delay`. The controller makes QEMU stop the VM when this much is left.
pub fn bytes_for(goal: Duration, drain: f64, delay: Duration) -> u64 {
    threshold(goal, Flow::steady(drain, delay))
}

/// The bytes of pages for which a downtime of `goal` has time.
pub(crate) fn threshold(goal: Duration, flow: Flow) -> u64 {
    // The goal is spent before the first page: the threshold is as small as possible.
    let spend = goal.saturating_sub(fixed(flow)).max(goal / 3).max(goal.min(MILLISECOND));
    to_u64(COUNTED_ON * flow.drain * spend.as_secs_f64())
}

/// Whole milliseconds, at least one.
pub(crate) fn whole(time: Duration) -> Duration {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(ms.max(1)).min(LONGEST)
}

/// The whole part of a number. A negative number, and one that is none, gives 0; one of 2^64 and
/// more gives 2^64 - 1.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, and takes a number that is none as 0"
)]
pub fn to_u64(number: f64) -> u64 {
    number as u64
}
