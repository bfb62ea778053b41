//! Measures what memory for writes costs: `ready [MIB]`. Prints the CPU time in which a keeper makes
//! that much ready, five times, by the page.

use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};
use store::{Keeper, Options, Store};

fn main() {
    let mib: u64 = std::env::args().nth(1).map_or(256, |n| n.parse().expect("a number"));
    for _ in 0..5 {
        let options = Options { reserve: mib << 20, ..Options::default() };
        let store = Store::create(1 << 20, options).expect("a store");
        let before = cpu();
        // Slabs of every length are in demand.
        let mut worker = store.worker().expect("a worker");
        let keeper = Keeper::start(&store).expect("a thread");
        for index in 0..4000 {
            let len = 100 + usize::try_from(index % 3900).expect("small");
            worker.put(index, 1, &[7; 4096][..len]).expect("memory");
        }
        while store.stats().mem_ready < mib << 19 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let used = cpu() - before;
        let pages = store.stats().mem_used_total / 4096;
        let micros = used.as_secs_f64() * 1e6 / f64::from(u32::try_from(pages).expect("few"));
        println!("{pages} pages ready or written: CPU {used:?}, {micros:.2} us a page");
        drop((worker, keeper));
    }
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let part = |value: i64| u64::try_from(value).expect("since the process began");
    Duration::from_secs(part(now.tv_sec)) + Duration::from_nanos(part(now.tv_nsec))
}
