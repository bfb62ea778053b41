//! A worker that waits for a slab is woken, whatever made the slab ready, and waits as long as the
//! keeper has not run.

use std::sync::{mpsc, Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use store::{GroupBuffer, Keeper, Options, PutError, Seen, Store};

/// Longer than a round of a test may take, on a machine that stands still as well: a worker that is
/// not woken waits this long.
const PATIENCE: Duration = Duration::from_secs(600);

/// One test after the other. A thread that begins or ends, or makes a store, may lose its CPU while
/// it holds the lock of the process's mappings: a keeper that waits for that lock counts as
/// unanswered by the kernel.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn every_waiter_for_the_keeper_is_woken() {
    let _turn = turn();
    for round in 0..40_u64 {
        let start = Instant::now();
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

/// The keeper's thread does not run for many times the patience, as on a machine with many runnable
/// threads.
#[test]
fn a_write_waits_for_a_keeper_that_does_not_run() {
    let _turn = turn();
    // A write waits 5 s in all for a keeper that sleeps, as this one does: where the machine stands
    // still for as long, the next try shows it.
    assert!((0..5).any(|_| waits_for_a_keeper()), "the machine stands still each time");
}

/// Whether the write has waited; `false` where the machine stood still for too long.
fn waits_for_a_keeper() -> bool {
    let patience = Duration::from_millis(50);
    let options = Options { reserve: 1 << 20, patience, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let (run, held) = mpsc::channel::<()>();
    let keeper = Keeper::start_in(&store, move || held.recv()).unwrap();
    assert_eq!(store.stats().mem_ready, 0, "the write needs the keeper");
    let mut worker = store.worker().unwrap();
    let start = Instant::now();
    let writer = thread::spawn(move || worker.put(0, 1, &[0x5a; 1000]));
    thread::sleep(patience * 10);
    let early = writer.is_finished();
    let stood_still = start.elapsed() > Duration::from_secs(4);
    run.send(()).unwrap();
    let written = writer.join().unwrap();
    drop(keeper);
    if stood_still && written.is_err() {
        return false;
    }
    assert!(!early && written.is_ok(), "{written:?}, before the keeper ran: {early}");
    true
}

#[test]
fn a_write_at_the_limit_fails_at_once() {
    let _turn = turn();
    let start = Instant::now();
    let (limit, patience) = (4 << 20, PATIENCE);
    let options = Options { mem_limit: limit, reserve: 1 << 20, patience, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    let mut worker = store.worker().unwrap();
    let full = (0..4096).find_map(|index| worker.put(index, 1, &[0x5a; 3000]).err());
    assert!(matches!(full, Some(PutError::Full { .. })), "{full:?}");
    let used = store.stats().mem_used_total;
    assert!(used > limit - (256 << 10), "full with {used} bytes of {limit}");
    drop(keeper);
    // As well when the keeper does not run.
    let (run, held) = mpsc::channel::<()>();
    let keeper = Keeper::start_in(&store, move || held.recv()).unwrap();
    let full = (4000..4096).find_map(|index| worker.put(index, 1, &[0x5a; 4096]).err());
    run.send(()).unwrap();
    drop(keeper);
    assert!(matches!(full, Some(PutError::Full { .. })), "{full:?}");
    assert!(start.elapsed() < PATIENCE / 2, "a write waited at the limit");
}

/// The thread of a keeper ends early only by a defect.
#[test]
fn a_write_does_not_wait_for_a_keeper_that_is_gone() {
    let _turn = turn();
    let options = Options { reserve: 1 << 20, patience: PATIENCE, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let (end, held) = mpsc::channel::<()>();
    let keeper = Keeper::start_in(&store, move || {
        let _ = held.recv();
        // As a panic, without its message.
        std::panic::resume_unwind(Box::new(()));
    })
    .unwrap();
    let mut worker = store.worker().unwrap();
    let writer = thread::spawn(move || worker.put(0, 1, &[0x5a; 1000]));
    thread::sleep(Duration::from_millis(50));
    end.send(()).unwrap();
    writer.join().unwrap().unwrap();
    drop(keeper);
}

/// Regression: the records of groups kept their memory, up to 8 bytes for each page of the store.
#[test]
fn a_store_that_is_empty_again_has_no_more_memory_than_at_first() {
    const PAGES: u64 = 4096;
    let _turn = turn();
    let store = Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap();
    let empty = store.stats().mem_used_total;
    let mut worker = store.worker().unwrap();
    let mut buffer = GroupBuffer::new();
    for from in (0..PAGES).step_by(8) {
        let seen: Vec<_> = (from..from + 8)
            .map(|index| {
                worker.put(index, 1, &[7; 300]).unwrap();
                Seen { index, tag: 1, bytes: &[7; 300] }
            })
            .collect();
        buffer.room()[..600].fill(9);
        assert_eq!(worker.put_group(&seen, 2, 600, &mut buffer), Ok(0xff));
    }
    let keeper = Keeper::start(&store).unwrap();
    let back_to = |most: u64, pages: std::ops::Range<u64>| {
        // Catches a hang only.
        let deadline = Instant::now() + PATIENCE / 2;
        while store.stats().mem_used_total > most {
            assert!(Instant::now() < deadline, "{most}: {:?}", store.stats());
            thread::sleep(Duration::from_millis(5));
        }
        // The groups that are left read as before.
        let worker = store.worker().unwrap();
        let mut buffer = GroupBuffer::new();
        for index in pages {
            let grouped = worker.get_group(index, &mut buffer).unwrap().unwrap();
            assert!(grouped.members == 8 && buffer.payload() == [9; 600], "{index}");
        }
    };
    // A slab with its region's head, and a page of records.
    worker.discard(8..PAGES);
    back_to(empty + (64 << 10), 0..8);
    worker.discard(0..8);
    drop(worker);
    back_to(empty, 0..0);
    drop(keeper);
    assert_eq!(store.resident().unwrap(), empty);
}
