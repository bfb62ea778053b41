//! The bytes left after each synchronisation, and whether they become less.

use crate::Sample;
use std::time::Duration;

/// A window lasts at least this long, and until QEMU has read the dirty log in it.
const WINDOW: Duration = Duration::from_secs(1);
/// Fewer bytes are left if they are at most this part of those left in the window before.
const LESS: f64 = 0.9;
/// The first pass is over once this part of what it sends was sent. QEMU skips pages that it need
/// not send.
const WHOLE: f64 = 0.98;

/// A window with at least one synchronisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Window {
    /// The most bytes that were left right after a synchronisation.
    pub(crate) left: u64,
    /// Whether another window came before this one.
    pub(crate) is_second: bool,
    /// Windows in which the rest did not shrink.
    pub(crate) flat: u32,
    /// When the window before this one ended, or else this one: the rest was no less then.
    pub(crate) since: Duration,
}

/// The windows of a migration.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    /// When the present window began; `None` in the first pass.
    since: Option<Duration>,
    /// Bytes that the first pass sends; 0 while unknown. They may be far less than the RAM:
    /// unplugged virtio-mem, and pages that a balloon reports as free, are not sent.
    first: u64,
    syncs: u64,
    /// The most left in the present window.
    peak: Option<u64>,
    /// The most left in the window before, and its end.
    last: Option<(u64, Duration)>,
    flat: u32,
    highest: u64,
}

#[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
impl Passes {
    /// Adds a sample; returns the window that it ends, if it does.
    pub(crate) fn push(&mut self, sample: &Sample) -> Option<Window> {
        let Some(since) = self.since else {
            // QEMU reads the dirty log once before it sends anything.
            if sample.syncs <= 1 {
                self.first = sample.sent.saturating_add(sample.remaining).min(sample.total);
            }
            let first = if self.first > 0 { self.first } else { sample.total };
            if first > 0 && sample.sent as f64 >= WHOLE * first as f64 {
                self.since = Some(sample.at);
                // The synchronisation at the end of the first pass may be this sample's.
                let is_new = sample.syncs != self.syncs;
                self.peak = Some(sample.remaining).filter(|_| is_new);
            }
            self.syncs = sample.syncs;
            return None;
        };
        if sample.syncs != self.syncs {
            self.syncs = sample.syncs;
            self.peak = self.peak.max(Some(sample.remaining));
        }
        let left = self.peak?;
        if sample.at.saturating_sub(since) < WINDOW {
            return None;
        }
        let is_flat = self.last.is_some_and(|(last, _)| left as f64 > LESS * last as f64);
        self.flat = if is_flat { self.flat.saturating_add(1) } else { 0 };
        let before = self.last.replace((left, sample.at));
        let is_second = before.is_some();
        let since = before.map_or(sample.at, |(_, end)| end);
        self.highest = self.highest.max(left);
        (self.since, self.peak) = (Some(sample.at), None);
        Some(Window { left, is_second, flat: self.flat, since })
    }

    /// The most that was left in any window.
    pub(crate) fn highest(&self) -> u64 {
        self.highest
    }

    /// Starts counting again: something was changed, and only later synchronisations show its
    /// effect.
    pub(crate) fn restart(&mut self, sample: &Sample) {
        self.since = self.since.map(|_| sample.at);
        self.syncs = sample.syncs;
        self.flat = 0;
        self.last = None;
        self.peak = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;

    fn sample(seconds: u64, syncs: u64, sent: u64, remaining: u64) -> Sample {
        Sample {
            at: Duration::from_secs(seconds),
            phase: Phase::Precopy,
            total: 1000,
            remaining,
            syncs,
            sent,
            data: sent,
            drain: 0.0,
            wire: 0,
            dirty_rate: None,
            bandwidth: None,
            delay: Duration::ZERO,
            throttle: 0,
            downtime_limit: None,
            max_bandwidth: None,
        }
    }

    /// Nine tenths of the RAM is unplugged virtio-mem.
    #[test]
    fn memory_that_is_never_sent_does_not_prolong_the_first_pass() {
        let mut passes = Passes::default();
        assert_eq!(passes.push(&sample(1, 1, 0, 100)), None);
        assert_eq!(passes.push(&sample(2, 1, 97, 3)), None);
        assert_eq!(passes.push(&sample(3, 2, 100, 40)), None);
        let window = passes.push(&sample(5, 3, 140, 40));
        let since = Duration::from_secs(5);
        assert_eq!(window, Some(Window { left: 40, is_second: false, flat: 0, since }));
        // A balloon reports half of the RAM as free during the pass.
        let mut passes = Passes::default();
        assert_eq!(passes.push(&sample(1, 1, 0, 1000)), None);
        assert_eq!(passes.push(&sample(2, 1, 400, 100)), None);
        assert_eq!(passes.push(&sample(3, 2, 500, 40)), None);
        assert!(passes.push(&sample(5, 3, 540, 40)).is_some());
    }
}
