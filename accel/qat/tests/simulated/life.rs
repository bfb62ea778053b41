//! Coming and going: instances, restarts, silence, stops, shortage, load.

use crate::sim::{self, poll_until, Sim};
use qat::status::Status;
use qat::{By, Direction, Engine, EngineOptions, Op, Reason, Snapshot, StartError, State};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Small and patient: what these tests look at is order, not time. No thread of a busy machine is
/// put aside so long.
fn options() -> EngineOptions {
    EngineOptions {
        max_plain: 4096,
        deadline: Duration::from_secs(60),
        share: false,
        verify_every: 4,
        ..EngineOptions::default()
    }
}

/// For a device that will be silent: what has to be waited for is waited for soon, and yet so long
/// that a device that is there, on a busy machine, is not called late.
fn impatient() -> EngineOptions {
    EngineOptions { deadline: Duration::from_secs(1), ..options() }
}

#[test]
fn a_host_without_device_or_instance_uses_software_and_reports_the_reason() {
    let sim = Sim::turn();
    sim.script("absent");
    assert_eq!(sim.start().unwrap_err(), StartError::Unavailable);
    sim.script("reset");
    sim.script("instances 0");
    let error = sim.start().unwrap_err();
    assert!(matches!(&error, StartError::NoInstance(unfit) if unfit.is_empty()), "{error}");
    // Both failed starts were undone: the next one succeeds, and a second at the same time does
    // not.
    sim.script("reset");
    let qat = sim.start().unwrap();
    assert_eq!(sim.start_at_once().unwrap_err(), StartError::AlreadyStarted);
    drop(qat);

    let mut engine = Engine::new(None, options());
    sim::run(&mut engine, &sim::pieces(50, 4096, true, 3), 8);
    let counted = engine.counters().snapshot();
    assert_eq!((counted.by_device, counted.software_for(Reason::NoInstance)), (0, 50));
}

#[test]
fn engines_beyond_the_instances_use_software_until_one_is_free() {
    let sim = Sim::turn();
    sim.script("instances 2; packages 2");
    let qat = sim.start().unwrap();
    let mut engines: Vec<Engine> = (0..3).map(|_| Engine::new(Some(&qat), options())).collect();
    let on_device: Vec<bool> = engines.iter().map(Engine::on_device).collect();
    assert_eq!(on_device, [true, true, false]);
    let pieces = sim::pieces(20, 4096, true, 5);
    sim::run(&mut engines[2], &pieces, 8);
    assert_eq!(engines[2].counters().snapshot().software_for(Reason::NoInstance), 20);
    drop(engines.remove(0));
    poll_until(&mut engines[1], Engine::on_device);
    sim::run(&mut engines[1], &pieces, 8);
    assert_eq!(engines[1].counters().snapshot().by_device, 20);
}

#[test]
fn every_instance_of_the_device_is_used_and_released() {
    let sim = Sim::turn();
    for setup in ["memory guard; order shuffled", "memory slab; order fifo; intermediate 12"] {
        sim.script("reset");
        sim.script(setup);
        let qat = sim.start().unwrap();
        let mut engine =
            Engine::new(Some(&qat), EngineOptions { max_plain: 64 << 10, ..options() });
        for (compress, len) in [
            (true, 4096),
            (false, 4096),
            (true, 64 << 10),
            (false, 64 << 10),
            (true, 9),
            (false, 9),
        ] {
            sim::run(&mut engine, &sim::pieces(40, len, compress, len as u64), 64);
        }
        let counted = engine.counters().snapshot();
        assert_eq!((counted.by_device, counted.software()), (240, 0), "{setup}: {counted:#?}");
        drop(engine);
        drop(qat);
        let device = sim.counters();
        assert_eq!((device.sessions, device.violations, device.in_flight), (0, 0, 0), "{setup}");
    }
}

#[test]
fn a_full_ring_is_polled_and_no_piece_is_done_twice() {
    let sim = Sim::turn();
    sim.script("ring 16; instances 1; latency 200");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    sim::run(&mut engine, &sim::pieces(300, 4096, true, 11), 128);
    let counted = engine.counters().snapshot();
    assert!(counted.retries > 0, "{counted:#?}");
    assert_eq!((counted.by_device, counted.suspicions), (300, 0), "{counted:#?}");
    assert!(sim.counters().max_in_flight <= 15);
}

