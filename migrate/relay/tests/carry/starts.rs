//! Source relays that start, fail to start, and end before the migration; and answers for a lost
//! session.

use crate::bad_peers::send_main;
use crate::harness::{
    bounded, config, keep_alive, read_exactly, read_rest, readable, Options, Receiving, Sending,
    PAGE, SILENCE, WATCHDOG,
};
use crate::identity::single;
use crate::resume::{hello, AMPLE};
use relay::{Host, RelayError, Server, ServerConfig, Source, UnixAddress};
use rustix::event::{poll, PollFd, PollFlags};
use session::{dial, FrameType, Grants, Header, Hello, Link, Session, SessionError, Verdict};
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{mpsc, Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stream::synth::{MainStream, Section};

/// Longer than any test runs.
pub(crate) const RESUME: Duration = Duration::from_secs(3600);

#[test]
fn a_relay_that_ends_before_its_migration_frees_its_target_at_once() {
    bounded(|| {
        let receiving = Receiving::resuming(&[None], Grants::default(), None, RESUME);
        let to = || config(receiving.address, Options { resume: RESUME, ..Options::default() });
        for _ in 0..10 {
            // Its socket cannot be created.
            let source = retry(|| Source::connect(&to()));
            let error = source.listen(&"unix:/nonexistent/s".parse().unwrap()).unwrap_err();
            assert!(matches!(error, RelayError::Listen { .. }), "{error}");
            drop(source);
            let error = receiving.result().unwrap_err().to_string();
            assert!(error.contains("before a migration began"), "{error}");
        }
    });
}

/// The target is free once its session has ended, shortly after the ABORT.
fn retry(connect: impl Fn() -> Result<Source, RelayError>) -> Source {
    let until = Instant::now() + WATCHDOG;
    loop {
        match connect() {
            Ok(source) => return source,
            Err(error) if error.to_string().contains("in progress") => {
                assert!(Instant::now() < until, "{error}");
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_peer_that_starts_late_is_awaited() {
    bounded(|| {
        // At an address of its own: another test may get the port of one that all use.
        let taken = TcpListener::bind("127.80.76.2:0").unwrap();
        let address = taken.local_addr().unwrap();
        drop(taken);
        let mut late = config(address, Options::default());
        late.connect_timeout = WATCHDOG;
        let (said, notices) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            Source::connect_with(&late, None, &mut |text| said.send(text.to_string()).unwrap())
        });
        let notice = notices.recv_timeout(WATCHDOG).expect("it is said");
        assert!(
            notice.contains("waiting up to") && notice.contains(&address.to_string()),
            "{notice}"
        );
        let listener = TcpListener::bind(address).unwrap();
        // The peer does not speak the protocol, which is another error than no listener.
        let (mut stranger, _) = listener.accept().unwrap();
        stranger.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let error = waiting.join().unwrap().unwrap_err().to_string();
        assert!(!error.contains("refused"), "{error}");
        // Only once, however many attempts were made.
        assert!(notices.try_recv().is_err());
    });
}

/// A receiver that ends after one migration.
fn once(
    host: Arc<dyn Host>,
    folder: &std::path::Path,
    resume: Duration,
) -> (SocketAddr, JoinHandle<()>) {
    let config = ServerConfig {
        qat: None,
        targets: vec![(None, UnixAddress::from(folder.join("dst")).into())],
        acceptor: None,
        decompress_threads: 1,
        page_size: 4096,
        grants: Grants::default(),
        resume,
        silence: SILENCE,
        delta_cache: 0,
        seed: None,
        history: 0,
    };
    let server = Server::new(config, host).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (address, std::thread::spawn(move || server.run(&listener, true).unwrap()))
}

/// Runs a session to its end.
struct Carries;

impl Host for Carries {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &relay::Destination) {
        let _ = destination.run(Vec::new);
    }

    fn notice(&self, _: &str) {}
}

#[test]
fn a_session_without_a_migration_does_not_count_for_once() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        let (address, running) = once(Arc::new(Carries), folder.path(), RESUME);
        let listener = UnixListener::bind(folder.path().join("dst")).unwrap();
        for _ in 0..3 {
            drop(retry(|| Source::connect(&config(address, Options::default()))));
        }
        // The one migration that it accepts, which fails.
        let source = Arc::new(retry(|| Source::connect(&config(address, Options::default()))));
        let path = folder.path().join("src");
        source.listen(&UnixAddress::from(path.clone())).unwrap();
        let carrying = source.clone();
        let sending = std::thread::spawn(move || carrying.run(|_| {}, Vec::new));
        assert!(!running.is_finished(), "it was used up");
        let qemu = UnixStream::connect(&path).unwrap();
        (&qemu).write_all(&single(3).main[..100]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, 100);
        drop(qemu);
        sending.join().unwrap().unwrap_err();
        running.join().unwrap();
    });
}

