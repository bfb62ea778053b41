//! Pages on a backing device, read through the device by fetch threads, while other requests go on.
#![expect(unsafe_code, reason = "buffers are handed to the device as addresses")]

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use device::{Buffer, Device, DeviceOptions, DeviceQueue, Errno, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};
use shelf::Shelf;
use store::{format_backing, Added, Batch, Options, Page, Seen, Store, Worker, MAX_OBJECT};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

fn made(pages: u64, disk: &Shelf, workers: usize) -> (Arc<Store>, Device) {
    let store = Store::create(pages, Options { reserve: 0, ..Options::default() }).unwrap();
    format_backing(disk, "shelf", &store).unwrap();
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let options = DeviceOptions { workers, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    (store, device)
}

/// Noise, or text with the version in it.
fn page(index: u64, version: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut state = index << 32 | version << 8 | 1;
    for byte in &mut page {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let noise = state.to_le_bytes()[7];
        *byte = if index.is_multiple_of(3) {
            noise
        } else {
            b"etaoin shrdlu xy"[usize::from(noise & 15)]
        };
    }
    page[..8].copy_from_slice(&version.to_le_bytes());
    page
}

/// Writes all of these pages back that are objects.
fn write_back(worker: &mut Worker, pages: std::ops::Range<u64>, batch: &mut Batch) -> u64 {
    let mut out = [0; MAX_OBJECT];
    let (mut index, mut sum) = (pages.start, 0);
    while index < pages.end {
        let added = match worker.look(index, &mut out).unwrap() {
            Page::Object { tag, len } => batch.add(&Seen { index, tag, bytes: &out[..len] }),
            _ => Added::Unfit,
        };
        let full = added == Added::Full;
        index += u64::from(!full);
        if full || index == pages.end {
            let done = worker.write_back(batch).unwrap();
            sum += done.pages;
            if done.left > 0 {
                break;
            }
        }
    }
    sum
}

fn request(op: Op, page: u64, bytes: &mut [u8]) -> Request {
    let pages = u32::try_from(bytes.len() / PAGE).unwrap();
    // SAFETY: each test leaves the bytes alone until the request is complete.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
    Request { op, page, pages, buffer }
}

/// Waits until the request of this queue is over.
fn wait(queue: &mut DeviceQueue) -> (u64, Result<(), Errno>) {
    wait_for(queue, 1)[0]
}

/// Waits until this many are complete, and checks that there are no more.
fn wait_for(queue: &mut DeviceQueue, number: usize) -> Vec<(u64, Result<(), Errno>)> {
    let mut over = Vec::new();
    loop {
        queue.reap(&mut |tag, result| over.push((tag, result)));
        if over.len() >= number {
            assert_eq!((over.len(), queue.in_flight()), (number, 0));
            return over;
        }
        if queue.arm() {
            let _ = poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None);
        }
    }
}

static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());
static AT_GATE: AtomicU64 = AtomicU64::new(0);

fn wait_at_gate() {
    AT_GATE.fetch_add(1, Ordering::Relaxed);
    let open = GATE.0.lock().unwrap();
    drop(GATE.1.wait_while(open, |open| !*open).unwrap());
}

