//! More reads of a backing device that does not answer than the ring to the fetch threads holds: no
//! request is refused or lost.
#![expect(unsafe_code, reason = "buffers are handed to the device as addresses")]

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device::{Buffer, Device, DeviceOptions, DeviceQueue, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};
use shelf::gate::{
    behind_the_gate, has_come, is_gate_open, page, put_out, set_gate, watch_this_thread,
};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);
const PAGES: u64 = 200;
/// These are on the device.
const OUT: u64 = 128;

fn device(depth: u16) -> (Arc<Store>, Device) {
    let store = Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap();
    behind_the_gate(&store, OUT);
    let options = DeviceOptions { workers: 1, depth, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let mut queue = device.queue().unwrap();
    (0..PAGES).for_each(|index| queue.write_now(index, &page(index)).unwrap());
    put_out(&store, 0..OUT);
    (store, device)
}

fn request(op: Op, page: u64, bytes: &mut [u8]) -> Request {
    let pages = u32::try_from(bytes.len() / PAGE).unwrap();
    // SAFETY: the tests leave the bytes alone until the request is over.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
    Request { op, page, pages, buffer }
}

fn finish(queue: &mut DeviceQueue) -> usize {
    let mut over = 0;
    while queue.in_flight() > 0 {
        queue.reap(&mut |tag, result| {
            assert_eq!(result, Ok(()), "request {tag}");
            over += 1;
        });
        if queue.in_flight() > 0 && queue.arm() {
            let _ = poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None);
        }
    }
    over
}

#[test]
fn reads_of_a_device_that_does_not_answer_are_queued_or_block() {
    // Like ublk's queues: 64 requests of 512 KiB each, all pages on the device. Each takes a few
    // entries, no submitter waits, and writes meanwhile complete.
    let (store, of) = device(64);
    let all: Vec<u8> = (0..OUT).flat_map(page).collect();
    set_gate(false);
    let mut queues: Vec<_> = (0..5).map(|_| of.queue().unwrap()).collect();
    let mut buffers = vec![vec![0; all.len()]; queues.len() * 64];
    let mut one = page(7);
    let asked = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            while !asked.load(Ordering::Acquire) && begun.elapsed() < LONG {
                thread::sleep(Duration::from_millis(5));
            }
            // In either case, so that no thread waits for ever.
            set_gate(true);
        });
        for (number, bytes) in buffers.iter_mut().enumerate() {
            let queue = &mut queues[number / 64];
            assert_eq!(queue.submit(number as u64, request(Op::Read, 0, bytes)), None);
            if number % 64 == 60 {
                let write = queue.submit(9, request(Op::Write, OUT + 3, &mut one));
                assert_eq!(write, Some(Ok(())), "a write waits behind reads");
            }
        }
        assert!(!is_gate_open(), "who asked for a read waited for it");
        asked.store(true, Ordering::Release);
    });
    let over: usize = queues.iter_mut().map(finish).sum();
    assert_eq!(over, buffers.len());
    assert!(buffers.iter().all(|bytes| *bytes == all));
    drop((queues, buffers, of, store));

    // So many small reads that the ring has no room: the submitter of a further one waits itself.
    const MANY: usize = 17_000;
    let (_store, of) = device(20_000);
    set_gate(false);
    watch_this_thread();
    let submitted = AtomicUsize::new(0);
    let mut queue = of.queue().unwrap();
    let mut bytes = vec![0; MANY * PAGE];
    thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            // If there is room for all, the submitter does not come.
            while !has_come() && submitted.load(Ordering::Relaxed) < MANY && begun.elapsed() < LONG
            {
                thread::sleep(Duration::from_millis(1));
            }
            // In either case, so that no thread waits for ever.
            set_gate(true);
        });
        let mut at_once = 0;
        for (number, bytes) in (0..).zip(bytes.chunks_exact_mut(PAGE)) {
            if let Some(done) = queue.submit(number, request(Op::Read, number % OUT, bytes)) {
                assert_eq!(done, Ok(()), "request {number}");
                at_once += 1;
            }
            submitted.fetch_add(1, Ordering::Relaxed);
        }
        assert!(at_once > 0, "there was room for all");
        assert!(submitted.load(Ordering::Relaxed) == MANY && has_come());
        assert_eq!(finish(&mut queue) + at_once, MANY);
    });
    for (number, bytes) in (0..).zip(bytes.chunks_exact(PAGE)) {
        assert!(bytes == page(number % OUT), "request {number}");
    }
    assert_eq!(of.stats().failed_reads, 0);
}
