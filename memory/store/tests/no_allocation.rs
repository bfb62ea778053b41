//! With a keeper, the I/O path allocates nothing and asks the kernel for no memory.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use store::{Keeper, Options, PutError, Store, MAX_OBJECT};

/// A thread of another test that gets no CPU may hold a lock of the kernel for which the keeper
/// waits. Only a hang takes longer.
const PATIENT: Duration = Duration::from_secs(600);

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is the system's allocator's, and counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn the_io_path_allocates_nothing() {
    const PAGES: u64 = 20_000;
    // Half of the writes fit, so that the full store is tested too.
    let (mem_limit, reserve) = (16 << 20, 12 << 20);
    let options = Options { mem_limit, reserve, patience: PATIENT, ..Options::default() };
    let store = Store::create(PAGES, options).unwrap();
    let _keeper = Keeper::start(&store).unwrap();
    let mut worker = store.worker().unwrap();
    let object = [0x5a; MAX_OBJECT];
    let mut out = [0; MAX_OBJECT];
    let before = ALLOCATIONS.get();
    let mut full = 0;
    for round in 0..3_u64 {
        for index in 0..PAGES {
            let len = 50 + usize::try_from(index * 7919 % 4000).unwrap();
            match worker.put(index, 1, &object[..len]) {
                Ok(()) => {}
                Err(PutError::Full { .. }) => full += 1,
                Err(error) => panic!("{error}"),
            }
            worker.get(index, &mut out).unwrap();
            if (index + round) % 3 == 0 {
                worker.discard(index..index + 1);
            } else if index % 5 == 0 {
                worker.put_same(index, 0).unwrap();
            }
        }
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert!(full > 0, "the limit was to be met");
}

/// The keeper's own allocations: those of its thread from its first look on.
static KEEPERS: AtomicU64 = AtomicU64::new(0);

/// Counts this thread's allocations until it is dropped.
struct Watched(u64);

impl Drop for Watched {
    fn drop(&mut self) {
        KEEPERS.fetch_add(ALLOCATIONS.get() - self.0, Ordering::Relaxed);
    }
}

#[test]
fn the_keeper_allocates_nothing() {
    const PAGES: u64 = 6000;
    let options = Options { reserve: 2 << 20, patience: PATIENT, ..Options::default() };
    let store = Store::create(PAGES, options).unwrap();
    let keeper = Keeper::start_in(&store, || Watched(ALLOCATIONS.get())).unwrap();
    let mut worker = store.worker().unwrap();
    let object = [0x5a; MAX_OBJECT];
    let begun = Instant::now();
    // It stocks slabs for waiting workers, frees memory, and compacts, which it starts once a
    // second.
    let mut round = 0;
    while begun.elapsed() < Duration::from_secs(3) || store.stats().pages_compacted == 0 {
        assert!(begun.elapsed() < Duration::from_secs(300), "it does not compact");
        for index in 0..PAGES {
            let len = 50 + usize::try_from((index * 7919 + round * 331) % 4000).unwrap();
            worker.put(index, 1, &object[..len]).unwrap();
        }
        for index in (0..PAGES).filter(|index| index % 7 > 0) {
            worker.discard(index..index + 1);
        }
        std::thread::sleep(Duration::from_millis(300));
        round += 1;
    }
    drop(keeper);
    assert_eq!(KEEPERS.load(Ordering::Relaxed), 0);
}

#[test]
fn memory_that_is_ready_is_touched_without_a_fault() {
    const PAGES: u64 = 2000;
    let options = Options { reserve: 64 << 20, patience: PATIENT, ..Options::default() };
    let store = Store::create(PAGES, options).unwrap();
    let _keeper = Keeper::start(&store).unwrap();
    let mut worker = store.worker().unwrap();
    let object = [0x5a; MAX_OBJECT];
    let mut out = [0; MAX_OBJECT];
    let mut run = |len: usize| {
        let before = faults_of_this_thread();
        for index in 0..PAGES {
            worker.put(index, 1, &object[..len]).unwrap();
            worker.get(index, &mut out).unwrap();
        }
        faults_of_this_thread() - before
    };
    run(1300);
    // 2000 objects of 1300 bytes lie on 640 pages; the code and the stack were touched before.
    let faults = run(1100);
    assert!(faults < 50, "{faults} page faults: somebody else was to take them");
}

/// Page faults that this thread has taken: the tenth and twelfth of its numbers in `stat`.
fn faults_of_this_thread() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("Linux has it");
    let (_, numbers) = stat.rsplit_once(')').expect("the name is in parentheses");
    let numbers: Vec<&str> = numbers.split_whitespace().collect();
    [7, 9].iter().map(|&at| numbers[at].parse::<u64>().expect("a number")).sum()
}