#[test]
fn a_thread_whose_page_is_on_the_device_serves_other_requests() {
    const PAGES: u64 = 64;
    *GATE.0.lock().unwrap() = true;
    let disk = Shelf::pausing(100, wait_at_gate);
    let (store, device) = made(PAGES, &disk, 1);
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index, 1)).unwrap();
    }
    let mut worker = store.worker().unwrap();
    assert_eq!(write_back(&mut worker, 0..40, &mut Batch::new(8)), 40);
    *GATE.0.lock().unwrap() = false;
    let (before, mut small, mut large) = (device.stats(), vec![0; 3 * PAGE], vec![0; 32 * PAGE]);
    // Three on the device; 32, some of which are; and meanwhile what is in memory.
    assert_eq!(queue.submit(7, request(Op::Read, 10, &mut small)), None);
    assert_eq!(queue.submit(8, request(Op::Read, 20, &mut large)), None);
    assert_eq!(queue.in_flight(), 2);
    let begun = Instant::now();
    while AT_GATE.load(Ordering::Relaxed) < 4 {
        assert!(begun.elapsed() < Duration::from_secs(300), "nobody reads from the device");
        thread::sleep(Duration::from_millis(1));
    }
    let mut one = vec![0; PAGE];
    for index in 40..PAGES {
        assert_eq!(queue.submit(9, request(Op::Read, index, &mut one)), Some(Ok(())));
        assert!(one == page(index, 1));
        one.copy_from_slice(&page(index, 2));
        assert_eq!(queue.submit(9, request(Op::Write, index, &mut one)), Some(Ok(())));
    }
    // A page that is being read from the device is written, and discarded.
    assert_eq!(queue.submit(9, request(Op::Write, 11, &mut one)), Some(Ok(())));
    assert_eq!(queue.reap(&mut |_, _| {}), 0);
    *GATE.0.lock().unwrap() = true;
    GATE.1.notify_all();
    let mut over = wait_for(&mut queue, 2);
    over.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(over, [(7, Ok(())), (8, Ok(()))]);
    assert!(small[..PAGE] == page(10, 1) && small[2 * PAGE..] == page(12, 1));
    assert!(small[PAGE..2 * PAGE] == page(11, 1) || small[PAGE..2 * PAGE] == one[..]);
    for (index, got) in (20..).zip(large.chunks_exact(PAGE)) {
        assert!(got == page(index, 1) || index >= 40 && got == page(index, 2), "page {index}");
    }
    let after = device.stats();
    let reads = 3 + 32 + PAGES - 40;
    assert_eq!((after.pages_read - before.pages_read, after.failed_reads), (reads, 0));
    // A part of a page: brought back, changed.
    let was_out = store.stats().bd_count;
    queue.patch(5, 100, b"patched").unwrap();
    let mut patched = page(5, 1);
    patched[100..107].copy_from_slice(b"patched");
    queue.read_now(5, &mut one).unwrap();
    assert!(one == patched);
    assert_eq!(store.stats().bd_count, was_out - 1);
    assert!(queue.extent(0, 40).is_ok_and(|extent| extent.pages == 40 && !extent.hole));
    // Only pages in memory are read at once.
    assert_eq!(queue.read_at_once(request(Op::Read, 5, &mut one)), Some(Ok(())));
    assert!(one == patched);
    assert_eq!(queue.read_at_once(request(Op::Read, 4, &mut small)), None);
    assert_eq!(queue.read_at_once(request(Op::Read, 63, &mut small)), Some(Err(Errno::Invalid)));
    assert_eq!(queue.in_flight(), 0);
    // Its error affects no other page.
    disk.0.fail_reads.store(5, Ordering::Relaxed);
    assert_eq!(queue.submit(1, request(Op::Read, 0, &mut one)), None);
    assert_eq!(wait(&mut queue), (1, Err(Errno::Io)));
    assert_eq!(queue.submit(1, request(Op::Read, 5, &mut one)), Some(Ok(())));
    let damage = device.damage().expect("it was counted").to_string();
    assert!(
        damage.contains("page 0: cannot read block 1 of the backing device: Input/output error"),
        "{damage}"
    );
    assert_eq!(queue.patch(1, 0, b"x"), Err(Errno::Io));
    // Dropping the queue waits for what is under way.
    disk.0.fail_reads.store(0, Ordering::Relaxed);
    assert_eq!(queue.submit(2, request(Op::Read, 0, &mut small)), None);
    drop(queue);
    assert!(small[..PAGE] == page(0, 1));
}

