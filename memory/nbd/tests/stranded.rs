//! Clients that go while their reads wait for a backing device that does not answer: they hold nobody's place.

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use shelf::Shelf;
use store::{format_backing, Batch, Options, Page, Seen, Store, MAX_OBJECT};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// What hangs, hangs for longer.
const LONG: Duration = Duration::from_secs(300);

static GATE: (Mutex<bool>, Condvar) = (Mutex::new(true), Condvar::new());

fn wait_at_gate() {
    let open = GATE.0.lock().unwrap();
    drop(GATE.1.wait_while(open, |open| !*open).unwrap());
}

fn set_gate(open: bool) {
    *GATE.0.lock().unwrap() = open;
    GATE.1.notify_all();
}

fn page(index: u64) -> Vec<u8> {
    let mut state = index << 32 | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    };
    (0..PAGE).map(|_| next()).collect()
}

/// A client with simple replies.
fn client(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&[0, 0, 0, 3], &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

fn ask(stream: &mut UnixStream, kind: u8, page: u64, len: usize, bytes: &[u8]) {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend([0, 0, 0, kind]);
    request.extend([7; 8]);
    request.extend((page * PAGE as u64).to_be_bytes());
    request.extend(u32::try_from(len).unwrap().to_be_bytes());
    request.extend(bytes);
    stream.write_all(&request).unwrap();
}

/// The bytes of the next answer, which is no error.
fn answer(stream: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; 16 + len];
    stream.read_exact(&mut bytes).expect("an answer comes");
    assert_eq!(bytes[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    bytes.split_off(16)
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < deadline, "{what} does not come");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_that_leave_a_disk_that_does_not_answer_hold_no_place() {
    const PAGES: u64 = 256;
    const OUT: u64 = 128;
    let disk = Shelf::pausing(2 + usize::try_from(OUT).unwrap(), wait_at_gate);
    let store = Store::create(PAGES, Options::default()).unwrap();
    format_backing(&disk, "shelf", &store).unwrap();
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let device = Arc::new(Device::new(&store, &DeviceOptions::default()).unwrap());
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    let mut worker = store.worker().unwrap();
    let (mut batch, mut out) = (Batch::new(128), [0; MAX_OBJECT]);
    for index in 0..OUT {
        let Page::Object { tag, len } = worker.look(index, &mut out).unwrap() else {
            panic!("page {index} is no object")
        };
        batch.add(&Seen { index, tag, bytes: &out[..len] });
    }
    assert_eq!(worker.write_back(&mut batch).unwrap().pages, OUT);
    let options = ServerOptions { connections: 2, ..ServerOptions::default() };
    let server = Arc::new(Server::new(Arc::clone(&device), options).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };

    set_gate(false);
    // More than there are connections: small reads, long ones, a write begun and not ended, one that says goodbye and one
    // that says nothing more and waits for its answers until it is gone.
    for round in 0..5 {
        let mut client = client(&path);
        ask(&mut client, 0, round * 8, PAGE, &[]);
        ask(&mut client, 0, 64, 40 * PAGE, &[]);
        // One that is in memory is written meanwhile, and that is told.
        ask(&mut client, 1, 200 + round, PAGE, &page(500 + round));
        answer(&mut client, 0);
        match round {
            0 => ask(&mut client, 1, 210, 16 * PAGE, &page(9)),
            1 => ask(&mut client, 2, 0, 0, &[]),
            2 => {
                client.shutdown(std::net::Shutdown::Write).unwrap();
                thread::sleep(Duration::from_millis(50));
                assert!(server.connections() > 0, "it has not gone");
            }
            _ => {}
        }
        drop(client);
        eventually("its place", || server.connections() == 0);
        assert_eq!(server.stranded() as u64, round + 1);
    }
    let mut other = client(&path);
    for round in 0..5 {
        ask(&mut other, 0, 200 + round, PAGE, &[]);
        assert!(answer(&mut other, PAGE) == page(500 + round), "what was written in round {round}");
    }
    ask(&mut other, 0, 210, PAGE, &[]);
    assert!(answer(&mut other, PAGE) == page(210), "half a write was done");
    // The disk answers: they are over, and what is read is what it was.
    set_gate(true);
    eventually("the end of all", || server.stranded() == 0);
    ask(&mut other, 0, 0, 128 * PAGE, &[]);
    let all: Vec<u8> = (0..128).flat_map(page).collect();
    assert!(answer(&mut other, all.len()) == all);
    drop(other);
    eventually("its place", || server.connections() == 0);

    // No more than so many are left; the others wait, and go on when there is room. Who ends the server does not wait.
    set_gate(false);
    let strand = || {
        let mut client = client(&path);
        ask(&mut client, 0, 3, PAGE, &[]);
        // It is under way when the next one is answered.
        ask(&mut client, 0, 250, PAGE, &[]);
        assert!(answer(&mut client, PAGE) == page(250));
    };
    for number in 1..=8 {
        strand();
        eventually("a place", || server.stranded() == number && server.connections() == 0);
    }
    strand();
    thread::sleep(Duration::from_secs(2));
    assert_eq!((server.stranded(), server.connections()), (8, 1));
    set_gate(true);
    eventually("the end of all", || server.stranded() == 0 && server.connections() == 0);
    set_gate(false);
    strand();
    server.stop();
    running.join().unwrap();
    assert_eq!(server.stranded(), 1);
    drop(server);
    set_gate(true);
    let mut bytes = vec![0; PAGE];
    queue.read_now(3, &mut bytes).unwrap();
    assert!(bytes == page(3));
}
