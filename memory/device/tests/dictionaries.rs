//! Dictionaries that are installed while clients write and read, with an allocator that aborts when
//! the I/O path allocates.
#![expect(unsafe_code, reason = "buffers are handed to the device as addresses")]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;

use codec::train;
use device::{Buffer, Device, DeviceOptions, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fs::{memfd_create, MemfdFlags};
use store::{
    dictionary_of, format_backing, Added, Batch, DictionaryError, FileDisk, Options, Page, Seen,
    Store, DICTIONARIES, MAX_DICTIONARY,
};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// Pages of each thread's part of the device.
const PART: u64 = 256;
const THREADS: u64 = 3;
const PAGES: u64 = PART * THREADS;

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Records that have their names in common with those of their kind; or noise; or one word.
fn page(kind: u64, number: u64) -> [u8; PAGE] {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = Vec::with_capacity(2 * PAGE);
    match number % 16 {
        7 => page.extend((0..512).flat_map(|_| next(&mut state).to_le_bytes())),
        11 => page.extend(number.to_le_bytes().repeat(512)),
        _ => {
            for field in 0_u64..120 {
                let name = (field + 1 + kind * 1000).wrapping_mul(0x2545_f491_4f6c_dd1d);
                let value = next(&mut state);
                page.extend_from_slice(format!("{name:020x}=<{value:016x}>").as_bytes());
            }
        }
    }
    page.truncate(PAGE);
    page.try_into().unwrap_or_else(|_| unreachable!("it was longer than a page"))
}

fn trained(kind: u64) -> Vec<u8> {
    let samples: Vec<u8> = (10_000..10_300).flat_map(|number| page(kind, number)).collect();
    train(&samples, PAGE, MAX_DICTIONARY).expect("there is much in common")
}

/// As the policy does it.
fn install(device: &Device, bytes: &[u8]) -> Result<usize, DictionaryError> {
    let dictionaries = device.dictionaries();
    let mut room = dictionaries.take_room().ok_or(DictionaryError::Full)?;
    Arc::get_mut(&mut room).expect("nobody has it yet").digest(bytes).expect("it is one");
    dictionaries.install(device.store(), room, bytes, 500)
}

fn device(store: &Arc<Store>, workers: usize) -> Device {
    let options = DeviceOptions { workers, dictionaries: true, ..DeviceOptions::default() };
    Device::new(store, &options).unwrap()
}

fn store() -> Arc<Store> {
    Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap()
}

/// Submits and waits for the end.
fn transfer(queue: &mut impl Queue, op: Op, page: u64, bytes: &mut [u8]) {
    // SAFETY: the bytes are ours, and the end is waited for.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
    let pages = u32::try_from(bytes.len() / PAGE).unwrap();
    let mut result = queue.submit(77, Request { op, page, pages, buffer });
    while result.is_none() {
        if queue.arm() {
            poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None).unwrap();
        }
        queue.reap(&mut |_, got| result = Some(got));
    }
    result.expect("it is over").unwrap();
}

/// Waits until each thread has written a thousand pages more.
fn all_write(written: &[AtomicU64]) {
    let before: Vec<u64> = written.iter().map(|pages| pages.load(Ordering::Relaxed)).collect();
    for (pages, before) in written.iter().zip(before) {
        while pages.load(Ordering::Relaxed) < before + 1000 {
            thread::yield_now();
        }
    }
}

