//! Every fault of the simulated device against every shape of work: each piece comes back exactly
//! once, right, and soon.

use crate::matrix::{sum, Fault, FAULTS};
use crate::sim::{self, Sim};
use qat::{Direction, Engine, EngineOptions, Snapshot};
use std::time::{Duration, Instant};

#[test]
fn every_piece_is_returned_once_and_correct_whatever_the_device_does() {
    let sim = Sim::turn();
    // `make test` sets this: half of the cases, in which every two values still meet.
    let half = std::env::var_os("PLATEN_QUICK").is_some();
    for (number, fault) in FAULTS.iter().enumerate() {
        for compress in [true, false] {
            for workers in [1, 4] {
                for (count, len, window) in [(160, 4096, 128), (24, 64 << 10, 8)] {
                    let sum = number + usize::from(compress) + workers / 4 + len / (64 << 10);
                    if !half || sum % 2 == 0 {
                        let shape = (count, len, window);
                        fault.until_met(|| run_case(&sim, fault, compress, workers, shape));
                    }
                }
            }
        }
    }
}

/// Returns whether the fault was met as meant, and how long the slowest piece has waited.
fn run_case(
    sim: &Sim,
    fault: &Fault,
    compress: bool,
    workers: usize,
    (count, len, window): (usize, usize, usize),
) -> (bool, Duration) {
    let case = format!(
        "{}: {} of {len} bytes, {workers} workers",
        fault.name,
        if compress { "compress" } else { "decompress" }
    );
    let case = &case;
    sim.script("reset");
    sim.script("instances 4; latency 30; seed 7");
    let options = EngineOptions {
        max_plain: len,
        deadline: fault.deadline(),
        direction: if compress { Direction::Compress } else { Direction::Decompress },
        share: false,
        verify_every: 1,
        ..EngineOptions::default()
    };
    let qat = sim.start().unwrap();
    let engines: Vec<Engine> =
        (0..workers).map(|_| Engine::new(Some(&qat), options.clone())).collect();
    assert!(engines.iter().all(Engine::on_device), "{case}");
    // From here on: the directives that count submissions begin now.
    sim.script(fault.script);
    let snapshots: Vec<Snapshot> = std::thread::scope(|scope| {
        let run = |mut engine: Engine, seed: u64| {
            let pieces = sim::pieces(count, len, compress, seed);
            let (first, second) = pieces.split_at(count / 2);
            sim::run(&mut engine, first, window);
            // A device that works may have done all of it before its event arrives.
            let start = Instant::now();
            while fault.script.contains("restarting") && sim.counters().events == 0 {
                std::thread::sleep(Duration::from_millis(1));
                assert!(start.elapsed() < sim::HANG, "{case}: no event");
            }
            sim::run(&mut engine, second, window);
            engine.counters().snapshot()
        };
        let threads: Vec<_> = engines
            .into_iter()
            .zip(1..)
            .map(|(engine, seed)| scope.spawn(move || run(engine, seed)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| panic!("{case}")))
            .collect()
    });
    drop(qat);
    for snapshot in &snapshots {
        assert_eq!(snapshot.delivered, count as u64, "{case}");
        assert_eq!(snapshot.by_device + snapshot.software(), count as u64, "{case}\n{snapshot:#?}");
    }
    assert_eq!(sim.counters().violations, 0, "{case}");
    let sum = sum(&snapshots);
    let met = (fault.met)(&sum);
    if !met {
        println!("{case}: not met as meant\n{sum:#?}\n{:#?}", sim.counters());
    }
    (met, Duration::from_micros(sum.longest_wait_us))
}
