//! Synthetic QEMUs, and the real relays between them.

mod qemus;

pub(crate) use qemus::{destination_qemu, source_qemu, source_that_tells, Reader, Streams};

use codec::{Codec, Settings};
use qat::Qat;
use relay::{
    Destination, DestinationEnd, Host, QemuSocket, RelayError, Server, ServerConfig, Source,
    SourceConfig, SourceEnd, UnixAddress,
};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use session::{FrameType, Grants, Header, Hello, Link, Setup};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};
use tls::{Acceptor, Connector};

pub(crate) const PAGE: usize = 4096;
/// How long an event that must not happen is waited for.
pub(crate) const A_WHILE: Duration = Duration::from_millis(150);
/// Nothing here takes this long unless it hangs. Tests of 10 s of CPU time have taken 215 s on a
/// machine of 2 cores with a load of 50.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(1200);
/// How long a link may be without bytes, unless a test is about that: a thread that gets no CPU for
/// the 3 s of [`session::SILENCE`] loses no link here.
pub(crate) const SILENCE: Duration = WATCHDOG;
pub(crate) const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
pub(crate) const SHUT_BAD: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 1];

/// Runs a test that fails instead of hanging.
pub(crate) fn bounded(body: impl FnOnce() + Send + 'static) {
    bounded_by(WATCHDOG, body);
}

/// The same for a test of many migrations.
pub(crate) fn bounded_by(limit: Duration, body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let test = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    match ended.recv_timeout(limit) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs: not over after {limit:?}"),
        _ => test.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause)),
    }
}

/// A target, and the result of its session.
pub(crate) type Ended = (Option<String>, Result<DestinationEnd, RelayError>);

/// The application around a session, which here only stores the result.
pub(crate) struct TestHost {
    ended: Mutex<Sender<Ended>>,
    pub(crate) notices: Mutex<Vec<String>>,
    /// The first connection to QEMU carries no byte before this comes.
    pub(crate) gate: Mutex<Option<Receiver<()>>>,
    /// Its sessions are those of NBD connections.
    disks: bool,
}

impl TestHost {
    pub(crate) fn new(ended: Sender<Ended>) -> Self {
        let (notices, gate) = Default::default();
        Self { ended: Mutex::new(ended), notices, gate, disks: false }
    }
}

impl Host for TestHost {
    fn is_for_disks(&self) -> bool {
        self.disks
    }

    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn connected(&self, _: &QemuSocket) -> Result<(), String> {
        if let Some(gate) = self.gate.lock().unwrap().take() {
            let _ = gate.recv();
        }
        Ok(())
    }

    fn serve(&self, target: &Option<String>, destination: &Destination) {
        let result = destination.run(|| b"{\"end\":\"destination\"}".to_vec());
        let _ = self.ended.lock().unwrap().send((target.clone(), result));
    }

    fn notice(&self, text: &str) {
        self.notices.lock().unwrap().push(text.into());
    }
}

