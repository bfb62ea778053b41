//! How many uncompressed bytes may be in flight (W16).
//!
//! Every byte the relays hold when the VM stops is downtime QEMU did not plan for. So the window
//! follows the drain rate: enough to keep the pipe full (rate x least latency) and 15 ms of drain
//! on top, which is what the codec threads and the link need to never run dry between two
//! acknowledgements.

use std::time::{Duration, Instant};

/// Drain time the relays may hold beyond the pipe itself. With QEMU's own socket buffers the hidden
/// part of the downtime stays under 20 ms.
const QUEUE: Duration = Duration::from_millis(15);
/// Before anything is known: one batch in flight for each of 8 codec threads.
const START: u64 = 4 << 20;
/// Never less: two batches of 512 KiB, or ratio and pipelining suffer (0.3 s at 30 Mbit/s
/// uncompressed).
const FLOOR: u64 = 1 << 20;
/// One rate sample.
const SAMPLE: Duration = Duration::from_millis(100);
/// The rate is the best of this many samples, so that a pause of the source does not read as a slow
/// link.
const SAMPLES: usize = 16;

/// Follows the drain rate of one session.
#[derive(Debug)]
pub(crate) struct Pacing {
    samples: [f64; SAMPLES],
    at: usize,
    since: Instant,
    bytes: u64,
    /// Somebody waited for the window during this sample: the sample shows the link, not the
    /// source.
    limited: bool,
    latency: Duration,
    cap: u64,
}

impl Pacing {
    /// `cap`: what the receiver's buffers hold, bytes.
    pub(crate) fn new(now: Instant, cap: u64) -> Self {
        let latency = Duration::from_secs(3600);
        Self { samples: [0.0; SAMPLES], at: 0, since: now, bytes: 0, limited: false, latency, cap }
    }

    /// `bytes` were delivered, the oldest of them after `latency` in flight.
    pub(crate) fn delivered(&mut self, now: Instant, bytes: u64, latency: Duration) {
        self.bytes += bytes;
        self.latency = self.latency.min(latency);
        let span = now.saturating_duration_since(self.since);
        if span < SAMPLE {
            return;
        }
        #[allow(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
        let rate = self.bytes as f64 / span.as_secs_f64();
        if self.limited || rate > self.rate() {
            self.at = (self.at + 1) % SAMPLES;
            self.samples[self.at] = rate;
        }
        self.since = now;
        self.bytes = 0;
        self.limited = false;
    }

    /// A reader had to wait for the window.
    pub(crate) fn waited(&mut self) {
        self.limited = true;
    }

    /// Drain rate in uncompressed bytes per second; 0 while unknown.
    pub(crate) fn rate(&self) -> f64 {
        self.samples.iter().copied().fold(0.0, f64::max)
    }

    /// Uncompressed bytes that may be in flight now.
    pub(crate) fn window(&self) -> u64 {
        let rate = self.rate();
        if rate == 0.0 {
            return START.min(self.cap);
        }
        let wanted = rate * (self.latency + QUEUE).as_secs_f64();
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and `as` saturates"
        )]
        let wanted = wanted as u64;
        wanted.max(FLOOR).min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drains `rate` bytes/s with 2 ms latency for a second and gives the window.
    fn window_at(rate: u64) -> u64 {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 64 << 20);
        for step in 1..=100 {
            pacing.waited();
            pacing.delivered(
                start + Duration::from_millis(10 * step),
                rate / 100,
                Duration::from_millis(2),
            );
        }
        pacing.window()
    }

    #[test]
    fn the_window_is_about_17_ms_of_drain_between_floor_and_cap() {
        assert_eq!(window_at(1_000_000), FLOOR);
        let gigabit_at_2_5 = window_at(312_000_000);
        assert!((5_000_000..5_900_000).contains(&gigabit_at_2_5), "{gigabit_at_2_5}");
        assert_eq!(window_at(20_000_000_000), 64 << 20);
    }

    #[test]
    fn a_pause_of_the_source_does_not_shrink_it() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 64 << 20);
        let at = |ms| start + Duration::from_millis(ms);
        pacing.waited();
        pacing.delivered(at(100), 31_200_000, Duration::from_millis(2));
        let before = pacing.window();
        for step in 2..60 {
            pacing.delivered(at(100 * step), 1000, Duration::from_millis(2));
        }
        assert_eq!(pacing.window(), before);
    }
}
