//! Every fault of the simulated device against every shape of work: each piece comes back exactly once, right, and
//! soon.

use crate::sim::{self, Sim};
use qat::{Direction, Engine, EngineOptions, Reason, Snapshot};
use std::time::{Duration, Instant};

/// Short, for the many cases that cost one. A busy machine's simulated device may miss it; that is a fault as well.
const DEADLINE: Duration = Duration::from_millis(60);
/// No piece may have waited longer, by the engines' own count. Several times the deadline, because a thread of a busy
/// machine can be put aside for long; far from the seconds or for ever that the faults would cost a naive driver.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

struct Fault {
    name: &'static str,
    script: &'static str,
    /// What must be seen in the sum of all engines' counters: the fault did happen, and was met in the way meant.
    met: fn(&Snapshot) -> bool,
}

const FAULTS: [Fault; 23] = [
    Fault { name: "none", script: "", met: |sum| sum.by_device > 0 },
    Fault { name: "full for a while", script: "at 3 retry 40", met: |sum| sum.retries >= 1 },
    Fault { name: "full for ever", script: "at 3 retry forever", met: |sum| sum.software() > 0 },
    Fault {
        name: "some refused",
        script: "at 3 fail 3",
        met: |sum| sum.software_for(Reason::Refused) > 0,
    },
    Fault { name: "all refused", script: "every 1 fail 1", met: |sum| sum.by_device == 0 },
    Fault {
        name: "overflow",
        script: "at 3 status -11 3",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "verify error",
        script: "at 3 status -18 2",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "error answers",
        script: "at 2 error -17 5",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "only error answers",
        script: "every 1 error -13 1",
        met: |sum| sum.by_device == 0,
    },
    Fault { name: "one poll fails", script: "at 2 pollfail 1", met: |sum| sum.poll_failures == 1 },
    Fault {
        name: "polls fail",
        script: "at 2 pollfail 100000000",
        met: |sum| sum.software_for(Reason::Poll) > 0,
    },
    Fault {
        name: "silence",
        script: "at 5 silence",
        met: |sum| sum.software_for(Reason::Late) > 0,
    },
    Fault {
        name: "silence from the start",
        script: "now silence",
        met: |sum| sum.by_device == 0 && sum.deadlines > 0,
    },
    Fault {
        name: "silence and back",
        script: "at 5 silence; after 600 revive",
        met: |sum| sum.software() > 0,
    },
    Fault { name: "some late", script: "at 3 late 600 4", met: |sum| sum.software() > 0 },
    Fault {
        name: "a wrong bit",
        script: "at 3 flip 3",
        met: |sum| sum.software_for(Reason::Wrong) > 0,
    },
    Fault {
        name: "every output wrong",
        script: "every 1 flip 1",
        met: |sum| sum.software_for(Reason::Wrong) > 0,
    },
    Fault {
        name: "a wrong checksum",
        script: "at 3 crc 3",
        met: |sum| sum.software_for(Reason::Wrong) > 0,
    },
    Fault { name: "death", script: "at 6 fatal", met: |sum| sum.software() > 0 },
    Fault { name: "death at once", script: "at 1 fatal", met: |sum| sum.software() > 0 },
    Fault { name: "restarting", script: "at 6 restarting", met: |sum| sum.software() > 0 },
    Fault { name: "reset", script: "at 6 reset 20", met: |sum| sum.software() > 0 },
    Fault {
        name: "restarting and back",
        script: "at 6 restarting; after 30 restarted",
        met: |sum| sum.by_device > 0,
    },
];

#[test]
fn every_piece_comes_back_once_and_right_whatever_the_device_does() {
    let sim = Sim::turn();
    for fault in &FAULTS {
        for compress in [true, false] {
            for workers in [1, 4] {
                for (count, len, window) in [(160, 4096, 128), (24, 64 << 10, 8)] {
                    run_case(&sim, fault, compress, workers, (count, len, window));
                }
            }
        }
    }
}

fn run_case(
    sim: &Sim,
    fault: &Fault,
    compress: bool,
    workers: usize,
    (count, len, window): (usize, usize, usize),
) {
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
        deadline: DEADLINE,
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
        let wait = Duration::from_micros(snapshot.longest_wait_us);
        assert!(wait < LONGEST_WAIT, "{case}: a piece waited {wait:?}\n{snapshots:#?}");
        assert_eq!(snapshot.delivered, count as u64, "{case}");
        assert_eq!(snapshot.by_device + snapshot.software(), count as u64, "{case}\n{snapshot:#?}");
    }
    let sum = sum(&snapshots);
    assert!((fault.met)(&sum), "{case}: not met as meant\n{sum:#?}\n{:#?}", sim.counters());
    assert_eq!(sim.counters().violations, 0, "{case}");
}

/// The counters the faults are judged by, added up.
fn sum(snapshots: &[Snapshot]) -> Snapshot {
    let add = |of: fn(&Snapshot) -> u64| snapshots.iter().map(of).sum();
    let by_software = Reason::ALL
        .into_iter()
        .map(|reason| (reason, snapshots.iter().map(|one| one.software_for(reason)).sum()))
        .collect();
    Snapshot {
        by_device: add(|one| one.by_device),
        retries: add(|one| one.retries),
        poll_failures: add(|one| one.poll_failures),
        deadlines: add(|one| one.deadlines),
        by_software,
        ..Snapshot::default()
    }
}
