//! Devices that keep a part of what they get, that are full of nothing, that are exchanged; data
//! that are not their fault.

use crate::sim::{self, Sim};
use qat::{Direction, Engine, EngineOptions, Op, Reason};
use std::time::{Duration, Instant};

fn options() -> EngineOptions {
    EngineOptions {
        max_plain: 4096,
        depth: 72,
        deadline: Duration::from_millis(60),
        share: false,
        ..EngineOptions::default()
    }
}

/// For a device that answers most requests: on a busy machine it does not answer all of those
/// within 60 ms.
fn patient() -> EngineOptions {
    EngineOptions { deadline: Duration::from_secs(1), ..options() }
}

/// Keeps `window` pieces in flight until `enough` returns true, or fails as hung.
fn stream(engine: &mut Engine, window: usize, mut enough: impl FnMut(&Engine) -> bool) {
    let start = Instant::now();
    let mut tag = 0_u64;
    while !enough(engine) {
        while engine.in_flight() < window {
            let Some(lease) = engine.take(4096) else { break };
            engine.source(&lease)[..4096].fill(tag.to_le_bytes()[0]);
            engine.submit(lease, 4096, Op::Compress, tag);
            tag += 1;
        }
        if engine.poll(|_, result| assert!(result.is_ok())) == 0 {
            engine.wait();
        }
        assert!(start.elapsed() < sim::HANG, "{:#?}", engine.counters().snapshot());
    }
}

/// Delivers all that is in flight.
fn finish(engine: &mut Engine) {
    let start = Instant::now();
    while engine.in_flight() > 0 {
        if engine.poll(|_, result| assert!(result.is_ok())) == 0 {
            engine.wait();
        }
        assert!(start.elapsed() < sim::HANG, "{:#?}", engine.counters().snapshot());
    }
}

/// Streams to devices that lose requests by this script, until `enough`, and expects fewer late
/// requests than `most`. Where a busy machine puts the device's thread aside for a second, all that
/// it has are late: tries again then.
fn loses(instances: u32, script: &str, most: u64, enough: impl Fn(&Sim, &Engine) -> bool) {
    for left in (0..5).rev() {
        let sim = Sim::turn();
        sim.script(&format!("instances {instances}; latency 30"));
        let qat = sim.start().unwrap();
        let mut engine = Engine::new(Some(&qat), patient());
        sim.script(script);
        stream(&mut engine, 32, |engine| enough(&sim, engine));
        let counted = engine.counters().snapshot();
        assert!(counted.suspicions >= 1, "{counted:#?}");
        if counted.deadlines < most {
            return;
        }
        assert!(left > 0, "{counted:#?}");
    }
}

#[test]
fn a_device_that_loses_a_request_now_and_then_is_suspected_at_the_third_check_that_finds_one() {
    // It answers the others, so it is never silent, and is far from having lost half of its slots.
    loses(1, "every 1000 late 3600000 1", 12, |_, engine| {
        engine.counters().snapshot().suspicions > 0
    });
}

#[test]
fn a_device_that_loses_some_requests_is_exchanged_before_it_has_lost_all_slots() {
    // It loses what it gets; each time its probes are answered it gets more, until half of its
    // slots are gone. Its session stays, for it still owes answers; the second is that of its
    // successor.
    let exchanged = |sim: &Sim, _: &Engine| sim.counters().sessions == 2;
    loses(2, "every 40 instance=0 late 3600000 1", 100, exchanged);
}

#[test]
fn a_ring_that_is_full_of_lost_requests_is_not_waited_for() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 30");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), patient());
    sim.script("at 100 late 3600000 1");
    // While the engine is suspect, it has all that is in flight in quarantine.
    stream(&mut engine, 32, |engine| {
        engine.on_device() && engine.counters().snapshot().quarantined == 1
    });
    // With nothing of value in flight, nothing is waited for: not even for a deadline.
    let before = engine.counters().snapshot();
    sim.script("now retry forever");
    stream(&mut engine, 32, |engine| engine.counters().snapshot().suspicions > before.suspicions);
    stream(&mut engine, 32, |engine| {
        engine.counters().snapshot().delivered > before.delivered + 500
    });
    let counted = engine.counters().snapshot();
    assert!(counted.software_for(Reason::Refused) > 0, "{counted:#?}");
}

#[test]
fn more_output_than_fits_is_not_read() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    let patient = EngineOptions { deadline: Duration::from_secs(60), ..options() };
    let mut engine = Engine::new(Some(&qat), patient);
    sim.script("at 5 produced 1000000 5");
    let delivered = |engine: &Engine| engine.counters().snapshot().delivered;
    stream(&mut engine, 8, |engine| delivered(engine) > 60);
    let counted = engine.counters().snapshot();
    assert_eq!(counted.software_for(Reason::Wrong), 5, "{counted:#?}");
}

#[test]
fn data_that_software_accepts_do_not_make_the_device_suspect() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    let options = EngineOptions {
        direction: Direction::Decompress,
        deadline: Duration::from_secs(60),
        ..options()
    };
    let mut engine = Engine::new(Some(&qat), options);
    let mut stream = sim::deflate(&[7; 4096]);
    stream.push(0);
    for tag in 0..40 {
        let lease = engine.take(4096).expect("one at a time");
        engine.source(&lease)[..stream.len()].copy_from_slice(&stream);
        engine.submit(lease, stream.len(), Op::Decompress { plain_len: 4096 }, tag);
        while engine.in_flight() > 0 {
            if engine.poll(|_, result| assert!(result.is_ok())) == 0 {
                engine.wait();
            }
        }
    }
    let counted = engine.counters().snapshot();
    assert_eq!((counted.suspicions, counted.software_for(Reason::Wrong)), (0, 40), "{counted:#?}");
    assert!(engine.on_device());
}