#[test]
fn pages_on_an_absent_device_are_errors_and_do_not_delay_the_queue() {
    const DEPTH: u16 = 8;
    let disk = Shelf::new(100);
    let (store, device) = made(64, &disk, 1);
    let mut queue = device.queue().unwrap();
    for index in 0..4 {
        queue.write_now(index, &page(index, 1)).unwrap();
    }
    let mut worker = store.worker().unwrap();
    assert_eq!(write_back(&mut worker, 0..4, &mut Batch::new(8)), 4);
    let fd = store.fd().try_clone_to_owned().unwrap();
    drop((worker, queue, device, store));
    let store = Store::attach(std::os::fd::AsFd::as_fd(&fd), Options::default()).unwrap();
    let options = DeviceOptions { workers: 1, depth: DEPTH, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let mut queue = device.queue().unwrap();
    let (mut one, mut many) = (vec![0; PAGE], vec![0; 32 * PAGE]);
    for round in 0..u64::from(2 * DEPTH) {
        let done = queue.submit(1, request(Op::Read, round % 4, &mut one));
        assert_eq!(done, Some(Err(Errno::Io)));
    }
    // There are still flights for split requests.
    let done = queue.submit(2, request(Op::Write, 8, &mut many));
    assert_eq!(done.unwrap_or_else(|| wait(&mut queue).1), Ok(()));
    assert_eq!(device.stats().split_requests, 1);
}

#[test]
fn requests_of_all_sizes_succeed_during_writeback_and_reads() {
    const PART: u64 = 60;
    const THREADS: u64 = 3;
    let disk = Shelf::pausing(50, thread::yield_now);
    let (store, device) = made(PART * THREADS, &disk, 2);
    let stop = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut queue = device.queue().unwrap();
            let (stop, rounds) = (&stop, &rounds);
            scope.spawn(move || {
                let _stop = Stop(stop);
                let mut versions = vec![0_u64; usize::try_from(PART).unwrap()];
                let mut bytes = vec![0; 40 * PAGE];
                let mut random = 0x1234_5678_u64 + thread;
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let from = (random >> 40) % PART;
                    let most = if random >> 62 == 0 { 40 } else { 4 };
                    let pages = (1 + (random >> 20) % most).min(PART - from);
                    let part = &mut bytes[..usize::try_from(pages).unwrap() * PAGE];
                    let at = |index: u64| usize::try_from(index).unwrap();
                    let first = thread * PART + from;
                    let done = match random >> 60 & 3 {
                        0 => {
                            for (index, page_bytes) in (from..).zip(part.chunks_exact_mut(PAGE)) {
                                versions[at(index)] += 1;
                                page_bytes.copy_from_slice(&page(
                                    thread * PART + index,
                                    versions[at(index)],
                                ));
                            }
                            queue.submit(1, request(Op::Write, first, part))
                        }
                        1 if random >> 50 & 3 == 0 => {
                            versions[at(from)..at(from + pages)].fill(0);
                            let pages = u32::try_from(pages).unwrap();
                            let buffer = Buffer::NONE;
                            queue.submit(1, Request { op: Op::Discard, page: first, pages, buffer })
                        }
                        _ => {
                            let done = queue.submit(1, request(Op::Read, first, part));
                            let done = done.unwrap_or_else(|| wait(&mut queue).1);
                            assert_eq!(done, Ok(()));
                            for (index, got) in (from..).zip(part.chunks_exact(PAGE)) {
                                let version = versions[at(index)];
                                let expected = match version {
                                    0 => [0; PAGE],
                                    _ => page(thread * PART + index, version),
                                };
                                assert!(
                                    got == expected,
                                    "page {index} of {thread} is not version {version}"
                                );
                            }
                            Some(Ok(()))
                        }
                    };
                    assert_eq!(done.unwrap_or_else(|| wait(&mut queue).1), Ok(()));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _stop = Stop(&stop);
        let mut worker = store.worker().unwrap();
        let mut batch = Batch::new(16);
        let begun = Instant::now();
        let mut out = 0;
        while rounds.load(Ordering::Relaxed) < 10_000 || out < 2000 {
            assert!(!stop.load(Ordering::Relaxed), "a client has failed");
            assert!(begun.elapsed() < Duration::from_secs(300), "{out} {rounds:?}");
            out += write_back(&mut worker, 0..PART * THREADS, &mut batch);
        }
        println!("{out} pages out, {:?}", store.backing_stats());
    });
    assert_eq!(device.stats().failed_reads, 0);
    assert!(store.backing_stats().unwrap().bd_reads > 500);
}

/// Aborts all threads when one fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
