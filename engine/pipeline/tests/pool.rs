//! The pool, results and submitter with real threads, and operation lists against an oracle.

#[path = "pool/devices.rs"]
mod devices;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pipeline::{Job, Pool, PoolConfig, Popped, Reorder, Results, Submitted, Submitter, Ticket};
use proptest::prelude::*;
use rustix::time::{clock_gettime, ClockId};

/// Doubles a number. First waits at its barrier or latch, if it has one, so that tests decide which
/// workers are busy.
struct Double {
    number: u64,
    gate: Option<Arc<Barrier>>,
    latch: Option<Arc<Latch>>,
}

/// Closed until it is opened.
#[derive(Default)]
struct Latch(Mutex<bool>, Condvar);

impl Latch {
    fn wait(&self) {
        let open = self.0.lock().unwrap();
        drop(self.1.wait_while(open, |open| !*open).unwrap());
    }
}

/// Opens a latch when dropped, so that a failing test ends.
struct Opener(Arc<Latch>);

impl Drop for Opener {
    fn drop(&mut self) {
        *self.0 .0.lock().unwrap() = true;
        self.0 .1.notify_all();
    }
}

impl Double {
    fn new(number: u64) -> Self {
        Self { number, gate: None, latch: None }
    }

    fn held_by(number: u64, gate: &Arc<Barrier>) -> Self {
        Self { number, gate: Some(Arc::clone(gate)), latch: None }
    }

    fn held_until(number: u64, opener: &Opener) -> Self {
        Self { number, gate: None, latch: Some(Arc::clone(&opener.0)) }
    }
}

impl Job for Double {
    type Output = (u64, u64);
    /// Jobs that this worker has run.
    type Context = Arc<AtomicU64>;

    fn run(self, ran: &mut Arc<AtomicU64>) -> (u64, u64) {
        if let Some(gate) = self.gate {
            gate.wait();
        }
        if let Some(latch) = self.latch {
            latch.wait();
        }
        ran.fetch_add(1, Ordering::Relaxed);
        (self.number, self.number * 2)
    }
}

fn pool(threads: usize, ring_capacity: usize) -> (Arc<Pool<Double>>, Vec<Arc<AtomicU64>>) {
    let mut contexts = Vec::new();
    let config = PoolConfig { threads, ring_capacity, name: "test" };
    let pool = Pool::new(config, |number| {
        assert_eq!(number, contexts.len());
        contexts.push(Arc::new(AtomicU64::new(0)));
        Arc::clone(&contexts[number])
    });
    (pool.expect("threads can be made"), contexts)
}

fn ran(contexts: &[Arc<AtomicU64>]) -> u64 {
    contexts.iter().map(|ran| ran.load(Ordering::Relaxed)).sum()
}

