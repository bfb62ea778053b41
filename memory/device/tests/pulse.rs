//! A supervisor's view of a device's threads: a thread that waits for a backing device does not
//! count as hung.

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device::{Device, DeviceOptions, Queue, PAGE, QAT_SLOTS};
use pulse::{Pulse, State};
use shelf::gate::{behind_the_gate, page, put_out, set_gate};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);
const PAGES: u64 = 8;

#[test]
fn a_queue_reports_idle_progress_and_a_wait_for_a_disk() {
    let store = Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap();
    let _disk = behind_the_gate(&store, PAGES);
    let pulse = Arc::new(Pulse::private());
    let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
    let device = Device::with_pulse(&store, &options, Arc::clone(&pulse)).unwrap();
    let mut queue = device.queue().unwrap();
    // Without workers the first queue has the first slot behind those of QAT threads.
    let seen = || pulse.slot(QAT_SLOTS.end).look();
    assert_eq!((seen().thread, seen().state), (0, State::Idle));
    for index in 0..PAGES {
        let before = seen();
        queue.write_now(index, &page(index)).unwrap();
        assert_eq!(seen().state, State::Idle);
        assert!(seen().thread > 0 && seen().progress > before.progress);
    }
    put_out(&store, 0..PAGES);
    for patches in [false, true] {
        set_gate(false);
        thread::scope(|scope| {
            let waits = scope.spawn(|| match patches {
                true => queue.patch(3, 5, b"here"),
                false => queue.read_now(3, &mut [0; PAGE]),
            });
            let start = Instant::now();
            while seen().state != State::Waits {
                assert!(start.elapsed() < LONG, "{:?}", seen());
                thread::sleep(Duration::from_millis(1));
            }
            set_gate(true);
            waits.join().unwrap().unwrap();
        });
        assert_eq!(seen().state, State::Idle);
    }
}
