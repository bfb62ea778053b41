//! A device that takes long over a write, and has many under way: small writes of one connection
//! must not wait for each other.

mod simple;

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use device::{
    Backend, Device, DeviceOptions, DeviceQueue, Errno, Extent, Op, Queue, Request, PAGE,
};
use nbd::{Server, ServerOptions};
use simple::{client, request};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);
/// A connection's slices.
const TOGETHER: usize = 8;

/// A device that begins no write before it has so many.
struct Patient(Device);

struct PatientQueue {
    queue: DeviceQueue,
    held: Vec<(u64, Request)>,
    over: Vec<(u64, Result<(), Errno>)>,
}

impl Backend for Patient {
    type Queue = PatientQueue;

    fn pages(&self) -> u64 {
        self.0.pages()
    }

    fn open(&self) -> io::Result<PatientQueue> {
        // No allocation while requests are done.
        let (held, over) = (Vec::with_capacity(TOGETHER), Vec::with_capacity(TOGETHER));
        Ok(PatientQueue { queue: self.0.open()?, held, over })
    }
}

impl Queue for PatientQueue {
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        if request.op != Op::Write {
            return self.queue.submit(tag, request);
        }
        self.held.push((tag, request));
        if self.held.len() == TOGETHER {
            for (tag, request) in self.held.drain(..) {
                self.over.extend(self.queue.submit(tag, request).map(|result| (tag, result)));
            }
        }
        None
    }

    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
        let number = self.over.len();
        self.over.drain(..).for_each(|(tag, result)| each(tag, result));
        number + self.queue.reap(each)
    }

    fn in_flight(&self) -> usize {
        self.held.len() + self.over.len() + self.queue.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.over.is_empty() && self.queue.arm()
    }

    fn defers_writes(&self) -> bool {
        true
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        self.queue.patch(page, at, bytes)
    }

    fn extent(&mut self, page: u64, most: u64) -> Result<Extent, Errno> {
        self.queue.extent(page, most)
    }
}

fn answer(stream: &mut UnixStream) -> u64 {
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).expect("an answer, though others are not done");
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    u64::from_be_bytes(reply[8..].try_into().unwrap())
}

#[test]
fn small_writes_of_one_connection_run_concurrently() {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    let server = Arc::new(
        Server::new(
            Arc::new(Patient(device)),
            ServerOptions { handshake: LONG, ..ServerOptions::default() },
        )
        .unwrap(),
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };
    let mut stream = client(&path, LONG);
    let mut model = vec![0; 256 * PAGE];
    // Whole pages, parts of them on either side, parts alone: these need no other thread.
    let shapes = [(0, PAGE), (0, 3 * PAGE), (17, 2 * PAGE), (4000, PAGE + 100), (9, 50)];
    let mut cookie = 0_usize;
    for round in 0..10 {
        let (mut asked, mut held) = (Vec::new(), 0);
        while held < TOGETHER {
            let (at, len) = shapes[(cookie + round) % shapes.len()];
            let offset = cookie * 5 % 252 * PAGE + at;
            let bytes: Vec<u8> =
                (0..len).map(|n| (n * 7 + round + offset / 512).to_le_bytes()[0]).collect();
            held += usize::from((offset + len) / PAGE > offset.div_ceil(PAGE));
            model[offset..offset + len].copy_from_slice(&bytes);
            stream.write_all(&request(1, cookie as u64, offset, len, &[])).unwrap();
            stream.write_all(&bytes).unwrap();
            asked.push(cookie as u64);
            cookie += 1;
        }
        let mut answered: Vec<u64> = asked.iter().map(|_| answer(&mut stream)).collect();
        answered.sort_unstable();
        assert_eq!(answered, asked);
    }
    for (offset, expected) in (0..).step_by(16 * PAGE).zip(model.chunks(16 * PAGE)) {
        stream.write_all(&request(0, 0, offset, expected.len(), &[])).unwrap();
        answer(&mut stream);
        let mut got = vec![0; expected.len()];
        stream.read_exact(&mut got).unwrap();
        assert!(got == expected, "at byte {offset}");
    }
    drop(stream);
    server.stop();
    running.join().unwrap();
}
