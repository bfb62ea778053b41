//! Measures what taking over a store costs: `takeover [PAGES]`. Writes objects of 900 to 2300
//! bytes, each twice, in random order; then attaches the store five times and prints wall and CPU
//! time of each.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::time::{clock_gettime, ClockId};
use store::{Options, Store};

fn main() {
    let pages: u64 = std::env::args().nth(1).map_or(1 << 20, |n| n.parse().expect("a number"));
    let options = || Options { reserve: 0, ..Options::default() };
    let store = Store::create(pages, options()).expect("a store");
    let mut worker = store.worker().expect("a worker");
    let mut bytes = [0x5a_u8; 4096];
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    };
    for index in 0..2 * pages {
        let at = if index < pages { index } else { random(pages) };
        let len = 900 + usize::try_from(random(1400)).expect("small");
        bytes[..8].copy_from_slice(&index.to_le_bytes());
        worker.put(at, 1, &bytes[..len]).expect("memory");
    }
    let fd = store.fd().try_clone_to_owned().expect("a descriptor");
    drop((worker, store));
    for _ in 0..5 {
        let (at, before) = (Instant::now(), cpu());
        let store = Store::attach(fd.as_fd(), options()).expect("the store");
        println!("{pages} pages: {:?}, CPU {:?}", at.elapsed(), cpu() - before);
        drop(store);
    }
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    let part = |value: i64| u64::try_from(value).expect("since the thread began");
    Duration::from_secs(part(now.tv_sec)) + Duration::from_nanos(part(now.tv_nsec))
}
