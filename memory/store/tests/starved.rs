//! A keeper whose thread gets hardly any CPU: writes wait for it, and do not fail. A keeper that
//! has the only CPU: writes get it.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "sets the policy of a thread")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// Threads of the tests share the lock of the process's mappings, for which a keeper waits.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn writes_wait_for_a_starved_keeper() {
    let _turn = turn();
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
    let (start, started) = std::sync::mpsc::channel();
    let spinner = thread::spawn(move || {
        bind();
        start.send(()).unwrap();
        while !stopped.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    });
    // A thread that starts maps memory.
    started.recv().unwrap();
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

/// The CPU time that a thread of this process has used.
fn used(thread: u32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// Writes pages of all lengths on the CPU of a keeper with real-time priority. Returns the CPU time
/// that the keeper uses meanwhile; `None` if this process may have no such priority.
fn used_by_a_keeper_beside_writes(reserve: u64) -> Option<Duration> {
    let store = Store::create(4096, Options { reserve, ..Options::default() }).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let keeper = Keeper::start_in(&store, move || {
        bind();
        let parameter = libc::sched_param { sched_priority: 1 };
        // SAFETY: the parameter is what the policy requires.
        let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameter) };
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        tell.send((set == 0).then_some(thread)).unwrap();
    })
    .unwrap();
    let thread = told.recv().unwrap()?;
    bind();
    let before = used(thread);
    let mut worker = store.worker().unwrap();
    for (page, len) in (0..4096).zip((0..4096_usize).step_by(64).cycle()) {
        worker.put(page, 1, &[0x5a; 4096][..len + 1]).unwrap();
    }
    let took = used(thread) - before;
    drop(keeper);
    Some(took)
}

/// A swap server's keeper has this priority.
#[test]
fn writes_on_the_only_cpu_get_it_from_a_keeper_with_real_time_priority() {
    let _turn = turn();
    for reserve in [1 << 20, 0] {
        let Some(took) = used_by_a_keeper_beside_writes(reserve) else {
            return eprintln!("skipped: this process may have no real-time priority");
        };
        // A keeper that does not sleep while a write waits uses all that the kernel gives to
        // real-time threads, 950 ms, for each such write.
        assert!(took < Duration::from_millis(900), "{took:?} with a reserve of {reserve}");
    }
}
