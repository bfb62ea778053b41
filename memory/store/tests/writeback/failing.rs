//! Devices that fail, now and then or for good, and that do not answer.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use store::{Batch, Block, Disk, GetError, Seen, Stopped, Store, Worker, MAX_OBJECT};

use super::shelf::Shelf;
use super::{bytes, given, options, read, write_back};

/// A store of `pages` pages, the first `out` of them written back to `disk`.
fn written_back(disk: &Shelf, pages: u64, out: u64) -> (Arc<Store>, Worker) {
    let store = given(pages, disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..pages {
        worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
    }
    assert_eq!(write_back(&mut worker, 0..out).unwrap().pages, out);
    (store, worker)
}

#[test]
fn a_temporarily_unreadable_device_is_attached_and_used_once_readable() {
    const PAGES: u64 = 20;
    let disk = Shelf::new(60);
    let (store, worker) = written_back(&disk, PAGES, 10);
    let fd = store.fd().try_clone_to_owned().unwrap();
    drop((worker, store));
    for foreign in [false, true] {
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        disk.0.fail_reads.store(5, Ordering::Relaxed);
        store.take_backing(disk.boxed(), "shelf").unwrap();
        let stopped = || store.backing_stats().unwrap().stopped;
        assert_eq!(stopped(), Some(Stopped::Unread { errno: None }));
        assert_eq!(store.lost_pages(), 0);
        let mut worker = store.worker().unwrap();
        // Nothing is written to what may be another owner's.
        assert!(write_back(&mut worker, 10..PAGES).is_err());
        store.resume_backing();
        assert_eq!(stopped(), Some(Stopped::Unread { errno: Some(5) }));
        assert!(write_back(&mut worker, 10..PAGES).is_err());
        disk.0.fail_reads.store(0, Ordering::Relaxed);
        for index in 0..PAGES {
            assert_eq!(read(&worker, index).unwrap(), Some(bytes(index, 1, MAX_OBJECT)));
        }
        let header = disk.0.blocks.lock().unwrap()[0].clone();
        if foreign {
            disk.0.blocks.lock().unwrap()[0].0[33] ^= 1;
        }
        assert_eq!(store.retry_backing().is_err(), foreign);
        assert_eq!(stopped(), foreign.then_some(Stopped::Foreign));
        if foreign {
            assert!(write_back(&mut worker, 10..PAGES).is_err());
            disk.0.blocks.lock().unwrap()[0] = header;
            // A device that was truncated meanwhile: reads of its last pages fail, and their
            // entries stay.
            let fd = store.fd().try_clone_to_owned().unwrap();
            drop((worker, store));
            disk.0.blocks.lock().unwrap().truncate(5);
            let store = Store::attach(fd.as_fd(), options()).unwrap();
            store.take_backing(disk.boxed(), "shelf").unwrap();
            let said = store.retry_backing().unwrap_err().to_string();
            assert_eq!(said, "shelf has 5 blocks of 4096 bytes, its header says 60");
            assert_eq!((store.lost_pages(), store.stats().bd_count), (0, PAGES));
            let worker = store.worker().unwrap();
            assert_eq!(read(&worker, 0).unwrap(), Some(bytes(0, 1, MAX_OBJECT)));
            assert!(matches!(read(&worker, 9), Err(GetError::Backing { errno: 0, .. })));
        } else {
            assert_eq!(write_back(&mut worker, 10..PAGES).unwrap().pages, 10);
        }
    }
}

/// A disk whose reads of the header wait, first at one barrier and then at the other.
#[derive(Clone, Debug)]
struct Silent(Shelf, Arc<[Barrier; 2]>);

impl Disk for Silent {
    fn blocks(&self) -> std::io::Result<u64> {
        self.0.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> std::io::Result<()> {
        for barrier in self.1.iter() {
            barrier.wait();
        }
        self.0.read(block, out)
    }

    fn write(&self, block: u32, blocks: &[Block]) -> std::io::Result<()> {
        self.0.write(block, blocks)
    }
}

/// The thread that recompresses pages, too, writes to the device.
#[test]
fn nobody_who_would_write_waits_for_the_header_of_a_silent_device() {
    const PAGES: u64 = 20;
    let disk = Shelf::new(60);
    let (store, worker) = written_back(&disk, PAGES, 10);
    let fd = store.fd().try_clone_to_owned().unwrap();
    drop((worker, store));
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    let silent = Silent(disk, Arc::new([Barrier::new(2), Barrier::new(2)]));
    store.take_backing(Box::new(silent.clone()), "shelf").unwrap();
    thread::scope(|scope| {
        let reading = scope.spawn(|| store.retry_backing());
        silent.1[0].wait();
        let (over, is_over) = std::sync::mpsc::channel();
        scope.spawn(|| {
            let over = over;
            store.resume_backing();
            let mut worker = store.worker().unwrap();
            over.send(write_back(&mut worker, 10..PAGES).is_err()).unwrap();
        });
        // Only a hang takes longer.
        let refused = is_over.recv_timeout(std::time::Duration::from_secs(60));
        silent.1[1].wait();
        reading.join().unwrap().unwrap();
        assert_eq!(refused, Ok(true));
    });
    let mut worker = store.worker().unwrap();
    assert_eq!(write_back(&mut worker, 10..PAGES).unwrap().pages, 10);
}

/// A disk whose next read fails.
#[derive(Clone, Debug)]
struct FailsOnce(Shelf, Arc<AtomicBool>);

impl Disk for FailsOnce {
    fn blocks(&self) -> std::io::Result<u64> {
        self.0.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> std::io::Result<()> {
        match self.1.swap(false, Ordering::Relaxed) {
            true => Err(std::io::Error::from_raw_os_error(5)),
            false => self.0.read(block, out),
        }
    }

    fn write(&self, block: u32, blocks: &[Block]) -> std::io::Result<()> {
        self.0.write(block, blocks)
    }
}

#[test]
fn a_failed_read_is_retried_before_the_page_is_lost() {
    let disk = FailsOnce(Shelf::new(60), Arc::new(AtomicBool::new(false)));
    let store = given(1, &disk);
    store.set_backing(Box::new(disk.clone()), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    worker.put(0, 1, &bytes(0, 1, MAX_OBJECT)).unwrap();
    assert_eq!(write_back(&mut worker, 0..1).unwrap().pages, 1);
    disk.1.store(true, Ordering::Relaxed);
    assert_eq!(read(&worker, 0).unwrap(), Some(bytes(0, 1, MAX_OBJECT)));
    assert!(!disk.1.load(Ordering::Relaxed));
    assert_eq!(store.backing_stats().unwrap().failed_reads, 1);
}

#[test]
fn a_device_that_does_not_answer_delays_only_its_first_reader() {
    let disk = Shelf::new(60);
    let store = given(4, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..3 {
        worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
    }
    assert_eq!(write_back(&mut worker, 0..3).unwrap().pages, 3);
    let failed = || store.backing_stats().unwrap().failed_reads;
    disk.0.fail_reads.store(5, Ordering::Relaxed);
    read(&worker, 0).unwrap_err();
    let first = failed();
    assert!(first > 1, "it was not tried again");
    read(&worker, 1).unwrap_err();
    assert_eq!(failed(), first + 1);
    // One success resets the failures.
    disk.0.fail_reads.store(0, Ordering::Relaxed);
    assert_eq!(read(&worker, 2).unwrap(), Some(bytes(2, 1, MAX_OBJECT)));
    disk.0.fail_reads.store(5, Ordering::Relaxed);
    read(&worker, 0).unwrap_err();
    assert!(failed() > first + 2, "it was not tried again");
}

#[test]
fn a_write_that_fails_leaves_every_page_in_memory_and_stops_writing() {
    const PAGES: u64 = 64;
    for good in [0, 1, 7, 20] {
        let disk = Shelf::new(60);
        let store = given(PAGES, &disk);
        store.set_backing(disk.boxed(), "shelf").unwrap();
        let mut worker = store.worker().unwrap();
        for index in 0..PAGES {
            worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
        }
        disk.0.good_writes.store(good, Ordering::Relaxed);
        disk.0.fail_writes.store(28, Ordering::Relaxed);
        let stopped = write_back(&mut worker, 0..PAGES).unwrap_err();
        assert!(stopped.to_string().contains("No space left on device"), "{stopped}");
        assert!(stopped.to_string().ends_with(": make room there, and ask again"), "{stopped}");
        let stats = store.backing_stats().unwrap();
        assert_eq!(stats.failed_writes, 1);
        assert!(matches!(stats.stopped, Some(Stopped::Write { errno: 28, .. })), "{stats:?}");
        // Whole batches are written; of the failed one, nothing is.
        assert_eq!(store.stats().bd_count, good / 16 * 16);
        assert_eq!(stats.blocks - stats.free, good / 16 * 16);
        // It is not retried until it is resumed.
        disk.0.fail_writes.store(0, Ordering::Relaxed);
        assert_eq!(write_back(&mut worker, 0..PAGES).unwrap_err(), stopped);
        assert_eq!(store.backing_stats().unwrap().failed_writes, 1);
        for index in 0..PAGES {
            assert_eq!(read(&worker, index).unwrap(), Some(bytes(index, 1, MAX_OBJECT)));
        }
        store.resume_backing();
        let done = write_back(&mut worker, 0..PAGES).unwrap();
        assert_eq!((done.pages, done.left), (59 - good / 16 * 16, 5));
        for index in 0..PAGES {
            assert_eq!(read(&worker, index).unwrap(), Some(bytes(index, 1, MAX_OBJECT)));
        }
    }
}

/// A disk whose first read pauses before and after it copies the block's bytes, on command.
#[derive(Clone, Debug)]
struct Halting(Shelf, Arc<(AtomicBool, Barrier)>);

impl Disk for Halting {
    fn blocks(&self) -> std::io::Result<u64> {
        self.0.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> std::io::Result<()> {
        let (halts, barrier) = &*self.1;
        if !halts.swap(false, Ordering::Relaxed) {
            return self.0.read(block, out);
        }
        // Here it is; on; the bytes are taken; on.
        barrier.wait();
        barrier.wait();
        let read = self.0.read(block, out);
        barrier.wait();
        barrier.wait();
        read
    }

    fn write(&self, block: u32, blocks: &[Block]) -> std::io::Result<()> {
        self.0.write(block, blocks)
    }
}

/// While a block is read, its page is overwritten, the block goes to another page, and then comes
/// back with the same bytes: the entry is unchanged afterwards, but the bytes read are wrong.
#[test]
fn a_block_that_is_freed_and_reused_during_a_read_is_read_again() {
    let disk = Halting(Shelf::new(2), Arc::new((AtomicBool::new(false), Barrier::new(2))));
    let store = given(8, &disk);
    store.set_backing(Box::new(disk.clone()), "shelf").unwrap();
    let (first, second) = (bytes(1, 1, 4096), bytes(2, 1, 4096));
    let mut worker = store.worker().unwrap();
    let mut put_out = |index: u64, bytes: &[u8]| {
        worker.put(index, 0, bytes).unwrap();
        let mut batch = Batch::new(1);
        batch.add(&Seen { index, tag: 0, bytes });
        assert_eq!(worker.write_back(&mut batch).unwrap().pages, 1);
    };
    put_out(1, &first);
    disk.1 .0.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&store.worker().unwrap(), 1));
        disk.1 .1.wait();
        let mut other = store.worker().unwrap();
        other.put(1, 0, &first).unwrap();
        put_out(2, &second);
        disk.1 .1.wait();
        disk.1 .1.wait();
        other.discard(2..3);
        put_out(1, &first);
        disk.1 .1.wait();
        assert_eq!(reader.join().unwrap().unwrap().as_ref(), Some(&first));
    });
    assert_eq!(store.backing_stats().unwrap().failed_reads, 0);
}

#[test]
fn a_failed_read_is_an_error_of_its_page_alone() {
    const PAGES: u64 = 40;
    let disk = Shelf::new(60);
    let (store, mut worker) = written_back(&disk, PAGES, 20);
    // A read of a medium that has lost the data is not retried.
    disk.0.fail_reads.store(61, Ordering::Relaxed);
    for index in 0..PAGES {
        match read(&worker, index) {
            Err(GetError::Backing { index: page, block, errno: 61 }) if index < 20 => {
                assert_eq!((page, u64::from(block)), (index, index + 1));
            }
            Ok(Some(page)) if index >= 20 => assert_eq!(page, bytes(index, 1, MAX_OBJECT)),
            other => panic!("page {index}: {other:?}"),
        }
    }
    disk.0.fail_reads.store(0, Ordering::Relaxed);
    // A block with other bytes, one of another page, and a truncated device.
    {
        let mut blocks = disk.0.blocks.lock().unwrap();
        blocks[3].0[4000] ^= 1;
        blocks[5] = blocks[6].clone();
        blocks.truncate(18);
    }
    for index in 0..20 {
        let found = read(&worker, index);
        match index {
            2 | 4 => assert!(matches!(found, Err(GetError::BackedChecksum { .. })), "{found:?}"),
            17.. => assert!(matches!(found, Err(GetError::Backing { errno: 0, .. })), "{found:?}"),
            _ => assert_eq!(found.unwrap(), Some(bytes(index, 1, MAX_OBJECT))),
        }
    }
    assert_eq!(store.backing_stats().unwrap().failed_reads, 20 + 5);
    let checked = worker.check(0..PAGES);
    assert_eq!((checked.sound, checked.damaged), (35, 5));
    // A write ends the damage.
    worker.put(2, 1, &bytes(2, 2, 50)).unwrap();
    assert_eq!(read(&worker, 2).unwrap(), Some(bytes(2, 2, 50)));
}

#[test]
fn damaged_block_directories_only_fail_the_read() {
    const PAGES: u64 = 30;
    let disk = Shelf::new(60);
    let store = given(PAGES, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, 100)).unwrap();
    }
    assert_eq!(write_back(&mut worker, 0..PAGES).unwrap().blocks, 1);
    let sound = disk.0.blocks.lock().unwrap()[1].clone();
    let mut random = 1_u64;
    let mut wrong = 0;
    for _ in 0..3000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut block = sound.clone();
        // In the header and the directory.
        let at = usize::try_from(random >> 40).unwrap() % 500;
        block.0[at] ^= random.to_le_bytes()[3] | 1;
        disk.0.blocks.lock().unwrap()[1] = block;
        for index in 0..PAGES {
            match read(&worker, index) {
                Ok(page) => assert_eq!(page, Some(bytes(index, 1, 100))),
                Err(GetError::BackedChecksum { .. }) => wrong += 1,
                Err(other) => panic!("{other}"),
            }
        }
    }
    assert!(wrong > 3000 / 2, "{wrong}");
}
