//! The CPU cores of this host that a migration would find idle.

use crate::report::process_cpu;
use std::time::Instant;

/// The host's CPU time, in ticks.
pub(crate) struct Load {
    at: Instant,
    own: f64,
    /// Busy ticks, and all ticks.
    ticks: Option<(f64, f64)>,
}

impl Load {
    pub(crate) fn now() -> Self {
        Self { at: Instant::now(), own: process_cpu(), ticks: ticks() }
    }

    /// Cores that a migration would get: those that were idle since [`Load::now`], or its share of
    /// the cores that other threads use, if that is more. `others` is the number of threads that
    /// run or wait for a CPU.
    pub(crate) fn cores_to_get(&self, others: f64) -> f64 {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        // Its codec threads, and one that reads or sends.
        let own = cores + 1.0;
        self.free_cores().max(cores * own / (own + others.max(0.0)))
    }

    /// Cores that were idle since [`Load::now`], or used by this process.
    pub(crate) fn free_cores(&self) -> f64 {
        /// A migration always gets some.
        const LEAST: f64 = 0.25;
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let (Some((busy, all)), Some((busy_now, all_now))) = (self.ticks, ticks()) else {
            return cores;
        };
        let idle = 1.0 - (busy_now - busy) / (all_now - all).max(1.0);
        let own = (process_cpu() - self.own) / self.at.elapsed().as_secs_f64().max(0.01);
        (idle.clamp(0.0, 1.0) * cores + own).clamp(LEAST, cores)
    }
}

/// Busy ticks and all ticks of all CPUs, of the first line of /proc/stat.
fn ticks() -> Option<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let mut words = text.lines().next()?.split_whitespace();
    let is_sum = words.next()? == "cpu";
    // user nice system idle iowait irq softirq steal; a guest's time is in user, too.
    let ticks: Vec<f64> = words.take(8).filter_map(|word| word.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let all: f64 = ticks.iter().sum();
    is_sum.then_some((all - idle, all))
}
