//! CPU time of both ends' caches for pages that are sent once, and for pages that are sent again.
//!
//! `cargo run --release -p delta --example cache_cost -- [MIB [RUNS]]`: chunks of 128 records
//! through a sender and a receiver, each with a new cache of 256 MiB. Medians, in CPU seconds a
//! GiB: of the sender, the receiver, and of a copy of the chunk alone, which either needs.

use delta::{Receiver, Sender, RECORD_HEAD, TABLE_ROOM};
use rustix::time::{clock_gettime, ClockId};

const PAGE: usize = 4096;
const PAGES: usize = 128;
const CACHE: u64 = 256 << 20;

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a number"));
    let chunks = args.next().unwrap_or(512) * 256 / PAGES;
    let runs = args.next().unwrap_or(5);
    let mut all = [const { Vec::new() }; 5];
    for _ in 0..runs {
        for (kind, time) in all.iter_mut().zip(one(chunks)) {
            kind.push(time / chunks as f64 * (1 << 30) as f64 / (PAGES * PAGE) as f64);
        }
    }
    let names = ["copy", "sender, once", "receiver, once", "sender, again", "receiver, again"];
    for (name, mut times) in names.into_iter().zip(all) {
        times.sort_by(f64::total_cmp);
        println!("{name:16} {:.3} s/GiB", times[times.len() / 2]);
    }
}

/// CPU seconds of each kind.
fn one(chunks: usize) -> [f64; 5] {
    let (mut sender, mut receiver) = (Sender::new(CACHE, PAGE), Receiver::new(CACHE, PAGE));
    let len = PAGES * (RECORD_HEAD + PAGE);
    let mut source = vec![0; len];
    let mut chunk = vec![0; len + TABLE_ROOM];
    let mut times = [0.0; 5];
    for round in 0..2 {
        for number in 0..chunks {
            // As many bytes as fit into a cache of the CPU, all different.
            for (at, word) in source.chunks_exact_mut(8).enumerate() {
                let seed = (number * len + at) as u64;
                word.copy_from_slice(&seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
            }
            let begun = cpu();
            chunk[..len].copy_from_slice(&source);
            let copied = cpu();
            let mut pass = sender.begin(&mut chunk, len);
            pass.records(0, (number * PAGES * PAGE) as u64, PAGES);
            let (table, _) = pass.finish();
            let sent = cpu();
            let (plain, tables) = chunk.split_at_mut(len);
            receiver.apply(plain, &tables[..table]).expect("a table of ours");
            let received = cpu();
            times[0] += (copied - begun) / 2.0;
            times[1 + 2 * round] += sent - copied;
            times[2 + 2 * round] += received - sent;
            assert!(plain == source);
        }
    }
    times
}

/// CPU seconds of this process, system time included.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
