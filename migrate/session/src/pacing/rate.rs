//! The drain rate: uncompressed bytes per second that the receiver writes to QEMU.

use std::time::{Duration, Instant};

/// The shortest sample. On a longer path a sample lasts a round trip, since acknowledgements arrive
/// in one burst per round trip.
const SAMPLE: Duration = Duration::from_millis(100);
/// The rate is the best of this many samples, so that a pause of the source does not look like a
/// slow link.
const SAMPLES: usize = 16;
/// The samples of [`Rate::recent`].
const RECENT: usize = 8;

/// Tracks the drain rate.
#[derive(Debug)]
pub(super) struct Rate {
    samples: [f64; SAMPLES],
    at: usize,
    since: Instant,
    bytes: u64,
    /// A reader waited for the window during this sample: the sample shows the rate of the link,
    /// not of the source.
    is_limited: bool,
}

impl Rate {
    pub(super) fn new(now: Instant) -> Self {
        Self { samples: [0.0; SAMPLES], at: 0, since: now, bytes: 0, is_limited: false }
    }

    /// Records `bytes` delivered over a path with round trips of `round`.
    pub(super) fn delivered(&mut self, now: Instant, bytes: u64, round: Duration) {
        self.bytes += bytes;
        let span = now.saturating_duration_since(self.since);
        if span < SAMPLE.max(round) {
            return;
        }
        #[allow(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
        let rate = self.bytes as f64 / span.as_secs_f64();
        if self.is_limited || rate > self.best() {
            self.at = (self.at + 1) % SAMPLES;
            self.samples[self.at] = rate;
        }
        self.restart(now);
    }

    /// Begins a new sample: the deliveries since the last one do not show the rate.
    pub(super) fn restart(&mut self, now: Instant) {
        self.since = now;
        self.bytes = 0;
        self.is_limited = false;
    }

    /// Records that a reader had to wait for the window.
    pub(super) fn waited(&mut self) {
        self.is_limited = true;
    }

    /// The mean of the last samples, bytes per second: the path's rate for bytes like those sent
    /// lately, whatever pauses the source makes. 0 while unknown.
    pub(super) fn recent(&self) -> f64 {
        let last = (0..RECENT).map(|back| self.samples[(self.at + SAMPLES - back) % SAMPLES]);
        let known: Vec<f64> = last.filter(|rate| *rate > 0.0).collect();
        #[allow(clippy::cast_precision_loss, reason = "at most 8")]
        let count = known.len() as f64;
        known.iter().sum::<f64>() / count.max(1.0)
    }

    /// Bytes per second; 0 while unknown.
    pub(super) fn best(&self) -> f64 {
        self.samples.iter().copied().fold(0.0, f64::max)
    }
}
