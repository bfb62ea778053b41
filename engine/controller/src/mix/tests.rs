//! The best mix against a search through all.

use super::limits::between;
use super::*;
use proptest::prelude::*;

fn limits(link: f64, workers: f64) -> Limits {
    Limits { link, workers, cores: None, floor: 0.0, idle_use: 0.75, slack: 0.0 }
}

/// All chunks in one class.
fn one(points: &[(f64, f64)], limits: &Limits) -> Mix {
    let points: Vec<_> =
        points.iter().enumerate().map(|(at, &(cost, size))| (at, Point { cost, size })).collect();
    let edge = hull(&points);
    best(&[edge.clone(), edge.clone(), edge.clone(), edge], &[1.0, 0.0, 0.0, 0.0], limits)
}

#[test]
fn a_mix_leaves_neither_link_nor_cpu_idle() {
    // 1 byte/ns and 1 core: raw takes 1 ns by the link, the codec 2 ns of CPU.
    let mix = one(&[(0.0, 1.0), (2.0, 0.5)], &limits(1.0, 1.0));
    // s = 1 - f/2 = 2 f = c.
    assert!((mix.pairs[0].share - 0.4).abs() < 1e-9, "{mix:?}");
    assert!((mix.at.cost - mix.at.size).abs() < 1e-9);
    // CPU to spare: all chunks. No CPU: none.
    assert_eq!(one(&[(0.0, 1.0), (2.0, 0.5)], &limits(0.1, 1.0)).pairs[0].share, 1.0);
    assert_eq!(one(&[(0.01, 1.0), (2.0, 0.5)], &limits(1e3, 1.0)).pairs[0].share, 0.0);
}

#[test]
fn a_class_that_has_almost_disappeared_does_not_stop_the_others() {
    let best_first =
        hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 0.1, size: 0.1 })]);
    let other = hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 2.0, size: 0.5 })]);
    let none = hull(&[(0, Point { cost: 0.0, size: 1.0 })]);
    // Shares shrink with each chunk of another class, and never reach 0.
    for gone in [0.0, 1e-300, 1e-30, 1e-14, 1e-12, 1e-9, 1e-5] {
        let hulls = [best_first.clone(), other.clone(), none.clone(), none.clone()];
        let mix = best(&hulls, &[gone, 1.0 - gone, 0.0, 0.0], &limits(0.1, 2.0));
        assert_eq!((mix.pairs[1].high, mix.pairs[1].share), (1, 1.0), "{gone}: {mix:?}");
    }
}

#[test]
fn the_class_that_gains_most_is_compressed_first() {
    let cheap = hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 0.5, size: 0.1 })]);
    let dear = hull(&[(0, Point { cost: 0.0, size: 1.0 }), (1, Point { cost: 2.0, size: 0.6 })]);
    let none = hull(&[(0, Point { cost: 0.0, size: 1.0 })]);
    let hulls = [dear, cheap, none.clone(), none];
    let mix = best(&hulls, &[0.5, 0.5, 0.0, 0.0], &limits(1.5, 1.0));
    assert_eq!((mix.pairs[1].high, mix.pairs[1].share), (1, 1.0));
    assert!(mix.pairs[0].share > 0.0 && mix.pairs[0].share < 0.3, "{mix:?}");
}

#[test]
fn idle_cpu_saves_bytes_only_beside_a_floor() {
    let points = [(0.0, 1.0), (1.0, 0.5), (4.0, 0.45)];
    let fast = Limits { floor: 2.0, ..limits(10.0, 1.0) };
    let mix = one(&points, &fast);
    // 0.75 of 2 ns: all of the second step, and 1/6 of the step to the third.
    assert!(mix.idle_used && (mix.at.cost - 1.5).abs() < 1e-6, "{mix:?}");
    let none = Limits { floor: 0.0, ..fast };
    assert!(one(&points, &none).at.cost < 0.1);
}

#[test]
fn the_last_percents_of_the_time_are_not_bought() {
    // By the link alone 5, 4.9 and 4.85 ns a byte.
    let points = [(0.001, 1.0), (1.0, 0.5), (3.0, 0.49), (9.0, 0.485)];
    let cost = |slack: f64| one(&points, &Limits { slack, ..limits(0.1, 8.0) }).at.cost;
    assert!((cost(0.0) - 9.0).abs() < 1e-9);
    assert!(cost(0.02) < 3.0 && cost(0.04) < 1.01, "{} {}", cost(0.02), cost(0.04));
    // Half of the CPU time for 1.5 %, but only a tenth of it with the work besides encoding.
    let cores = Some((8.0, 100.0));
    let dear = one(&points, &Limits { slack: 0.02, cores, ..limits(0.01, 8.0) });
    assert!((dear.at.cost - 9.0).abs() < 1e-9, "{dear:?}");
}

proptest! {
    /// Against a search through all pairs of points in fine steps, including dominated points.
    #[test]
    fn no_other_mix_is_faster(
        points in prop::collection::vec((0.001_f64..20.0, 0.01_f64..1.0), 1..12),
        link in 0.001_f64..20.0,
        workers in 0.1_f64..64.0,
        cores in prop::option::of((0.5_f64..64.0, 0.0_f64..2.0)),
    ) {
        let limits = Limits { cores, ..limits(link, workers) };
        let mix = one(&points, &limits);
        let time = limits.time(mix.at);
        for a in &points {
            for b in &points {
                for step in 0..=50 {
                    let share = f64::from(step) / 50.0;
                    let from = Point { cost: a.0, size: a.1 };
                    let to = Point { cost: b.0, size: b.1 };
                    let other = limits.time(between(from, to, share));
                    prop_assert!(time <= other * (1.0 + 1e-9), "{mix:?} {time} against {other}");
                }
            }
        }
        let pair = mix.pairs[0];
        let (low, high) = (points[pair.low], points[pair.high]);
        let there = low.0 + pair.share * (high.0 - low.0);
        prop_assert!((there - mix.at.cost).abs() < 1e-9);
    }

    #[test]
    fn a_mix_that_saves_cpu_time_loses_no_more_than_it_may(
        points in prop::collection::vec((0.001_f64..20.0, 0.01_f64..1.0), 1..12),
        link in 0.001_f64..20.0,
        workers in 0.1_f64..64.0,
        slack in 0.0_f64..0.1,
    ) {
        let limits = limits(link, workers);
        let (fastest, mix) = (one(&points, &limits), one(&points, &Limits { slack, ..limits }));
        let lost = limits.time(mix.at) / limits.time(fastest.at) - 1.0;
        let saved = 1.0 - mix.at.cost / fastest.at.cost;
        prop_assert!(lost <= slack + 1e-6, "{lost} of {slack}");
        prop_assert!(saved >= 8.0 * lost - 1e-6, "{saved} for {lost}");
    }

    #[test]
    fn a_faster_link_never_asks_for_more_cpu(
        points in prop::collection::vec((0.001_f64..20.0, 0.01_f64..1.0), 1..12),
        link in 0.001_f64..20.0,
        faster in 1.0_f64..50.0,
        workers in 0.1_f64..64.0,
    ) {
        let slow = one(&points, &limits(link, workers));
        let fast = one(&points, &limits(link * faster, workers));
        prop_assert!(fast.at.cost <= slow.at.cost * (1.0 + 1e-9) + 1e-12);
    }
}
