//! The mix of codecs that drains soonest, as crate `controller` chooses it.
//!
//! Its documentation has the function: a byte of pages takes `max(s / B, c / W, (c + o) / C, 1 /
//! Q)`, and the best is a mix of two candidates at most. Here the destination's cores and decoders
//! are further terms. Where both ends are one host, its cores do the work of both.

use crate::sizes::{Candidate, Sizes};

/// CPU time besides encoding and decoding, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// For each byte of pages: QEMU, and reading and hashing in a relay.
    pub page: f64,
    /// For each byte on the link: encryption and TCP.
    pub wire: f64,
}

impl Work {
    fn of(self, size: f64) -> f64 {
        self.page + self.wire * size
    }
}

/// The destination.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct There {
    /// Cores that are free there; `None`: both ends are one host, and share its free cores.
    pub free: Option<f64>,
    /// Threads that decode.
    pub workers: f64,
    /// CPU time besides decoding.
    pub work: Work,
}

/// CPU time that is available, and that is needed besides encoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Codec threads.
    pub workers: f64,
    /// Cores that other processes, and the guest, leave free.
    pub free: f64,
    /// CPU time for reading, hashing and sending.
    pub work: Work,
    /// The destination; `None` if it is unknown, and no bottleneck.
    pub there: Option<There>,
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
    /// CPU time at the destination for each byte of pages, ns; 0 where it is unknown.
    pub cost_there: f64,
}

/// The cost of a byte of pages with a mix: bytes on the link, and ns to encode and to decode.
#[derive(Clone, Copy)]
struct Point {
    size: f64,
    encode: f64,
    decode: f64,
}

impl Point {
    fn towards(self, other: Self, share: f64) -> Self {
        let mix = |a: f64, b: f64| a + share * (b - a);
        Self {
            size: mix(self.size, other.size),
            encode: mix(self.encode, other.encode),
            decode: mix(self.decode, other.decode),
        }
    }
}

/// The mix of `sizes` that drains soonest over a link of `link` bytes per second, from a QEMU that
/// writes `source` bytes of pages per second.
pub fn best(sizes: &Sizes, link: f64, source: f64, cores: Cores) -> Best {
    let of =
        |one: &Candidate| Point { size: one.size(), encode: one.cost(), decode: one.decode_cost() };
    let points: Vec<Point> = sizes.0.iter().map(of).collect();
    let mut found = None;
    for &a in &points {
        for &b in &points {
            for share in shares(a, b, link, cores) {
                let one = evaluate(a.towards(b, share), link, source, cores);
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
    let raw = Point { size: 1.0, encode: 0.0, decode: 0.0 };
    found.unwrap_or_else(|| evaluate(raw, link, source, cores))
}

/// The shares of `b` at which the maximum of the linear terms may be least: the two ends, and the
/// points where two terms are equal.
fn shares(a: Point, b: Point, link: f64, cores: Cores) -> Vec<f64> {
    let (a, b) = (terms(a, link, cores), terms(b, link, cores));
    let mut shares = vec![0.0, 1.0];
    for i in 0..a.len() {
        for j in 0..i {
            let (at_a, at_b) = (a[i] - a[j], b[i] - b[j]);
            let share = at_a / (at_a - at_b);
            if share.is_finite() && (0.0..1.0).contains(&share) {
                shares.push(share);
            }
        }
    }
    shares
}

/// The time that each stage needs for a byte of pages, ns: all stages work at the same time.
fn terms(point: Point, link: f64, cores: Cores) -> [f64; 5] {
    let here = point.encode + cores.work.of(point.size);
    let there = cores.there.map_or(0.0, |there| point.decode + there.work.of(point.size));
    let (here, there) = match cores.there.map(|there| there.free) {
        Some(None) => (here + there, 0.0),
        Some(Some(free)) => (here, there / free),
        None => (here, 0.0),
    };
    let decoding = cores.there.map_or(0.0, |there| point.decode / there.workers);
    let on_link = point.size / (link / 1e9);
    [on_link, point.encode / cores.workers, here / cores.free, there, decoding]
}

fn evaluate(point: Point, link: f64, source: f64, cores: Cores) -> Best {
    let longest = terms(point, link, cores).into_iter().fold(0.0, f64::max);
    let ns = longest.max(1e9 / source).max(1e-3);
    Best {
        drain: 1e9 / ns,
        size: point.size,
        cost: point.encode + cores.work.of(point.size),
        cost_there: cores.there.map_or(0.0, |there| point.decode + there.work.of(point.size)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(points: &[(u64, u64)]) -> Sizes {
        let candidates = controller::Config::candidates();
        let of = |(settings, &(encoded, cpu_ns))| Candidate {
            pages: 1000,
            encoded,
            cpu_ns,
            ..Candidate::new(settings)
        };
        Sizes(candidates.into_iter().zip(points).map(of).collect())
    }

    const NONE: Work = Work { page: 0.0, wire: 0.0 };
    const CORES: Cores = Cores { workers: 2.0, free: 2.0, work: NONE, there: None };

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
        // A codec that costs no time saves bytes on the link.
        assert!((bound.size - 0.5).abs() < 1e-9, "{bound:?}");
    }

    /// Both ends on one host share its cores; on two hosts the slower end decides.
    #[test]
    fn the_destination_counts() {
        let sizes = sizes(&[(1000, 0)]);
        let work = |page| Work { page, wire: 0.0 };
        let cores = |free| Cores {
            work: work(1.0),
            there: Some(There { free, workers: 2.0, work: work(3.0) }),
            ..CORES
        };
        // 4 ns a byte on 2 cores; 3 ns on 1 core there.
        let one_host = best(&sizes, 1e12, 1e12, cores(None));
        assert!((one_host.drain - 0.5e9).abs() < 1e3, "{one_host:?}");
        let two_hosts = best(&sizes, 1e12, 1e12, cores(Some(1.0)));
        assert!((two_hosts.drain - 1e9 / 3.0).abs() < 1e3, "{two_hosts:?}");
        assert_eq!((two_hosts.cost, two_hosts.cost_there), (1.0, 3.0));
    }

    #[test]
    fn a_slow_decoder_is_a_bottleneck() {
        let mut sizes = sizes(&[(1000, 0), (500, 100)]);
        sizes.0[1].decode_ns = 10_000;
        let there = There { free: Some(8.0), workers: 1.0, work: NONE };
        let slow =
            best(&Sizes(sizes.0.split_off(1)), 1e9, 1e12, Cores { there: Some(there), ..CORES });
        assert!((slow.drain - 1e8).abs() < 1e3, "{slow:?}");
    }
}
