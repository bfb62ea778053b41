//! A server's connections to itself, for the kernel's client of the disk: they need no path.

mod simple;

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::{Backend, Device, DeviceOptions, DeviceQueue, PAGE};
use nbd::{Server, ServerOptions};
use rustix::fs::{fcntl_getfl, OFlags};
use simple::{client, greeted, request};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

fn server() -> Arc<Server<Device>> {
    server_with(ServerOptions { handshake: LONG, ..ServerOptions::default() })
}

fn server_with(options: ServerOptions) -> Arc<Server<Device>> {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    Arc::new(Server::new(Arc::new(device), options).unwrap())
}

fn run(server: &Arc<Server<Device>>, path: &Path) -> JoinHandle<()> {
    let (server, listener) = (Arc::clone(server), UnixListener::bind(path).unwrap());
    thread::spawn(move || server.run(&listener, |_| ()).unwrap())
}

/// Page 0 of the disk that the connection leads to, after the page was filled with `byte`, if any.
fn page(mut stream: UnixStream, byte: Option<u8>) -> u8 {
    if let Some(byte) = byte {
        stream.write_all(&request(1, 1, 0, PAGE, &[byte; PAGE])).unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
    }
    stream.write_all(&request(0, 2, 0, PAGE, &[])).unwrap();
    let mut answer = [0; 16 + PAGE];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer[16..].iter().all(|&found| found == answer[16]));
    answer[16]
}

#[test]
fn a_server_connects_to_itself_wherever_the_path_leads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let [one, other] = [server(), server()];
    // Before it serves: the connection waits.
    let early = one.dial().unwrap();
    let running = run(&one, &path);
    assert_eq!(page(greeted(early, LONG), Some(7)), 7);
    assert_eq!(page(client(&path, LONG), None), 7);
    // A cleaner of /run has removed it.
    std::fs::remove_file(&path).unwrap();
    let several = [(); 3].map(|()| greeted(one.dial().unwrap(), LONG));
    assert_eq!(several.map(|stream| page(stream, None)), [7; 3]);
    // Another device has it now.
    let others = run(&other, &path);
    assert_eq!(page(client(&path, LONG), Some(9)), 9);
    assert_eq!(page(greeted(one.dial().unwrap(), LONG), None), 7);
    for (server, running) in [(one, running), (other, others)] {
        server.stop();
        running.join().unwrap();
        assert_eq!(server.dial().unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}

/// They may all be idle, and the kernel would wait for a place.
#[test]
fn other_clients_leave_places_for_the_connections_of_the_server_to_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let options =
        ServerOptions { connections: 2, dialled: 1, handshake: LONG, ..ServerOptions::default() };
    let server = server_with(options);
    let running = run(&server, &path);
    // The connection of the server to itself fails at first.
    server.admit_others();
    let first = client(&path, LONG);
    let mut second = UnixStream::connect(&path).unwrap();
    second.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(second.read(&mut [0; 18]).unwrap(), 0);
    assert_eq!(page(greeted(server.dial().unwrap(), LONG), Some(7)), 7);
    assert_eq!(page(first, None), 7);
    server.stop();
    running.join().unwrap();
}

/// A device that signals each opening of a queue, which continues on a signal.
struct Gate {
    device: Device,
    opened: Sender<()>,
    go: Mutex<Receiver<()>>,
}

impl Backend for Gate {
    type Queue = DeviceQueue;

    fn pages(&self) -> u64 {
        self.device.pages()
    }

    fn open(&self) -> io::Result<DeviceQueue> {
        self.opened.send(()).unwrap();
        self.go.lock().unwrap().recv_timeout(LONG).unwrap();
        self.device.open()
    }
}

/// Regression: while the server's thread for its own connections began, a client that waited took
/// the memory that was allocated in advance for the kernel's.
#[test]
fn the_connections_of_the_server_to_itself_have_their_memory_before_other_clients() {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    let (opened, has_opened) = channel();
    let (may_go, go) = channel();
    let gate = Arc::new(Gate { device, opened, go: Mutex::new(go) });
    let options = ServerOptions { dialled: 1, handshake: LONG, ..ServerOptions::default() };
    let server = Arc::new(Server::new(gate, options).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let hello = [&[0, 0, 0, 3], &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat();
    let say_hello = |stream: &mut UnixStream| {
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(&hello).unwrap();
    };
    // It waits from the beginning, and is not waited for.
    let mut other = UnixStream::connect(&path).unwrap();
    say_hello(&mut other);
    let mode = listener.try_clone().unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };
    // The next thing that the server does is to look for connections.
    while !fcntl_getfl(&mode).unwrap().contains(OFlags::NONBLOCK) {
        thread::sleep(Duration::from_millis(1));
    }
    let mut dialled = server.dial().unwrap();
    say_hello(&mut dialled);
    has_opened.recv_timeout(LONG).unwrap();
    // This connection has no memory yet. The other one is not even accepted.
    other.set_nonblocking(true).unwrap();
    let got = other.read(&mut [0; 18]);
    assert_eq!(got.unwrap_err().kind(), ErrorKind::WouldBlock, "it came first");
    assert_eq!(server.connections(), 1);
    may_go.send(()).unwrap();
    has_opened.recv_timeout(LONG).unwrap();
    may_go.send(()).unwrap();
    other.set_nonblocking(false).unwrap();
    for (mut stream, byte) in [(dialled, Some(7)), (other, None)] {
        stream.read_exact(&mut [0; 18 + 10]).unwrap();
        assert_eq!(page(stream, byte), 7);
    }
    server.stop();
    running.join().unwrap();
}
