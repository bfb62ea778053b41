//! CPU time that gains hardly any time is not spent, unless pages are sent again.

use crate::model::World;
use crate::{compare, size, DATA};

const KINDS: [&str; 3] = ["text", "guest", "redis"];
/// Slow enough for 16 threads to use zstd 9 for everything.
const LINKS: [f64; 2] = [0.0125, 0.125];

fn worlds(again: bool) -> impl Iterator<Item = (String, World)> {
    let kinds = DATA.into_iter().filter(|(name, _)| KINDS.contains(name));
    kinds.flat_map(move |(name, data)| {
        LINKS.map(|link| {
            let bytes = size(link);
            let world = World { workers: 16, bytes, again, ..World::new(link, data) };
            (format!("{name}, {link}"), world)
        })
    })
}

/// Zstd 9 is the fastest, for twice the CPU time of a mix of levels that takes 2 % longer.
#[test]
fn little_time_is_given_for_much_cpu_time() {
    for (name, world) in worlds(false) {
        let (_, best, chosen, auto) = compare(&world);
        let (time, cpu) = (chosen.time / best.time, chosen.cpu / best.cpu);
        println!(
            "{name}: {time:.3} of the time, {cpu:.2} of the CPU time; {} explored of {}",
            chosen.explored, chosen.chunks
        );
        assert!(time < 1.045 && cpu < 0.8, "{name}: {time:.3}, {cpu:.2}\n{}", auto.current());
    }
}

/// While the guest writes what has to be sent again, a second lost costs more than a second.
#[test]
fn no_time_is_given_while_pages_are_sent_again() {
    for (name, world) in worlds(true) {
        let (_, best, chosen, auto) = compare(&world);
        let time = chosen.time / best.time;
        println!("{name}: {time:.3} of the time");
        assert!(time < 1.015, "{name}: {time:.3}\n{}", auto.current());
    }
}
