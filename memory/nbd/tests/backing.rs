//! Pages that are on a backing device, asked for by the kernel's way of speaking and by the other
//! one: only the client that sent them waits for them.

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;
mod simple;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use device::{Device, DeviceOptions, Queue, PAGE};
use nbd::{Server, ServerOptions};
use shelf::gate::{behind_the_gate, page, put_out, set_gate};
use simple::{client, request};
use store::{Options, Store};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);
const PAGES: u64 = 4096;
/// These are on the device; the others are in memory.
const OUT: u64 = 1024;

fn pages(from: u64, number: u64) -> Vec<u8> {
    (from..from + number).flat_map(page).collect()
}

struct Client {
    stream: UnixStream,
    /// Bytes that reads are to bring, by their cookies.
    lengths: BTreeMap<u64, usize>,
    cookie: u64,
}

impl Client {
    /// One with simple replies only, as the kernel's.
    fn new(path: &std::path::Path) -> Self {
        let stream = client(path, LONG);
        Self { stream, lengths: BTreeMap::new(), cookie: 0 }
    }

    fn ask(&mut self, command: u8, page: u64, pages: u64, bytes: &[u8]) -> u64 {
        self.cookie += 1;
        let (offset, length) = (page * PAGE as u64, pages * PAGE as u64);
        let [offset, len] = [offset, length].map(|bytes| usize::try_from(bytes).unwrap());
        self.stream.write_all(&request(command, self.cookie, offset, len, bytes)).unwrap();
        let brings = if command == 0 { length } else { 0 };
        self.lengths.insert(self.cookie, usize::try_from(brings).unwrap());
        self.cookie
    }

    fn read(&mut self, page: u64, pages: u64) -> u64 {
        self.ask(0, page, pages, &[])
    }

    fn write(&mut self, page: u64, number: u64, from: u64) -> u64 {
        self.ask(1, page, number, &pages(from, number))
    }

    /// The next answer: whose, its error, its bytes.
    fn answer(&mut self) -> (u64, u32, Vec<u8>) {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).expect("an answer comes");
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        let length = self.lengths.remove(&cookie).expect("it was asked, and not answered");
        let mut bytes = vec![0; if error == 0 { length } else { 0 }];
        self.stream.read_exact(&mut bytes).unwrap();
        (cookie, error, bytes)
    }
}

// Over 80 lines: one sequence on one disk that is held open.
#[test]
fn reads_of_the_backing_device_delay_no_write() {
    let store = Store::create(PAGES, Options::default()).unwrap();
    let disk = behind_the_gate(&store, OUT);
    let options = DeviceOptions { workers: 1, depth: 64, ..DeviceOptions::default() };
    let device = Arc::new(Device::new(&store, &options).unwrap());
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    put_out(&store, 0..OUT);

    let server = Arc::new(
        Server::new(
            Arc::clone(&device),
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
    let mut client = Client::new(&path);

    set_gate(false);
    let mut reads = BTreeMap::new();
    // As many as the kernel has on the way, of one page and of eight; long ones, some of whose
    // pages are in memory.
    for number in 0..128 {
        let (at, pages) = (number * 7, if number % 3 == 0 { 8 } else { 1 });
        reads.insert(client.read(at, pages), (at, pages));
    }
    for number in 0..12 {
        let (at, pages) = (OUT - 20 * (number + 1), 40);
        reads.insert(client.read(at, pages), (at, pages));
    }
    reads.insert(client.read(0, OUT), (0, OUT));
    // Pages in memory are read, written (one page and many) and discarded while nothing comes from
    // the device; that is what frees memory.
    for round in 0..40 {
        let at = OUT + 200 + round * 64;
        let write = client.write(at, 1, at + 5000);
        assert_eq!(client.answer(), (write, 0, vec![]), "round {round}");
        let read = client.read(at, 2);
        let expected = [page(at + 5000), page(at + 1)].concat();
        assert!(client.answer() == (read, 0, expected), "round {round}");
        let long = client.write(at + 2, 40, at + 6000);
        assert_eq!(client.answer(), (long, 0, vec![]), "round {round}");
        // Of one that is on the device, too.
        let here = client.write(900 + round, 1, 900 + round);
        assert_eq!(client.answer(), (here, 0, vec![]), "round {round}");
        let trim = client.ask(4, at + 50, 8, &[]);
        assert_eq!(client.answer(), (trim, 0, vec![]), "round {round}");
    }
    assert_eq!(device.stats().failed_reads, 0);
    set_gate(true);
    while !reads.is_empty() {
        let (cookie, error, bytes) = client.answer();
        let (at, number) = reads.remove(&cookie).expect("a read is answered once");
        assert_eq!(error, 0, "{number} pages from {at}");
        assert!(bytes == pages(at, number), "{number} pages from {at}");
    }
    // A long one whose end is on the device does not begin before all of it is there, whatever else
    // waits: begun, it would keep every other answer back.
    assert_eq!((client.write(300, 256, 300), client.answer().1), (client.cookie, 0));
    set_gate(false);
    let reads = [client.read(1, 1), client.read(2, 1), client.read(300, 320)];
    let write = client.write(OUT + 10, 1, OUT + 10);
    assert_eq!(client.answer(), (write, 0, vec![]));
    set_gate(true);
    for _ in reads {
        let (cookie, error, bytes) = client.answer();
        let (at, number) =
            [(1, 1), (2, 1), (300, 320)][usize::try_from(cookie - reads[0]).unwrap()];
        assert!(error == 0 && bytes == pages(at, number), "{number} pages from {at}: {error}");
    }
    // One that fails gets an error, and no other does.
    disk.0.fail_reads.store(61, Ordering::Relaxed);
    let (bad, good) = (client.read(3, 1), client.read(OUT + 3, 1));
    let answers: BTreeMap<u64, u32> =
        [client.answer(), client.answer()].map(|(cookie, error, _)| (cookie, error)).into();
    assert_eq!(answers, BTreeMap::from([(bad, 5), (good, 0)]));
    disk.0.fail_reads.store(0, Ordering::Relaxed);
    // One that leaves with reads on the way is gone when they are over.
    set_gate(false);
    for number in 0..50 {
        client.read(number * 8, 8);
    }
    drop(client);
    set_gate(true);
    assert_eq!(queue.in_flight(), 0);
    server.stop();
    running.join().unwrap();
    assert_eq!(server.connections(), 0);
}
