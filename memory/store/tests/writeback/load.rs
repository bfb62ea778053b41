//! A full file system, and clients that use pages while they are written back.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use store::{BackBuffer, Disk, DiskError, FileDisk, Page, WrittenBack, MAX_OBJECT};

use super::shelf::Shelf;
use super::{bytes, folder, given, length, read, write_back};

#[test]
fn a_full_file_system_holds_its_blocks_and_the_other_pages_stay_in_memory() {
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
    let unmount = || Command::new("umount").arg(&folder).output().unwrap();
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
    // A process that another test is starting has copies of files that are open here.
    let begun = Instant::now();
    while !unmount().status.success() {
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", unmount());
        thread::sleep(Duration::from_millis(5));
    }
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
fn clients_that_write_read_and_discard_during_writeback_read_their_own_pages() {
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