/// Releases the jobs held at `gate`, `rounds` times.
fn open(gate: &Barrier, rounds: usize) {
    for _ in 0..rounds {
        gate.wait();
    }
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(200))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every submitted job comes back once, or is refused; no output is invented.
    #[test]
    fn every_job_gives_one_output(
        threads in 1usize..5,
        ring_capacity in 1usize..9,
        wait in any::<bool>(),
        // `true` submits; `false` pops a result if there is one.
        ops in prop::collection::vec(prop::bool::weighted(0.7), 1..300),
    ) {
        let (pool, contexts) = pool(threads, ring_capacity);
        let results = Results::new(ops.len());
        let submitter = Submitter::new(pool, Arc::clone(&results), wait);
        let mut expected = HashMap::new();
        let mut busy = 0;
        let check = |expected: &mut HashMap<u64, u64>, (number, doubled)| {
            let known = expected.remove(&number);
            prop_assert_eq!(known, Some(doubled));
            Ok(())
        };
        for (number, submit) in (0u64..).zip(&ops) {
            if !submit {
                if let Some(output) = results.pop() {
                    check(&mut expected, output)?;
                }
                continue;
            }
            expected.insert(number, number * 2);
            match submitter.submit(Double::new(number), 3) {
                Submitted::Queued => {}
                Submitted::Busy(job) => {
                    prop_assert!(!wait);
                    prop_assert_eq!(job.number, number);
                    expected.remove(&number);
                    busy += 1;
                }
                Submitted::Closed(_) => prop_assert!(false, "the pool was closed"),
            }
        }
        submitter.flush();
        prop_assert_eq!(results.len(), expected.len(), "flush returned before the last output");
        while let Some(output) = results.pop() {
            check(&mut expected, output)?;
        }
        prop_assert!(expected.is_empty());
        let counters = submitter.counters();
        prop_assert_eq!(counters.busy, busy);
        prop_assert_eq!(counters.busy_pages, busy * 3);
        prop_assert_eq!(counters.pages, ran(&contexts) * 3);
    }

    /// Against the definition: an item comes out once it and all items before it have arrived.
    #[test]
    fn reorder_gives_the_sequence(
        window in 1usize..12,
        ops in prop::collection::vec(prop::option::of(0u64..20), 0..200),
    ) {
        let mut reorder = Reorder::new(window);
        let mut came = vec![false; 512];
        let mut next = 0u64;
        for op in ops {
            match op {
                // An item near the next one in order.
                Some(offset) => {
                    let seq = (next + offset).saturating_sub(4);
                    let fits = seq >= next
                        && seq - next < window as u64
                        && !came[usize::try_from(seq).expect("small")];
                    prop_assert_eq!(reorder.insert(seq, seq).is_ok(), fits);
                    if fits {
                        came[usize::try_from(seq).expect("small")] = true;
                    }
                }
                None => {
                    let there = came[usize::try_from(next).expect("small")];
                    prop_assert_eq!(reorder.pop(), there.then_some(next));
                    next += u64::from(there);
                }
            }
        }
    }
}

/// All workers at a barrier, their rings full: the only state without room.
fn fill(pool: &Pool<Double>, results: &Arc<Results<(u64, u64)>>, gate: &Arc<Barrier>) -> u64 {
    let mut number = 0;
    let began = Instant::now();
    while number < pool.depth() as u64 {
        assert!(began.elapsed() < Duration::from_secs(200), "{number} jobs fit, not all");
        match pool.try_submit(Double::held_by(number, gate), results) {
            Ok(()) => number += 1,
            // A worker has yet to take its first job out of its ring.
            Err(_) => thread::yield_now(),
        }
    }
    number
}

#[test]
fn room_is_found_in_any_worker_and_busy_is_counted() {
    const THREADS: usize = 3;
    let (pool, contexts) = pool(THREADS, 4);
    assert_eq!(pool.depth(), THREADS * 5);
    let results = Results::new(64);
    let gate = Arc::new(Barrier::new(THREADS + 1));
    let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), false);
    let filled = fill(&pool, &results, &gate);
    assert_eq!(pool.waiting(), THREADS * 4);
    // A worker is busy from a moment after it has taken its job.
    let began = Instant::now();
    while pool.busy_workers() < THREADS {
        assert!(began.elapsed() < Duration::from_secs(200), "{} are busy", pool.busy_workers());
        thread::yield_now();
    }
    assert_eq!(pool.busy_workers(), THREADS);
    submitter.pass_by(6);
    for _ in 0..2 {
        assert!(
            matches!(submitter.submit(Double::new(99), 1), Submitted::Busy(job) if job.number == 99)
        );
    }
    assert_eq!(submitter.counters().busy, 2);
    assert_eq!(submitter.counters().busy_rate(), 0.25);
    // All jobs are held, so the workers pass the barrier together, five times.
    open(&gate, 5);
    submitter.flush();
    assert_eq!(results.len() as u64, filled);
    assert_eq!(ran(&contexts), filled);
    assert_eq!(pool.busy_workers(), 0);
}

#[test]
fn a_job_reaches_an_idle_worker_while_another_worker_is_blocked() {
    let (pool, contexts) = pool(2, 4);
    let (held, results) = (Results::new(4), Results::new(4));
    let opener = Opener(Arc::default());
    assert!(pool.try_submit(Double::held_until(0, &opener), &held).is_ok());
    for number in 1..=1000 {
        // Long enough, now and then, for the idle worker to go to sleep.
        if number % 10 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(pool.try_submit(Double::new(number), &results).is_ok());
        assert_eq!(results.pop_until(soon()), Popped::Item((number, number * 2)));
    }
    assert_eq!(ran(&contexts), 1000, "the held job has run");
    drop(opener);
    assert_eq!(held.pop_until(soon()), Popped::Item((0, 0)));
}

