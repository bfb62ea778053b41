//! Clients that go while their reads wait for a backing device that does not answer: they occupy no
//! connection.

#[path = "../../store/tests/shelf/mod.rs"]
mod shelf;
mod simple;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use shelf::gate::{behind_the_gate, page, put_out, set_gate};
use simple::{client, request};
use store::{Options, Store};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

fn ask(stream: &mut UnixStream, kind: u8, page: u64, len: usize, bytes: &[u8]) {
    let offset = usize::try_from(page).unwrap() * PAGE;
    stream.write_all(&request(kind, 7, offset, len, bytes)).unwrap();
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

// Over 80 lines: one sequence on one disk that does not answer.
#[test]
fn clients_that_disconnect_from_a_disk_that_does_not_answer_occupy_no_connection() {
    const PAGES: u64 = 256;
    const OUT: u64 = 128;
    let store = Store::create(PAGES, Options::default()).unwrap();
    behind_the_gate(&store, OUT);
    let device = Arc::new(Device::new(&store, &DeviceOptions::default()).unwrap());
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    put_out(&store, 0..OUT);
    let options = ServerOptions { connections: 2, handshake: LONG, ..ServerOptions::default() };
    let server = Arc::new(Server::new(Arc::clone(&device), options).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };

    set_gate(false);
    // More than there are connections: small reads, long ones, a write begun and not ended, one
    // that disconnects and one that sends nothing more and waits for its answers until it is gone.
    for round in 0..5 {
        let mut client = client(&path, LONG);
        ask(&mut client, 0, round * 8, PAGE, &[]);
        ask(&mut client, 0, 64, 40 * PAGE, &[]);
        // One that is in memory is written meanwhile, and its reply arrives.
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
    let mut other = client(&path, LONG);
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

    // No more than so many are left; the others wait, and go on when there is room. The end of the
    // server does not wait.
    set_gate(false);
    let strand = || {
        let mut client = client(&path, LONG);
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
