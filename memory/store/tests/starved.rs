//! A keeper whose thread gets hardly any CPU: writes wait for it, and do not fail.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "sets the policy of a thread")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};
use store::{Keeper, Options, Store};

/// Binds the calling thread to the first CPU that it may use.
fn bind() {
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
    sched_setaffinity(None, &one).unwrap();
}

#[test]
fn writes_wait_for_a_starved_keeper() {
    let patience = Duration::from_millis(5);
    let options = Options { reserve: 1 << 20, patience, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let keeper = Keeper::start_in(&store, || {
        bind();
        let parameter = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameter is what the policy requires.
        let idle = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter) };
        assert_eq!(idle, 0);
    })
    .unwrap();
    // It leaves the keeper's thread a few thousandths of the CPU.
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let spinner = thread::spawn(move || {
        bind();
        while !stopped.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    });
    let mut worker = store.worker().unwrap();
    let lens = (0..4096_usize).step_by(64);
    let failed = (0..)
        .zip(lens)
        .find_map(|(index, len)| worker.put(index, 1, &[0x5a; 4096][..len + 1]).err());
    stop.store(true, Ordering::Relaxed);
    spinner.join().unwrap();
    drop(keeper);
    assert!(failed.is_none(), "{failed:?}");
}
