//! Pages compressed by the simulated QAT device, with every fault of its script, against plain
//! memory; with an allocator that aborts when the I/O path allocates.
#![expect(unsafe_code, reason = "buffers are handed to the device as addresses")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers, and seeds that may be cut")]

#[path = "../../../accel/qat/tests/simulated/matrix.rs"]
mod matrix;
#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;
#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../../accel/qat/tests/simulated/sim.rs"]
mod sim;
#[path = "qat/stored.rs"]
mod stored;

use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{Codec, Settings};
use device::{
    Buffer, Damage, Device, DeviceOptions, DeviceQueue, Errno, OffloadOptions, OffloadStats, Op,
    OpenError, Queue, Request, PAGE,
};
use matrix::{sum, Fault, FAULTS};
use qat::{Direction, Engine, EngineOptions, Qat, Snapshot};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use shelf::Shelf;
use sim::{Sim, HANG};
use store::{format_backing, Added, Batch, Options, Page, Seen, Store, MAX_OBJECT};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// Pages of each client.
const PART: u64 = 160;
const CLIENTS: u64 = 3;

/// Options with which a fault can show: verified outputs, no sharing, the fault's deadline.
fn offload(threads: usize, deadline: Duration) -> OffloadOptions {
    OffloadOptions { threads, depth: 32, share: false, verify_every: 1, deadline }
}

fn device(store: &Arc<Store>, workers: usize) -> Device {
    let settings = Settings::new(Codec::DeflateQz, Some(1)).unwrap();
    Device::new(store, &DeviceOptions { settings, workers, depth: 64, ..DeviceOptions::default() })
        .unwrap()
}

/// Waits until this many threads use the device.
fn await_ready(device: &Device, on_device: usize) {
    let start = Instant::now();
    while stats(device).on_device != on_device {
        assert!(start.elapsed() < HANG, "not {on_device}: {:#?}", stats(device));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stats(device: &Device) -> OffloadStats {
    device.offload_stats().expect("it is offloading")
}

fn total(device: &Device) -> Snapshot {
    sum(&stats(device).engines)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 20) % end
    }

    /// A page like text, like a heap, same-filled, or of noise; never two alike.
    fn page(&mut self, out: &mut [u8]) {
        match self.below(8) {
            0 => {
                let word = self.next().to_le_bytes();
                out.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&word));
            }
            1 => out.iter_mut().for_each(|byte| *byte = self.next().to_le_bytes()[5]),
            2..=4 => {
                out.iter_mut().for_each(|byte| *byte = b"etaoin shrdlu"[self.below(13) as usize])
            }
            _ => {
                out.fill(0);
                out.chunks_mut(24).for_each(|chunk| chunk[0] = self.next().to_le_bytes()[4]);
            }
        }
    }
}

/// A client with its own pages of the device, and what they should hold.
struct Client {
    queue: DeviceQueue,
    base: u64,
    model: Vec<u8>,
    random: Random,
}

impl Client {
    fn new(device: &Device, number: u64, seed: u64) -> Self {
        let model = vec![0; (PART as usize) * PAGE];
        let random = Random((seed << 8 | number) * 2 + 1);
        Self { queue: device.queue().unwrap(), base: number * PART, model, random }
    }

    /// Waits until no more than `left` requests are under way.
    fn wait(&mut self, left: usize, results: &mut Vec<(u64, Result<(), Errno>)>) {
        let start = Instant::now();
        while self.queue.in_flight() > left {
            if self.queue.arm() {
                let second = Timespec { tv_sec: 1, tv_nsec: 0 };
                let _ = poll(&mut [PollFd::new(&self.queue.fd(), PollFlags::IN)], Some(&second));
            }
            self.queue.reap(&mut |tag, result| results.push((tag, result)));
            assert!(start.elapsed() < HANG, "requests that are not done");
        }
    }

    fn read(&mut self, page: u64, out: &mut [u8]) -> Result<(), Errno> {
        self.queue.read_now(self.base + page, out)
    }

