//! Lists of requests against plain memory, on several queues at once, with an allocator that aborts
//! when the I/O path allocates.
#![expect(unsafe_code, reason = "buffers are handed to the device as addresses")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and seeds that may be cut")]

use std::sync::{Arc, Barrier};
use std::thread;

use codec::{Codec, Settings};
use device::{
    Backend, Buffer, Device, DeviceOptions, DeviceQueue, Errno, Op, Queue, Request, PAGE,
};
use proptest::prelude::*;
use rustix::event::{poll, PollFd, PollFlags};
use store::{Options, Store};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// Pages of each thread's part of the device.
const PART: u64 = 96;
const THREADS: u64 = 3;

#[derive(Clone, Debug)]
enum Step {
    Write { page: u64, pages: u64, kind: u8, seed: u64 },
    Read { page: u64, pages: u64 },
    Discard { page: u64, pages: u64 },
    Zero { page: u64, pages: u64, keep: bool },
    Patch { page: u64, at: usize, len: usize, seed: u64 },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || {
        prop_oneof![
            3 => (0..PART, 1..4_u64),
            2 => (0..PART, 4..PART),
        ]
        .prop_map(|(page, pages)| (page, pages.min(PART - page)))
    };
    prop_oneof![
        5 => (range(), 0..4_u8, any::<u64>())
            .prop_map(|((page, pages), kind, seed)| Step::Write { page, pages, kind, seed }),
        4 => range().prop_map(|(page, pages)| Step::Read { page, pages }),
        1 => range().prop_map(|(page, pages)| Step::Discard { page, pages }),
        1 => (range(), any::<bool>())
            .prop_map(|((page, pages), keep)| Step::Zero { page, pages, keep }),
        3 => (0..PART, 0..PAGE, 0..PAGE, any::<u64>())
            .prop_map(|(page, at, len, seed)| Step::Patch { page, at, len: len.min(PAGE - at), seed }),
        1 => Just(Step::Flush),
    ]
}

/// Bytes of a kind: one word, text-like, noise, or zeros with a little in them.
fn fill(bytes: &mut [u8], kind: u8, seed: u64) {
    let mut random = seed | 1;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    match kind {
        0 => bytes
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&seed.to_le_bytes()[..word.len()])),
        1 => {
            bytes.iter_mut().for_each(|byte| *byte = b"etaoin shrdlu"[(next() >> 40) as usize % 13])
        }
        2 => bytes.iter_mut().for_each(|byte| *byte = next().to_le_bytes()[5]),
        _ => {
            bytes.fill(0);
            if let Some(byte) = bytes.get_mut(seed as usize % PAGE) {
                *byte = 7;
            }
        }
    }
}

/// Submits and waits for the end.
fn run(queue: &mut impl Queue, request: Request) -> Result<(), Errno> {
    if let Some(result) = queue.submit(77, request) {
        return result;
    }
    let mut result = None;
    while result.is_none() {
        if queue.arm() {
            poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None).unwrap();
        }
        queue.reap(&mut |tag, got| {
            assert_eq!(tag, 77);
            assert!(result.replace(got).is_none(), "one completion");
        });
    }
    result.unwrap()
}

fn transfer(queue: &mut impl Queue, op: Op, page: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    // SAFETY: the bytes are ours, and `run` waits for the end.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
    let pages = u32::try_from(bytes.len() / PAGE).unwrap();
    run(queue, Request { op, page, pages, buffer })
}

fn bare(op: Op, page: u64, pages: u64) -> Request {
    Request { op, page, pages: u32::try_from(pages).unwrap(), buffer: Buffer::NONE }
}

