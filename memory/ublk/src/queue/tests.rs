use super::*;
use crate::geometry::Geometry;
use crate::sys::{self, IoDescriptor};
use device::guard::IoPath;
use device::{Backend, Device, DeviceOptions, Errno, Extent};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use store::{Keeper, Options, Store};

/// A scripted kernel: arrivals for each wait. Does not allocate while it runs.
struct Script {
    waits: Vec<Vec<Arrival>>,
    next: usize,
    descriptors: Vec<IoDescriptor>,
    fetched: Vec<u16>,
    committed: Vec<(u16, i32)>,
}

impl Script {
    fn new(descriptors: Vec<IoDescriptor>, waits: Vec<Vec<Arrival>>) -> Self {
        let (fetched, committed) = (Vec::with_capacity(16), Vec::with_capacity(16));
        Self { waits, next: 0, descriptors, fetched, committed }
    }
}

impl Ring for Script {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.fetched.push(tag);
        Ok(())
    }
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.committed.push((tag, result));
        Ok(())
    }
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn wait(&mut self, out: &mut Vec<Arrival>) -> io::Result<()> {
        // At the end of the script a real kernel would sleep for ever.
        let next = self.waits.get(self.next).ok_or(io::ErrorKind::TimedOut)?;
        self.next += 1;
        out.extend(next);
        Ok(())
    }
    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.descriptors[usize::from(tag)]
    }
}

/// A backend that does small requests at once and large ones at the next poll. It uses only the
/// length of a buffer.
struct Later {
    wake: OwnedFd,
    waiting: Vec<u64>,
    seen: Vec<(Op, u64, u32, usize)>,
    answer: Result<(), Errno>,
}

impl Later {
    fn new(answer: Result<(), Errno>) -> Self {
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Self { wake, waiting: Vec::with_capacity(16), seen: Vec::with_capacity(16), answer }
    }
}

impl Queue for Later {
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        self.seen.push((request.op, request.page, request.pages, request.buffer.len()));
        if request.pages < 4 {
            return Some(self.answer);
        }
        self.waiting.push(tag);
        None
    }
    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
        let over = self.waiting.len();
        while let Some(tag) = self.waiting.pop() {
            each(tag, self.answer);
        }
        over
    }
    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
    fn arm(&mut self) -> bool {
        self.waiting.is_empty()
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
    fn patch(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), Errno> {
        unreachable!("the disk has blocks of a page")
    }
    fn extent(&mut self, _: u64, _: u64) -> Result<Extent, Errno> {
        unreachable!("the kernel does not ask")
    }
}

const GEOMETRY: Geometry = Geometry { size: 1 << 20, queues: 1, depth: 4, max_io: 8 * 4096 };

fn run(script: &mut impl Ring, backend: &mut impl Queue) -> Result<(), QueueError> {
    run_until(script, backend, &AtomicBool::new(false))
}

fn run_until(
    script: &mut impl Ring,
    backend: &mut impl Queue,
    ended: &AtomicBool,
) -> Result<(), QueueError> {
    let buffers = Buffers::new(&GEOMETRY).unwrap();
    let mut tags = Tags::new(GEOMETRY.depth, GEOMETRY.size / 4096, GEOMETRY.max_io);
    let mut arrivals = Vec::with_capacity(8);
    // As in the queue's thread.
    fetch(script, &mut tags)?;
    let path = IoPath::enter();
    let result = serve(script, backend, &mut tags, &buffers, 0, &mut arrivals, ended);
    drop(path);
    result
}

fn descriptor(op: u8, page: u64, pages: u32) -> IoDescriptor {
    IoDescriptor { op_flags: op.into(), sectors: pages * 8, start: page * 8, addr: 0 }
}

fn gone() -> Vec<Arrival> {
    (0..4).map(|tag| Arrival::Tag(tag, sys::ABORT)).collect()
}

#[test]
fn small_and_large_requests_are_answered_once_each_and_then_the_queue_ends() {
    let descriptors = vec![
        descriptor(sys::OP_READ, 0, 1),
        descriptor(sys::OP_WRITE, 8, 8),
        descriptor(sys::OP_DISCARD, 0, 256),
        descriptor(sys::OP_FLUSH, 0, 0),
    ];
    let all = (0..4).map(|tag| Arrival::Tag(tag, 0)).collect();
    let waits = vec![all, vec![Arrival::Backend], gone()];
    let (mut script, mut backend) = (Script::new(descriptors, waits), Later::new(Ok(())));
    run(&mut script, &mut backend).unwrap();
    assert_eq!(script.fetched, [0, 1, 2, 3]);
    // Large requests after small ones, in the order of their completion.
    assert_eq!(script.committed, [(0, 4096), (3, 0), (2, 0), (1, 8 * 4096)]);
    let seen = [
        (Op::Read, 0, 1, 4096),
        (Op::Write, 8, 8, 8 * 4096),
        (Op::Discard, 0, 256, 0),
        (Op::Flush, 0, 0, 0),
    ];
    assert_eq!(backend.seen, seen);
}

