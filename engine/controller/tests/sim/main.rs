//! The controller against every fixed choice, in simulated migrations over tables of real chunks.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times and sizes of a simulation, far below 2^53"
)]

mod first_samples;
mod frugal;
mod histories;
mod model;
mod pauses;
mod scenes;
mod tables;

use controller::Controller;
use model::{controller, run, run_until, Chooser, Outcome, World};
use tables::{Row, GUEST, LZ4, RANDOM, REDIS, TEXT, ZSTD};

/// 100 Mbit/s, 1 and 10 Gbit/s, and no limit, in bytes per ns.
const LINKS: [(&str, f64); 4] =
    [("100M", 0.0125), ("1G", 0.125), ("10G", 1.25), ("unlimited", f64::INFINITY)];

type Data = fn(usize) -> &'static Row;

const DATA: [(&str, Data); 6] = [
    ("text", |at| &TEXT[at % TEXT.len()]),
    ("guest", |at| &GUEST[at % GUEST.len()]),
    ("redis", |at| &REDIS[at % REDIS.len()]),
    ("random", |at| &RANDOM[at % RANDOM.len()]),
    // Every third chunk random, the others from the guest.
    ("mixed", |at| if at % 3 == 0 { &RANDOM[0] } else { &GUEST[at % GUEST.len()] }),
    // Text, random, guest, 256 MiB each in turn.
    ("phases", |at| match at / 512 % 3 {
        0 => &TEXT[at % TEXT.len()],
        1 => &RANDOM[at % RANDOM.len()],
        _ => &GUEST[at % GUEST.len()],
    }),
];

/// The fastest fixed choice, and the controller.
fn compare(world: &World) -> (usize, Outcome, Outcome, Controller) {
    let auto = controller(world);
    let chosen = run(world, Chooser::Auto(&auto));
    let (at, best) = fastest(world, f64::INFINITY).expect("there are some");
    (at, best, chosen, auto)
}

/// The fastest of the fixed choices that take less than `limit` ns, candidates included that the
/// controller does not have. None is run for longer than the fastest before it takes.
fn fastest(world: &World, limit: f64) -> Option<(usize, Outcome)> {
    let mut best: Option<(usize, Outcome)> = None;
    for at in 0..1 + LZ4.len() + ZSTD.len() {
        let limit = best.as_ref().map_or(limit, |(_, best)| best.time);
        best = run_until(world, Chooser::Fixed(at), limit).map(|it| (at, it)).or(best);
    }
    best
}

/// About ten seconds' worth, and at least a gigabyte.
fn size(link: f64) -> f64 {
    (link * 25e9).clamp(1e9, 6e9)
}

/// Within 5 % of the fastest fixed choice, and `more` ns.
fn check(name: &str, world: &World, more: f64, failed: &mut Vec<String>) {
    let auto = controller(world);
    let chosen = run(world, Chooser::Auto(&auto));
    let Some((at, best)) = fastest(world, chosen.time) else {
        println!("{name:<32} {:>7.2} s, no fixed choice is faster", chosen.time / 1e9);
        return;
    };
    let line = format!(
        "{name:<32} {:>7.2} s, best fixed {:>9} {:>7.2} s: {:.3}; {:.1} cores, {:.0} % of the link; {} explored of {}",
        chosen.time / 1e9,
        match at {
            0 => "none".into(),
            at if at <= LZ4.len() => format!("lz4 {}", LZ4[at - 1]),
            _ => format!("zstd {}", ZSTD[at - 1 - LZ4.len()]),
        },
        best.time / 1e9,
        chosen.time / best.time,
        chosen.cpu / chosen.time,
        100.0 * chosen.wire / (world.link)(0.0) / chosen.time,
        chosen.explored,
        chosen.chunks
    );
    println!("{line}");
    if chosen.time > 1.05 * best.time + more {
        for decision in auto.explain_after(0).1.iter().rev().take(4) {
            println!("{decision}");
        }
        println!("{}", auto.current());
        failed.push(line);
    }
}

fn sweep(workers: usize) {
    let mut failed = Vec::new();
    for (data_name, data) in DATA {
        for (link_name, link) in LINKS {
            let world = World { workers, bytes: size(link), ..World::new(link, data) };
            check(
                &format!("{data_name}, {link_name}, {workers} threads"),
                &world,
                0.0,
                &mut failed,
            );
        }
    }
    assert!(failed.is_empty(), "slower than the best fixed choice by more than 5 %: {failed:#?}");
}

#[test]
fn within_5_percent_of_the_best_fixed_choice_with_1_thread() {
    sweep(1);
}

#[test]
fn within_5_percent_of_the_best_fixed_choice_with_4_threads() {
    sweep(4);
}

#[test]
fn within_5_percent_of_the_best_fixed_choice_with_16_threads() {
    sweep(16);
}