    /// Writes runs of pages that do not overlap, all in flight at once; meanwhile changes and reads
    /// other pages.
    fn round(&mut self) {
        let mut data = self.model.clone();
        let mut free: Vec<(u64, u64)> = Vec::new();
        let mut writes = Vec::new();
        let mut at = 0;
        while at < PART {
            let most = if self.random.below(3) == 0 { 60 } else { 4 };
            let pages = (1 + self.random.below(most)).min(PART - at);
            if self.random.below(4) > 0 {
                let bytes = at as usize * PAGE..(at + pages) as usize * PAGE;
                for page in data[bytes].chunks_mut(PAGE) {
                    self.random.page(page);
                }
                writes.push((at, pages));
            } else {
                free.push((at, pages));
            }
            at += pages;
        }
        let mut results = Vec::new();
        for (number, &(page, pages)) in writes.iter().enumerate() {
            let bytes = &mut data[page as usize * PAGE..(page + pages) as usize * PAGE];
            // SAFETY: `data` lives until every request is over, and no code writes it meanwhile.
            let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
            let page = self.base + page;
            let request = Request { op: Op::Write, page, pages: pages as u32, buffer };
            if let Some(result) = self.queue.submit(number as u64, request) {
                results.push((number as u64, result));
            }
            self.wait(24, &mut results);
        }
        for &(page, pages) in &free {
            match self.random.below(3) {
                0 => {
                    let request = Request {
                        op: Op::Discard,
                        page: self.base + page,
                        pages: pages as u32,
                        buffer: Buffer::NONE,
                    };
                    assert_eq!(self.queue.submit(0, request), Some(Ok(())));
                    data[page as usize * PAGE..(page + pages) as usize * PAGE].fill(0);
                }
                1 => {
                    let at = self.random.below(PAGE as u64 - 40) as usize;
                    let bytes = [self.random.next().to_le_bytes()[3]; 40];
                    self.queue.patch(self.base + page, at, &bytes).unwrap();
                    data[page as usize * PAGE + at..][..40].copy_from_slice(&bytes);
                }
                _ => {
                    let mut out = vec![1; PAGE];
                    self.read(page, &mut out).unwrap();
                    assert!(out == data[page as usize * PAGE..][..PAGE], "page {page}");
                }
            }
        }
        self.wait(0, &mut results);
        results.sort_unstable_by_key(|result| result.0);
        let expected: Vec<_> = (0..writes.len() as u64).map(|number| (number, Ok(()))).collect();
        assert_eq!(results, expected, "each request is over once, and well");
        self.model = data;
    }

    /// Compares every page.
    fn check(&mut self) {
        let mut out = vec![0; self.model.len()];
        self.read(0, &mut out).unwrap();
        for (page, (got, expected)) in out.chunks(PAGE).zip(self.model.chunks(PAGE)).enumerate() {
            assert!(got == expected, "page {page} of the client at {}", self.base);
        }
    }
}

#[test]
fn every_page_reads_as_last_written_whatever_the_device_does() {
    let sim = Sim::turn();
    for fault in &FAULTS {
        for threads in [1, 2] {
            fault.until_met(|| run_case(&sim, fault, threads));
        }
    }
}

/// Returns whether the fault was met as meant, and how long the slowest page has waited.
fn run_case(sim: &Sim, fault: &Fault, threads: usize) -> (bool, Duration) {
    let case = &format!("{}, {threads} threads", fault.name);
    sim.script("reset");
    sim.script("instances 4; latency 30; seed 7");
    let store = Store::create(CLIENTS * PART, Options::default()).unwrap();
    let device = device(&store, 1);
    let qat = sim.start().unwrap();
    assert_eq!(
        device.offload(&qat, &offload(threads, fault.deadline())).unwrap(),
        threads,
        "{case}"
    );
    await_ready(&device, threads);
    sim.script(fault.script);
    std::thread::scope(|scope| {
        let run = |number| {
            let mut client = Client::new(&device, number, threads as u64);
            (0..3).for_each(|_| client.round());
            client.check();
            // A device that works may have completed all of it before its event arrives.
            let start = Instant::now();
            while fault.script.contains("restarting") && sim.counters().events == 0 {
                std::thread::sleep(Duration::from_millis(1));
                assert!(start.elapsed() < HANG, "{case}: no event");
            }
            (0..3).for_each(|_| client.round());
            client.check();
        };
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || run(number))).collect();
        clients.into_iter().for_each(|client| client.join().unwrap_or_else(|_| panic!("{case}")));
    });
    let all = stats(&device);
    for engine in &all.engines {
        assert_eq!(engine.delivered, engine.submitted, "{case}\n{all:#?}");
        assert_eq!(engine.by_device + engine.software(), engine.delivered, "{case}\n{all:#?}");
    }
    // A thread that has seen the device's event gives the engine no more pages: then no engine
    // counts what software does.
    let seen = ["fatal", "restarting", "reset"].iter().any(|event| fault.script.contains(event))
        && sim.counters().events > 0;
    let sum = total(&device);
    let met = seen || (fault.met)(&sum);
    if !met {
        println!("{case}: not met as meant\n{all:#?}\n{:#?}", sim.counters());
    }
    assert_eq!(device.stats().failed_writes + device.stats().failed_reads, 0, "{case}");
    drop((device, qat));
    assert_eq!(sim.counters().violations, 0, "{case}");
    (met, Duration::from_micros(sum.longest_wait_us))
}