#[test]
fn an_exchange_for_an_instance_of_less_depth_drops_the_places_of_the_old_one() {
    let sim = Sim::turn();
    // Enough for one engine of depth 32, and less than that for a second.
    sim.script("usdm 800K; instances 2; latency 30");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), EngineOptions { depth: 32, ..options() });
    assert!(engine.on_device());
    sim.script("now instance=0 silence");
    for tag in 0..30 {
        let lease = engine.take(4096).expect("there are 32");
        engine.source(&lease)[..4096].fill(3);
        engine.submit(lease, 4096, Op::Compress, tag);
    }
    let mut delivered = 0;
    let start = Instant::now();
    while delivered < 30 {
        let polled = engine.poll(|_, result| {
            assert!(result.is_ok());
            delivered += 1;
            if delivered == 1 {
                // The receiver of the results is delayed, while the device answers.
                sim.script("now instance=0 revive");
                std::thread::sleep(Duration::from_millis(1200));
            }
        });
        if polled == 0 {
            engine.wait();
        }
        assert!(start.elapsed() < sim::HANG);
    }
    // The exchange is made when the engine looks next.
    sim::run(&mut engine, &sim::pieces(40, 4096, true, 61), 16);
}

#[test]
fn a_dead_instance_holds_its_memory_until_it_restarts() {
    let sim = Sim::turn();
    sim.script("instances 2; packages 2");
    let qat = sim.start().unwrap();
    let patient = EngineOptions { deadline: Duration::from_secs(60), ..options() };
    let mut engine = Engine::new(Some(&qat), patient);
    sim::run(&mut engine, &sim::pieces(20, 4096, true, 67), 16);
    sim.script("now instance=0 fatal");
    let start = Instant::now();
    while engine.on_device() {
        engine.poll(|_, _| {});
        assert!(start.elapsed() < sim::HANG);
    }
    drop(engine);
    // Its session could not be removed, and what the device may write to is not given back.
    assert_eq!(sim.counters().sessions, 1);
    sim.script("now instance=0 restarting; now instance=0 restarted");
    while sim.counters().sessions > 0 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < sim::HANG, "{:#?}", sim.counters());
    }
}

#[test]
fn a_silent_device_costs_one_deadline_for_each_instance_and_no_more() {
    let sim = Sim::turn();
    sim.script("instances 2; latency 30");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    sim.script("now silence");
    // Given up, then exchanged for the other one, and that given up.
    stream(&mut engine, 32, |engine| engine.counters().snapshot().suspicions == 2);
    finish(&mut engine);
    let (after, start) = (engine.counters().snapshot(), Instant::now());
    stream(&mut engine, 32, |_| start.elapsed() > Duration::from_millis(1500));
    let counted = engine.counters().snapshot();
    assert_eq!((counted.deadlines, counted.suspicions), (after.deadlines, 2), "{counted:#?}");
    assert!(counted.by_device == 0 && counted.delivered > after.delivered, "{counted:#?}");
}

#[test]
fn no_other_thread_uses_an_instance_while_it_dies() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 30");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    // The event thread polls it each time as well.
    for _ in 0..60 {
        sim.script("at 20 reset 5");
        let (events, before) = (sim.counters().events, engine.counters().snapshot().by_device);
        stream(&mut engine, 16, |engine| {
            sim.counters().events >= events + 3
                && engine.counters().snapshot().by_device > before + 100
        });
        sim.script("");
    }
    assert_eq!(sim.counters().violations, 0);
}

#[test]
fn jobs_that_the_device_completes_late_are_withdrawn_from_software() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 30");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    sim.script("now silence");
    for tag in 0..60_u64 {
        let lease = engine.take(4096).expect("there are 72");
        engine.source(&lease)[..4096].fill(tag.to_le_bytes()[0]);
        engine.submit(lease, 4096, Op::Compress, tag);
    }
    let mut delivered = 0;
    let start = Instant::now();
    while delivered < 60 {
        let polled = engine.poll(|_, result| {
            assert!(result.is_ok());
            delivered += 1;
            if delivered == 1 {
                // All are late, and queued; this took longer than software has for one look. Those
                // behind it are answered before the next one.
                sim.script("now revive");
                while sim.counters().plain_bytes < 60 * 4096 {
                    std::thread::sleep(Duration::from_millis(1));
                    assert!(start.elapsed() < sim::HANG, "{:#?}", sim.counters());
                }
                std::thread::sleep(Duration::from_millis(300));
            }
        });
        if polled == 0 {
            engine.wait();
        }
        assert!(start.elapsed() < sim::HANG, "{:#?}", engine.counters().snapshot());
    }
    let counted = engine.counters().snapshot();
    assert_eq!(counted.delivered, 60, "{counted:#?}");
    // That nothing of theirs was left in the queue is asserted by who takes the next one from it.
    assert!(counted.by_device > 0 && counted.software() > 0, "{counted:#?}");
    sim::poll_until(&mut engine, Engine::on_device);
}
