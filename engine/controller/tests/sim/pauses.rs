//! QEMUs that are slow now and then, as where programs share too few cores.

use crate::model::{Slow, World};
use crate::{check, DATA};

const KINDS: [&str; 3] = ["text", "guest", "mixed"];

/// Period and length of the slow times in ms, and the rate then, bytes per ns.
const SLOW: [(f64, f64, f64); 6] = [
    (60.0, 20.0, 0.0),
    (150.0, 75.0, 0.0),
    (400.0, 120.0, 0.0),
    (1000.0, 250.0, 0.0),
    (700.0, 250.0, 0.06),
    (1500.0, 500.0, 0.06),
];

/// The slow times are no evidence of the rate afterwards. Where the plan took them for it, every
/// third of these scenes took more than 1.05 of the best fixed choice's time, and some 1.2.
fn with_pauses(at_source: bool) {
    let mut failed = Vec::new();
    for (data_name, data) in DATA.into_iter().filter(|(name, _)| KINDS.contains(name)) {
        for (period, length, rate) in SLOW {
            // In pauses longer than its 15 ms the window runs dry each time. Chunks that went raw
            // have shown the path's least latency to it, so it holds less than a fixed choice's.
            let more = if period < 100.0 { 1e9 } else { 0.1e9 };
            for workers in [1, 2, 8] {
                for link in [0.06, 0.125] {
                    let slow = Slow { period: period * 1e6, length: length * 1e6, rate };
                    let mut world = World { workers, bytes: link * 15e9, ..World::new(link, data) };
                    if at_source {
                        world.source_slow = slow;
                    } else {
                        world.destination_slow = slow;
                    }
                    let name = format!(
                        "{data_name}, {link}, {workers} threads, {at_source} {period} {length} {rate}"
                    );
                    check(&name, &world, more, &mut failed);
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_pausing_source_does_not_count_as_slow() {
    with_pauses(true);
}

#[test]
fn a_pausing_destination_does_not_count_as_slow() {
    with_pauses(false);
}
