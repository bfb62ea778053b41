//! Writing back and bringing back: real devices, full ones, failing ones, foreign ones, and clients
//! that write, read and discard meanwhile.
#![cfg(not(loom))]

mod shelf;

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use shelf::Shelf;
use store::{
    format_backing, Added, BackBuffer, BackingError, Batch, Block, Disk, DiskError, FileDisk,
    GetError, Options, Page, Seen, Stopped, Store, Worker, WriteBackError, WrittenBack, MAX_OBJECT,
};

fn bytes(index: u64, version: u64, len: usize) -> Vec<u8> {
    let mut state = index << 32 | version | 1 << 63;
    let mut bytes: Vec<u8> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()[7]
        })
        .collect();
    let version = version.to_le_bytes();
    bytes[..len.min(8)].copy_from_slice(&version[..len.min(8)]);
    bytes
}

/// Four kinds of lengths: a page as it is, and three that share blocks.
fn length(index: u64) -> usize {
    [MAX_OBJECT, 1300, 90, 3900][usize::try_from(index % 4).unwrap()]
}

fn options() -> Options {
    Options { reserve: 0, ..Options::default() }
}

fn given(pages: u64, disk: &dyn Disk) -> Arc<Store> {
    let store = Store::create(pages, options()).unwrap();
    format_backing(disk, "shelf", &store).unwrap();
    store
}

/// Writes back those of these pages that fit, in batches of 16 blocks.
fn write_back(
    worker: &mut Worker,
    pages: std::ops::Range<u64>,
) -> Result<WrittenBack, WriteBackError> {
    let mut batch = Batch::new(16);
    let mut sum = WrittenBack::default();
    let mut out = [0; MAX_OBJECT];
    let mut index = pages.start;
    loop {
        let added = match worker.look(index, &mut out) {
            _ if index >= pages.end => Added::Full,
            Ok(Page::Object { tag, len }) => batch.add(&Seen { index, tag, bytes: &out[..len] }),
            _ => Added::Unfit,
        };
        if added == Added::Full {
            let done = worker.write_back(&mut batch)?;
            sum.pages += done.pages;
            sum.changed += done.changed;
            sum.blocks += done.blocks;
            sum.left += done.left;
            if index >= pages.end || done.left > 0 {
                return Ok(sum);
            }
        } else {
            index += 1;
        }
    }
}