/// Executes `steps` on the part of the device that begins at `base`, and compares every byte read.
fn follow(queue: &mut impl Queue, base: u64, model: &mut [u8], steps: &[Step]) {
    let bytes = |page: u64, pages: u64| {
        let at = usize::try_from(page).unwrap() * PAGE;
        at..at + usize::try_from(pages).unwrap() * PAGE
    };
    for step in steps {
        match *step {
            Step::Write { page, pages, kind, seed } => {
                let mut data = vec![0; bytes(page, pages).len()];
                for (number, chunk) in data.chunks_mut(PAGE).enumerate() {
                    fill(chunk, kind, seed.wrapping_add(number as u64));
                }
                transfer(queue, Op::Write, base + page, &mut data).unwrap();
                model[bytes(page, pages)].copy_from_slice(&data);
            }
            Step::Read { page, pages } => {
                let mut data = vec![0xa5; bytes(page, pages).len()];
                transfer(queue, Op::Read, base + page, &mut data).unwrap();
                assert!(data == model[bytes(page, pages)], "{pages} pages from {page}");
            }
            Step::Discard { page, pages } => {
                run(queue, bare(Op::Discard, base + page, pages)).unwrap();
                model[bytes(page, pages)].fill(0);
            }
            Step::Zero { page, pages, keep } => {
                run(queue, bare(Op::WriteZeroes { keep }, base + page, pages)).unwrap();
                model[bytes(page, pages)].fill(0);
                let extent = queue.extent(base + page, pages).unwrap();
                assert_eq!((extent.pages, extent.hole, extent.zero), (pages, !keep, true));
            }
            Step::Patch { page, at, len, seed } => {
                let mut data = vec![0; len];
                fill(&mut data, 1 + (seed % 3) as u8, seed);
                queue.patch(base + page, at, &data).unwrap();
                let start = bytes(page, 1).start + at;
                model[start..start + len].copy_from_slice(&data);
            }
            Step::Flush => run(queue, bare(Op::Flush, 0, 0)).unwrap(),
        }
    }
}

fn device(pages: u64, codec: Codec, workers: usize) -> Device {
    let store = Store::create(pages, Options::default()).unwrap();
    let settings = Settings::new(codec, None).unwrap();
    Device::new(&store, &DeviceOptions { settings, workers, depth: 4, ..DeviceOptions::default() })
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn several_queues_read_what_plain_memory_reads(
        lists in prop::collection::vec(prop::collection::vec(step(), 1..40), THREADS as usize),
        codec in prop::sample::select(vec![Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::Raw]),
        workers in 0..4_usize,
    ) {
        let device = Arc::new(device(PART * THREADS, codec, workers));
        let threads: Vec<_> = lists.into_iter().zip(0..).map(|(steps, part)| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let mut model = vec![0; usize::try_from(PART).unwrap() * PAGE];
                follow(&mut device.open().unwrap(), part * PART, &mut model, &steps);
                model
            })
        }).collect();
        let models: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        // Another queue sees the same.
        let mut queue = device.open().unwrap();
        for (model, part) in models.iter().zip(0..) {
            let mut data = vec![1; model.len()];
            transfer(&mut queue, Op::Read, part * PART, &mut data).unwrap();
            prop_assert!(&data == model);
        }
        prop_assert_eq!(device.stats().failed_reads + device.stats().failed_writes, 0);
        prop_assert_eq!(device.stats().invalid_io, 0);
    }
}

/// Many requests under way on one queue, more than it has flights.
#[test]
fn requests_that_overtake_each_other_complete() {
    const PAGES: usize = 32;
    let device = device(64 * PAGES as u64, Codec::Lz4, 3);
    let mut queue: DeviceQueue = device.queue().unwrap();
    let mut buffers: Vec<Vec<u8>> = (0..64)
        .map(|number| {
            let mut bytes = vec![0; PAGES * PAGE];
            fill(&mut bytes, 1, number);
            bytes
        })
        .collect();
    let expected = buffers.clone();
    for op in [Op::Write, Op::Read] {
        if op == Op::Read {
            buffers.iter_mut().for_each(|buffer| buffer.fill(0));
        }
        let mut seen = vec![0; buffers.len()];
        for (number, bytes) in buffers.iter_mut().enumerate() {
            // SAFETY: the bytes stay where they are and are not touched until all have arrived.
            let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
            let page = (number * PAGES) as u64;
            let request = Request { op, page, pages: PAGES as u32, buffer };
            if let Some(result) = queue.submit(number as u64, request) {
                result.unwrap();
                seen[number] += 1;
            }
        }
        while queue.in_flight() > 0 {
            if queue.arm() {
                poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None).unwrap();
            }
            queue.reap(&mut |tag, result| {
                result.unwrap();
                seen[tag as usize] += 1;
            });
        }
        assert_eq!(seen, vec![1; 64]);
    }
    assert!(buffers == expected);
}