/// A receiving relay with its targets, stopped when dropped.
pub(crate) struct Receiving {
    pub(crate) server: Arc<Server>,
    pub(crate) host: Arc<TestHost>,
    pub(crate) address: SocketAddr,
    ended: Receiver<Ended>,
    pub(crate) folder: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Receiving {
    pub(crate) fn with(names: &[Option<&str>], grants: Grants) -> Self {
        Self::secured(names, grants, None)
    }

    pub(crate) fn secured(
        names: &[Option<&str>],
        grants: Grants,
        acceptor: Option<Acceptor>,
    ) -> Self {
        Self::resuming(names, grants, acceptor, Duration::ZERO)
    }

    pub(crate) fn resuming(
        names: &[Option<&str>],
        grants: Grants,
        acceptor: Option<Acceptor>,
        resume: Duration,
    ) -> Self {
        Self::made(names, grants, acceptor, (resume, SILENCE), (None, false, None), false)
    }

    /// A receiver for one migration.
    pub(crate) fn once(resume: Duration) -> Self {
        let lasts = (resume, SILENCE);
        Self::made(&[None], Grants::default(), None, lasts, (None, false, None), true)
    }

    /// A receiver that loses silent links, as any outside of tests.
    pub(crate) fn that_hears(resume: Duration) -> Self {
        let lasts = (resume, session::SILENCE);
        Self::made(&[None], Grants::default(), None, lasts, (None, false, None), false)
    }

    /// A receiver of NBD connections.
    pub(crate) fn of_disks(grants: Grants, resume: Duration) -> Self {
        Self::made(&[None], grants, None, (resume, SILENCE), (None, true, None), false)
    }

    /// A receiver whose codec threads have a device.
    pub(crate) fn on_device(qat: Arc<Qat>) -> Self {
        let lasts = (Duration::ZERO, SILENCE);
        Self::made(&[None], Grants::default(), None, lasts, (Some(qat), false, None), false)
    }

    /// A receiver that has these pages.
    pub(crate) fn seeded(resume: Duration, seed: Arc<dyn delta::Seed>) -> Self {
        let seed = (None, false, Some(seed));
        Self::made(&[None], Grants::default(), None, (resume, SILENCE), seed, false)
    }

    fn made(
        names: &[Option<&str>],
        grants: Grants,
        acceptor: Option<Acceptor>,
        (resume, silence): (Duration, Duration),
        (qat, disks, seed): (Option<Arc<Qat>>, bool, Option<Arc<dyn delta::Seed>>),
        once: bool,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: Option<&str>| folder.path().join(name.unwrap_or("dst"));
        let targets = names
            .iter()
            .map(|name| (name.map(str::to_string), UnixAddress::from(path(*name)).into()))
            .collect();
        let (sender, ended) = mpsc::channel();
        let host = Arc::new(TestHost { disks, ..TestHost::new(sender) });
        let config = ServerConfig {
            qat,
            targets,
            acceptor,
            decompress_threads: 2,
            page_size: u32::try_from(PAGE).unwrap(),
            grants,
            resume,
            silence,
            delta_cache: DELTA_CACHE,
            seed,
            history: HISTORY,
        };
        let server = Server::new(config, host.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let running = server.clone();
        let thread = Some(std::thread::spawn(move || running.run(&listener, once).unwrap()));
        Self { server, host, address, ended, folder, thread }
    }

    pub(crate) fn new() -> Self {
        Self::with(&[None], Grants::default())
    }

    /// The destination QEMU's listening socket.
    pub(crate) fn qemu(&self, name: Option<&str>) -> UnixListener {
        UnixListener::bind(self.folder.path().join(name.unwrap_or("dst"))).unwrap()
    }

    /// Waits until the receiver has printed this.
    pub(crate) fn says(&self, words: &str) {
        let until = Instant::now() + WATCHDOG;
        loop {
            let notices = self.host.notices.lock().unwrap().join("\n");
            if notices.contains(words) {
                return;
            }
            assert!(Instant::now() < until, "it does not say '{words}': {notices}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether the receiver has ended, as one for one migration does.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub(crate) fn result(&self) -> Result<DestinationEnd, RelayError> {
        self.ended.recv_timeout(WATCHDOG).expect("the session ends").1
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        // Twice: ends the sessions in any state.
        self.server.stop();
        self.server.stop();
        // A failed test must not also hang here.
        if let (false, Some(thread)) = (std::thread::panicking(), self.thread.take()) {
            thread.join().unwrap();
        }
    }
}

/// In the refusal of a receiver whose target has a session.
const BUSY: &str = "a migration to this target is in progress";

/// Bytes of delta cache that receivers grant in these tests.
pub(crate) const DELTA_CACHE: u64 = 64 << 20;
/// Bytes of histories that receivers grant in these tests.
pub(crate) const HISTORY: u64 = 16 << 20;

/// A running source relay.
pub(crate) struct Sending {
    pub(crate) path: PathBuf,
    pub(crate) notices: Receiver<String>,
    pub(crate) handle: relay::SourceHandle,
    source: Arc<Source>,
    thread: JoinHandle<Result<SourceEnd, RelayError>>,
}

/// The options of a source relay that tests change.
pub(crate) struct Options {
    pub(crate) codec: Codec,
    pub(crate) level: Option<i32>,
    pub(crate) auto: bool,
    pub(crate) threads: usize,
    pub(crate) links: u16,
    pub(crate) wait: bool,
    pub(crate) name: Option<String>,
    pub(crate) connector: Option<Connector>,
    pub(crate) resume: Duration,
    pub(crate) silence: Duration,
    pub(crate) setup_timeout: Duration,
    pub(crate) delta_cache: u64,
    /// The most pages of the receiver's seed.
    pub(crate) seed: u32,
    /// Bytes of histories.
    pub(crate) history: u64,
    pub(crate) accelerator: Option<Arc<Qat>>,
    /// Sends by codec qpl.
    pub(crate) qpl: Option<qpl::Qpl>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            codec: Codec::Zstd,
            level: None,
            auto: false,
            threads: 2,
            links: 2,
            wait: true,
            name: None,
            connector: None,
            resume: Duration::ZERO,
            silence: SILENCE,
            setup_timeout: relay::SETUP_TIMEOUT,
            delta_cache: 0,
            seed: 0,
            history: 0,
            accelerator: None,
            qpl: None,
        }
    }
}

pub(crate) fn config(peer: SocketAddr, options: Options) -> SourceConfig {
    SourceConfig {
        peer: peer.to_string(),
        connector: options.connector,
        settings: match options.qpl {
            Some(_) => Settings::qpl(),
            None => Settings::new(options.codec, options.level).unwrap(),
        },
        auto: options.auto.then(relay::AutoConfig::default),
        compress_threads: options.threads,
        compress_wait_thread: options.wait,
        max_bandwidth: None,
        turns: None,
        links: options.links,
        page_size: u32::try_from(PAGE).unwrap(),
        name: options.name,
        setup: Some(Setup::with_return_path()),
        resume: options.resume,
        silence: options.silence,
        connect_timeout: Duration::ZERO,
        answer_timeout: WATCHDOG,
        setup_timeout: options.setup_timeout,
        delta_cache: options.delta_cache,
        seed: options.seed,
        pages: None,
        history: options.history,
        qpl: options.qpl,
    }
}

impl Sending {
    pub(crate) fn new(to: &Receiving, peer: SocketAddr, options: Options) -> Self {
        let unique = options.name.clone().unwrap_or("src".into());
        let accelerator = options.accelerator.clone();
        let config = config(peer, options);
        let until = Instant::now() + WATCHDOG;
        let source = loop {
            let source = Source::connect_with(&config, accelerator.as_ref(), &mut |_| {});
            // A receiver reports a session's end before it frees the session's target.
            let busy = source.as_ref().is_err_and(|error| error.to_string().contains(BUSY));
            if !busy || Instant::now() > until {
                break source.unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        Self::running(source, to, &unique)
    }

    /// Runs a source relay that has connected.
    pub(crate) fn running(source: Source, to: &Receiving, unique: &str) -> Self {
        let path = to.folder.path().join(format!("{unique}-source"));
        let source = Arc::new(source);
        source.listen(&UnixAddress::from(path.clone())).unwrap();
        let (sender, notices) = mpsc::channel();
        let handle = source.handle();
        let running = source.clone();
        let thread = std::thread::spawn(move || {
            running.run(
                |notice| {
                    let _ = sender.send(notice.to_string());
                },
                || b"{\"end\":\"source\"}".to_vec(),
            )
        });
        Self { path, notices, handle, source, thread }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    /// Chunks sent as parts of histories so far.
    pub(crate) fn parts(&self) -> u64 {
        self.source.counters().history_parts.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Pages stored in the delta cache so far, and how many of them went as differences.
    pub(crate) fn deltas(&self) -> (u64, u64) {
        let counters = self.source.counters();
        let load =
            |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
        (load(&counters.delta_stored), load(&counters.delta_pages))
    }

    /// Pages of the receiver's seed that are known, and how many were not sent for that.
    pub(crate) fn seed(&self) -> (u64, u64) {
        let counters = self.source.counters();
        let load =
            |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
        (load(&counters.seed_offered), load(&counters.seed_pages))
    }

    /// Waits for the last offer of the receiver's seed.
    pub(crate) fn await_seed(&self, go_on: impl Fn() -> bool) {
        self.source.await_seed(WATCHDOG, go_on);
    }

    /// Plain bytes read from the source QEMU that the destination has not acknowledged.
    pub(crate) fn in_flight(&self) -> u64 {
        self.source.session().credits().flow().0
    }

    /// Whether the relay may read from its source QEMU's main connection.
    pub(crate) fn has_credit(&self) -> bool {
        let credits = self.source.session().credits();
        let permit = credits.permit_by(0, Some(Instant::now())).flatten();
        permit.map(|permit| credits.give_back(permit)).is_some()
    }

    /// Pieces compressed by a device.
    pub(crate) fn by_device(&self) -> u64 {
        by_device(&self.source.accelerators())
    }

    /// Counters of the codec threads that use libqpl.
    pub(crate) fn qpl(&self) -> Vec<qpl::Snapshot> {
        self.source.qpl()
    }

    /// Bytes read from the links.
    pub(crate) fn received(&self) -> u64 {
        self.source.session().bytes_in.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Whether the session has ended early.
    pub(crate) fn has_failed(&self) -> bool {
        self.source.session().failure().is_some()
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    pub(crate) fn result(self) -> Result<SourceEnd, RelayError> {
        self.thread.join().unwrap()
    }
}

/// Pieces processed by a device for these codec threads.
pub(crate) fn by_device(threads: &[qat::Snapshot]) -> u64 {
    threads.iter().map(|thread| thread.by_device).sum()
}

/// Whether `socket` becomes readable (or ends) within `wait`.
pub(crate) fn readable(socket: &UnixStream, wait: Duration) -> bool {
    let seconds = i64::try_from(wait.as_secs()).unwrap();
    let wait = Timespec { tv_sec: seconds, tv_nsec: i64::from(wait.subsec_nanos()) };
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut fds, Some(&wait)).unwrap() > 0
}

/// Waits until the destination of this relay may be starting the VM, or has it.
pub(crate) fn until_in_doubt(sending: &Sending) {
    let until = Instant::now() + WATCHDOG;
    while !sending.handle.in_doubt() {
        assert!(sending.is_running() && Instant::now() < until, "it is never in doubt");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All remaining bytes; a reset ends them like a close.
pub(crate) fn read_rest(mut socket: &UnixStream) -> Vec<u8> {
    let mut out = Vec::new();
    let mut piece = vec![0; 65536];
    loop {
        match socket.read(&mut piece) {
            Ok(n @ 1..) => out.extend_from_slice(&piece[..n]),
            // With a timeout a read ends like this if this process was stopped meanwhile.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return out,
        }
    }
}

/// Sends heartbeats on a link that a test holds and does not use, until it is cut: a session with a
/// silent peer ends after some seconds, which a slow machine may need.
pub(crate) fn keep_alive(mut link: Link) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while link.write_all(&Header::free(FrameType::Heartbeat, 0).to_bytes()).is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    })
}

/// Exactly `len` bytes.
pub(crate) fn read_exactly(mut socket: &UnixStream, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    socket.read_exact(&mut out).expect("the connection goes on");
    out
}

/// Pseudo-random numbers, the same each time.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next().to_le_bytes()[3]).collect()
    }
}

/// Zero, same-filled, text-like and incompressible pages.
pub(crate) fn pages(count: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut noise = Noise(seed | 1);
    let page = |noise: &mut Noise| match noise.next() % 8 {
        0 | 1 => vec![0; PAGE],
        2 => vec![0x5a; PAGE],
        3..=5 => {
            let word = noise.next().to_le_bytes();
            (0..PAGE).map(|i| word[i * i / 100 % 8] & 0x3f).collect()
        }
        _ => noise.bytes(PAGE),
    };
    (0..count).map(|_| page(&mut noise)).collect()
}

/// Offsets of a main stream's barrier markers.
pub(crate) fn marker_starts(main: &[u8]) -> Vec<usize> {
    let mut tokens = Vec::new();
    Tokeniser::new(Kind::Main, PAGE).feed(main, &mut tokens);
    let mut at = 0;
    let mut starts = Vec::new();
    for token in &tokens {
        if matches!(token, Token::Barrier { .. }) {
            starts.push(at);
        }
        at += token.len(PAGE);
    }
    starts
}

/// Ends of a channel's SYNC packets.
pub(crate) fn sync_ends(channel: &[u8]) -> Vec<usize> {
    let mut tokeniser = Tokeniser::new(Kind::Multifd, PAGE);
    tokeniser.feed(channel, &mut Vec::new());
    tokeniser.sync_ends().to_vec()
}

/// Offset of a synthetic main stream's end-of-stream tag.
pub(crate) fn tag_at(main: &[u8]) -> usize {
    let json = b"{\"page_size\"";
    let json = main.windows(json.len()).rposition(|part| part == json).expect("a description");
    assert_eq!(main[json - 6..json - 4], [0x00, 0x06]);
    json - 6
}

/// Compares without printing megabytes.
pub(crate) fn assert_same(got: &[u8], sent: &[u8], what: &str) {
    let differs = got.iter().zip(sent).position(|(got, sent)| got != sent);
    assert_eq!(differs, None, "{what} differs at this offset");
    assert_eq!(got.len(), sent.len(), "{what} has another length");
}

/// A whole migration that must succeed with every byte the same.
pub(crate) fn carries(streams: &Streams, options: Options, piece: usize, reader: Reader) {
    carries_to(&Receiving::new(), streams, options, piece, reader);
}

/// The same with a running receiver. Returns the number of pages that found no codec thread with
/// room.
pub(crate) fn carries_to(
    receiving: &Receiving,
    streams: &Streams,
    options: Options,
    piece: usize,
    reader: Reader,
) -> u64 {
    let start = |receiving: &Receiving| Sending::new(receiving, receiving.address, options);
    carries_by(receiving, streams, start, piece, reader)
}

/// The same with the source relay that `start` returns.
pub(crate) fn carries_by(
    receiving: &Receiving,
    streams: &Streams,
    start: impl FnOnce(&Receiving) -> Sending,
    piece: usize,
    reader: Reader,
) -> u64 {
    let destination = destination_qemu(receiving.qemu(None), streams, reader);
    let sending = start(receiving);
    let source = source_qemu(sending.path.clone(), streams.clone(), piece);
    let received = destination.join().unwrap();
    assert_same(&received.main, &streams.main, "main");
    for (id, (got, sent)) in received.channels.iter().zip(&streams.channels).enumerate() {
        assert_same(got, sent, &format!("channel {id}"));
    }
    assert_same(
        &source.join().unwrap(),
        &[&[0, 2, 0, 4, 0, 0, 0, 1][..], &SHUT_OK].concat(),
        "return path",
    );
    let relay = sending.source.clone();
    let end = sending.result().expect("the source relay succeeds");
    assert!(end.return_path);
    assert!(end.hidden_downtime.is_some_and(|time| !time.is_zero()));
    assert_eq!(end.peer_report, b"{\"end\":\"destination\"}");
    let end = receiving.result().expect("the destination relay succeeds");
    assert_eq!(end.peer_report, b"{\"end\":\"source\"}");
    relay.busy().0
}