fn read(worker: &Worker, index: u64) -> Result<Option<Vec<u8>>, GetError> {
    let mut out = [0; MAX_OBJECT];
    loop {
        match worker.get(index, &mut out)? {
            Page::Absent => return Ok(None),
            Page::Object { len, .. } => return Ok(Some(out[..len].to_vec())),
            Page::Backed => match worker.read_back(index, &mut BackBuffer::new(), &mut out)? {
                Some(Page::Object { len, .. }) => return Ok(Some(out[..len].to_vec())),
                _ => continue,
            },
            other => panic!("page {index}: {other:?}"),
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn what_was_written_back_is_read_by_the_next_server_and_its_blocks_are_used_again() {
    const PAGES: u64 = 400;
    let path = folder("real").join("backing");
    let disk = FileDisk::open(&path, 1 << 20).unwrap();
    println!("direct: {}", disk.is_direct());
    let store = given(PAGES, &disk);
    let fd = disk.fd().try_clone_to_owned().unwrap();
    store.set_backing(Box::new(disk), "backing").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, length(index))).unwrap();
    }
    let before = store.stats();
    let done = write_back(&mut worker, 0..PAGES).unwrap();
    // An uncompressed page takes a block, and so does an object of 3900 bytes; two or three smaller
    // ones share one.
    assert!(done.left > 0 && done.pages > 255 && done.changed == 0, "{done:?}");
    assert_eq!(done.blocks, 255);
    let stats = store.stats();
    assert_eq!((stats.bd_count, stats.orig_data_size), (done.pages, before.orig_data_size));
    assert_eq!(
        stats.compr_data_size,
        (0..PAGES)
            .filter(|&index| worker.peek(index).unwrap().0 != Page::Backed)
            .map(|index| length(index) as u64)
            .sum()
    );
    for index in 0..PAGES {
        assert_eq!(
            read(&worker, index).unwrap(),
            Some(bytes(index, 1, length(index))),
            "page {index}"
        );
    }
    // Overwritten and discarded: a block is free once all of its pages are gone.
    worker.discard(0..100);
    for index in 100..150 {
        worker.put(index, 1, &bytes(index, 2, 500)).unwrap();
    }
    let free = store.backing_stats().unwrap().free;
    assert!(free >= 80, "{free}");
    let done = write_back(&mut worker, 0..PAGES).unwrap();
    assert!(done.pages > 80, "{done:?}");
    let expected = |index: u64| match index {
        0..100 => None,
        100..150 => Some(bytes(index, 2, 500)),
        _ => Some(bytes(index, 1, length(index))),
    };
    let store_fd = store.fd().try_clone_to_owned().unwrap();
    let (written, before) = (store.written_today(), store.stats());
    assert_eq!(written, store.backing_stats().unwrap().bd_writes);
    drop((worker, store));

    let store = Store::attach(store_fd.as_fd(), options()).unwrap();
    let worker = store.worker().unwrap();
    // Without the device, only reads of its pages fail.
    let on_it = (0..PAGES).find(|&index| worker.peek(index).unwrap().0 == Page::Backed).unwrap();
    assert_eq!(read(&worker, on_it), Err(GetError::NoBacking { index: on_it }));
    let late = store.set_backing(Box::new(FileDisk::inherit(fd.as_fd()).unwrap()), "backing");
    assert!(matches!(late, Err(BackingError::Late { .. })), "{late:?}");
    drop((worker, store));

    let store = Store::attach(store_fd.as_fd(), options()).unwrap();
    store.set_backing(Box::new(FileDisk::inherit(fd.as_fd()).unwrap()), "backing").unwrap();
    let mut worker = store.worker().unwrap();
    assert_eq!((store.stats().bd_count, store.lost_pages()), (before.bd_count, 0));
    assert_eq!(store.written_today(), written);
    for index in 0..PAGES {
        assert_eq!(read(&worker, index).unwrap(), expected(index), "page {index}");
    }
    assert_eq!(worker.check(0..PAGES).damaged, 0);
    worker.discard(0..PAGES);
    let stats = store.backing_stats().unwrap();
    assert_eq!(stats.free, stats.blocks);
    // Closing the last copy of the descriptor unlocks.
    assert!(matches!(FileDisk::open(&path, 0), Err(DiskError::InUse)));
    drop((worker, store, fd));
    FileDisk::open(&path, 0).unwrap();
}