#[test]
fn a_full_device_shares_its_load_with_software_and_does_most_of_it() {
    let sim = Sim::turn();
    // 16 pieces each 3 ms: software is several times as fast, and the device still has a part in
    // it.
    sim.script("instances 1; latency 3000");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(
        Some(&qat),
        EngineOptions { share: true, depth: 16, deadline: Duration::from_secs(60), ..options() },
    );
    sim::run(&mut engine, &sim::pieces(600, 4096, true, 13), 64);
    let counted = engine.counters().snapshot();
    let busy = counted.software_for(Reason::Busy);
    assert!(busy > 0 && counted.by_device >= 16, "{counted:#?}");
    assert_eq!(counted.by_device + busy, 600, "{counted:#?}");
}

#[test]
fn a_silent_device_costs_the_deadline_once_and_is_used_again_when_it_answers() {
    // Where a busy machine puts the device's thread aside for a second, it is late once more.
    assert!((0..5).any(|_| is_used_again_when_it_answers()), "late each time");
}

/// `false` if the device was late after it had been revived.
fn is_used_again_when_it_answers() -> bool {
    let sim = Sim::turn();
    // With another instance, the engine would exchange its own after a second, and wait again.
    sim.script("instances 1");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), impatient());
    let pieces = sim::pieces(100, 4096, true, 17);
    sim.script("at 1 silence");
    sim::run(&mut engine, &pieces, 64);
    let first = engine.counters().snapshot();
    assert!(first.deadlines > 0 && first.suspicions == 1, "{first:#?}");
    assert_eq!(first.by_device, 0);
    assert!(first.quarantined > 0);
    // Nobody waits for it again, though probes are sent and time out.
    for _ in 0..3 {
        sim::run(&mut engine, &pieces, 64);
    }
    let second = engine.counters().snapshot();
    assert_eq!(second.deadlines, first.deadlines, "{second:#?}");
    poll_until(&mut engine, |engine| engine.counters().snapshot().probes > 0);
    sim.script("now revive");
    poll_until(&mut engine, Engine::on_device);
    sim::run(&mut engine, &pieces, 64);
    let last = engine.counters().snapshot();
    // Its event thread may have been put aside in a poll, with the instance's turn.
    let without_turn = |counted: &Snapshot| {
        counted.software_for(Reason::Refused) + counted.software_for(Reason::Poll)
    };
    if last.deadlines > second.deadlines || without_turn(&last) > without_turn(&second) {
        return false;
    }
    assert_eq!((last.by_device, last.recoveries), (100, 1), "{last:#?}");
    poll_until(&mut engine, |engine| engine.counters().snapshot().quarantined == 0);
    assert_eq!(engine.counters().snapshot().late, first.quarantined);
    true
}

#[test]
fn a_device_that_is_reset_is_used_again() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    let pieces = sim::pieces(200, 4096, false, 19);
    sim.script("at 20 reset 30");
    sim::run(&mut engine, &pieces, 64);
    assert!(engine.counters().snapshot().software() > 0);
    poll_until(&mut engine, |engine| {
        engine.on_device() && engine.counters().snapshot().recoveries > 0
    });
    let before = engine.counters().snapshot().by_device;
    sim::run(&mut engine, &pieces, 64);
    assert_eq!(engine.counters().snapshot().by_device, before + 200);
    let status =
        Status::collect(std::path::Path::new("/nowhere"), Ok(&sim.libraries), Some(Ok(&qat)));
    let instance = status.instances.iter().find(|instance| instance.claimed).unwrap();
    assert_eq!((instance.state, instance.fatals, instance.restarts), (State::Running, 1, 1));
    assert_eq!(instance.strays, 0);
}

#[test]
fn an_engine_on_a_dead_instance_takes_a_free_one() {
    let sim = Sim::turn();
    // Two devices: the death of the first leaves the second.
    sim.script("instances 2; packages 2");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    sim.script("at 5 instance=0 fatal");
    let pieces = sim::pieces(60, 4096, true, 23);
    sim::run(&mut engine, &pieces, 32);
    poll_until(&mut engine, Engine::on_device);
    let before = engine.counters().snapshot().by_device;
    sim::run(&mut engine, &pieces, 32);
    assert_eq!(engine.counters().snapshot().by_device, before + 60);
}