/// Runs a session to its end, and passes on the session and its messages.
struct Says {
    notices: Mutex<mpsc::Sender<String>>,
    sessions: Mutex<mpsc::Sender<Arc<Session>>>,
}

impl Host for Says {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &relay::Destination) {
        let _ = self.sessions.lock().unwrap().send(destination.session().clone());
        let _ = destination.run(Vec::new);
    }

    fn notice(&self, text: &str) {
        let _ = self.notices.lock().unwrap().send(text.into());
    }
}

/// A receiver for one migration, and a main stream of a source that is played by hand.
struct Lost {
    _folder: tempfile::TempDir,
    address: SocketAddr,
    running: JoinHandle<()>,
    notices: mpsc::Receiver<String>,
    session: Arc<Session>,
    link: Link,
    destination: UnixStream,
    asking: Hello,
}

impl Lost {
    /// `resume`: how long the receiver waits for the source's links.
    fn new(resume: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (sender, notices) = mpsc::channel();
        let (sessions, opened) = mpsc::channel();
        let host = Says { notices: Mutex::new(sender), sessions: Mutex::new(sessions) };
        let (address, running) = once(Arc::new(host), folder.path(), resume);
        let listener = UnixListener::bind(folder.path().join("dst")).unwrap();
        let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
        let (link, welcome) = dial(&address.to_string(), None, &greeting).unwrap();
        let main = b"QEVM\0\0\0\x03";
        let link = send_main(link, main);
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, main.len());
        let session = opened.recv_timeout(WATCHDOG).unwrap();
        keep_alive(Link::from(link.socket().try_clone().unwrap()));
        let asking = Hello { token: Some(welcome.token), ask: true, ..greeting };
        Self { _folder: folder, address, running, notices, session, link, destination, asking }
    }

    /// Ends the source's link.
    fn cut(&self) {
        self.link.socket().shutdown(Shutdown::Both).unwrap();
    }

    fn waits_for(&self, words: &str) {
        while !self.notices.recv_timeout(WATCHDOG).unwrap().contains(words) {}
    }

    /// The receiver is still there for the question, and ends when it has answered.
    fn gets_its_answer(self) {
        self.waits_for("answering for up to");
        let error = dial(&self.address.to_string(), None, &self.asking).unwrap_err();
        assert!(
            matches!(error, SessionError::Over { answer: Verdict { committed: false, .. }, .. }),
            "{error}"
        );
        self.running.join().unwrap();
    }
}

/// W28: the links are lost, the receiver has stopped waiting, and the source asks after that.
#[test]
fn a_receiver_for_one_migration_answers_for_one_that_was_lost() {
    bounded(|| {
        // It answers for twice as long and 10 s.
        let lost = Lost::new(AMPLE);
        lost.cut();
        // The receiver has given up.
        assert_eq!(read_rest(&lost.destination), b"");
        lost.gets_its_answer();
    });
}

/// W28: the destination QEMU ends while no link is up, so that the source gets no report.
#[test]
fn a_receiver_for_one_migration_answers_for_one_that_ended_during_an_outage() {
    bounded(|| {
        let lost = Lost::new(RESUME);
        lost.cut();
        lost.waits_for("waiting up to");
        lost.destination.shutdown(Shutdown::Both).unwrap();
        lost.gets_its_answer();
    });
}

/// W28: the session ends over a link that has not been found dead yet: it takes no bytes.
#[test]
fn a_receiver_for_one_migration_answers_for_one_whose_source_was_not_reached() {
    bounded(|| {
        let lost = Lost::new(RESUME);
        // No thread reads the link: the ABORT stands behind bytes of the return path.
        let destination = lost.destination.try_clone().unwrap();
        let flood =
            std::thread::spawn(move || while (&destination).write_all(&[0xff; 16384]).is_ok() {});
        let until = Instant::now() + WATCHDOG;
        while !lost.session.link_progress().0 {
            assert!(Instant::now() < until, "the link takes all bytes");
            std::thread::sleep(Duration::from_millis(1));
        }
        lost.session.fail(SessionError::Local { reason: "the test".into() });
        flood.join().unwrap();
        lost.gets_its_answer();
    });
}

/// W28: the source ends the session itself, and does not know whether the destination may run.
#[test]
fn a_receiver_for_one_migration_answers_a_source_that_ended_it_in_doubt() {
    bounded(|| {
        let mut lost = Lost::new(RESUME);
        let note = br#"{"reason":"the test","committed":false,"asks":true}"#;
        let header = Header::free(FrameType::Abort, u32::try_from(note.len()).unwrap());
        lost.link.write_all(&[&header.to_bytes()[..], note].concat()).unwrap();
        lost.gets_its_answer();
    });
}

