//! How fast pages drain, from the last samples.

use crate::Sample;
use std::collections::VecDeque;
use std::time::Duration;

/// The time over which rates are averaged.
const LONG: Duration = Duration::from_secs(3);
/// A rate that falls shows over this time.
const SHORT: Duration = Duration::from_millis(750);
/// No rate is computed over a shorter time.
const LEAST: Duration = Duration::from_millis(400);
/// A pause of QEMU (it reads the dirty log) is a larger part of the shorter time: a rate over it
/// counts as fallen only below the average divided by this.
const PAUSES: f64 = 1.25;
/// QEMU's bandwidth is that of its last 100 ms, and it stops the VM at a moment at which it is
/// high: the highest of this time counts.
const RECENT: Duration = Duration::from_secs(2);

/// Rates and delay of a migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Flow {
    /// Bytes of pages per second, zero pages not counted.
    pub(crate) drain: f64,
    /// Bytes per second on the links.
    pub(crate) wire: f64,
    /// The bandwidth that QEMU multiplies its downtime-limit with, bytes per second.
    pub(crate) bandwidth: Option<f64>,
    /// How long bytes are under way.
    pub(crate) delay: Duration,
}

impl Flow {
    /// A flow of which only these two figures are known.
    pub(crate) fn steady(drain: f64, delay: Duration) -> Self {
        Self { drain, wire: 0.0, bandwidth: None, delay }
    }
}

#[derive(Clone, Copy, Debug)]
struct Point {
    at: Duration,
    data: u64,
    wire: u64,
    bandwidth: Option<f64>,
    delay: Duration,
}

/// The last samples.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    points: VecDeque<Point>,
    drain: f64,
    max_bandwidth: Option<u64>,
}

impl Rates {
    pub(crate) fn push(&mut self, sample: &Sample) {
        let Sample { at, data, wire, bandwidth, delay, .. } = *sample;
        let is_later = self.points.back().is_none_or(|last| at > last.at);
        if !is_later {
            return;
        }
        self.drain = Some(sample.drain).filter(|rate| rate.is_finite()).unwrap_or(0.0);
        self.max_bandwidth = sample.max_bandwidth.filter(|rate| *rate > 0);
        self.points.push_back(Point { at, data, wire, bandwidth, delay });
        while self.points.get(1).is_some_and(|second| at.saturating_sub(second.at) >= LONG) {
            self.points.pop_front();
        }
    }

    /// The rates now; `None` while nothing is known.
    pub(crate) fn flow(&self) -> Option<Flow> {
        let last = self.points.back()?;
        let rate = |over: Duration, of: fn(&Point) -> u64| {
            let first = self.points.iter().rev().find(|point| last.at - point.at >= over);
            let first = first.or(self.points.front())?;
            let time = last.at - first.at;
            #[expect(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
            let bytes = of(last).saturating_sub(of(first)) as f64;
            (time >= LEAST).then(|| bytes / time.as_secs_f64())
        };
        let data = |point: &Point| point.data;
        // A QEMU that makes pauses drains less than the path carries.
        let mut drain = rate(LONG, data)?.min(PAUSES * rate(SHORT, data)?).max(self.drain);
        if let Some(most) = self.max_bandwidth {
            #[expect(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
            let most = most as f64;
            drain = drain.min(most);
        }
        let recent = self.points.iter().filter(|point| last.at - point.at <= RECENT);
        let bandwidth = recent
            .filter_map(|point| point.bandwidth)
            .filter(|rate| rate.is_finite() && *rate > 0.0)
            .reduce(f64::max);
        let delays: Duration = self.points.iter().map(|point| point.delay).sum();
        let delay = delays / u32::try_from(self.points.len()).unwrap_or(u32::MAX);
        let wire = rate(LONG, |point| point.wire)?;
        (drain > 0.0).then_some(Flow { drain, wire, bandwidth, delay })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;

    fn sample(ms: u64, data: u64) -> Sample {
        Sample {
            at: Duration::from_millis(ms),
            phase: Phase::Precopy,
            total: 1 << 30,
            remaining: 0,
            syncs: 1,
            sent: data,
            data,
            drain: 0.0,
            wire: data / 3,
            dirty_rate: None,
            bandwidth: None,
            delay: Duration::from_millis(20),
            throttle: 0,
            downtime_limit: None,
            max_bandwidth: None,
        }
    }

    #[test]
    fn a_rate_needs_time_and_follows_a_fall_within_a_second() {
        let mut rates = Rates::default();
        rates.push(&sample(0, 0));
        rates.push(&sample(250, 25_000));
        assert_eq!(rates.flow(), None);
        for step in 2..40 {
            rates.push(&sample(250 * step, 25_000 * step));
        }
        let flow = rates.flow().unwrap();
        assert!((flow.drain - 100_000.0).abs() < 1.0 && (flow.wire - 33_333.0).abs() < 2.0);
        assert_eq!(flow.delay, Duration::from_millis(20));
        // It falls to a tenth.
        for step in 1..4 {
            rates.push(&sample(9750 + 250 * step, 975_000 + 2_500 * step));
        }
        assert!(rates.flow().unwrap().drain < 13_000.0, "{:?}", rates.flow());
        // A pause of 100 ms is no fall.
        let mut rates = Rates::default();
        for step in 0..20 {
            let pause = if step > 18 { 10_000 } else { 0 };
            rates.push(&sample(250 * step, 25_000 * step - pause));
        }
        assert!(rates.flow().unwrap().drain > 95_000.0, "{:?}", rates.flow());
        // Nor is a QEMU that sends little of what the path carries.
        rates.push(&Sample { drain: 400_000.0, ..sample(6000, 500_000) });
        assert!(rates.flow().unwrap().drain >= 400_000.0, "{:?}", rates.flow());
    }

    #[test]
    fn nonsense_is_bounded() {
        let mut rates = Rates::default();
        for (ms, data) in [(1000, 9), (900, 5), (2000, 3), (2000, u64::MAX), (2500, 0)] {
            let drain = f64::NAN;
            rates.push(&Sample { bandwidth: Some(f64::NAN), drain, ..sample(ms, data) });
            assert!(rates.flow().is_none_or(|flow| flow.drain.is_finite()));
        }
        let mut rates = Rates::default();
        for step in 0..20 {
            rates.push(&Sample { max_bandwidth: Some(5), ..sample(250 * step, 25_000 * step) });
        }
        assert!(rates.flow().unwrap().drain <= 5.0);
    }
}
