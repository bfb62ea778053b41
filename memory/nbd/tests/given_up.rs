//! A connection that is given up while one of its requests is held up, as the kernel's client does
//! after some time: its requests on another connection must not be overtaken by the one that the
//! slow thread still serves.

mod simple;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::parent_id;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use device::{
    Backend, Device, DeviceOptions, DeviceQueue, Errno, Extent, Op, Queue, Request, PAGE,
};
use nbd::{Server, ServerOptions};
use simple::{client, greeted, request};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

/// A device whose next write of page 5 signals its start, and continues on a signal.
struct Slow {
    device: Device,
    next: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

struct SlowQueue {
    queue: DeviceQueue,
    slow: Arc<Slow>,
}

struct Shared(Arc<Slow>);

impl Backend for Shared {
    type Queue = SlowQueue;

    fn pages(&self) -> u64 {
        self.0.device.pages()
    }

    fn open(&self) -> io::Result<SlowQueue> {
        Ok(SlowQueue { queue: self.0.device.open()?, slow: Arc::clone(&self.0) })
    }
}

impl Queue for SlowQueue {
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        if request.op == Op::Write && request.page == 5 {
            let next = self.slow.next.lock().unwrap().take();
            if let Some((begun, go)) = next {
                begun.send(()).unwrap();
                go.recv_timeout(LONG).unwrap();
            }
        }
        self.queue.submit(tag, request)
    }

    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
        self.queue.reap(each)
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
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

/// Sends a write of page 5.
fn write(stream: &mut UnixStream, byte: u8) {
    // No page of one word.
    let bytes: Vec<u8> = (0..PAGE).map(|at| if at == 7 { 99 } else { byte }).collect();
    stream.write_all(&request(1, byte.into(), 5 * PAGE, PAGE, &bytes)).unwrap();
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < deadline, "{what} does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_repeated_request_waits_for_the_thread_that_still_serves_it() {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    let (begun, has_begun) = channel();
    let (go, may_go) = channel();
    let slow = Arc::new(Slow { device, next: Mutex::new(Some((begun, may_go))) });
    let server = Server::new(
        Arc::new(Shared(Arc::clone(&slow))),
        // The kernel's: this process is a child of that one.
        ServerOptions { handshake: LONG, attacher: Some(parent_id()), ..ServerOptions::default() },
    );
    let server = Arc::new(server.unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };

    let (mut first, mut second, mut third) =
        (client(&path, LONG), client(&path, LONG), client(&path, LONG));
    write(&mut first, 1);
    has_begun.recv_timeout(LONG).unwrap();
    first.shutdown(Shutdown::Both).unwrap();
    assert_eq!(server.kernel_ended(), 1, "whoever watches must see it while the thread is held up");
    // Sent again, and the next by the same connection.
    write(&mut second, 1);
    write(&mut second, 2);
    // The third may wait as well, before it has read anything.
    eventually("a wait", || server.waiting() >= 1);
    // One that is given up while it waits ends, held up or not: the server has two more, and then
    // one.
    write(&mut third, 3);
    eventually("another wait", || server.waiting() == 2);
    third.shutdown(Shutdown::Both).unwrap();
    eventually("its end", || server.waiting() == 1 && server.connections() == 2);
    let mut page = vec![0; PAGE];
    let mut queue = slow.device.queue().unwrap();
    queue.read_now(5, &mut page).unwrap();
    assert_eq!(page, vec![0; PAGE], "something was stored while the first write was held up");

    go.send(()).unwrap();
    let mut replies = [0; 32];
    second.read_exact(&mut replies).unwrap();
    assert_eq!((replies[4..8].to_vec(), replies[20..24].to_vec()), (vec![0; 4], vec![0; 4]));
    queue.read_now(5, &mut page).unwrap();
    assert_eq!(page[0], 2, "a write that was given up came after the one that followed it");
    assert_eq!((server.waiting(), server.kernel_ended()), (0, 2));

    // All at once are given up when the server ends: no connection waits for another.
    server.stop();
    running.join().unwrap();
}

/// Regression: another client with simple replies, as a second disk of the kernel, counted as the
/// one that is swapped to. Each of its ends replaced the server, and delayed swapping by 8 s.
#[test]
fn the_end_of_another_client_is_not_that_of_the_kernel_s() {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    let (begun, has_begun) = channel();
    let (go, may_go) = channel();
    let slow = Arc::new(Slow { device, next: Mutex::new(Some((begun, may_go))) });
    // This process is no child of its own.
    let attacher = Some(std::process::id());
    let options = ServerOptions { handshake: LONG, attacher, ..ServerOptions::default() };
    let server = Arc::new(Server::new(Arc::new(Shared(slow)), options).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let running = {
        let server = Arc::clone(&server);
        thread::spawn(move || server.run(&listener, |_| ()).unwrap())
    };

    let mut kernel = greeted(server.dial().unwrap(), LONG);
    let mut other = client(&path, LONG);
    write(&mut other, 1);
    has_begun.recv_timeout(LONG).unwrap();
    other.shutdown(Shutdown::Both).unwrap();
    assert_eq!(server.kernel_ended(), 0, "a request of another client is held up");
    // The kernel's client does not wait for that request.
    kernel.write_all(&request(0, 7, 0, PAGE, &[])).unwrap();
    kernel.read_exact(&mut [0; 16 + PAGE]).unwrap();
    go.send(()).unwrap();
    eventually("its end", || server.connections() == 1);
    assert_eq!(server.kernel_ended(), 0, "another client has ended");
    kernel.shutdown(Shutdown::Both).unwrap();
    eventually("the kernel's end", || server.kernel_ended() == 1);
    server.stop();
    running.join().unwrap();
}