#[test]
fn each_of_several_submitters_reaches_the_workers_that_are_not_blocked() {
    const THREADS: usize = 4;
    for held_workers in 1..THREADS {
        let (pool, _) = pool(THREADS, 4);
        let held = Results::new(THREADS);
        let opener = Opener(Arc::default());
        for number in 0..held_workers as u64 {
            assert!(pool.try_submit(Double::held_until(number, &opener), &held).is_ok());
        }
        thread::scope(|scope| {
            for who in 0..3 {
                let pool = &pool;
                scope.spawn(move || {
                    let results = Results::new(4);
                    for number in 0..5000 {
                        let number = 10_000 * who + number;
                        assert!(pool.submit_wait(Double::new(number), &results).is_ok());
                        let output = results.pop_until(soon());
                        assert_eq!(output, Popped::Item((number, number * 2)));
                    }
                });
            }
        });
        drop(opener);
        for _ in 0..held_workers {
            assert!(matches!(held.pop_until(soon()), Popped::Item(_)));
        }
    }
}

#[test]
fn a_waiting_submitter_gets_room_and_is_not_counted_busy() {
    let (pool, _) = pool(2, 2);
    let results = Results::new(64);
    let gate = Arc::new(Barrier::new(3));
    let filled = fill(&pool, &results, &gate);
    let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), true);
    thread::scope(|scope| {
        scope.spawn(|| open(&gate, 3));
        for number in 0..100 {
            assert!(matches!(submitter.submit(Double::new(filled + number), 1), Submitted::Queued));
            while results.pop().is_some() {}
        }
    });
    submitter.flush();
    assert_eq!(submitter.counters().busy, 0);
    assert_eq!(submitter.counters().pages, 100);
}

#[test]
fn closing_finishes_what_is_queued_and_refuses_the_rest() {
    for round in 0..200u64 {
        let (pool, contexts) = pool(2, 4);
        let results = Results::new(4096);
        let accepted = AtomicU64::new(0);
        thread::scope(|scope| {
            for wait in [false, true] {
                let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), wait);
                let accepted = &accepted;
                scope.spawn(move || {
                    for number in 0..2000 {
                        match submitter.submit(Double::new(number), 1) {
                            Submitted::Queued => drop(accepted.fetch_add(1, Ordering::Relaxed)),
                            Submitted::Busy(_) => assert!(!wait),
                            Submitted::Closed(_) => break,
                        }
                    }
                    // Also after the close: every accepted job has run, or will.
                    submitter.flush();
                });
            }
            if round % 2 == 0 {
                thread::yield_now();
            }
            pool.close();
        });
        assert!(pool.is_closed());
        assert!(pool.try_submit(Double::new(1), &results).is_err());
        assert!(pool.submit_wait(Double::new(1), &results).is_err());
        drop(pool);
        assert_eq!(ran(&contexts), accepted.into_inner());
        assert_eq!(results.len() as u64, ran(&contexts));
    }
}

#[test]
fn a_waiting_submitter_is_woken_by_the_close() {
    let (pool, _) = pool(1, 2);
    let results = Results::new(64);
    let gate = Arc::new(Barrier::new(2));
    fill(&pool, &results, &gate);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.submit_wait(Double::new(7), &results));
        pool.close();
        let refused = waiter.join().expect("no panic");
        assert_eq!(refused.map_err(|job| job.number), Err(7));
        open(&gate, 3);
    });
}

