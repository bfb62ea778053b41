//! A server killed under load, and the next one: threads that write, write in part, read, discard,
//! compact, make groups and write back, and a keeper, ended by SIGKILL at any moment.
#![cfg(not(loom))]
#![expect(unsafe_code, reason = "forks a server that is killed")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::process::{kill_process, waitpid, Pid, Signal, WaitOptions};
use store::{
    format_backing, BackBuffer, Batch, Change, FileDisk, GroupBuffer, Keeper, ModifyError, Options,
    Page, Seen, Store, Worker, MAX_OBJECT,
};

const PAGES: u64 = 4000;
const THREADS: u64 = 3;
const ROUNDS: u32 = 10;

fn options() -> Options {
    // A thread that gets no CPU may hold a lock of the kernel for which the keeper waits.
    let patience = std::time::Duration::from_secs(600);
    Options { reserve: 8 << 20, patience, ..Options::default() }
}

/// The bytes of a version of a page: no two versions have the same.
fn bytes(index: u64, version: u64) -> Vec<u8> {
    let mut state = index << 32 | version;
    let len = 40 + usize::try_from(state.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).unwrap() % 4057;
    let mut bytes: Vec<u8> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()[7]
        })
        .collect();
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Version words of each page, in a file of their own: begun, and done.
struct Log(File);

impl Log {
    fn set(&self, what: u64, index: u64, version: u64) {
        self.0.write_all_at(&version.to_le_bytes(), (index * 2 + what) * 8).unwrap();
    }

    fn get(&self, what: u64, index: u64) -> u64 {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, (index * 2 + what) * 8).unwrap();
        u64::from_le_bytes(word)
    }
}

/// Makes one of up to ten pages; the payload is their versions, and something to fill some objects.
fn group(worker: &mut Worker, from: u64, buffer: &mut GroupBuffer) {
    let mut page = [0; MAX_OBJECT];
    let mut found = Vec::new();
    for index in from..from + 10 {
        if let Page::Object { len, .. } = worker.look(index, &mut page).unwrap() {
            found.push((index, page[..len].to_vec()));
        }
    }
    let len = 6000 + usize::try_from(from).unwrap() % 5000;
    for (to, (_, bytes)) in buffer.room().chunks_mut(8).zip(&found) {
        to.copy_from_slice(&bytes[..8]);
    }
    let seen: Vec<_> =
        found.iter().map(|(index, bytes)| Seen { index: *index, tag: 1, bytes }).collect();
    if !seen.is_empty() {
        // Without room there is none.
        let _ = worker.put_group(&seen, 2, len, buffer);
    }
}

/// A file in memory as the backing device, smaller than what there is for it.
fn backing(disk: &OwnedFd) -> FileDisk {
    FileDisk::inherit(disk.as_fd()).unwrap()
}