#[test]
fn an_unverified_output_is_an_error_when_it_is_read_and_never_a_wrong_byte() {
    let sim = Sim::turn();
    sim.script("instances 1; seed 3");
    let store = Store::create(PART, Options::default()).unwrap();
    let device = device(&store, 0);
    let qat = sim.start().unwrap();
    let options = OffloadOptions { verify_every: 0, ..offload(1, Duration::from_secs(60)) };
    device.offload(&qat, &options).unwrap();
    await_ready(&device, 1);
    sim.script("every 2 flip 1");
    let mut client = Client::new(&device, 0, 5);
    client.round();
    let (mut right, mut refused) = (0, 0);
    let mut out = vec![0; PAGE];
    for page in 0..PART {
        match client.read(page, &mut out) {
            Ok(()) => {
                assert!(out == client.model[page as usize * PAGE..][..PAGE], "page {page}");
                right += 1;
            }
            Err(errno) => {
                assert_eq!(errno, Errno::Io);
                refused += 1;
            }
        }
    }
    assert!(right > 10 && refused > 10, "{right} right, {refused} refused");
    assert_eq!(device.stats().failed_reads, refused);
    let damage = device.damage().unwrap();
    assert!(matches!(damage, Damage::Offloaded { .. } | Damage::Decode { .. }), "{damage}");
}

#[test]
fn a_restarted_device_is_used_again_and_software_compresses_meanwhile() {
    let sim = Sim::turn();
    for script in ["now silence", "now fatal"] {
        sim.script("reset");
        // The other instance is free, but claiming it would allocate.
        sim.script("instances 2; latency 20");
        let store = Store::create(PART, Options::default()).unwrap();
        let device = device(&store, 1);
        let qat = sim.start().unwrap();
        device.offload(&qat, &offload(1, Duration::from_secs(1))).unwrap();
        await_ready(&device, 1);
        let mut client = Client::new(&device, 0, 9);
        // On a busy machine it may be late, and is then tried again.
        let by_device_beyond = |client: &mut Client, before: u64| {
            let start = Instant::now();
            while total(&device).by_device <= before {
                client.round();
                await_ready(&device, 1);
                assert!(start.elapsed() < HANG, "{script}: {:#?}", stats(&device));
            }
        };
        by_device_beyond(&mut client, 0);
        let before = total(&device);
        sim.script(script);
        let start = Instant::now();
        while stats(&device).on_device > 0 {
            client.round();
            assert!(start.elapsed() < HANG, "{script}: {:#?}", stats(&device));
        }
        // No request polls the device now.
        let lost = total(&device);
        // A thread that has seen the device's event gives the engine no more pages.
        let is_told = script == "now fatal";
        assert!(is_told || lost.software() > before.software(), "{script}: {lost:#?}");
        let written = device.stats().pages_written;
        (0..3).for_each(|_| client.round());
        client.check();
        let gone = total(&device);
        assert_eq!(
            (gone.by_device, gone.software()),
            (lost.by_device, lost.software()),
            "{script}"
        );
        assert!(device.stats().pages_written > written);
        // An engine that may exchange its instance does so after a second.
        std::thread::sleep(Duration::from_millis(1500));
        if script == "now silence" {
            sim.script("now revive");
        } else {
            let events = sim.counters().events;
            sim.script("now restarting");
            while sim.counters().events == events {
                assert!(start.elapsed() < HANG, "no event");
                std::thread::sleep(Duration::from_millis(1));
            }
            sim.script("now restarted");
        }
        await_ready(&device, 1);
        by_device_beyond(&mut client, gone.by_device);
        client.check();
    }
}

#[test]
fn a_closing_queue_waits_for_the_devices_jobs() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 5000");
    let store = Store::create(64, Options::default()).unwrap();
    let device = device(&store, 0);
    let qat = sim.start().unwrap();
    device.offload(&qat, &offload(1, Duration::from_secs(60))).unwrap();
    await_ready(&device, 1);
    let mut bytes = vec![0; 64 * PAGE];
    let mut random = Random(5);
    bytes.chunks_mut(PAGE).for_each(|page| random.page(page));
    let mut queue = device.queue().unwrap();
    // SAFETY: `bytes` lives until the queue has gone.
    let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), bytes.len()) };
    let request = Request { op: Op::Write, page: 0, pages: 64, buffer };
    assert_eq!(queue.submit(1, request), None);
    drop(queue);
    let expected = bytes.clone();
    drop(bytes);
    let mut out = vec![0; 64 * PAGE];
    device.queue().unwrap().read_now(0, &mut out).unwrap();
    assert!(out == expected);
}

