//! A full store of pages that do not compress, under memory pressure, and a backing device that is
//! slower than the clients' writes.

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use device::guard::Allocator;
use device::{Device, DeviceOptions, DeviceQueue, Errno, PAGE};
use policy::{Policy, Settings};
use shelf::Shelf;
use store::{format_backing, Block, Disk, Keeper, Options, Store};

/// The policy's thread and the clients' may not allocate: a debug build ends at once.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const PAGES: u64 = 2000;
const LIMIT: u64 = 4 << 20;

/// Refused writes of the clients for each write that the disk answers, so it is slower than they
/// are.
const REFUSED: u64 = 50;

/// The disk's writes that have begun, and those that may end.
#[derive(Debug, Default)]
struct Gate {
    begun: AtomicU64,
    may_end: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    fn let_end(&self, writes: u64) {
        let mut may_end = self.may_end.lock().unwrap();
        *may_end = may_end.saturating_add(writes);
        self.changed.notify_all();
    }
}

#[derive(Debug)]
struct Slow(Shelf, Arc<Gate>);

impl Disk for Slow {
    fn blocks(&self) -> io::Result<u64> {
        self.0.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        self.0.read(block, out)
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        // The first block is the header.
        if block > 0 {
            let number = self.1.begun.fetch_add(1, Ordering::Relaxed) + 1;
            let may_end = self.1.may_end.lock().unwrap();
            drop(self.1.changed.wait_while(may_end, |may_end| *may_end < number).unwrap());
        }
        self.0.write(block, blocks)
    }
}

/// Ends the clients and opens the gate, also when the test fails.
struct End<'a>(&'a AtomicBool, &'a Gate);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.let_end(u64::MAX);
    }
}

/// Noise.
fn page(index: u64, version: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut state = index << 32 | version << 1 | 1;
    for chunk in page.chunks_exact_mut(4) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        chunk.copy_from_slice(&(state >> 32).to_le_bytes()[..4]);
    }
    page
}

fn assert_holds(queue: &mut DeviceQueue, index: u64, version: u64) {
    let mut out = [0; PAGE];
    queue.read_now(index, &mut out).unwrap();
    assert!(out == page(index, version), "page {index} is not version {version}");
}

fn assert_within_limit(store: &Store) {
    let (stats, resident) = (store.stats(), store.resident().unwrap());
    assert!(stats.mem_used_max <= LIMIT && resident <= LIMIT, "{resident} {stats:?}");
}

fn settings(pressure: &tempfile::NamedTempFile) -> Settings {
    std::fs::write(pressure, "some avg10=99.00 avg60=0.00\n").unwrap();
    let mut settings = Settings {
        period: 1,
        idle: 1,
        idle_pressed: 1,
        level: 1,
        cpu: 100,
        cpu_pressed: 100,
        backing_free: 0,
        writeback_limit_enable: false,
        writeback_batch_size: 16,
        writeback_huge_idle_pressed: 2,
        writeback_idle_pressed: 7,
        ..Settings::default()
    };
    settings.pressure.file = pressure.path().into();
    settings
}

/// Writes pages in order until one is refused; returns their number.
fn fill(queue: &mut DeviceQueue) -> u64 {
    let refused = (0..PAGES).find(|&index| match queue.write_now(index, &page(index, 1)) {
        Ok(()) => false,
        Err(errno) => {
            assert_eq!(errno, Errno::NoSpace, "page {index}");
            true
        }
    });
    refused.expect("the limit is less than all pages")
}

#[test]
fn a_full_store_of_noise_goes_on_with_a_disk_that_is_slower_than_the_writes() {
    let options = Options { mem_limit: LIMIT, reserve: 256 << 10, ..Options::default() };
    let store = Store::create(PAGES, options).unwrap();
    let (shelf, gate) = (Shelf::new(1 + usize::try_from(PAGES).unwrap()), Arc::default());
    let disk = Slow(shelf, Arc::clone(&gate));
    format_backing(&disk, "slow", &store).unwrap();
    store.set_backing(Box::new(disk), "slow").unwrap();
    let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    let mut queue = device.queue().unwrap();
    let mut stored = fill(&mut queue);
    let pressure = tempfile::NamedTempFile::new().unwrap();
    let policy = Policy::start(&store, &settings(&pressure)).unwrap();
    let ended = AtomicBool::new(false);
    let _end = End(&ended, &gate);

    // The disk has been asked to write before pages of any kind are old enough, though there is no
    // room for a mark.
    wait_until("a write to the disk", || gate.begun.load(Ordering::Relaxed) > 0);
    let stats = policy.stats();
    assert!(stats.pressed_passes < 7, "{stats:?}");

    // It does not answer: the pages are there, a refused one keeps its bytes, and a discarded one
    // leaves its place to another.
    for index in 0..stored {
        assert_holds(&mut queue, index, 1);
    }
    let mut version = 1;
    while queue.write_now(7, &page(7, version + 1)).is_ok() {
        // The kernel did not answer in time before, and there was a place left.
        version += 1;
        stored += u64::from(queue.write_now(stored, &page(stored, 1)).is_ok());
    }
    assert_holds(&mut queue, 7, version);
    store.worker().unwrap().discard(stored - 1..stored);
    version += 1;
    queue.write_now(7, &page(7, version)).unwrap();
    assert_holds(&mut queue, 7, version);
    assert_within_limit(&store);

    // It answers one write for many of theirs.
    let refusals = AtomicU64::new(0);
    let left: Vec<u64> = (stored - 1..PAGES).collect();
    thread::scope(|scope| {
        let _end = End(&ended, &gate);
        let (ended, gate, refusals, device, store) = (&ended, &gate, &refusals, &device, &store);
        let halves = left.chunks(left.len().div_ceil(2));
        let clients = halves.map(|pages| {
            let mut queue = device.queue().unwrap();
            scope.spawn(move || {
                for &index in pages {
                    while let Err(errno) = queue.write_now(index, &page(index, 1)) {
                        assert_eq!(errno, Errno::NoSpace, "page {index}");
                        if refusals.fetch_add(1, Ordering::Relaxed) % REFUSED == 0 {
                            gate.let_end(1);
                        }
                        assert!(!ended.load(Ordering::Relaxed), "page {index} has no place");
                        thread::yield_now();
                    }
                    assert_holds(&mut queue, index, 1);
                    assert_within_limit(store);
                }
            })
        });
        let clients: Vec<_> = clients.collect();
        wait_until("all pages stored", || clients.iter().all(|client| client.is_finished()));
    });
    drop(policy);
    let stats = store.stats();
    println!("{} refused, {} on the disk", refusals.load(Ordering::Relaxed), stats.bd_count);
    assert!(stats.bd_count >= PAGES - LIMIT / PAGE as u64, "{stats:?}");
    assert_eq!(stats.orig_data_size, PAGES * PAGE as u64);
    for index in 0..PAGES {
        assert_holds(&mut queue, index, if index == 7 { version } else { 1 });
    }
    assert_within_limit(&store);
    drop(keeper);
}

fn wait_until(what: &str, there: impl Fn() -> bool) {
    // Catches a hang only.
    let deadline = Instant::now() + Duration::from_secs(300);
    while !there() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