/// Writes a part of the page, whose contents then are this version; `false` if it is in a group or
/// written back.
fn modify(worker: &mut Worker, index: u64, version: u64, page: &mut [u8; MAX_OBJECT]) -> bool {
    let new = bytes(index, version);
    let edit = |_, out: &mut [u8; MAX_OBJECT]| {
        out[..new.len()].copy_from_slice(&new);
        Some(Change::Object { tag: 1, len: new.len() })
    };
    match worker.modify(index, page, edit) {
        Ok(()) => true,
        Err(ModifyError::Grouped { .. } | ModifyError::Backed { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn serve(fd: &OwnedFd, disk: &OwnedFd, log: &Log) {
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    store.set_backing(Box::new(backing(disk)), "disk").unwrap();
    let _keeper = Keeper::start(&store).unwrap();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut worker = store.worker().unwrap();
            scope.spawn(move || {
                let mut page = [0; MAX_OBJECT];
                let mut buffer = GroupBuffer::new();
                let mut block = BackBuffer::new();
                let mut random = u64::from(std::process::id()) << 8 | thread | 1;
                loop {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let index = random % (PAGES / THREADS) * THREADS + thread;
                    let version = log.get(0, index) + 1;
                    log.set(0, index, version);
                    if version.is_multiple_of(16) {
                        worker.discard(index..index + 1);
                    } else if !version.is_multiple_of(4)
                        || !modify(&mut worker, index, version, &mut page)
                    {
                        worker.put(index, 1, &bytes(index, version)).unwrap();
                    }
                    log.set(1, index, version);
                    // Another thread's page may have any version, but must not be damaged.
                    let other = random >> 20 & 2047;
                    if worker.get(other, &mut page).unwrap() == Page::Grouped {
                        worker.get_group(other, &mut buffer).unwrap();
                    }
                    worker.read_back(other, &mut block, &mut page).unwrap();
                }
            });
        }
        let mut worker = store.worker().unwrap();
        scope.spawn(move || {
            let mut batch = Batch::new(32);
            let mut page = [0; MAX_OBJECT];
            loop {
                for index in 0..PAGES {
                    if let Ok(Page::Object { tag, len }) = worker.look(index, &mut page) {
                        batch.add(&Seen { index, tag, bytes: &page[..len] });
                    }
                    if batch.blocks() == 32 || index + 1 == PAGES {
                        worker.write_back(&mut batch).unwrap();
                    }
                }
            }
        });
        scope.spawn(|| loop {
            store.compact_step(512);
        });
        let mut worker = store.worker().unwrap();
        scope.spawn(move || {
            let mut buffer = GroupBuffer::new();
            loop {
                for from in (0..PAGES - 10).step_by(10) {
                    group(&mut worker, from, &mut buffer);
                }
            }
        });
    });
}

// Over 80 lines: the child and its judge, side by side.
#[test]
fn the_next_server_finds_every_page_that_was_acknowledged() {
    let store = Store::create(PAGES, options()).unwrap();
    let fd = store.fd().try_clone_to_owned().unwrap();
    let disk = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&disk, 600 * 4096).unwrap();
    format_backing(&backing(&disk), "disk", &store).unwrap();
    drop(store);
    let log = Log(File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap()));
    log.0.set_len(PAGES * 16).unwrap();
    let mut slowest = Duration::ZERO;
    let mut written = 0;
    let mut grouped = 0;
    let mut backed = 0;
    for round in 0..ROUNDS {
        // SAFETY: this test is alone in its process, so the child has a consistent copy; it never
        // returns.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "no child");
        if pid == 0 {
            let _ = std::panic::catch_unwind(|| serve(&fd, &disk, &log));
            // SAFETY: ends this process; reached only by a panic, which the parent then sees.
            unsafe { libc::_exit(1) };
        }
        let pid = Pid::from_raw(pid).unwrap();
        let sum = |log: &Log| (0..PAGES).map(|index| log.get(1, index)).sum::<u64>();
        let before = sum(&log);
        let begun = Instant::now();
        while sum(&log) < before + 3000 + 700 * u64::from(round) {
            assert!(begun.elapsed() < Duration::from_secs(300), "the server does nothing");
            thread::sleep(Duration::from_millis(1));
        }
        kill_process(pid, Signal::KILL).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.terminating_signal(), Some(Signal::KILL.as_raw()), "{status:?}");

        let killed = Instant::now();
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        slowest = slowest.max(killed.elapsed());
        store.set_backing(Box::new(backing(&disk)), "disk").unwrap();
        assert_eq!(store.lost_pages(), 0);
        assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
        let worker = store.worker().unwrap();
        let mut page = [0; MAX_OBJECT];
        let mut buffer = GroupBuffer::new();
        let mut block = BackBuffer::new();
        for index in 0..PAGES {
            let found = match worker.get(index, &mut page).expect("no page is damaged") {
                Page::Absent => None,
                Page::Object { len, .. } => {
                    let version = u64::from_le_bytes(page[..8].try_into().unwrap());
                    assert!(page[..len] == bytes(index, version), "page {index} is mixed up");
                    Some(version)
                }
                Page::Same(_) => panic!("nobody stored one"),
                Page::Backed => {
                    backed += 1;
                    let found = worker.read_back(index, &mut block, &mut page);
                    let Ok(Some(Page::Object { len, .. })) = found else { panic!("{found:?}") };
                    let version = u64::from_le_bytes(page[..8].try_into().unwrap());
                    assert!(page[..len] == bytes(index, version), "page {index} is mixed up");
                    Some(version)
                }
                Page::Grouped => {
                    grouped += 1;
                    let place = worker.look_group(index, &mut buffer).expect("no group is damaged");
                    let at = place.expect("it is in one").position * 8;
                    let version = &buffer.payload()[at..at + 8];
                    Some(u64::from_le_bytes(version.try_into().unwrap()))
                }
            };
            let (begun, done) = (log.get(0, index), log.get(1, index));
            let says = |version: u64| (!version.is_multiple_of(16)).then_some(version);
            assert!(
                found == says(done) || found == says(begun),
                "round {round}: page {index} has version {found:?}, {done} done, {begun} begun"
            );
            // The last operation did or did not happen; from here on the page is what was found.
            if found == says(done) {
                log.set(0, index, done);
            } else {
                log.set(1, index, begun);
            }
        }
        written = sum(&log);
    }
    println!(
        "{ROUNDS} servers killed, {written} pages written, {grouped} found in groups, {backed} on the backing device, slowest takeover {slowest:?}"
    );
    assert!(grouped > 100, "only {grouped} pages were in groups");
    assert!(backed > 100, "only {backed} pages were on the backing device");
    assert!(slowest < Duration::from_secs(300), "taking over hangs");
}
