//! Clients that lie take a bounded amount of the server's memory each. Alone in its process, whose
//! memory is measured.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use store::{Options, Store};

const SIZE: u64 = 64 << 20;
const LIARS: usize = 24;

/// A connection may have so many bytes, as the documents say, and its thread and table some.
const EACH: u64 = (3 << 20) + (1 << 20);

fn connect(path: &std::path::Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[&[0, 0, 0, 3], &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

fn request(kind: u16, offset: u64, length: u32) -> Vec<u8> {
    let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &[0; 8]];
    [&head.concat()[..], &offset.to_be_bytes(), &length.to_be_bytes()].concat()
}

/// Bytes of memory that this process has.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn clients_with_invalid_requests_cost_a_bounded_amount_of_memory() {
    let store = Store::create(SIZE / PAGE as u64, Options::default()).unwrap();
    let options = DeviceOptions { workers: 2, depth: 8, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let handshake = Duration::from_secs(300);
    let options = ServerOptions { connections: LIARS + 1, handshake, ..ServerOptions::default() };
    let server = Arc::new(Server::new(Arc::new(device), options).unwrap());
    let running = Arc::clone(&server);
    let served = thread::spawn(move || running.run(&listener, |_| ()).unwrap());

    let mut good = connect(&path);
    let mut ask = || {
        good.write_all(&request(0, 0, 4096)).unwrap();
        good.read_exact(&mut [0; 16 + 4096]).unwrap();
    };
    ask();
    let before = resident();
    let mut liars = Vec::new();
    for number in 0..LIARS {
        let mut liar = connect(&path);
        match number % 3 {
            // Asks for much, and reads none of it.
            0 => (0..64).for_each(|_| liar.write_all(&request(0, 0, 32 << 20)).unwrap()),
            // Announces a large write, and sends most of it.
            1 => {
                liar.write_all(&request(1, 0, 32 << 20)).unwrap();
                liar.set_nonblocking(true).unwrap();
                let _ = liar.write(&[0x5a; 20_000]);
            }
            // Many small ones at once, and reads no answer.
            _ => {
                liar.set_nonblocking(true).unwrap();
                let some = request(0, 0, 64 << 10).repeat(1000);
                let _ = liar.write(&some);
            }
        }
        liars.push(liar);
    }
    // The server has taken all that the clients can make it take when its memory no longer grows.
    let (mut most, mut since, begun) = (0, Instant::now(), Instant::now());
    while since.elapsed() < Duration::from_secs(2) && begun.elapsed() < Duration::from_secs(60) {
        ask();
        let now = resident();
        if now > most {
            (most, since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(10));
    }
    let took = most.saturating_sub(before);
    println!("{LIARS} clients that lie take {} KiB", took >> 10);
    assert_eq!(server.connections(), LIARS + 1);
    assert!(took < LIARS as u64 * EACH, "{} KiB", took >> 10);
    drop(liars);
    server.stop();
    served.join().unwrap();
}
