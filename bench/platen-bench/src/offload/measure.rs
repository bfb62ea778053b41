//! Measures the cost and gain of offloading.
//!
//! *Direct*: submit one page, wait for it, take the next, like a caller of a synchronous interface.
//! *Asynchronous*: have many in flight. Both use the same engine without load sharing, so that only
//! the way of waiting differs. On a simulated device the figures show software's cost and the
//! effect of latency, never a device's throughput; with its `engine stored` and 128 in flight they
//! show the cost of this driver alone.
//!
//! CPU time is the calling thread's: submission, both copies, polling, checks. A simulated device's
//! threads are other threads.

use anyhow::ensure;
use qat::{Engine, Op, Snapshot};
use rustix::time::{clock_gettime, ClockId};
use std::time::{Duration, Instant};

/// Page size measured, bytes.
pub(super) const PAGE: usize = 4096;

/// The extent of a measurement.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// The number of pages, taken from the given ones in turn.
    pub(super) pages: usize,
    /// Pages in flight: 1 is direct offload. The engine's depth is a limit too.
    pub(super) in_flight: usize,
    /// Whether to poll without a pause instead of sleeping between polls without a result. This
    /// gives the least latency, and takes a whole CPU.
    pub(super) busy: bool,
    /// Stop after this time, even if pages remain.
    pub(super) at_most: Duration,
}

/// A measurement's result.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Measured {
    /// The most pages in flight.
    pub(super) in_flight: usize,
    /// Pages done.
    pub(super) pages: u64,
    /// Pages done by the device.
    pub(super) by_device: u64,
    /// Wall time, seconds.
    pub(super) seconds: f64,
    /// Pages a second.
    pub(super) pages_per_second: f64,
    /// CPU time of the calling thread a page, microseconds.
    pub(super) cpu_us_per_page: f64,
    /// The median time from submission to delivery, microseconds.
    pub(super) p50_us: f64,
    /// The 99th percentile of that time, microseconds.
    pub(super) p99_us: f64,
    /// Plain bytes over compressed bytes.
    pub(super) ratio: f64,
    /// The engine's counters afterwards.
    pub(super) counters: Snapshot,
}

impl Measured {
    /// The same, if the device has done all of it: software's share would count as the device's.
    pub(super) fn by_device_alone(self) -> anyhow::Result<Self> {
        let (all, by_device) = (self.pages, self.by_device);
        ensure!(
            by_device == all,
            "the device did {by_device} of {all} pages, and software the others: repeat this on a host \
             that does less else"
        );
        Ok(self)
    }
}

/// Compresses pages of `pages`, `plan.in_flight` at a time. `pages` is whole pages, at least one.
///
/// Each result is copied out, as a relay copies it into its frame.
pub(super) fn measure(engine: &mut Engine, pages: &[u8], plan: &Plan) -> Measured {
    let (pages, _) = pages.as_chunks::<PAGE>();
    assert!(!pages.is_empty(), "no whole page to compress");
    let window = plan.in_flight.max(1);
    // Allocate everything before the clock starts.
    let mut waits: Vec<u32> = Vec::with_capacity(plan.pages);
    let mut frame = vec![0; engine.capacity()];
    let before = engine.counters().snapshot();
    let (start, cpu) = (Instant::now(), thread_cpu());
    let (mut submitted, mut compressed) = (0, 0u64);
    let mut ended = start;
    while waits.len() < submitted || submitted < plan.pages {
        // One clock reading for all pages of an iteration; times are relative to it.
        let now = micros(start);
        let more = start.elapsed() < plan.at_most;
        if !more && submitted == waits.len() {
            break;
        }
        while more && submitted < plan.pages && engine.in_flight() < window {
            let Some(lease) = engine.take(PAGE) else { break };
            engine.source(&lease)[..PAGE].copy_from_slice(&pages[submitted % pages.len()]);
            engine.submit(lease, PAGE, Op::Compress, u64::from(now));
            submitted += 1;
        }
        let delivered = engine.poll(|at, result| {
            if let Ok(finished) = result {
                frame[..finished.bytes.len()].copy_from_slice(finished.bytes);
                compressed += finished.bytes.len() as u64;
            }
            let since = micros(start).saturating_sub(u32::try_from(at).unwrap_or(0));
            waits.push(since);
        });
        if delivered == 0 {
            if plan.busy {
                std::hint::spin_loop();
            } else {
                engine.wait();
            }
        } else {
            ended = Instant::now();
        }
    }
    let cpu = thread_cpu().saturating_sub(cpu);
    let counters = engine.counters().snapshot();
    let seconds = (ended - start).as_secs_f64();
    let done = waits.len();
    waits.sort_unstable();
    Measured {
        in_flight: window,
        pages: done as u64,
        by_device: counters.by_device - before.by_device,
        seconds,
        pages_per_second: done as f64 / seconds.max(1e-9),
        cpu_us_per_page: cpu.as_secs_f64() * 1e6 / done.max(1) as f64,
        p50_us: quantile(&waits, 50),
        p99_us: quantile(&waits, 99),
        ratio: (done * PAGE) as f64 / compressed.max(1) as f64,
        counters,
    }
}

