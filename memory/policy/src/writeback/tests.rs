use super::*;
use device::{Device, DeviceOptions, DeviceQueue};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use store::{format_backing, Block, Disk, FileDisk, Options};

/// A page of noise.
fn page(index: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut state = index << 20 | 1;
    for chunk in page.chunks_exact_mut(4) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        chunk.copy_from_slice(&(state >> 32).to_le_bytes()[..4]);
    }
    page
}

/// A disk whose writes of pages fail when so many have not.
#[derive(Debug)]
struct Failing(FileDisk, Arc<AtomicU64>);

impl Disk for Failing {
    fn blocks(&self) -> io::Result<u64> {
        self.0.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        self.0.read(block, out)
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        // The first block is the header.
        if block > 0 {
            let left =
                self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            left.map_err(|_| io::Error::from_raw_os_error(5))?;
        }
        self.0.write(block, blocks)
    }

    fn free(&self) -> Option<u64> {
        self.0.free()
    }

    fn is_hole(&self) -> io::Result<Option<bool>> {
        self.0.is_hole()
    }

    fn make_room(&self) -> io::Result<()> {
        self.0.make_room()
    }
}

/// A store of old pages of noise, and its backing file.
fn full(pages: u64) -> (Arc<Store>, tempfile::TempDir) {
    let (store, folder, _) = with(pages, &Arc::new(AtomicU64::new(u64::MAX)));
    (store, folder)
}

/// The same with a disk of as many blocks, of which so many writes succeed.
fn with(pages: u64, good: &Arc<AtomicU64>) -> (Arc<Store>, tempfile::TempDir, DeviceQueue) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(pages, Options::default()).unwrap();
    let disk = FileDisk::open(&folder.path().join("backing"), (pages + 1) << 12).unwrap();
    let disk = Failing(disk, Arc::clone(good));
    format_backing(&disk, "backing", &store).unwrap();
    store.set_backing(Box::new(disk), "backing").unwrap();
    let device = Device::new(&store, &DeviceOptions { workers: 0, ..Default::default() }).unwrap();
    let mut queue = device.queue().unwrap();
    for index in 0..pages {
        queue.write_now(index, &page(index)).unwrap();
    }
    let worker = store.worker().unwrap();
    (0..7).for_each(|_| worker.grow_older(0..pages));
    (store, folder, queue)
}

/// Regression: a pass of minutes, begun under pressure, wrote to the disk to its end.
#[test]
fn a_pass_ends_with_the_pressure_that_it_is_for() {
    const PAGES: u64 = 64;
    let (store, _folder) = full(PAGES);
    let counters = Arc::new(Counters::default());
    let settings = Settings {
        backing_free: 0,
        writeback_batch_size: 4,
        writeback_pressed_only: true,
        ..Settings::default()
    };
    let mut back = WriteBack::new(&store, &settings, &counters).unwrap().unwrap();
    let [pressed, calm] = [true, false].map(|pressed| Wanted::Policy { pressed });
    let counts = || (counters.stats().writeback_passes, store.stats().bd_count);
    assert!(!back.step(calm));
    assert_eq!(counts(), (0, 0));
    assert!(back.step(pressed));
    assert_eq!(counts(), (1, 4));
    assert!(!back.step(calm) && !back.step(calm));
    assert_eq!(counts(), (1, 4));
    // The next one is a pass of its own.
    while back.step(pressed) {}
    assert_eq!(counts(), (2, PAGES));
    // A request has nothing to do with pressure, nor have these settings.
    let always = Settings { writeback_pressed_only: false, ..settings };
    let (store, _folder) = full(PAGES);
    let mut back = WriteBack::new(&store, &always, &counters).unwrap().unwrap();
    assert!(back.step(calm) && back.step(Wanted::Asked(What::Huge)));
    assert_eq!(store.stats().bd_count, 8);
}

/// Regression: with a backing device pages that do not compress filled the memory of a host that
/// swaps, also when none of them could be written any more.
#[test]
fn pages_are_expected_to_leave_memory_while_passes_can_write() {
    const PAGES: u64 = 64;
    let settings = Settings {
        backing_free: 0,
        writeback_batch_size: 4,
        writeback_pressed_only: true,
        ..Settings::default()
    };
    let pressed = Wanted::Policy { pressed: true };
    let begun = |settings: &Settings, pressure: bool| {
        let (store, folder) = full(PAGES);
        let counters = Arc::new(Counters::default());
        let mut back = WriteBack::new(&store, settings, &counters).unwrap().unwrap();
        back.begin(pressure);
        (store, folder, back)
    };
    let (store, _folder, mut back) = begun(&settings, true);
    assert!(store.expects_writeback());
    while back.step(pressed) {}
    assert!(store.stats().bd_count == PAGES && store.expects_writeback());
    // The day's limit.
    let limited = Settings { writeback_limit: 10, ..settings.clone() };
    let (store, _folder, mut back) = begun(&limited, true);
    assert!(back.step(pressed) && store.expects_writeback());
    while back.step(pressed) {}
    assert!(store.stats().bd_count == 10 && !store.expects_writeback());
    // The file system's space. A pass that can write again ends it.
    let floor = Settings { backing_free: u64::MAX, ..settings.clone() };
    let (store, _folder, mut back) = begun(&floor, true);
    assert!(!back.step(pressed) && !store.expects_writeback());
    back.settings.backing_free = 0;
    assert!(back.step(pressed) && store.expects_writeback());
    // Passes on request only.
    let (store, _folder, mut back) = begun(&settings, false);
    assert!(!store.expects_writeback());
    while back.step(Wanted::Asked(What::Huge)) {}
    assert!(store.stats().bd_count == PAGES && !store.expects_writeback());
}

/// Regression: a failed write hid what the same batch had written before it.
#[test]
fn pages_written_before_a_failed_write_are_counted() {
    const PAGES: u64 = 64;
    let good = Arc::new(AtomicU64::new(u64::MAX));
    let (store, _folder, mut queue) = with(PAGES, &good);
    let counters = Arc::new(Counters::default());
    let settings = Settings { backing_free: 0, writeback_batch_size: 8, ..Settings::default() };
    let mut back = WriteBack::new(&store, &settings, &counters).unwrap().unwrap();
    while back.step(Wanted::Asked(What::Huge)) {}
    assert_eq!(store.stats().bd_count, PAGES);
    // Every other block is free: a batch is several writes, the third of which fails.
    for index in (0..PAGES).step_by(2) {
        queue.write_now(index, &page(index)).unwrap();
    }
    let before = (store.stats().bd_count, counters.stats().pages_written_back);
    assert_eq!(before, (PAGES / 2, PAGES));
    good.store(2, Ordering::Relaxed);
    assert!(!back.step(Wanted::Asked(What::Huge)));
    let (stats, after) = (counters.stats(), store.stats().bd_count);
    assert_eq!((stats.writeback_failed, after - before.0), (1, 2), "{stats:?}");
    assert_eq!(stats.pages_written_back - before.1, 2, "{stats:?}");
    let mut out = [0; PAGE];
    for index in 0..PAGES {
        queue.read_now(index, &mut out).unwrap();
        assert!(out == page(index), "{index}");
    }
}
