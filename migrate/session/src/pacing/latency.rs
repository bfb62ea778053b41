//! The latency of the path without the queue that the window itself causes.
//!
//! The time from the reading of a frame to its acknowledgement is the latency of the path plus the
//! wait behind earlier frames. In a steady flow the window determines that wait, so a minimum over
//! recent frames would grow by the window's own queue each time it is measured. As in BBR, a
//! *probe* lets the queue drain and measures the frames that follow. It runs after 10 s without a
//! frame as fast as the minimum. It also runs soon after all frames have become slower than the
//! window explains, or the rate has fallen: the path may have changed, and too small a window
//! lowers the rate with each round trip.

use std::time::{Duration, Instant};

/// Drain time of the bytes that the relays may hold beyond the path itself. With QEMU's own socket
/// buffers the hidden part of the downtime stays under 20 ms.
pub(super) const QUEUE: Duration = Duration::from_millis(15);

/// A minimum that no frame has confirmed for this long is measured again.
const CONFIRMED: Duration = Duration::from_secs(10);
/// Frames slower than the window explains for this long, and for a round trip, cause a probe.
const SLOW: Duration = Duration::from_millis(200);
/// How long a probe measures; longer if no frame has come back by then.
const LOOK: Duration = Duration::from_millis(50);
/// A rate that has fallen to this fraction causes a probe too. When the latency has risen by less
/// than the allowed queue, the window still explains the frames' delay, and yet the rate falls.
const FALLEN: f64 = 0.9;
/// Pause between such probes: longer after each that finds the latency unchanged.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    Idle,
    /// Frames read before `since` drain.
    Draining {
        since: Instant,
    },
    /// Frames read after `since` show the latency of the path.
    Looking {
        since: Instant,
        least: Option<Duration>,
    },
}

/// A frame that was acknowledged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) now: Instant,
    /// From reading to acknowledgement.
    pub(super) latency: Duration,
    /// The part of `latency` in which the frame's own bytes drain at the drain rate.
    pub(super) own: Duration,
    /// Bytes still in flight.
    pub(super) in_flight: u64,
    /// The drain rate, bytes per second.
    pub(super) rate: f64,
    /// How long a whole window takes to drain at that rate.
    pub(super) window: Duration,
}

impl Sample {
    /// Whether the frame was read after `moment`.
    fn is_read_after(&self, moment: Instant) -> bool {
        self.now.checked_sub(self.latency).is_some_and(|read| read >= moment)
    }
}

/// Tracks the latency of the path.
#[derive(Debug)]
pub(super) struct Latency {
    least: Option<Duration>,
    /// When a frame was last about as fast as `least`.
    confirmed: Instant,
    probe: Probe,
    /// The best rate since the last probe.
    best_rate: f64,
    /// Since when all frames have been slower than the window explains.
    slow_since: Option<Instant>,
    /// A reader has waited for the window since `slow_since`.
    is_limited: bool,
    /// Slow frames cause no probe before this.
    not_before: Instant,
    pause: Duration,
    round: Round,
    /// The last round found no queue although the window was the limit.
    has_no_queue: bool,
}

/// One round trip: the time from the reading of a frame to its acknowledgement.
#[derive(Debug)]
struct Round {
    since: Instant,
    least: Duration,
    is_limited: bool,
}

impl Round {
    fn new(now: Instant) -> Self {
        Self { since: now, least: Duration::MAX, is_limited: false }
    }
}

impl Latency {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            least: None,
            confirmed: now,
            probe: Probe::Idle,
            best_rate: 0.0,
            slow_since: None,
            is_limited: false,
            not_before: now,
            pause: PAUSE.0,
            round: Round::new(now),
            has_no_queue: false,
        }
    }

    /// The least latency; `None` before the first frame.
    pub(super) fn least(&self) -> Option<Duration> {
        self.least
    }

    /// Whether a probe shrinks the window now.
    pub(super) fn is_probing(&self) -> bool {
        self.probe != Probe::Idle
    }

    /// Whether the last round found no queue although the window was the limit: the path can take
    /// more.
    pub(super) fn has_no_queue(&self) -> bool {
        self.has_no_queue
    }

    /// Records that a reader had to wait for the window.
    pub(super) fn waited(&mut self) {
        self.is_limited = true;
        self.round.is_limited = true;
    }

    /// Records an acknowledged frame. `drained`: bytes in flight at which the queue is empty.
    pub(super) fn sample(&mut self, sample: Sample, drained: u64) {
        let Sample { now, latency, .. } = sample;
        let known = self.least.unwrap_or(latency);
        if latency <= known {
            self.least = Some(latency);
        }
        let least = known.min(latency);
        if latency <= least + (least / 8).min(QUEUE / 3) + Duration::from_millis(1) {
            self.confirmed = now;
        }
        match self.probe {
            Probe::Idle => self.watch(sample, least),
            Probe::Draining { since } => {
                // Several streams may each have a frame in flight, which can be more than
                // `drained`.
                if sample.in_flight <= drained || sample.is_read_after(since) {
                    self.probe = Probe::Looking { since: now, least: None };
                }
            }
            Probe::Looking { since, least: seen } if sample.is_read_after(since) => {
                let seen = seen.map_or(latency, |seen| seen.min(latency));
                if now.saturating_duration_since(since) < LOOK {
                    self.probe = Probe::Looking { since, least: Some(seen) };
                } else {
                    self.conclude(sample, known, seen);
                }
            }
            Probe::Looking { .. } => {}
        }
    }

    /// Checks for reasons to probe.
    fn watch(&mut self, sample: Sample, least: Duration) {
        let Sample { now, latency, .. } = sample;
        self.round.least = self.round.least.min(latency.saturating_sub(sample.own));
        if sample.is_read_after(self.round.since) {
            self.has_no_queue = self.round.is_limited && self.round.least <= least + QUEUE / 6;
            self.round = Round::new(now);
        }
        // The least window may hold more than the queue allows.
        let explained = (least + QUEUE).max(sample.window);
        if latency <= explained + explained / 4 {
            self.slow_since = None;
        } else if self.slow_since.is_none() {
            self.slow_since = Some(now);
            self.is_limited = false;
        }
        let is_slow = self.slow_since.is_some_and(|since| {
            let long = now.saturating_duration_since(since) >= SLOW;
            long && self.is_limited && sample.is_read_after(since)
        });
        self.best_rate = self.best_rate.max(sample.rate);
        let has_fallen = sample.rate < FALLEN * self.best_rate;
        if (is_slow || has_fallen) && now >= self.not_before
            || now.saturating_duration_since(self.confirmed) >= CONFIRMED
        {
            self.probe = Probe::Draining { since: now };
            self.has_no_queue = false;
        }
    }

    /// Ends a probe that measured `seen`; the minimum was `known`.
    fn conclude(&mut self, sample: Sample, known: Duration, seen: Duration) {
        let Sample { now, rate, .. } = sample;
        let is_new = seen > known + known / 4 + Duration::from_millis(2);
        self.pause = if is_new { PAUSE.0 } else { (2 * self.pause).min(PAUSE.1) };
        self.not_before = now + self.pause;
        self.least = Some(seen);
        self.confirmed = now;
        self.probe = Probe::Idle;
        self.best_rate = rate;
        self.slow_since = None;
        self.round = Round::new(now);
    }
}