/// Direct and asynchronous offload of the same pages on the same engine.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Comparison {
    /// One page at a time, sleeping while it is with the device.
    pub(super) direct: Measured,
    /// One page at a time, polling without a pause.
    pub(super) direct_busy: Measured,
    /// Many in flight.
    pub(super) asynchronous: Measured,
    /// Throughput of `asynchronous` over that of `direct`.
    pub(super) gain: f64,
    /// Throughput of `asynchronous` over that of `direct_busy`.
    pub(super) gain_busy: f64,
}

/// Measures all three ways, direct first. The engine should have load sharing off.
pub(super) fn compare(
    engine: &mut Engine,
    pages: &[u8],
    plan: &Plan,
) -> anyhow::Result<Comparison> {
    let mut with = |in_flight, busy| {
        measure(engine, pages, &Plan { in_flight, busy, ..plan.clone() }).by_device_alone()
    };
    let (direct, direct_busy) = (with(1, false)?, with(1, true)?);
    let asynchronous = with(plan.in_flight, plan.busy)?;
    let over = |other: &Measured| asynchronous.pages_per_second / other.pages_per_second.max(1e-9);
    let (gain, gain_busy) = (over(&direct), over(&direct_busy));
    Ok(Comparison { direct, direct_busy, asynchronous, gain, gain_busy })
}

fn micros(start: Instant) -> u32 {
    // 71 minutes: longer than any measurement here.
    u32::try_from(start.elapsed().as_micros()).unwrap_or(u32::MAX)
}

fn thread_cpu() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// A percentile of sorted waits.
fn quantile(waits: &[u32], percent: usize) -> f64 {
    let at = (waits.len() * percent / 100).min(waits.len().saturating_sub(1));
    waits.get(at).copied().map_or(0.0, f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qat::EngineOptions;

    #[test]
    fn every_page_is_counted_when_time_runs_out() {
        let options = EngineOptions { max_plain: PAGE, ..EngineOptions::default() };
        let mut engine = Engine::new(None, options);
        let pages = vec![7; 3 * PAGE];
        let plan = Plan { pages: 40, in_flight: 8, busy: false, at_most: Duration::from_secs(60) };
        let measured = measure(&mut engine, &pages, &plan);
        assert_eq!((measured.pages, measured.by_device), (40, 0));
        let refused = measured.clone().by_device_alone().unwrap_err().to_string();
        assert!(refused.contains("the device did 0 of 40 pages"), "{refused}");
        assert!(measured.ratio > 100.0 && measured.cpu_us_per_page > 0.0);
        let none = measure(&mut engine, &pages, &Plan { at_most: Duration::ZERO, ..plan });
        assert_eq!((none.pages, engine.in_flight()), (0, 0));
    }
}