#[test]
fn a_device_that_is_not_this_store_s_is_refused_and_left_alone() {
    let disk = Shelf::new(40);
    let store = given(10, &disk);
    let attach = |disk: &Shelf| store.set_backing(disk.boxed(), "shelf").unwrap_err().to_string();
    let sound = disk.0.blocks.lock().unwrap()[0].clone();
    // A header with another value, and a right checksum.
    let with = |word: usize, value: u64, sum: bool| {
        let changed = Shelf::new(40);
        let mut block = sound.clone();
        block.0[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        if sum {
            let sum = crc32c_of(&block.0[..48]);
            block.0[48..56].copy_from_slice(&u64::from(sum).to_le_bytes());
        }
        changed.0.blocks.lock().unwrap()[0] = block;
        changed
    };
    for (disk, said) in [
        (
            Shelf::new(1),
            "shelf has 1 blocks of 4096 bytes, a header and one page need 2".to_owned(),
        ),
        (
            Shelf::new(40),
            "shelf is no backing device: its first word is 0000000000000000".to_owned(),
        ),
        (
            with(1, 7, true),
            "shelf: backing device of format version 7, this program has 1".to_owned(),
        ),
        (with(2, 512, true), "shelf: its header says blocks of 512, expected 4096".to_owned()),
        (with(3, 41, true), "shelf has 40 blocks of 4096 bytes, its header says 41".to_owned()),
        (with(3, 1, true), "shelf: its header says blocks: 1, expected 134217728".to_owned()),
        (
            with(3, 1 << 40, true),
            "shelf: its header says blocks: 1099511627776, expected 134217728".to_owned(),
        ),
        (
            with(4, 77, true),
            format!("shelf belongs to the store 000000000000004d, this one is {:016x}", store.id()),
        ),
        (
            with(5, 2, true),
            "shelf was last used by server 2 of its store, this is server 1".to_owned(),
        ),
    ] {
        let before = disk.0.blocks.lock().unwrap().first().map(|block| block.0);
        assert_eq!(attach(&disk), said);
        assert_eq!(disk.0.blocks.lock().unwrap().first().map(|block| block.0), before);
    }
    let said = attach(&with(3, 39, false));
    assert!(said.starts_with("shelf: checksum of its header is "), "{said}");
    // Foreign data, wherever it begins.
    for at in [0, 1, 16, 31, 256, 287, 16_384, 19_968, 19_999] {
        let disk = Shelf::new(20_000);
        disk.0.blocks.lock().unwrap()[at].0[1080] = 0x53;
        let said = format_backing(&disk, "/dev/sdx1", &store).unwrap_err().to_string();
        assert!(
            said.starts_with(&format!(
                "/dev/sdx1 is no backing device and not empty: its block {at} has data"
            )),
            "{said}"
        );
    }
    // A superblock of an array at 4 KiB and the like leave the block before them unchanged.
    let taken_over = with(4, 77, true);
    taken_over.0.blocks.lock().unwrap()[0].0[1080] = 0x53;
    let said = format_backing(&taken_over, "/dev/sdx1", &store).unwrap_err().to_string();
    assert!(said.contains("its block 0 has data"), "{said}");
    // A device of another store is accepted.
    let old = with(4, 77, true);
    format_backing(&old, "shelf", &store).unwrap();
    store.set_backing(old.boxed(), "shelf").unwrap();
    assert!(attach(&old).contains("one only"));
    let folder = folder("not-a-file");
    assert!(FileDisk::open(&folder, 0).is_err());
}

fn crc32c_of(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

/// One of 1 TiB, empty but for one block.
#[derive(Debug)]
struct Long(u32);

impl Disk for Long {
    fn blocks(&self) -> std::io::Result<u64> {
        Ok(1 << 28)
    }

    fn read(&self, block: u32, out: &mut Block) -> std::io::Result<()> {
        out.0.fill(u8::from(block == self.0));
        Ok(())
    }

    fn write(&self, block: u32, _: &[Block]) -> std::io::Result<()> {
        assert_eq!((block, self.0), (0, 1 << 20), "written to, though it is somebody's");
        Ok(())
    }

    fn free(&self) -> Option<u64> {
        None
    }

    fn is_direct(&self) -> bool {
        true
    }
}

#[test]
fn marks_at_the_end_of_a_long_disk_and_behind_an_old_header_are_seen() {
    let store = Store::create(10, options()).unwrap();
    for block in [0, 31, 256, 16_384, (1 << 28) - 32, (1 << 28) - 1] {
        let refused = format_backing(&Long(block), "it", &store).unwrap_err();
        assert!(
            matches!(refused, BackingError::Foreign { block: b, .. } if b == block),
            "{refused}"
        );
    }
    // No format has a signature there.
    format_backing(&Long(1 << 20), "it", &store).unwrap();

    // A former backing device is accepted again, unless a new owner has left its header in place.
    let disk = Shelf::new(80);
    format_backing(&disk, "it", &store).unwrap();
    disk.0.blocks.lock().unwrap()[1].0.fill(7);
    format_backing(&disk, "it", &store).unwrap();
    let bcachefs = 0xeff7_3d80_cf60_6ad9_a990_ce66_f673_85c6_u128.to_le_bytes();
    let marks: [(usize, usize, &[u8]); 4] = [
        (1, 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
        (1, 24, &bcachefs),
        (32, 0, &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0]),
        (63, 3072, &[0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c]),
    ];
    for (block, byte, mark) in marks {
        let before = disk.0.blocks.lock().unwrap()[block].clone();
        disk.0.blocks.lock().unwrap()[block].0[byte..][..mark.len()].copy_from_slice(mark);
        let refused = format_backing(&disk, "it", &store).unwrap_err();
        assert!(
            matches!(refused, BackingError::Foreign { block: b, .. } if b as usize == block),
            "{refused}"
        );
        disk.0.blocks.lock().unwrap()[block] = before;
    }
    format_backing(&disk, "it", &store).unwrap();
}

#[test]
fn files_that_are_somebody_s_are_refused_and_left_as_they_are() {
    let folder = folder("foreign");
    let store = Store::create(10, options()).unwrap();
    let path = folder.join("backing");
    let given = |size| format_backing(&FileDisk::open(&path, size).unwrap(), "it", &store);
    // Only holes, or empty: ours to write.
    given(1 << 20).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    // It was a backing device, and is taken again.
    given(2 << 20).unwrap();
    fs::remove_file(&path).unwrap();
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    given(0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    fs::write(&path, []).unwrap();
    given(8192).unwrap();
    // Foreign, though all blocks that are checked are zeros; neither written nor extended.
    for (at, what) in [(0, &b"mine"[..]), (100, b"mine"), (3 << 20, b"mine"), (40_000, &[0])] {
        fs::remove_file(&path).unwrap();
        let file = fs::File::create(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, what, at).unwrap();
        let before = fs::read(&path).unwrap();
        let said = given(1 << 30).unwrap_err().to_string();
        assert!(said.starts_with("it is no backing device and not empty: a file with"), "{said}");
        assert!(fs::read(&path).unwrap() == before, "{at}");
    }
}

#[test]
fn what_is_no_disk_is_refused_and_nothing_is_made_in_its_place() {
    // A mistyped name.
    let wrong = Path::new("/dev/platen-no-such-disk");
    let refused = FileDisk::open(wrong, 1 << 20).unwrap_err();
    assert!(matches!(refused, DiskError::NoDevice), "{refused}");
    assert!(!wrong.exists());
    assert!(matches!(FileDisk::open(Path::new("/dev/null"), 0), Err(DiskError::Kind)));
    // A file system needs memory for a late write.
    let path = folder("for-swap").join("backing");
    let swap = FileDisk::open(&path, 1 << 20).unwrap().check_for_swap().unwrap_err();
    assert!(matches!(swap, DiskError::Swap("a file")), "{swap}");
    let memory = Path::new("/dev/shm/platen-test-backing");
    if fs::write(memory, []).is_err() {
        println!("skipped: there is no /dev/shm to write to");
        return;
    }
    let refused = FileDisk::open(memory, 1 << 20);
    fs::remove_file(memory).unwrap();
    assert!(matches!(refused, Err(DiskError::Memory("tmpfs"))), "{refused:?}");
}

/// By a loop device, where one can be made.
#[test]
fn a_block_device_that_somebody_has_claimed_is_refused() {
    let image = folder("claimed").join("image");
    fs::File::create(&image).unwrap().set_len(80 << 20).unwrap();
    let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else {
        println!("skipped: no loop device can be made here");
        return;
    };
    let name = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let result = std::panic::catch_unwind(|| {
        let path = Path::new(&name);
        let disk = FileDisk::open(path, 0).unwrap();
        assert!(matches!(FileDisk::open(path, 0), Err(DiskError::Claimed)));
        assert!(matches!(disk.check_for_swap(), Err(DiskError::Swap("a loop device"))));
        // Inheriting succeeds, and is no claim of its own.
        let heir = FileDisk::inherit(disk.fd()).unwrap();
        assert_eq!(heir.blocks().unwrap(), 20_480);
        let store = given(10, &heir);
        store.set_backing(Box::new(heir), &name).unwrap();
        // A device of another store is accepted; with data at its end it is not, once its header is
        // gone.
        format_backing(&disk, &name, &given(10, &disk)).unwrap();
        disk.write(0, &[Block::ZERO]).unwrap();
        disk.write(20_470, &[Block([7; MAX_OBJECT])]).unwrap();
        let said = format_backing(&disk, &name, &store).unwrap_err().to_string();
        assert!(said.contains("its block 20470 has data"), "{said}");
    });
    Command::new("losetup").args(["--detach", &name]).status().unwrap();
    result.unwrap();
}

#[test]
fn a_device_that_cannot_be_read_just_now_is_taken_and_used_when_it_can() {
    const PAGES: u64 = 20;
    let disk = Shelf::new(60);
    let store = given(PAGES, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
    }
    assert_eq!(write_back(&mut worker, 0..10).unwrap().pages, 10);
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

#[test]
fn a_read_that_fails_is_tried_again_before_the_page_is_given_up() {
    let disk = Shelf::new(60);
    let store = given(4, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    worker.put(0, 1, &bytes(0, 1, MAX_OBJECT)).unwrap();
    assert_eq!(write_back(&mut worker, 0..1).unwrap().pages, 1);
    disk.0.fail_reads.store(5, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while store.backing_stats().unwrap().failed_reads < 2 {
                std::thread::yield_now();
            }
            disk.0.fail_reads.store(0, Ordering::Relaxed);
        });
        assert_eq!(read(&worker, 0).unwrap(), Some(bytes(0, 1, MAX_OBJECT)));
    });
}

#[test]
fn a_device_that_answers_nobody_is_not_waited_for_by_each_reader_anew() {
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

    fn free(&self) -> Option<u64> {
        None
    }

    fn is_direct(&self) -> bool {
        true
    }
}

/// While a block is read, its page is overwritten, the block goes to another page, and then comes
/// back with the same bytes: the entry is unchanged afterwards, but the bytes read are wrong.
#[test]
fn a_block_that_went_and_came_back_during_one_read_is_read_again() {
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
fn a_read_that_fails_is_that_page_s_error_and_nobody_else_s() {
    const PAGES: u64 = 40;
    let disk = Shelf::new(60);
    let store = given(PAGES, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
    }
    assert_eq!(write_back(&mut worker, 0..20).unwrap().pages, 20);
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
fn directories_that_say_anything_are_no_more_than_a_failed_read() {
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

#[test]
fn a_file_system_that_is_full_keeps_what_it_has_and_the_rest_stays_in_memory() {
    const PAGES: u64 = 300;
    let folder = folder("full");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=512k", "none"])
        .arg(&folder)
        .output();
    if !mounted.as_ref().is_ok_and(|output| output.status.success()) {
        println!("skipped: cannot mount a tmpfs here: {mounted:?}");
        return;
    }
    let unmount = || Command::new("umount").arg(&folder).status().unwrap();
    let path = folder.join("backing");
    // Opening it by name would refuse it, because it is memory. Here only a full file system
    // matters.
    assert!(matches!(FileDisk::open(&path, 2 << 20), Err(DiskError::Memory("tmpfs"))));
    assert!(!path.exists());
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(2 << 20).unwrap();
    let disk = FileDisk::inherit(file.as_fd()).unwrap();
    println!("direct: {}, killable: {}", disk.is_direct(), disk.is_killable());
    let store = given(PAGES, &disk);
    store.set_backing(Box::new(disk), "backing").unwrap();
    let space = store.backing_space().expect("it is a file");
    assert!((400 << 10..=512 << 10).contains(&space), "{space}");
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, MAX_OBJECT)).unwrap();
    }
    let stopped = write_back(&mut worker, 0..PAGES).unwrap_err();
    assert!(stopped.to_string().contains("No space left on device"), "{stopped}");
    let out = store.stats().bd_count;
    assert!((90..128).contains(&out), "{out}");
    for index in 0..PAGES {
        assert_eq!(
            read(&worker, index).unwrap(),
            Some(bytes(index, 1, MAX_OBJECT)),
            "page {index}"
        );
    }
    // A part of it is removed behind our back.
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    let failed = (0..PAGES).filter(|&index| read(&worker, index).is_err()).count() as u64;
    assert_eq!(failed, out - 1);
    drop((worker, store, file));
    let mut block = [0; 8];
    File::open(&path).unwrap().read_exact_at(&mut block, 0).unwrap();
    assert_eq!(&block, b"platenBK");
    assert!(unmount().success());
}

/// Ends all when one fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

// Over 80 lines: the threads share the state that each checks.
#[test]
fn clients_that_write_read_and_discard_while_pages_go_out_see_their_own() {
    const PAGES: u64 = 240;
    const THREADS: u64 = 3;
    // Few blocks, so that each is soon reused for another page.
    let disk = Shelf::pausing(24, thread::yield_now);
    let store = given(PAGES, &disk);
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let stop = AtomicBool::new(false);
    let (done, back) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut worker = store.worker().unwrap();
            let (stop, done, back) = (&stop, &done, &back);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut versions = vec![None; usize::try_from(PAGES).unwrap()];
                let mut random = 0x9e37_79b9 + thread;
                let mut out = [0; MAX_OBJECT];
                let mut buffer = BackBuffer::new();
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let index = (random >> 40) % (PAGES / THREADS) * THREADS + thread;
                    let held = &mut versions[usize::try_from(index).unwrap()];
                    match random >> 60 {
                        0..3 => {
                            // Sometimes with the same contents as before, so that its block may
                            // look like the last one.
                            let next = if random & 0x1000 == 0 { 1 } else { held.unwrap_or(0) + 1 };
                            worker.put(index, 1, &bytes(index, next, length(index))).unwrap();
                            *held = Some(next);
                        }
                        3 => {
                            worker.discard(index..index + 1);
                            *held = None;
                        }
                        4 => {
                            if worker.read_back(index, &mut buffer, &mut out).unwrap().is_some() {
                                let new = bytes(index, 7, 1000);
                                if worker.bring_back(index, &buffer, 1, &new).unwrap() {
                                    worker.put(index, 1, &bytes(index, 1, length(index))).unwrap();
                                    *held = Some(1);
                                }
                            }
                        }
                        5..8 => {
                            // Another client's page can be read, whatever its contents.
                            read(&worker, random >> 20 & 127).unwrap();
                        }
                        _ => {
                            let backed = worker.peek(index).unwrap().0 == Page::Backed;
                            let expected = held.map(|version| bytes(index, version, length(index)));
                            assert_eq!(read(&worker, index).unwrap(), expected, "page {index}");
                            back.fetch_add(u64::from(backed), Ordering::Relaxed);
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut worker = store.worker().unwrap();
        let begun = Instant::now();
        let _stop = Stop(&stop);
        let mut sum = WrittenBack::default();
        while done.load(Ordering::Relaxed) < 60_000
            || sum.pages < 3000
            || back.load(Ordering::Relaxed) < 3000
        {
            assert!(!stop.load(Ordering::Relaxed), "a client has failed");
            assert!(begun.elapsed() < Duration::from_secs(300), "{sum:?} {done:?} {back:?}");
            let round = write_back(&mut worker, 0..PAGES).unwrap();
            sum.pages += round.pages;
            sum.changed += round.changed;
            sum.blocks += round.blocks;
            store.compact_step(64);
        }
        stop.store(true, Ordering::Relaxed);
        println!("{sum:?}, {} reads", back.load(Ordering::Relaxed));
    });
    let mut worker = store.worker().unwrap();
    assert_eq!(worker.check(0..PAGES).damaged, 0);
    let stats = store.backing_stats().unwrap();
    assert_eq!((stats.failed_reads, stats.failed_writes), (0, 0));
    worker.discard(0..PAGES);
    assert_eq!(store.backing_stats().unwrap().free, stats.blocks);
}