/// Two threads write the same pages, entirely and partly; every read returns one of their writes.
#[test]
fn two_concurrent_writes_of_a_page_are_never_mixed() {
    let device = Arc::new(device(16, Codec::Zstd, 2));
    let threads: Vec<_> = (0..2_u8)
        .map(|own| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let mut queue = device.queue().unwrap();
                let mut out = vec![0; 16 * PAGE];
                for round in 0..200_u64 {
                    let mut bytes = vec![0; 16 * PAGE];
                    for page in bytes.chunks_mut(PAGE) {
                        // The first and the last byte say whose it is, and which.
                        fill(page, 1 + own, round);
                        page[0] = own;
                        page[PAGE - 1] = own;
                    }
                    transfer(&mut queue, Op::Write, 0, &mut bytes).unwrap();
                    transfer(&mut queue, Op::Read, 0, &mut out).unwrap();
                    for page in out.chunks(PAGE) {
                        assert_eq!(page[0], page[PAGE - 1], "round {round}");
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Four threads count in the bytes of one page, each in its own, while whole pages are written
/// beside it.
#[test]
fn partial_writes_of_one_page_lose_no_byte() {
    let device = Arc::new(device(2, Codec::Lz4, 0));
    let threads: Vec<_> = (0..4_usize)
        .map(|own| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let mut queue = device.queue().unwrap();
                let mut page = vec![0; PAGE];
                for round in 1..=250_u8 {
                    queue.patch(0, own * 1000, &[round; 900]).unwrap();
                    queue.read_now(0, &mut page).unwrap();
                    let got = &page[own * 1000..own * 1000 + 900];
                    assert!(got.iter().all(|&byte| byte == round), "{own} in round {round}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut page = vec![0; PAGE];
    device.queue().unwrap().read_now(0, &mut page).unwrap();
    for own in 0..4 {
        assert!(page[own * 1000..own * 1000 + 900].iter().all(|&byte| byte == 250));
        assert!(page[own * 1000 + 900..(own * 1000 + 1000).min(PAGE)]
            .iter()
            .all(|&byte| byte == 0));
    }
}

/// One thread patches the middle of a page while another writes whole pages: a patch never restores
/// older contents. Both start each round together, and sleep until both have finished it, so that
/// the machine's load does not matter.
#[test]
fn a_partial_write_never_undoes_a_write() {
    const ROUNDS: u32 = 2000;
    let device = Arc::new(device(1, Codec::Zstd, 0));
    let together = Arc::new(Barrier::new(2));
    let patcher = {
        let (device, together) = (Arc::clone(&device), Arc::clone(&together));
        thread::spawn(move || {
            let mut queue = device.queue().unwrap();
            for round in 0..ROUNDS {
                together.wait();
                (0..round % 89 * 20).for_each(|_| std::hint::spin_loop());
                queue.patch(0, 2000, &round.to_le_bytes()).unwrap();
                together.wait();
            }
        })
    };
    let mut queue = device.queue().unwrap();
    let mut out = vec![0; PAGE];
    let mut wrong = None;
    for round in 0..ROUNDS {
        let mut page = vec![0; PAGE];
        fill(&mut page, (round % 3) as u8, u64::from(round));
        page[..4].copy_from_slice(&round.to_le_bytes());
        page[PAGE - 4..].copy_from_slice(&round.to_le_bytes());
        together.wait();
        // Not always at the same moment of a patch.
        (0..round % 97 * 20).for_each(|_| std::hint::spin_loop());
        queue.write_now(0, &page).unwrap();
        together.wait();
        queue.read_now(0, &mut out).unwrap();
        page[2000..2004].copy_from_slice(&out[2000..2004]);
        // The other one is not left waiting.
        wrong = wrong.or((page != out).then_some(round));
    }
    patcher.join().unwrap();
    assert_eq!(wrong, None, "the round in which a patch undid a write");
}

#[test]
fn requests_that_are_not_valid_are_refused_and_counted() {
    let device = device(32, Codec::Lz4, 1);
    let mut queue = device.queue().unwrap();
    let mut bytes = vec![0; 2 * PAGE];
    for (page, len) in
        [(31, 2 * PAGE), (32, PAGE), (u64::MAX, PAGE), (u64::MAX / PAGE as u64, PAGE)]
    {
        let result = transfer(&mut queue, Op::Write, page, &mut bytes[..len]);
        assert_eq!(result, Err(Errno::Invalid), "page {page}");
    }
    // SAFETY: the request is over when `submit` returns.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), PAGE + 1) };
    let request = Request { op: Op::Read, page: 0, pages: 1, buffer };
    assert_eq!(run(&mut queue, request), Err(Errno::Invalid));
    assert_eq!(run(&mut queue, bare(Op::Discard, 1, 32)), Err(Errno::Invalid));
    assert_eq!(queue.patch(0, 4000, &[0; 97]), Err(Errno::Invalid));
    assert_eq!(queue.patch(32, 0, &[1]), Err(Errno::Invalid));
    assert_eq!(queue.extent(32, 1), Err(Errno::Invalid));
    // Nothing was asked for, and nothing is wrong.
    assert_eq!(run(&mut queue, bare(Op::Discard, 32, 0)), Ok(()));
    assert!(device.stats().invalid_io >= 7, "{:?}", device.stats());
    assert_eq!(device.store().stats().orig_data_size, 0);
}

#[test]
fn a_full_device_returns_enospc_and_loses_no_page() {
    let options = Options { mem_limit: 2 << 20, reserve: 0, ..Options::default() };
    let store = Store::create(4096, options).unwrap();
    let settings = Settings::new(Codec::Zstd, None).unwrap();
    let device = Device::new(
        &store,
        &DeviceOptions { settings, workers: 2, depth: 4, ..DeviceOptions::default() },
    )
    .unwrap();
    let mut queue = device.queue().unwrap();
    let mut page = vec![0; PAGE];
    let mut stored = Vec::new();
    for number in 0..4096_u64 {
        fill(&mut page, 2, number);
        match queue.write_now(number, &page) {
            Ok(()) => stored.push(number),
            Err(errno) => assert_eq!(errno, Errno::NoSpace),
        }
    }
    assert!(stored.len() > 100 && stored.len() < 600, "{} pages", stored.len());
    assert_eq!(device.stats().failed_writes, 4096 - stored.len() as u64);
    let mut big = vec![0; 64 * PAGE];
    fill(&mut big, 2, 5);
    let before = device.stats().pages_written;
    assert_eq!(transfer(&mut queue, Op::Write, 1000, &mut big), Err(Errno::NoSpace));
    // Each thread meets the error once at most: the other pages are not tried, because each could
    // wait for memory. Pages stored before may have been overwritten.
    let over = stored.iter().filter(|number| (1000..1064).contains(*number)).count() as u64;
    let tried = device.stats().pages_written - before;
    assert!(tried <= over + 3, "{tried} pages of a write without memory were tried");
    let mut out = vec![0; PAGE];
    for number in stored {
        if !(1000..1064).contains(&number) {
            fill(&mut page, 2, number);
            queue.read_now(number, &mut out).unwrap();
            assert!(out == page, "page {number}");
        }
    }
}

/// Bytes that change in the store's memory are an error of their page alone, reported once and
/// counted.
#[test]
fn damage_is_an_error_of_its_page_until_the_page_is_written() {
    use std::os::unix::fs::FileExt;
    let device = device(64, Codec::Zstd, 1);
    let mut queue = device.queue().unwrap();
    let mut pages = vec![0; 64 * PAGE];
    for (page, seed) in pages.chunks_mut(PAGE).zip(0..) {
        fill(page, 1, seed);
    }
    transfer(&mut queue, Op::Write, 0, &mut pages).unwrap();
    assert_eq!(device.damage(), None);
    // One of the first page's bytes, wherever it is: from the end of the file, until a change has
    // an effect.
    let file = std::fs::File::from(device.store().fd().try_clone_to_owned().unwrap());
    let mut out = vec![0; PAGE];
    let len = file.metadata().unwrap().len();
    let damaged = (0..len / 512).rev().map(|at| at * 512).find(|&at| {
        let mut bytes = [0; 512];
        if file.read_at(&mut bytes, at).unwrap() != bytes.len() || bytes == [0; 512] {
            return false;
        }
        let changed = bytes.map(|byte| byte ^ 0x40);
        file.write_all_at(&changed, at).unwrap();
        let failed = queue.read_now(7, &mut out).is_err();
        if !failed {
            file.write_all_at(&bytes, at).unwrap();
        }
        failed
    });
    assert!(damaged.is_some(), "no byte of page 7 was found");
    assert_eq!(queue.read_now(7, &mut out), Err(Errno::Io));
    assert_eq!(queue.patch(7, 0, b"x"), Err(Errno::Io));
    let reason = device.damage().unwrap().to_string();
    assert!(reason.starts_with("page ") && reason.contains("checksum"), "{reason}");
    assert!(device.stats().failed_reads >= 3, "{:?}", device.stats());
    // A request reports it, and its other pages are read.
    let mut all = vec![0; 64 * PAGE];
    assert_eq!(transfer(&mut queue, Op::Read, 0, &mut all), Err(Errno::Io));
    let whole = all.chunks(PAGE).zip(pages.chunks(PAGE)).filter(|(got, want)| got == want).count();
    assert!((60..64).contains(&whole), "{whole} pages are whole");
    queue.write_now(7, &pages[7 * PAGE..8 * PAGE]).unwrap();
    queue.read_now(7, &mut out).unwrap();
    assert!(out == pages[7 * PAGE..8 * PAGE]);
    assert_eq!(device.damage().unwrap().to_string(), reason);
}

/// Queues that are dropped with requests in flight wait for them, and their numbers are reused
/// while invitations to them are still in the ring.
#[test]
fn queues_come_and_go_with_requests_under_way() {
    const PAGES: usize = 48;
    let device = Arc::new(device(4 * 6 * PAGES as u64, Codec::Lz4, 4));
    let threads: Vec<_> = (0..4_u64)
        .map(|own| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                for round in 0..40_u64 {
                    let mut bytes = vec![0; 6 * PAGES * PAGE];
                    for (page, seed) in bytes.chunks_mut(PAGE).zip(0..) {
                        fill(page, 1 + (round % 3) as u8, own << 32 | round << 16 | seed);
                    }
                    let first = own * 6 * PAGES as u64;
                    let mut queue = device.queue().unwrap();
                    for (number, part) in bytes.chunks_mut(PAGES * PAGE).enumerate() {
                        // SAFETY: the bytes are not touched until the queue is dropped.
                        let buffer = unsafe { Buffer::new(part.as_mut_ptr(), part.len()) };
                        let page = first + (number * PAGES) as u64;
                        let pages = PAGES as u32;
                        let request = Request { op: Op::Write, page, pages, buffer };
                        queue.submit(0, request).unwrap_or(Ok(())).unwrap();
                    }
                    drop(queue);
                    let mut out = vec![0; bytes.len()];
                    transfer(&mut device.queue().unwrap(), Op::Read, first, &mut out).unwrap();
                    assert!(out == bytes, "thread {own}, round {round}");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(device.stats().invalid_io, 0);
}