/// A kernel that gives each tag a request again and again, for a number of rounds.
struct Busy {
    rounds: u32,
    ready: Vec<u16>,
    given: u32,
    failed: u32,
}

impl Ring for Busy {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.ready.push(tag);
        Ok(())
    }
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.ready.push(tag);
        self.failed += u32::from(result < 0);
        Ok(())
    }
    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn wait(&mut self, out: &mut Vec<Arrival>) -> io::Result<()> {
        while let Some(tag) = self.ready.pop() {
            let over = self.given >= self.rounds;
            self.given += 1;
            out.push(Arrival::Tag(tag.into(), if over { sys::ABORT } else { 0 }));
        }
        if out.is_empty() {
            // Long enough for another thread to run.
            std::thread::sleep(std::time::Duration::from_micros(50));
            out.push(Arrival::Backend);
        }
        Ok(())
    }
    fn descriptor(&self, tag: u16) -> IoDescriptor {
        let round = u64::from(self.given);
        match (round + u64::from(tag)) % 7 {
            0 => descriptor(sys::OP_DISCARD, round * 5 % 200, 40),
            1 => descriptor(sys::OP_WRITE_ZEROES, round * 3 % 200, 9),
            2 => descriptor(sys::OP_FLUSH, 0, 0),
            3 => descriptor(sys::OP_READ, round * 11 % 248, 8),
            4 => descriptor(sys::OP_READ, round * 7 % 256, 1),
            5 => descriptor(sys::OP_WRITE, round * 13 % 248, 8),
            _ => descriptor(sys::OP_WRITE, round * 17 % 256, 1),
        }
    }
}

#[test]
fn requests_of_a_real_device_and_its_keeper_allocate_nothing() {
    // A thread that gets no CPU may hold a lock of the kernel for which the keeper waits.
    let patience = std::time::Duration::from_secs(600);
    let options = Options { patience, ..Options::default() };
    let store = Store::create(GEOMETRY.size / 4096, options).unwrap();
    let keeper = Keeper::start_in(&store, IoPath::enter).unwrap();
    let options = DeviceOptions { workers: 1, depth: 8, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let mut queue = device.open().unwrap();
    let mut kernel = Busy { rounds: 4000, ready: Vec::with_capacity(8), given: 0, failed: 0 };
    run(&mut kernel, &mut queue).unwrap();
    assert_eq!((kernel.given, kernel.failed), (4004, 0));
    assert!(device.stats().pages_written > 1000);
    drop((queue, device, keeper));
}

#[test]
fn a_backend_s_errors_reach_the_kernel() {
    let descriptors = vec![
        descriptor(sys::OP_WRITE, 0, 1),
        descriptor(sys::OP_WRITE, 0, 8),
        descriptor(9, 0, 1),
        descriptor(sys::OP_READ, 256, 1),
    ];
    let all = (0..4).map(|tag| Arrival::Tag(tag, 0)).collect();
    let mut script = Script::new(descriptors, vec![all, gone()]);
    run(&mut script, &mut Later::new(Err(Errno::NoSpace))).unwrap();
    assert_eq!(script.committed, [(0, -28), (2, -95), (3, -5), (1, -28)]);
}

/// As a driver's work for a dead server does, when it comes after the takeover: the server has
/// to learn of it while the other tags' requests are served.
#[test]
fn a_driver_that_ends_a_command_is_noticed_before_the_queue_ends() {
    let descriptors = vec![descriptor(sys::OP_READ, 0, 1); 4];
    for (first, noticed) in [(0, false), (sys::ABORT, true)] {
        let script = &mut Script::new(descriptors.clone(), vec![vec![Arrival::Tag(1, first)]]);
        let ended = AtomicBool::new(false);
        // The script ends before the queue does.
        run_until(script, &mut Later::new(Ok(())), &ended).unwrap_err();
        assert_eq!(ended.load(Ordering::Acquire), noticed, "after {first}");
    }
}

#[test]
fn a_kernel_that_gives_a_tag_twice_ends_the_queue() {
    let descriptors = vec![descriptor(sys::OP_WRITE, 0, 8); 4];
    let twice = vec![Arrival::Tag(1, 0), Arrival::Tag(1, 0)];
    let mut script = Script::new(descriptors, vec![twice]);
    let error = run(&mut script, &mut Later::new(Ok(()))).unwrap_err();
    let expected = Violation::NotFetching { tag: 1 };
    assert!(matches!(error, QueueError::Violation(v) if v == expected), "{error}");
}
