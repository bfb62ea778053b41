//! A poll of the event thread that never returns. It is a program of its own: that thread is left
//! behind, and with it the library.

#[expect(dead_code, reason = "shared with the other tests of the simulated device")]
#[path = "simulated/sim.rs"]
mod sim;

use qat::{Engine, EngineOptions};
use std::time::{Duration, Instant};

#[test]
fn an_engine_does_not_wait_at_each_poll_for_an_event_thread_that_is_stuck() {
    let sim = sim::Sim::turn();
    sim.script("instances 1");
    let qat = sim.start().unwrap();
    let options = EngineOptions {
        max_plain: 4096,
        deadline: Duration::from_secs(1),
        share: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Some(&qat), options);
    // The device keeps what it has, so that the engine goes on polling it.
    sim.script("at 1 silence");
    sim::run(&mut engine, &sim::pieces(40, 4096, true, 71), 40);
    assert!(engine.counters().snapshot().quarantined > 0);
    // The engine has nothing to do: the event thread polls the suspect instance.
    let before = sim.counters().faults;
    sim.script("now block poll");
    let start = Instant::now();
    while sim.counters().faults == before {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < sim::HANG, "{:#?}", sim.counters());
    }
    // With 20 ms for each piece this takes 40 s.
    let start = Instant::now();
    sim::run(&mut engine, &sim::pieces(2000, 4096, true, 73), 8);
    let taken = start.elapsed();
    assert!(taken < Duration::from_secs(20), "{taken:?}: {:#?}", engine.counters().snapshot());
    drop(engine);
    drop(qat);
    assert!(qat::is_stuck());
}