#[test]
fn workers_wait_for_room_in_the_results_and_go_on() {
    let (pool, _) = pool(3, 4);
    let results = Results::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..30_000 {
                assert!(pool.submit_wait(Double::new(number), &results).is_ok());
            }
        });
        let mut seen = vec![false; 30_000];
        for _ in 0..30_000 {
            let Popped::Item((number, _)) = results.pop_until(soon()) else {
                panic!("a wake-up was lost");
            };
            let seen = &mut seen[usize::try_from(number).expect("small")];
            assert!(!std::mem::replace(seen, true));
        }
    });
    assert_eq!(results.pop_until(Some(Instant::now())), Popped::Timeout);
}

#[test]
fn several_threads_may_pop() {
    let (pool, _) = pool(2, 4);
    let results = Results::new(8);
    let popped = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| loop {
                match results.pop_until(soon()) {
                    Popped::Item(_) => drop(popped.fetch_add(1, Ordering::Relaxed)),
                    Popped::Closed => break,
                    Popped::Timeout => panic!("a wake-up was lost"),
                }
            });
        }
        let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), true);
        for number in 0..30_000 {
            assert!(matches!(submitter.submit(Double::new(number), 1), Submitted::Queued));
        }
        submitter.flush();
        results.close();
    });
    assert_eq!(popped.into_inner(), 30_000);
}

#[test]
fn closed_results_return_the_remaining_outputs_and_free_their_workers() {
    let (pool, _) = pool(1, 4);
    let results = Results::new(2);
    for number in 0..4 {
        assert!(pool.submit_wait(Double::new(number), &results).is_ok());
    }
    // The worker waits for room for the third output, or soon will.
    results.close();
    assert_eq!(results.push((0, 0)), Err((0, 0)));
    let submitter = Submitter::new(pool, Arc::clone(&results), true);
    submitter.flush();
    while let Popped::Item((number, doubled)) = results.pop_until(soon()) {
        assert_eq!(doubled, number * 2);
    }
    assert_eq!(results.pop_until(soon()), Popped::Closed);
}

#[test]
fn cpu_times_are_those_of_the_workers_and_persist_after_their_end() {
    struct Spin;
    impl Job for Spin {
        type Output = ();
        type Context = ();
        fn run(self, _: &mut ()) {
            // Thread CPU time: on a busy machine the thread may get little of the wall time.
            let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
            let until = used() + Duration::from_millis(30);
            while used() < until {
                std::hint::spin_loop();
            }
        }
    }
    let config = PoolConfig { threads: 2, ..PoolConfig::default() };
    let pool: Arc<Pool<Spin>> = Pool::new(config, |_| ()).expect("threads can be made");
    let results = Results::new(4);
    let submitter = Submitter::new(Arc::clone(&pool), results, true);
    assert!(matches!(submitter.submit(Spin, 1), Submitted::Queued));
    submitter.flush();
    // The kernel's figure while the thread runs, its own when it has ended: both include the job.
    let total = |pool: &Pool<Spin>| pool.cpu_times().iter().sum::<Duration>();
    let running = total(&pool);
    pool.join();
    if std::path::Path::new("/proc/self/schedstat").exists() {
        assert!(running >= Duration::from_millis(5), "{running:?}");
    } else {
        eprintln!("this kernel keeps no schedstat: times of running workers not tested");
    }
    assert!(total(&pool) >= running, "{:?} after {running:?}", pool.cpu_times());
    assert!(total(&pool) < Duration::from_secs(5), "{:?}", pool.cpu_times());
}

/// A job that runs until its sender is dropped.
struct Endless(std::sync::mpsc::Receiver<()>);

impl Job for Endless {
    type Output = ();
    type Context = ();

    fn run(self, (): &mut ()) {
        let _ = self.0.recv();
    }
}

#[test]
fn a_pool_leaves_a_worker_behind_that_does_not_end_in_time() {
    let (release, endless) = std::sync::mpsc::channel();
    let pool = Pool::new(PoolConfig { threads: 2, ..PoolConfig::default() }, |_| ()).unwrap();
    pool.leave_behind_after(Duration::from_millis(50));
    let results = Results::new(4);
    assert!(pool.try_submit(Endless(endless), &results).is_ok());
    drop(pool);
    assert!(results.is_empty(), "the job has ended");
    // It still delivers its output.
    drop(release);
    assert_eq!(results.pop_until(None), Popped::Item(()));
}
