//! Measures what a read of a page costs that is stored as it is: `whole [PAGES]`. Prints
//! nanoseconds of CPU for a page, five times: by way of a buffer, as the policy reads, and with one
//! copy, as I/O threads read.

use std::time::Duration;

use codec::Codec;
use device::{PageReader, PAGE};
use rustix::time::{clock_gettime, ClockId};
use store::{Options, Store};

fn main() {
    let pages: u64 = std::env::args().nth(1).map_or(1 << 15, |n| n.parse().expect("a number"));
    let options = Options { reserve: 0, ..Options::default() };
    let store = Store::create(pages, options).expect("a store");
    let mut worker = store.worker().expect("a worker");
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        state >> 33
    };
    let mut page = [0; PAGE];
    for index in 0..pages {
        page.chunks_exact_mut(4)
            .for_each(|word| word.copy_from_slice(&random().to_le_bytes()[..4]));
        worker.put(index, Codec::Raw.to_wire(), &page).expect("memory");
    }
    let mut reader = PageReader::new(&store);
    for _ in 0..5 {
        let [two, one] = [false, true].map(|touch| {
            let before = cpu();
            for _ in 0..4 * pages {
                reader.read(&worker, random() % pages, touch, &mut page).expect("a page");
            }
            (cpu() - before).as_nanos() / u128::from(4 * pages)
        });
        println!("two copies {two} ns, one copy {one} ns");
    }
}

fn cpu() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    let part = |value: i64| u64::try_from(value).expect("since the thread began");
    Duration::from_secs(part(now.tv_sec)) + Duration::from_nanos(part(now.tv_nsec))
}