#[test]
fn a_stop_with_requests_that_never_complete_ends_and_frees_none_of_their_memory() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), impatient());
    sim.script("at 1 silence");
    let pieces = sim::pieces(40, 4096, true, 29);
    sim::run(&mut engine, &pieces, 40);
    let lost = engine.counters().snapshot().quarantined;
    assert!(lost > 0);
    drop(engine);
    drop(qat);
    assert_eq!(sim.counters().violations, 0);
    // And the next life has no part in it.
    sim.script("reset");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    sim::run(&mut engine, &pieces, 40);
    assert_eq!(engine.counters().snapshot().by_device, 40);
}

#[test]
fn requests_of_a_dropped_engine_free_the_instance_when_they_complete() {
    let sim = Sim::turn();
    sim.script("instances 1");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), impatient());
    sim.script("at 1 silence");
    sim::run(&mut engine, &sim::pieces(40, 4096, true, 31), 40);
    drop(engine);
    let mut engine = Engine::new(Some(&qat), options());
    assert!(!engine.on_device());
    sim.script("now revive");
    poll_until(&mut engine, Engine::on_device);
    sim::run(&mut engine, &sim::pieces(40, 4096, true, 37), 40);
    assert_eq!(engine.counters().snapshot().by_device, 40);
}

#[test]
fn too_little_pinned_memory_is_named_and_software_does_the_work() {
    let sim = Sim::turn();
    sim.script("usdm 64K; instances 1");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    assert!(!engine.on_device());
    sim::run(&mut engine, &sim::pieces(20, 4096, true, 41), 8);
    let status =
        Status::collect(std::path::Path::new("/nowhere"), Ok(&sim.libraries), Some(Ok(&qat)));
    let problem = status.instances[0].problem.as_deref().unwrap();
    assert!(problem.contains("memlock"), "{problem}");
    assert!(serde_json::to_string(&status).unwrap().contains("memlock"));
    assert_eq!(qat.problems().len(), 1, "{:?}", qat.problems());
    // A device that has started may lack the memory of more threads.
    let root = tempfile::tempdir().unwrap();
    let limits = root.path().join("proc/self/limits");
    std::fs::create_dir_all(limits.parent().unwrap()).unwrap();
    std::fs::write(limits, "Max locked memory         67108864   67108864   bytes\n").unwrap();
    let status = Status::collect(root.path(), Ok(&sim.libraries), Some(Ok(&qat)));
    let missing: Vec<_> = status.missing.iter().map(|missing| missing.what.as_str()).collect();
    assert_eq!(missing, ["memory that may be locked: 65536 KiB, 262144 wanted"]);
}

#[test]
fn a_little_pinned_memory_gives_an_engine_of_less_depth() {
    let sim = Sim::turn();
    sim.script("usdm 512K; instances 1");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    assert!(engine.on_device());
    sim::run(&mut engine, &sim::pieces(100, 4096, true, 59), 64);
    assert_eq!(engine.counters().snapshot().by_device, 100);
    assert!(sim.counters().max_in_flight <= 32);
    let status =
        Status::collect(std::path::Path::new("/nowhere"), Ok(&sim.libraries), Some(Ok(&qat)));
    let problem = status.instances[0].problem.as_deref().unwrap();
    assert!(problem.contains("of 128 requests"), "{problem}");
}

#[test]
fn broken_data_is_an_error_of_the_sender_and_not_of_the_device() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    for qat in [None, Some(&qat)] {
        let mut engine =
            Engine::new(qat, EngineOptions { direction: Direction::Decompress, ..options() });
        let good = sim::deflate(&[7; 4000]);
        let mut broken: Vec<(Vec<u8>, usize)> =
            (1..good.len()).map(|len| (good[..len].to_vec(), 4000)).collect();
        broken.extend([
            (vec![0xff; 300], 4000),
            (vec![0; 64], 4096),
            (Vec::new(), 10),
            (Vec::new(), 0),
        ]);
        broken.extend([
            (good.clone(), 3999),
            (good.clone(), 4001),
            (good.clone(), 0),
            (good.clone(), 1 << 40),
        ]);
        let count = broken.len();
        for (tag, (data, plain_len)) in broken.into_iter().enumerate() {
            let lease = loop {
                if let Some(lease) = engine.take(4096) {
                    break lease;
                }
                engine.poll(|_, result| assert!(result.is_err()));
            };
            engine.source(&lease)[..data.len()].copy_from_slice(&data);
            engine.submit(lease, data.len(), Op::Decompress { plain_len }, tag as u64);
        }
        while engine.in_flight() > 0 {
            engine.poll(|tag, result| assert!(result.is_err(), "piece {tag}"));
        }
        let counted = engine.counters().snapshot();
        assert_eq!((counted.bad_data, counted.suspicions), (count as u64, 0), "{counted:#?}");
    }
}

