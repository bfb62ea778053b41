use super::*;
use crate::options::Options;
use crate::PutError;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;

/// A thread of another test that gets no CPU may hold a lock of the kernel for which the keeper
/// waits. Only a hang takes longer.
const PATIENT: Duration = Duration::from_secs(600);

/// Sets the contents of `/proc/meminfo`.
fn say(file: &std::fs::File, available_kib: u64) {
    let text = format!("MemTotal: {:>14} kB\nMemAvailable: {available_kib:>10} kB\n", 1 << 18);
    file.write_all_at(text.as_bytes(), 0).unwrap();
}

fn wait_until(what: &str, mut there: impl FnMut() -> bool) {
    // Catches a hang only.
    let deadline = Instant::now() + Duration::from_secs(300);
    while !there() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Its first writes need it, and the kernel has no memory then.
#[test]
fn the_reserve_does_not_go_at_once_when_memory_gets_short() {
    assert_eq!(decayed(3277, Duration::ZERO), 3277);
    assert_eq!(decayed(3277, ASK), 2867);
    let second = decayed(3277, Duration::from_secs(1));
    assert!((1600..1700).contains(&second), "{second}");
    assert_eq!(decayed(3277, Duration::from_secs(100)), 0);
    let file = rustix::fs::memfd_create("meminfo", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    let reserve = 16 << 20;
    say(&file, 8 << 10);
    let store = Store::create(20_000, Options { reserve, ..Options::default() }).unwrap();
    let mut memory = Memory::new(&store, Available::of(file));
    store.look(&mut memory);
    store.stock(&memory.demand);
    assert!(store.is_short());
    assert_eq!(store.heap.reserve.load(Ordering::Relaxed), 4096);
    // Without demand yet, a slab of each length.
    assert!(store.stats().mem_ready > 0, "nothing is ready for the first writes");
    memory.reserve = 0;
    store.set_reserve(&memory);
    assert_eq!(store.heap.reserve.load(Ordering::Relaxed), LEAST);
    assert!(store.release_surplus(&memory.demand));
    assert_eq!(store.stats().mem_ready, 0);
}

#[test]
fn the_reserve_shrinks_while_memory_is_short_and_comes_back() {
    let file = rustix::fs::memfd_create("meminfo", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    let reserve = 16 << 20;
    say(&file, 200 << 10);
    let options = Options { reserve, patience: PATIENT, ..Options::default() };
    let store = Store::create(20_000, options).unwrap();
    let available = Available::of(file.try_clone().unwrap());
    let keeper = Keeper::start_on(&store, || (), available).unwrap();
    let mut worker = store.worker().unwrap();
    let mut write = |from: u64| {
        for index in from..from + 4000 {
            let len = 500 + usize::try_from(index % 3000).unwrap();
            worker.put(index, 1, &[7; 4096][..len]).unwrap();
        }
    };
    write(0);
    wait_until("the whole reserve", || store.stats().mem_ready >= reserve / 2);
    // Less than a 16th of the machine's memory and the reserve.
    say(&file, 31 << 10);
    wait_until("a small reserve", || store.stats().mem_ready <= 3 << 20);
    // The keeper may be between the two.
    wait_until("the count of what is resident", || {
        store.stats().mem_used_total == store.resident().unwrap()
    });
    // Writes find their memory all the same.
    write(4000);
    wait_until("a small reserve again", || store.stats().mem_ready <= 3 << 20);
    say(&file, 200 << 10);
    write(8000);
    wait_until("the whole reserve again", || store.stats().mem_ready >= reserve / 2);
    drop(keeper);
}

/// They free no memory, and a swap area full of them leaves the host none.
#[test]
fn pages_that_do_not_compress_have_a_part_of_the_limit_while_memory_is_short() {
    let file = rustix::fs::memfd_create("meminfo", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = std::fs::File::from(file);
    say(&file, 200 << 10);
    let (limit, reserve) = (32 << 20, 1 << 20);
    let (mem_limit, patience, whole_part) = (limit, PATIENT, 8);
    let options = Options { mem_limit, reserve, patience, whole_part, ..Options::default() };
    let store = Store::create(8192, options).unwrap();
    let available = Available::of(file.try_clone().unwrap());
    let keeper = Keeper::start_on(&store, || (), available).unwrap();
    let mut worker = store.worker().unwrap();
    let part = limit / 8 / PAGE as u64;
    // There is memory: they are stored.
    for index in 0..part + 500 {
        worker.put(index, 0, &[7; PAGE]).unwrap();
    }
    say(&file, 8 << 10);
    wait_until("memory is short", || store.is_short());
    assert!(matches!(worker.put(0, 0, &[8; PAGE]), Err(PutError::Full { .. })));
    // While they are written back they are stored.
    store.expect_writeback(true);
    for _ in 0..2 * 64 {
        worker.put(0, 0, &[8; PAGE]).unwrap();
    }
    store.expect_writeback(false);
    assert!(matches!(worker.put(0, 0, &[9; PAGE]), Err(PutError::Full { .. })));
    // One that frees some of its memory is stored, and so are they when less of them are.
    worker.put(1, 1, &[7; 4000]).unwrap();
    worker.discard(0..600);
    worker.put(0, 0, &[8; PAGE]).unwrap();
    // Beside others that compress they are refused again, however many are tried.
    let (mut turn, mut refused) = (0, 0);
    wait_until("refusals", || {
        turn += 1;
        for index in 0..20 {
            worker.put(4000 + index, 1, &[7; 900]).unwrap();
        }
        let whole = worker.put(100 + turn % 500, 0, &[8; PAGE]);
        refused += u32::from(matches!(whole, Err(PutError::Full { .. })));
        refused >= 300
    });
    // The store as a whole frees memory where more pages compress than do not: none is refused,
    // though the others that each turn stores would allow refusals at the next look.
    for turn in 0..60 {
        for index in 0..1000 {
            worker.put(5000 + index, 1, &[7; 900]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
        worker.put(700 + turn % 10, 0, &[8; PAGE]).unwrap();
    }
    worker.discard(5000..6000);
    // Without others that compress they are stored: the client has nothing better.
    let mut stored = 0;
    wait_until("pages that are stored as they are", || {
        stored += u32::from(worker.put(300, 0, &[8; PAGE]).is_ok());
        stored >= 300
    });
    say(&file, 200 << 10);
    wait_until("memory is there", || !store.is_short());
    worker.put(300, 0, &[8; PAGE]).unwrap();
    drop(keeper);
}

#[test]
fn a_large_store_is_compacted_for_less_than_a_small_one() {
    assert_eq!((worth(100), worth(51_200)), (1, 200));
    // 1, 8 and 64 GiB: a pass looks at 64 MiB of whole pages.
    assert_eq!([1 << 18, 1 << 21, 1 << 24].map(worth), [1024, 1024, 4096]);
}

/// Regression: a pass looked at the same slabs as the last one, and was the last if no further
/// object was freed.
#[test]
fn compaction_goes_on_while_a_pass_frees_enough() {
    const SLABS: u64 = 4096;
    let store = Store::create(SLABS * 8, Options { reserve: 0, ..Options::default() }).unwrap();
    let mut worker = store.worker().unwrap();
    // Eight of these objects fill a slab of one page.
    for index in 0..SLABS * 8 {
        worker.put(index, 1, &[7; 508]).unwrap();
    }
    for index in (0..SLABS * 8).filter(|index| index % 8 > 0) {
        worker.discard(index..index + 1);
    }
    drop(worker);
    let used = || store.stats().mem_used_total / PAGE as u64;
    assert!(used() > SLABS);
    let mut memory = Memory::new(&store, Available::new());
    for _ in 0..20 {
        memory.looked = Instant::now().checked_sub(PERIOD).unwrap();
        memory.rest = memory.looked;
        while store.tend(&mut memory) {}
    }
    // An eighth of the slabs, the table, and heads of regions.
    assert!(used() < SLABS / 4, "{} pages", used());
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    let worker = store.worker().unwrap();
    let mut out = [0; PAGE];
    for index in (0..SLABS * 8).step_by(8) {
        worker.get(index, &mut out).unwrap();
        assert!(out[..508] == [7; 508], "{index}");
    }
}

/// With real-time priority it would have a CPU for itself while pages change.
#[test]
fn compaction_rests_after_a_long_pass() {
    const PAGES: u64 = 8 * 4096;
    let store = Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap();
    let mut worker = store.worker().unwrap();
    // Eight of these objects fill a slab of one page. A pass looks at a quarter of the slabs.
    for index in 0..PAGES {
        worker.put(index, 1, &[7; 508]).unwrap();
    }
    for index in (0..PAGES).filter(|index| index % 8 > 0) {
        worker.discard(index..index + 1);
    }
    drop(worker);
    let mut memory = Memory::new(&store, Available::new());
    let look = |memory: &mut Memory| {
        memory.looked = Instant::now().checked_sub(PERIOD).unwrap();
        store.tend(memory);
    };
    look(&mut memory);
    assert!(memory.compacting);
    // As if it had taken so long.
    memory.begun = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    while memory.compacting {
        store.tend(&mut memory);
    }
    assert_eq!(memory.freed, None);
    look(&mut memory);
    assert!(!memory.compacting);
    memory.rest = Instant::now();
    look(&mut memory);
    assert!(memory.compacting);
}

/// A store whose keeper's thread runs `enter` and then waits for the sender.
fn held(enter: impl FnOnce(&Store, &mpsc::Receiver<()>) + Send + 'static) -> Held {
    let patience = Duration::from_millis(20);
    let options = Options { reserve: 1 << 20, patience, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let (run, wait) = mpsc::channel();
    let (kept, (begun, begin)) = (Arc::clone(&store), mpsc::channel());
    let enter = move || {
        begun.send(()).unwrap();
        enter(&kept, &wait);
    };
    let keeper = Keeper::start_in(&store, enter).unwrap();
    begin.recv().unwrap();
    Held { store, keeper, run }
}

struct Held {
    store: Arc<Store>,
    keeper: Keeper,
    run: mpsc::Sender<()>,
}

/// Reads wait behind the write, and the kernel may need them to find memory.
#[test]
fn a_write_fails_while_the_kernel_does_not_answer() {
    let asleep = held(|store, wait| {
        // Stands for a system call that does not return.
        let _ = store.heap.asks.ask(|| wait.recv());
    });
    let busy = held(|store, wait| {
        store.heap.asks.ask(|| while wait.try_recv().is_err() {});
    });
    for Held { store, keeper, run } in [asleep, busy] {
        let mut worker = store.worker().unwrap();
        let full = [(); 3].map(|()| worker.put(0, 1, &[7; 1000]));
        run.send(()).unwrap();
        let all = full.iter().all(|full| matches!(full, Err(PutError::Full { .. })));
        assert!(all, "{full:?}");
        // It may still be in that request.
        wait_until("an answer", || worker.put(0, 1, &[7; 1000]).is_ok());
        drop(keeper);
    }
}

/// As where it waits for a lock: reads wait behind the write here, too.
#[test]
fn a_write_does_not_wait_for_ever_for_a_keeper_that_does_something_else() {
    let Held { store, keeper, run } = held(|_, wait| {
        let _ = wait.recv();
    });
    let mut worker = store.worker().unwrap();
    let begun = Instant::now();
    let full = worker.put(0, 1, &[7; 1000]);
    let waited = begun.elapsed();
    run.send(()).unwrap();
    assert!(matches!(full, Err(PutError::Full { .. })), "{full:?}");
    assert!(waited >= crate::asks::LONGEST_WAIT, "{waited:?}");
    drop(keeper);
}

/// With real-time priority it would keep the worker from its CPU.
#[test]
fn the_keeper_sleeps_when_workers_have_only_to_take_their_slabs() {
    let store = Store::create(4096, Options { reserve: 1 << 20, ..Options::default() }).unwrap();
    let heap = &store.heap;
    let mut memory = Memory::new(&store, Available::new());
    store.tend(&mut memory);
    assert!(!store.has_work(false));
    heap.wanted[3].fetch_add(2, Ordering::Relaxed);
    heap.begun[3].fetch_add(2, Ordering::Relaxed);
    assert!(store.has_work(false));
    store.serve_waiting();
    assert!(!store.has_work(false));
    // A thread that does not wait takes one first.
    heap.regions.take_ready(&heap.map, 3).unwrap();
    assert!(store.has_work(false));
    store.serve_waiting();
    heap.regions.take_ready(&heap.map, 3).unwrap();
    heap.wanted[3].fetch_sub(1, Ordering::Relaxed);
    assert!(!store.has_work(false));
}

/// The next writes then wait, too.
#[test]
fn the_reserve_is_filled_when_a_worker_has_waited() {
    // Nothing but the keeper ends the wait.
    let options = Options { reserve: 1 << 20, patience: PATIENT, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let mut memory = Memory::new(&store, Available::new());
    // A keeper is there, and does nothing by itself.
    let counted = Counted::new(&store);
    let waits = {
        let store = Arc::clone(&store);
        thread::spawn(move || store.worker().unwrap().put(0, 1, &[7; 1000]))
    };
    let heap = &store.heap;
    wait_until("a write that waits", || {
        heap.wanted.iter().any(|wanted| wanted.load(Ordering::Relaxed) > 0)
    });
    store.tend(&mut memory);
    waits.join().unwrap().unwrap();
    assert!(store.has_work(false), "nothing wakes the keeper");
    store.tend(&mut memory);
    assert!(!store.has_work(false));
    assert!(store.stats().mem_ready >= 1 << 19, "{}", store.stats().mem_ready);
    drop(counted);
}

/// As above, where the limit is reached. A wait that begins after a refusal is served.
#[test]
fn the_keeper_sleeps_when_workers_have_only_to_see_that_they_get_no_slab() {
    let options = Options { mem_limit: 64 << 12, reserve: 0, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let heap = &store.heap;
    let mut slabs = Vec::new();
    while heap.grow(1, None).is_ok() {
        slabs.extend(heap.regions.take_ready(&heap.map, 1).map(|(slab, _)| slab));
    }
    let begin = || {
        heap.wanted[3].fetch_add(1, Ordering::Relaxed);
        heap.begun[3].fetch_add(1, Ordering::Release);
    };
    for refusals in 1..4 {
        begin();
        assert!(store.has_work(false));
        store.serve_waiting();
        assert_eq!(heap.refused[3].load(Ordering::Relaxed), refusals);
        assert!(!store.has_work(false));
    }
    // The three have seen it. Memory is freed, and another wait begins.
    heap.wanted[3].fetch_sub(3, Ordering::Relaxed);
    slabs.into_iter().for_each(|slab| heap.regions.put_ready(&heap.map, slab, 1));
    begin();
    assert!(store.has_work(true));
    store.serve_waiting();
    assert_eq!(heap.refused[3].load(Ordering::Relaxed), 3);
    assert_eq!(heap.regions.ready_slabs(3), 1);
    // A thread that does not wait takes its slab: it is not answered.
    heap.regions.take_ready(&heap.map, 3).unwrap();
    assert!(store.has_work(true));
}