#[test]
fn a_page_that_changes_while_the_device_has_it_reads_as_one_whole_version() {
    const PAGES: usize = 24;
    let sim = Sim::turn();
    sim.script("instances 1; latency 20000");
    let store = Store::create(PAGES as u64, Options::default()).unwrap();
    let device = device(&store, 1);
    let qat = sim.start().unwrap();
    let options = OffloadOptions { depth: 64, ..offload(1, Duration::from_secs(60)) };
    device.offload(&qat, &options).unwrap();
    await_ready(&device, 1);
    let mut client = Client::new(&device, 0, 21);
    let mut versions = vec![vec![0; PAGES * PAGE]; 3];
    for version in &mut versions {
        for page in version.chunks_mut(PAGE) {
            page.iter_mut().for_each(|b| *b = b"etaoin shrdlu"[client.random.below(13) as usize]);
        }
    }
    let mut submit = |client: &mut Client, version: usize, number: usize| {
        let bytes = &mut versions[version][number * PAGE..][..PAGE];
        // SAFETY: the versions live until every request is over, and no code writes them meanwhile.
        let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), PAGE) };
        let request = Request { op: Op::Write, page: number as u64, pages: 1, buffer };
        assert_eq!(client.queue.submit(number as u64, request), None);
    };
    (0..PAGES).for_each(|number| submit(&mut client, 0, number));
    for number in 0..PAGES {
        match number % 3 {
            0 => submit(&mut client, 1, number),
            1 => {
                let (op, page) = (Op::Discard, number as u64);
                let request = Request { op, page, pages: 1, buffer: Buffer::NONE };
                assert_eq!(client.queue.submit(0, request), Some(Ok(())));
            }
            _ => client.queue.patch(number as u64, 100, b"patched").unwrap(),
        }
    }
    assert!(client.queue.in_flight() > 0, "the device has answered before anything was changed");
    let mut results = Vec::new();
    client.wait(0, &mut results);
    assert!(results.iter().all(|result| result.1.is_ok()), "{results:?}");
    let mut out = vec![0; PAGE];
    for number in 0..PAGES {
        client.read(number as u64, &mut out).unwrap();
        let first = &versions[0][number * PAGE..][..PAGE];
        let other = match number % 3 {
            0 => versions[1][number * PAGE..][..PAGE].to_vec(),
            1 => vec![0; PAGE],
            _ => [&first[..100], b"patched", &first[107..]].concat(),
        };
        assert!(out == first || out == other, "page {number}");
    }
    // Later writes win.
    let mut submit = |client: &mut Client, number: usize| {
        let bytes = &mut versions[2][number * PAGE..][..PAGE];
        // SAFETY: as above.
        let buffer = unsafe { Buffer::new(bytes.as_mut_ptr(), PAGE) };
        let request = Request { op: Op::Write, page: number as u64, pages: 1, buffer };
        assert_eq!(client.queue.submit(number as u64, request), None);
    };
    (0..PAGES).for_each(|number| submit(&mut client, number));
    client.wait(0, &mut results);
    for number in 0..PAGES {
        client.read(number as u64, &mut out).unwrap();
        assert!(out == versions[2][number * PAGE..][..PAGE], "page {number}");
    }
    assert_eq!(total(&device).by_device, stats(&device).engines[0].delivered);
}

#[test]
fn settings_that_cannot_be_offloaded_are_refused_with_the_reason() {
    let sim = Sim::turn();
    sim.script("instances 2");
    let store = Store::create(64, Options::default()).unwrap();
    let qat: Arc<Qat> = sim.start().unwrap();
    let options = offload(8, Duration::from_secs(60));
    let zstd =
        Device::new(&store, &DeviceOptions { workers: 0, ..DeviceOptions::default() }).unwrap();
    let error = zstd.offload(&qat, &options).unwrap_err();
    assert!(matches!(error, OpenError::Offload(Codec::Zstd)), "{error}");
    assert!(zstd.offload_stats().is_none());
    let once = device(&store, 0);
    assert_eq!(once.offload(&qat, &offload(1, Duration::from_secs(60))).unwrap(), 1);
    let again = once.offload(&qat, &options);
    assert!(matches!(again, Err(OpenError::NoInstance)), "though an instance is free");
    drop(once);
    let first = device(&store, 0);
    assert_eq!(first.offload(&qat, &options).unwrap(), 2, "as many as there are instances");
    assert!(matches!(first.offload(&qat, &options), Err(OpenError::NoInstance)));
    let second = device(&store, 0);
    assert!(matches!(second.offload(&qat, &options), Err(OpenError::NoInstance)));
    drop(first);
    assert_eq!(second.offload(&qat, &options).unwrap(), 2, "the first has given them back");
}
