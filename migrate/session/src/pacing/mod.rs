//! The limit on uncompressed bytes in flight (W16).
//!
//! Every byte that the relays hold when the VM stops is downtime that QEMU did not plan for. So the
//! window follows the drain rate. It fills the path (rate x latency) and adds 15 ms of drain, which
//! the codec threads and the link need so as never to run dry between two acknowledgements.
//!
//! Rate and latency are measured on the bytes that the window lets through. Too small a window must
//! not mistake its own effect for the path's: it would shrink for ever. So the latency is probed
//! when all frames are slower than the window explains (`latency`), and while no queue is found the
//! window grows by a quarter each round trip, whatever the rate was (`rate`).

mod latency;
mod rate;
#[cfg(test)]
mod simulated;

use latency::{Latency, Sample, QUEUE};
use rate::Rate;
use std::time::{Duration, Instant};

/// Before the first measurement: one batch in flight for each of 8 codec threads.
const START: u64 = 4 << 20;
/// The least window, except in a probe: two batches of 512 KiB. Less would cost ratio and
/// pipelining. (At 30 Mbit/s uncompressed it is 0.3 s.)
const FLOOR: u64 = 1 << 20;
/// A probe divides the window by this, so that the queue drains.
const PROBE_PART: u64 = 8;
/// The least window in a probe.
const PROBE_FLOOR: u64 = 64 << 10;

/// The content of an acknowledgement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delivery {
    pub(crate) now: Instant,
    /// Plain bytes of all frames acknowledged.
    pub(crate) bytes: u64,
    /// From the reading of the first of these frames to now.
    pub(crate) latency: Duration,
    /// Plain bytes of that frame.
    pub(crate) first_bytes: u64,
    /// Plain bytes still in flight.
    pub(crate) in_flight: u64,
}

/// The window of one session.
#[derive(Debug)]
pub(crate) struct Pacing {
    rate: Rate,
    latency: Latency,
    cap: u64,
}

impl Pacing {
    /// `cap`: bytes that the receiver's buffers hold.
    pub(crate) fn new(now: Instant, cap: u64) -> Self {
        Self { rate: Rate::new(now), latency: Latency::new(now), cap }
    }

    /// Records an acknowledgement.
    pub(crate) fn delivered(&mut self, delivery: Delivery) {
        let Delivery { now, bytes, latency, first_bytes, in_flight } = delivery;
        let drained = self.probe_window();
        let rate = self.rate();
        let takes = |bytes: u64| {
            #[allow(clippy::cast_precision_loss, reason = "a time; 53 bits are plenty")]
            let seconds = if rate > 0.0 { bytes as f64 / rate } else { 0.0 };
            Duration::from_secs_f64(seconds.min(10.0))
        };
        let (own, window) = (takes(first_bytes), takes(self.full_window()));
        self.latency.sample(Sample { now, latency, own, in_flight, rate, window }, drained);
        if self.latency.is_probing() {
            // The probe limits the rate.
            self.rate.restart(now);
        } else {
            self.rate.delivered(now, bytes, self.latency.least().unwrap_or_default());
        }
    }

    /// Records that a reader had to wait for the window.
    pub(crate) fn waited(&mut self) {
        self.rate.waited();
        self.latency.waited();
    }

    /// Drain rate in uncompressed bytes per second; 0 while unknown.
    pub(crate) fn rate(&self) -> f64 {
        self.rate.best()
    }

    /// The drain rate of bytes like those sent lately; 0 while unknown.
    pub(crate) fn recent_rate(&self) -> f64 {
        self.rate.recent()
    }

    /// Uncompressed bytes that may be in flight now.
    pub(crate) fn window(&self) -> u64 {
        if self.latency.is_probing() {
            self.probe_window()
        } else {
            self.full_window()
        }
    }

    /// The least number of chunks in a window. On a long path a chunk of a quarter of the window
    /// takes as long to drain as the allowed queue.
    pub(crate) fn chunks(&self) -> u64 {
        let is_long = self.latency.least().is_some_and(|latency| latency > 2 * QUEUE);
        if is_long {
            8
        } else {
            4
        }
    }

    fn probe_window(&self) -> u64 {
        (self.full_window() / PROBE_PART).max(PROBE_FLOOR)
    }

    fn full_window(&self) -> u64 {
        let (rate, Some(latency)) = (self.rate(), self.latency.least()) else {
            return START.min(self.cap);
        };
        if rate == 0.0 {
            return START.min(self.cap);
        }
        let queue = if self.latency.has_no_queue() { QUEUE.max(latency / 4) } else { QUEUE };
        let wanted = rate * (latency + queue).as_secs_f64();
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

    const AT_ONCE: Duration = Duration::from_millis(2);

    fn delivery(now: Instant, bytes: u64) -> Delivery {
        Delivery { now, bytes, latency: AT_ONCE, first_bytes: bytes, in_flight: 0 }
    }

    /// Drains `rate` bytes/s with 2 ms latency for a second and returns the window.
    fn window_at(rate: u64) -> u64 {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 64 << 20);
        for step in 1..=100 {
            pacing.waited();
            pacing.delivered(delivery(start + Duration::from_millis(10 * step), rate / 100));
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
    fn the_recent_rate_follows_the_bytes_and_ignores_pauses() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 64 << 20);
        assert_eq!(pacing.recent_rate(), 0.0);
        let mut now = start;
        let mut deliver = |pacing: &mut Pacing, bytes, limited: bool| {
            now += Duration::from_millis(100);
            if limited {
                pacing.waited();
            }
            pacing.delivered(delivery(now, bytes));
        };
        (0..20).for_each(|_| deliver(&mut pacing, 3_000_000, true));
        assert!((pacing.recent_rate() - 3e7).abs() < 1e5, "{}", pacing.recent_rate());
        // A source that has little to send.
        (0..100).for_each(|_| deliver(&mut pacing, 1000, false));
        assert!((pacing.recent_rate() - 3e7).abs() < 1e5, "{}", pacing.recent_rate());
        // Bytes that shrink less.
        (0..8).for_each(|_| deliver(&mut pacing, 1_000_000, true));
        assert!((pacing.recent_rate() - 1e7).abs() < 1e5, "{}", pacing.recent_rate());
    }

    #[test]
    fn a_pause_of_the_source_does_not_shrink_the_window() {
        let start = Instant::now();
        let mut pacing = Pacing::new(start, 64 << 20);
        let at = |ms| start + Duration::from_millis(ms);
        pacing.waited();
        pacing.delivered(delivery(at(100), 31_200_000));
        let before = pacing.window();
        for step in 2..60 {
            pacing.delivered(delivery(at(100 * step), 1000));
        }
        assert_eq!(pacing.window(), before);
    }
}