#[test]
fn a_relay_reports_why_it_ends() {
    bounded(|| {
        let receiving = Receiving::new();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        sending.handle.end("the source QEMU refused to migrate");
        let error = sending.result().unwrap_err().to_string();
        assert!(error.contains("refused to migrate") && !error.contains("the user"), "{error}");
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("refused to migrate") && !error.contains("the user"), "{error}");
    });
}

/// Ends its session when the connection to QEMU was made, and has not carried a byte.
#[derive(Default)]
struct EndsWhenConnected(Mutex<Option<Arc<Session>>>);

impl Host for EndsWhenConnected {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn connected(&self, _: &relay::QemuSocket) -> Result<(), String> {
        let session = self.0.lock().unwrap().take().expect("the session runs");
        session.fail(SessionError::Local { reason: "the end of the test".into() });
        // Until the deciding thread is about to close QEMU's connections.
        std::thread::sleep(Duration::from_millis(30));
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &relay::Destination) {
        *self.0.lock().unwrap() = Some(destination.session().clone());
        let _ = destination.run(Vec::new);
    }

    fn notice(&self, _: &str) {}
}

/// Begins a migration, and again as long as the relay closes the connection before the first bytes
/// have come: this thread may stand still before it writes them. Returns the source's socket, and
/// the destination's unless the relay has ended first.
fn begin_in_time(
    sending: &Sending,
    listener: &UnixListener,
    bytes: &[u8],
) -> (UnixStream, Option<UnixStream>) {
    loop {
        let source = sending.connect();
        let _ = (&source).write_all(bytes);
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&source, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        if fds[0].revents().contains(PollFlags::IN) {
            return (source, Some(listener.accept().unwrap().0));
        }
        match sending.notices.recv_timeout(WATCHDOG) {
            Ok(said) => assert!(said.contains("closed a connection that wrote"), "{said}"),
            Err(mpsc::RecvTimeoutError::Disconnected) => return (source, None),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("its end is not explained"),
        }
    }
}

/// QEMU 11.1 that is cancelled there can wait for its connection to end, and its VM with it.
#[test]
fn a_source_that_is_silent_behind_its_header_is_closed() {
    bounded(|| {
        let short = || Options { setup_timeout: Duration::from_millis(300), ..Options::default() };
        let mut set_up = MainStream::new(PAGE);
        set_up.file_header().section(Section::Start);
        set_up.block_table(&[("pc.ram", 1 << 30)]).end_of_section();
        let set_up = set_up.take();
        let header = MainStream::new(PAGE).file_header().take();
        // The header, and all of the setup.
        for begun in [&header, &set_up] {
            let receiving = Receiving::new();
            let listener = receiving.qemu(None);
            let sending = Sending::new(&receiving, receiving.address, short());
            let (source, _destination) = begin_in_time(&sending, &listener, begun);
            assert_eq!(read_rest(&source), b"", "closed");
            let error = sending.result().unwrap_err().to_string();
            assert!(error.contains("sent nothing for 0 s"), "{error}");
            receiving.result().unwrap_err();
        }

        // Behind the first part of its RAM a source may be silent for any time.
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, short());
        let mut begun = MainStream::new(PAGE);
        begun.file_header().section(Section::Start);
        begun.block_table(&[("pc.ram", 1 << 30)]).end_of_section();
        begun.section(Section::Part).end_of_section();
        let (source, _destination) = begin_in_time(&sending, &listener, &begun.take());
        assert!(!readable(&source, Duration::from_secs(1)), "closed");
        assert!(sending.is_running());
        drop(source);
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

/// The same QEMU, told by platen to cancel: its VM does not wait for the whole time of a setup.
#[test]
fn a_source_that_is_cancelled_in_its_setup_and_closes_nothing_is_closed() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let header = MainStream::new(PAGE).file_header().take();
        let (source, _destination) = begin_in_time(&sending, &listener, &header);
        assert!(sending.handle.forbid_commit());
        assert_eq!(read_rest(&source), b"", "closed");
        let error = sending.result().unwrap_err().to_string();
        assert!(error.contains("probably cancelled"), "{error}");
        receiving.result().unwrap_err();
    });
}

/// QEMU would take it for its main channel, and refuse the migration that comes next.
#[test]
fn a_destination_never_gets_a_connection_without_a_byte_however_the_session_ends() {
    bounded(|| {
        for _ in 0..20 {
            let folder = Receiving::new();
            let listener = folder.qemu(None);
            let host = Arc::new(EndsWhenConnected::default());
            let (address, running) = once(host, folder.folder.path(), Duration::ZERO);
            let sending = Sending::new(&folder, address, Options::default());
            let source = sending.connect();
            (&source).write_all(&single(3000).main).unwrap_or(());
            let (destination, _) = listener.accept().unwrap();
            assert!(read_rest(&destination).starts_with(b"QEVM"), "no byte came");
            drop(source);
            sending.result().unwrap_err();
            running.join().unwrap();
        }
    });
}
