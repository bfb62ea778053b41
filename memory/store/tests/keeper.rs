//! A worker that waits for a slab is woken, whatever made the slab ready.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use store::{Keeper, Options, Store};

/// Longer than the whole test may take: a worker that is not woken waits this long.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn every_waiter_for_the_keeper_is_woken() {
    let start = Instant::now();
    for round in 0..40_u64 {
        // Nearly nothing ready, and objects of all lengths: workers wait all the time.
        let options = Options { reserve: 1 << 20, patience: PATIENCE, ..Options::default() };
        let store = Store::create(4096, options).unwrap();
        let keeper = Keeper::start(&store).unwrap();
        let writers: Vec<_> = (0..3_u64)
            .map(|own| {
                let store = Arc::clone(&store);
                thread::spawn(move || {
                    let mut worker = store.worker().unwrap();
                    let bytes = [0x5a; 4096];
                    for number in 0..1300_u64 {
                        let len = (number * 2_654_435_761 + own * 77 + round * 991) % 4096 + 1;
                        let object = &bytes[..usize::try_from(len).unwrap()];
                        worker.put(own * 1300 + number, 1, object).unwrap();
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        drop(keeper);
        assert!(start.elapsed() < PATIENCE / 2, "a worker was not woken in round {round}");
    }
}
