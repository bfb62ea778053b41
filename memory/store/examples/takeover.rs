//! What taking over a store costs: pages of one length each, its server gone, attached again.
use std::os::fd::AsFd;
use std::time::Instant;
use store::{Options, Store};
fn main() {
    let pages: u64 = std::env::args().nth(1).map_or(1 << 20, |n| n.parse().unwrap());
    let options = || Options { reserve: 0, ..Options::default() };
    let store = Store::create(pages, options()).unwrap();
    let mut worker = store.worker().unwrap();
    let mut bytes = [0x5a_u8; 4096];
    let mut state = 1_u64;
    for round in 0..2 {
        for index in 0..pages {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = 900 + (state >> 33) as usize % 1400;
            bytes[..8].copy_from_slice(&index.to_le_bytes());
            let at = if round == 0 { index } else { (state >> 20) % pages };
            worker.put(at, 1, &bytes[..len]).unwrap();
        }
    }
    let fd = store.fd().try_clone_to_owned().unwrap();
    drop(worker);
    drop(store);
    for _ in 0..5 {
        let (at, before) = (Instant::now(), cpu());
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        println!("{pages} pages: {:?}, CPU {:?}", at.elapsed(), cpu() - before);
        drop(store);
    }
}
fn cpu() -> std::time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
