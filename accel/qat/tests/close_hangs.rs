//! A call in which the event thread closes an abandoned channel, and which never returns. It is a
//! program of its own: that thread is left behind, and with it the library.

#[expect(dead_code, reason = "shared with the other tests of the simulated device")]
#[path = "simulated/sim.rs"]
mod sim;

use qat::{Engine, EngineOptions};
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[test]
fn an_engine_is_dropped_while_the_event_thread_is_stuck_in_the_channel_of_another() {
    let sim = sim::Sim::turn();
    sim.script("instances 2");
    let qat = sim.start().unwrap();
    let engine = || {
        let options = EngineOptions {
            max_plain: 4096,
            deadline: Duration::from_secs(1),
            share: false,
            ..EngineOptions::default()
        };
        Engine::new(Some(&qat), options)
    };
    let (mut first, mut second) = (engine(), engine());
    // Both leave requests with the device.
    sim.script("at 1 silence");
    for engine in [&mut first, &mut second] {
        sim::run(engine, &sim::pieces(40, 4096, true, 79), 40);
        assert!(engine.counters().snapshot().quarantined > 0);
    }
    drop(first);
    // The event thread polls the instance of a dropped engine twice in each round: as a neglected
    // one, and to close its channel.
    let before = sim.counters().faults;
    sim.script("now instance=0 pollfail; now instance=0 block poll");
    let start = Instant::now();
    while sim.counters().faults < before + 2 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < sim::HANG, "{:#?}", sim.counters());
    }
    let (done, dropped) = mpsc::channel();
    std::thread::spawn(move || {
        drop(second);
        let _ = done.send(());
    });
    dropped.recv_timeout(Duration::from_secs(60)).expect("the second engine is dropped");
}
