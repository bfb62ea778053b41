//! The mix of codecs that drains soonest, as crate `controller` chooses it.
//!
//! Its documentation has the function: a byte of pages takes
//! `max(s / B, c / W, (c + o) / C, 1 / Q)`, and the best is a mix of two candidates at most.

use crate::sizes::Sizes;

/// CPU time that there is, and that is needed besides encoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Codec threads.
    pub workers: f64,
    /// Cores that other processes, and the guest, leave free.
    pub free: f64,
    /// CPU time for reading, hashing and sending a byte of pages, ns.
    pub other: f64,
}

/// A mix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// Bytes of pages that drain per second.
    pub drain: f64,
    /// Bytes on the link for each byte of pages.
    pub size: f64,
    /// CPU time at the source for each byte of pages, ns.
    pub cost: f64,
}

/// The mix of `sizes` that drains soonest over a link of `link` bytes per second, from a QEMU that
/// writes `source` bytes of pages per second.
pub fn best(sizes: &Sizes, link: f64, source: f64, cores: Cores) -> Best {
    let points: Vec<(f64, f64)> = sizes.0.iter().map(|one| (one.size(), one.cost())).collect();
    let mut found = None;
    for &(s_a, c_a) in &points {
        for &(s_b, c_b) in &points {
            for share in shares((s_a, c_a), (s_b, c_b), link, cores) {
                let mix = |a: f64, b: f64| a + share * (b - a);
                let one = evaluate(mix(s_a, s_b), mix(c_a, c_b), link, source, cores);
                let is_better = |other: &Best| {
                    one.drain > other.drain * (1.0 + 1e-9)
                        || (one.drain >= other.drain * (1.0 - 1e-9) && one.size < other.size)
                };
                if found.as_ref().is_none_or(is_better) {
                    found = Some(one);
                }
            }
        }
    }
    found.unwrap_or_else(|| evaluate(1.0, 0.0, link, source, cores))
}

/// The shares of `b` at which the maximum of two terms may be least: the ends, and where the link
/// takes as long as the threads or as the cores.
fn shares(
    (s_a, c_a): (f64, f64),
    (s_b, c_b): (f64, f64),
    link: f64,
    cores: Cores,
) -> impl Iterator<Item = f64> {
    let link_ns = link / 1e9;
    let equal = |cores: f64, other: f64| {
        let (s, c) = ((s_a - s_b) / link_ns, (c_b - c_a) / cores);
        let share = (s_a / link_ns - (c_a + other) / cores) / (s + c);
        if share.is_finite() {
            share.clamp(0.0, 1.0)
        } else {
            0.0
        }
    };
    [0.0, 1.0, equal(cores.workers, 0.0), equal(cores.free, cores.other)].into_iter()
}

fn evaluate(size: f64, cost: f64, link: f64, source: f64, cores: Cores) -> Best {
    let cost_all = cost + cores.other;
    let ns = (size / (link / 1e9))
        .max(cost / cores.workers)
        .max(cost_all / cores.free)
        .max(1e9 / source)
        .max(1e-3);
    Best { drain: 1e9 / ns, size, cost: cost_all }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes::Candidate;

    fn sizes(points: &[(u64, u64)]) -> Sizes {
        let candidates = crate::sizes::controller_candidates();
        let of =
            |(settings, &(encoded, cpu_ns))| Candidate { settings, pages: 1000, encoded, cpu_ns };
        Sizes(candidates.into_iter().zip(points).map(of).collect())
    }

    const CORES: Cores = Cores { workers: 2.0, free: 2.0, other: 0.0 };

    #[test]
    fn a_slow_link_gets_the_smallest_and_a_fast_one_the_cheapest() {
        // none, lz4, a slow codec.
        let sizes = sizes(&[(1000, 0), (500, 1000), (250, 10_000)]);
        let slow = best(&sizes, 1e6, 1e12, CORES);
        assert!((slow.size - 0.25).abs() < 1e-9 && (slow.drain - 4e6).abs() < 1.0, "{slow:?}");
        let fast = best(&sizes, 1e11, 1e12, CORES);
        assert!(fast.size > 0.99 && fast.drain > 0.98e11, "{fast:?}");
    }

    #[test]
    fn link_and_threads_finish_together() {
        let sizes = sizes(&[(1000, 0), (500, 2000)]);
        // All with the codec: 1e9 a second by the threads, 2 x link by the link. A link of 750 MB/s
        // drains most with four fifths of the pages encoded: (1 - f / 2) / 0.75 = f.
        let mix = best(&sizes, 750e6, 1e12, CORES);
        let share = 0.8;
        assert!((mix.size - (1.0 - share / 2.0)).abs() < 1e-6, "{mix:?}");
        assert!((mix.drain - 1e9 / share).abs() < 1e3, "{mix:?}");
    }

    #[test]
    fn a_slow_qemu_bounds_all() {
        let sizes = sizes(&[(1000, 0), (500, 1000)]);
        let bound = best(&sizes, 1e9, 1e8, CORES);
        assert!((bound.drain - 1e8).abs() < 1.0, "{bound:?}");
        // What costs no time is saved on the link.
        assert!((bound.size - 0.5).abs() < 1e-9, "{bound:?}");
    }
}