#[test]
fn a_wrong_output_is_found_by_the_sample_check() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    // Not verified: the flipped bit comes out, and the layer above must find it. That is the
    // documented limit.
    let mut engine = Engine::new(Some(&qat), EngineOptions { verify_every: 0, ..options() });
    sim.script("every 1 flip 1");
    let pieces = sim::pieces(1, 4096, true, 43);
    let lease = engine.take(4096).unwrap();
    engine.source(&lease)[..4096].copy_from_slice(&pieces[0].source);
    engine.submit(lease, 4096, Op::Compress, 0);
    let found = AtomicBool::new(false);
    while engine.in_flight() > 0 {
        engine.poll(|_, result| {
            let finished = result.unwrap();
            assert_eq!(finished.by, By::Device);
            let wrong = sim::inflate(finished.bytes).map_or(true, |plain| plain != pieces[0].plain);
            found.store(wrong, Ordering::Relaxed);
        });
    }
    assert!(found.into_inner(), "the simulated fault did not act");
    drop(engine);
    // Verified one in four: at the first one looked at, the device loses its trust with everything
    // in flight.
    let mut engine = Engine::new(Some(&qat), EngineOptions { verify_every: 1, ..options() });
    sim::run(&mut engine, &sim::pieces(50, 4096, true, 47), 32);
    let counted = engine.counters().snapshot();
    // A bit that decoders pass over, in the padding of a stored block, is no fault.
    assert!(counted.by_device < 10 && counted.suspicions == 1, "{counted:#?}");
}

#[test]
fn after_a_wrong_output_no_other_one_in_flight_is_taken_unverified() {
    let sim = Sim::turn();
    sim.script("instances 1; order fifo");
    let qat = sim.start().unwrap();
    let mut engine = Engine::new(Some(&qat), options());
    // One in four is verified: the first wrong one.
    sim.script("at 4 flip forever");
    // Text, in whose streams hardly a bit is one that decoders pass over.
    let pieces: Vec<_> = sim::pieces(128, 4096, true, 61).into_iter().step_by(4).collect();
    for (tag, piece) in (0..).zip(&pieces) {
        let lease = engine.take(4096).expect("there are 128");
        engine.source(&lease)[..4096].copy_from_slice(&piece.source);
        engine.submit(lease, 4096, piece.op, tag);
    }
    // The engine finds all of them at its first poll.
    let start = Instant::now();
    while sim.counters().plain_bytes < 32 * 4096 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < sim::HANG, "{:#?}", sim.counters());
    }
    std::thread::sleep(Duration::from_millis(100));
    while engine.in_flight() > 0 {
        let polled = engine.poll(|tag, result| {
            sim::check(&pieces[usize::try_from(tag).unwrap()], &result.unwrap());
        });
        if polled == 0 {
            engine.wait();
        }
        assert!(start.elapsed() < sim::HANG, "{:#?}", engine.counters().snapshot());
    }
    let counted = engine.counters().snapshot();
    assert!(counted.by_device < 8 && counted.suspicions == 1, "{counted:#?}");
}

#[test]
fn a_slot_can_be_given_back() {
    let sim = Sim::turn();
    let qat = sim.start().unwrap();
    for qat in [None, Some(&qat)] {
        let mut engine = Engine::new(qat, EngineOptions { depth: 2, ..options() });
        for _ in 0..100 {
            let (one, two) = (engine.take(4096).unwrap(), engine.take(4096).unwrap());
            engine.give_back(one);
            engine.give_back(two);
        }
        sim::run(&mut engine, &sim::pieces(10, 4096, true, 53), 2);
    }
}
