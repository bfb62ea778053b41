//! A client of a few lines that sends requests that no library would, against a real server and
//! device.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use codec::Settings;
use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use proptest::prelude::*;
use store::{Options, Store};

#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

const SIZE: u64 = 16 << 20;
/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

/// A server on a socket of its own, and its messages.
struct Served {
    server: Arc<Server<Device>>,
    thread: Option<thread::JoinHandle<()>>,
    path: std::path::PathBuf,
    notices: Arc<Mutex<Vec<String>>>,
    _dir: tempfile::TempDir,
}

impl Served {
    fn new(options: ServerOptions) -> Self {
        let store = Store::create(SIZE / PAGE as u64, Options::default()).unwrap();
        let device = DeviceOptions {
            settings: Settings::default(),
            workers: 2,
            depth: 8,
            ..DeviceOptions::default()
        };
        let device = Device::new(&store, &device).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap();
        let server = Arc::new(Server::new(Arc::new(device), options).unwrap());
        let notices = Arc::new(Mutex::new(Vec::new()));
        let (running, said) = (Arc::clone(&server), Arc::clone(&notices));
        let thread = thread::spawn(move || {
            running.run(&listener, |line| said.lock().unwrap().push(line.to_owned())).unwrap();
        });
        Self { server, thread: Some(thread), path, notices, _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream
    }

    /// A client without structured replies.
    fn simple(&self) -> Client {
        let mut stream = self.connect();
        stream.write_all(&3_u32.to_be_bytes()).unwrap();
        stream.write_all(b"IHAVEOPT").unwrap();
        stream.write_all(&1_u32.to_be_bytes()).unwrap();
        stream.write_all(&0_u32.to_be_bytes()).unwrap();
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(u64::from_be_bytes(reply[..8].try_into().unwrap()), SIZE);
        Client { stream, cookie: 0 }
    }

    fn notices(&self) -> String {
        self.notices.lock().unwrap().join("\n")
    }

    /// Waits until so many lines were printed.
    fn wait_for_notice(&self, part: &str) {
        let begun = Instant::now();
        while !self.notices().contains(part) {
            assert!(begun.elapsed() < LONG, "\"{part}\" is not in: {}", self.notices());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until so many connections are open.
    fn wait_for_connections(&self, number: usize) {
        let begun = Instant::now();
        while self.server.connections() != number {
            assert!(begun.elapsed() < LONG, "{} connections", self.server.connections());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    fn send(&mut self, flags: u16, kind: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// Error and cookie of the next reply.
    fn reply(&mut self) -> (u32, u64) {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    fn data(&mut self, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        let cookie = self.send(0, 1, offset, u32::try_from(data.len()).unwrap(), data);
        let (error, of) = self.reply();
        assert_eq!(of, cookie);
        error
    }

    fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        let cookie = self.send(0, 0, offset, u32::try_from(length).unwrap(), &[]);
        assert_eq!(self.reply(), (0, cookie));
        self.data(length)
    }

    /// Whether the server has closed the connection.
    fn closed(mut self) -> bool {
        match self.stream.read(&mut [0; 64]) {
            Ok(got) => got == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut random = seed | 1;
    (0..len)
        .map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Half of the bytes are the same, so that it compresses.
            random.to_le_bytes()[3] | 0xf0
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: usize, seed: u64 },
    Read { offset: u64, len: usize },
    Trim { offset: u64, len: u32 },
    Zero { offset: u64, len: u32, no_hole: bool },
}

/// Ranges of all sizes and no alignment; every path of the server has its share.
fn range() -> impl Strategy<Value = (u64, usize)> {
    let len =
        prop_oneof![3 => 0..10_000_usize, 1 => 30_000..40_000_usize, 1 => 250_000..600_000_usize];
    (0..SIZE, len, any::<bool>()).prop_map(|(offset, len, aligned)| {
        let unit = if aligned { PAGE as u64 } else { 1 };
        let offset = offset / unit * unit;
        let len = len / usize::try_from(unit).unwrap() * usize::try_from(unit).unwrap();
        (offset, len.min(usize::try_from(SIZE - offset).unwrap()))
    })
}

fn step() -> impl Strategy<Value = Step> {
    let short = |len: usize| u32::try_from(len).unwrap();
    prop_oneof![
        4 => (range(), any::<u64>()).prop_map(|((offset, len), seed)| Step::Write { offset, len, seed }),
        3 => range().prop_map(|(offset, len)| Step::Read { offset, len }),
        1 => range().prop_map(move |(offset, len)| Step::Trim { offset, len: short(len) }),
        1 => (range(), any::<bool>()).prop_map(move |((offset, len), no_hole)| {
            Step::Zero { offset, len: short(len), no_hole }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Any ranges, one after the other, against plain memory.
    #[test]
    fn the_export_reads_what_plain_memory_reads(
        compact: bool,
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let served = Served::new(ServerOptions { compact, handshake: LONG, ..ServerOptions::default() });
        let mut client = served.simple();
        let mut model = vec![0; usize::try_from(SIZE).unwrap()];
        let at = |offset: u64, len: usize| {
            let start = usize::try_from(offset).unwrap();
            start..start + len
        };
        for step in steps {
            match step {
                Step::Write { offset, len, seed } => {
                    let data = noise(len, seed);
                    prop_assert_eq!(client.write(offset, &data), 0);
                    model[at(offset, len)].copy_from_slice(&data);
                }
                Step::Read { offset, len } => {
                    prop_assert!(client.read(offset, len) == model[at(offset, len)]);
                }
                Step::Trim { offset, len } => {
                    let cookie = client.send(0, 4, offset, len, &[]);
                    prop_assert_eq!(client.reply(), (0, cookie));
                    let page = PAGE as u64;
                    let (first, end) = (offset.div_ceil(page), (offset + u64::from(len)) / page);
                    if first < end {
                        model[at(first * page, usize::try_from((end - first) * page).unwrap())].fill(0);
                    }
                }
                Step::Zero { offset, len, no_hole } => {
                    let cookie = client.send(u16::from(no_hole) << 1, 6, offset, len, &[]);
                    prop_assert_eq!(client.reply(), (0, cookie));
                    model[at(offset, len as usize)].fill(0);
                }
            }
        }
        prop_assert!(client.read(0, usize::try_from(SIZE).unwrap()) == model);
        prop_assert_eq!(served.notices(), "");
    }
}

#[test]
fn many_requests_at_once_are_all_answered_and_long_reads_are_not_torn() {
    [false, true].into_iter().for_each(many_requests);
}

fn many_requests(compact: bool) {
    let served =
        Served::new(ServerOptions { compact, handshake: LONG, ..ServerOptions::default() });
    let mut client = served.simple();
    // Slices of one read, small requests and other long reads, all sent before any is answered.
    let big = noise(3 << 20, 9);
    assert_eq!(client.write(4096, &big), 0);
    let mut writer = Client { stream: client.stream.try_clone().unwrap(), cookie: 1000 };
    let sender = thread::spawn(move || {
        for round in 0..6_u64 {
            writer.send(0, 0, 4096, 3 << 20, &[]);
            writer.send(0, 1, 8 << 20, 4096, &noise(4096, round));
            writer.send(0, 0, 5000, 300, &[]);
            writer.send(0, 1, 9 << 20, 1 << 20, &noise(1 << 20, round));
            writer.send(0, 3, 0, 0, &[]);
        }
    });
    let mut answered = Vec::new();
    for _ in 0..30 {
        let (error, cookie) = client.reply();
        assert_eq!(error, 0);
        match (cookie - 1001) % 5 {
            0 => assert!(client.data(3 << 20) == big),
            2 => assert!(client.data(300) == big[904..1204]),
            _ => {}
        }
        answered.push(cookie);
    }
    sender.join().unwrap();
    answered.sort_unstable();
    assert_eq!(answered, (1001..1031).collect::<Vec<_>>());
    assert!(client.read(9 << 20, 1 << 20) == noise(1 << 20, 5));
}

#[test]
fn invalid_requests_are_answered_or_end_that_connection_alone() {
    // Those that send nothing stay until the end, however long the machine stands still.
    let options = ServerOptions { connections: 4, handshake: LONG, ..ServerOptions::default() };
    let served = Served::new(options);
    let mut good = served.simple();
    assert_eq!(good.write(0, b"kept"), 0);

    // Ranges that are not there, commands and flags that are none; the connection goes on.
    let mut client = served.simple();
    assert_eq!(client.write(SIZE - 2, b"toolong"), 28);
    let payload = noise(1 << 20, 3);
    assert_eq!(client.write(u64::MAX - 5, &payload), 28);
    for (flags, kind, offset, length) in [
        (0, 0, SIZE, 1),
        (0, 0, u64::MAX, 4096),
        (0, 4, SIZE, 4096),
        (0, 99, 0, 0),
        (4, 0, 0, 512),
        (0, 7, 0, 512),
    ] {
        let cookie = client.send(flags, kind, offset, length, &[]);
        assert_eq!(client.reply(), (22, cookie), "{kind} {flags}");
    }
    let cookie = client.send(0, 0, 0, 33 << 20, &[]);
    assert_eq!(client.reply(), (75, cookie));
    assert_eq!(client.read(0, 4), b"kept");

    // A write that is too long, and no request at all.
    client.send(0, 1, 0, 33 << 20, &[]);
    assert!(client.closed());
    served.wait_for_notice("write of 34603008 bytes");
    // A connection that has ended counts until its thread is over, and four are the most.
    served.wait_for_connections(1);
    let mut client = served.simple();
    client.stream.write_all(&[0x11; 100]).unwrap();
    assert!(client.closed());
    served.wait_for_notice("request begins with 11111111");
    served.wait_for_connections(1);

    // Gone in the middle of a write.
    let mut client = served.simple();
    client.send(0, 1, 0, 1 << 20, &[7; 5000]);
    drop(client);
    served.wait_for_notice("cut in the middle");
    served.wait_for_connections(1);

    // Nonsense instead of a handshake.
    let mut stream = served.connect();
    stream.write_all(&[0xff; 64]).unwrap();
    assert!(Client { stream, cookie: 0 }.closed());
    served.wait_for_notice("client flags ffffffff");
    served.wait_for_connections(1);

    // One that sends requests and never reads; one that sends nothing; the fifth is one too many.
    let mut deaf = served.simple();
    for _ in 0..64 {
        deaf.send(0, 0, 0, 8 << 20, &[]);
    }
    let silent = served.connect();
    let _another = served.connect();
    let mut fifth = UnixStream::connect(&served.path).unwrap();
    assert_eq!(fifth.read(&mut [0; 18]).unwrap(), 0);
    served.wait_for_notice("4 connections are open");

    assert_eq!(good.read(0, 4), b"kept");
    assert_eq!(good.write(100, b"still here"), 0);
    drop(silent);
}

#[test]
fn a_slow_handshake_ends() {
    let options =
        ServerOptions { handshake: Duration::from_millis(50), ..ServerOptions::default() };
    let served = Served::new(options);
    let mut stream = UnixStream::connect(&served.path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // The time may be over before the greeting.
    let mut greeting = Vec::new();
    stream.read_to_end(&mut greeting).unwrap();
    assert!(greeting.is_empty() || greeting.len() == 18, "{greeting:?}");
    served.wait_for_notice("not done in time");
}

#[test]
fn stopping_ends_connections_and_the_server() {
    let served = Served::new(ServerOptions { handshake: LONG, ..ServerOptions::default() });
    let mut client = served.simple();
    assert_eq!(client.write(0, &[1; 4096]), 0);
    assert_eq!(served.server.connections(), 1);
    served.server.stop();
    assert!(client.closed());
}