#[test]
fn clients_see_their_own_pages_while_dictionaries_are_installed() {
    let store = store();
    let device = device(&store, 2);
    let written: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for part in 0..THREADS {
            let mut queue = device.queue().unwrap();
            let (written, over) = (&written[usize::try_from(part).unwrap()], &over);
            scope.spawn(move || {
                let mut state = part + 1;
                let mut held = vec![(0, 0); usize::try_from(PART).unwrap()];
                let mut bytes = vec![0; 64 * PAGE];
                let mut expected = vec![0; 64 * PAGE];
                transfer(&mut queue, Op::Discard, part * PART, &mut []);
                for at in 0..PART {
                    queue.write_now(part * PART + at, &page(0, 0)).unwrap();
                }
                while !over.load(Ordering::Relaxed) {
                    // Few, done where they arrive, and many, shared with the workers.
                    let count = 1 + next(&mut state)
                        % if next(&mut state).is_multiple_of(4) { 64 } else { 3 };
                    let from = next(&mut state) % (PART - count + 1);
                    let range =
                        usize::try_from(from).unwrap()..usize::try_from(from + count).unwrap();
                    let len = range.len() * PAGE;
                    if next(&mut state).is_multiple_of(2) {
                        for (chunk, held) in bytes.chunks_exact_mut(PAGE).zip(&mut held[range]) {
                            *held = (next(&mut state) % 5, next(&mut state) >> 8);
                            chunk.copy_from_slice(&page(held.0, held.1));
                        }
                        transfer(&mut queue, Op::Write, part * PART + from, &mut bytes[..len]);
                        written.fetch_add(count, Ordering::Relaxed);
                    } else {
                        for (chunk, held) in expected.chunks_exact_mut(PAGE).zip(&held[range]) {
                            chunk.copy_from_slice(&page(held.0, held.1));
                        }
                        transfer(&mut queue, Op::Read, part * PART + from, &mut bytes[..len]);
                        assert!(bytes[..len] == expected[..len], "part {part}, page {from}");
                    }
                    // A part of a page, which keeps the rest, whatever that was made with.
                    let at = usize::try_from(next(&mut state) % PART).unwrap();
                    let mut whole = page(held[at].0, held[at].1);
                    let index = part * PART + at as u64;
                    let mut out = [0; PAGE];
                    queue.patch(index, 100, b"changed").unwrap();
                    whole[100..107].copy_from_slice(b"changed");
                    queue.read_now(index, &mut out).unwrap();
                    assert!(out == whole, "page {index}");
                    queue.write_now(index, &page(held[at].0, held[at].1)).unwrap();
                }
            });
        }
        for kind in 0..DICTIONARIES as u64 {
            all_write(&written);
            assert_eq!(install(&device, &trained(kind)), Ok(usize::try_from(kind).unwrap()));
        }
        all_write(&written);
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(install(&device, &trained(0)), Err(DictionaryError::Full));
    let pages = store.dictionary_pages();
    assert!(pages[DICTIONARIES - 1] > PAGES / 2, "{pages:?}");
    assert_eq!(device.stats().failed_reads, 0);
}

#[test]
fn pages_retain_their_dictionary_on_the_backing_device_and_with_the_next_server() {
    let store = store();
    let disk = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&disk, 1024 * 4096).unwrap();
    let back = || Box::new(FileDisk::inherit(disk.as_fd()).unwrap());
    format_backing(&*back(), "disk", &store).unwrap();
    store.set_backing(back(), "disk").unwrap();
    let first = device(&store, 0);
    let mut queue = first.queue().unwrap();
    for index in 0..PART {
        queue.write_now(index, &page(1, index)).unwrap();
    }
    install(&first, &trained(1)).unwrap();
    for index in PART..2 * PART {
        queue.write_now(index, &page(1, index)).unwrap();
    }
    let with = store.dictionary_pages()[0];
    assert!(with > PART * 3 / 4, "{with}");
    let write_back = |store: &Arc<Store>| {
        let mut worker = store.worker().unwrap();
        let mut batch = Batch::new(512);
        let mut out = [0; PAGE];
        let mut tags = 0;
        for index in PART / 2..PART * 3 / 2 {
            if let Page::Object { tag, len } = worker.look(index, &mut out).unwrap() {
                tags += u64::from(dictionary_of(tag).is_some());
                assert_eq!(batch.add(&Seen { index, tag, bytes: &out[..len] }), Added::Yes);
            }
        }
        assert!(worker.write_back(&mut batch).unwrap().pages > PART / 2);
        tags
    };
    let gone = write_back(&store);
    assert!(gone > 0);
    assert_eq!(store.dictionary_pages()[0], with - gone, "those on the device are not in memory");
    let check = |queue: &mut device::DeviceQueue| {
        let mut bytes = vec![0; PAGE];
        for index in 0..2 * PART {
            transfer(queue, Op::Read, index, &mut bytes);
            assert!(bytes == page(1, index), "page {index}");
        }
    };
    check(&mut queue);
    queue.patch(PART, 9, b"nine").unwrap();
    queue.write_now(PART, &page(1, PART)).unwrap();

    let fd = store.fd().try_clone_to_owned().unwrap();
    drop((queue, first, store));
    let store = Store::attach(fd.as_fd(), Options::default()).unwrap();
    store.set_backing(back(), "disk").unwrap();
    let second = device(&store, 1);
    let mut queue = second.queue().unwrap();
    check(&mut queue);
    // The next dictionary goes beside the first.
    assert_eq!(install(&second, &trained(2)), Ok(1));
    for index in 0..PART {
        queue.write_now(index, &page(2, index)).unwrap();
        queue.write_now(index, &page(1, index)).unwrap();
    }
    check(&mut queue);
    assert_eq!(second.stats().failed_reads, 0);
}
