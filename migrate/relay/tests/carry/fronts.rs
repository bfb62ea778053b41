//! W4a, W4b: sessions that a front opens and another server carries; QEMU's connections by TCP.

use crate::cutter::Cutter;
use crate::harness::{
    assert_same, bounded, config, read_exactly, read_rest, tag_at, Ended, Options, Receiving,
    TestHost, A_WHILE, DELTA_CACHE, HISTORY, PAGE, SHUT_OK, SILENCE, WATCHDOG,
};
use crate::identity::single;
use crate::resume::{hello, RESUME};
use crate::secured::credentials;
use relay::{
    Entrance, Front, FrontConfig, Promise, QemuAddress, QemuSocket, RelayError, Server,
    ServerConfig, Source, Switchboard,
};
use rustix::fd::{AsFd, BorrowedFd};
use session::{dial, Grants, Hello, Histories, SessionError};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tls::{Acceptor, Authority, Connector};

type Links = Sender<(TcpStream, String)>;

/// Has each session in a server of its own, as a service has each in a process.
struct Board {
    acceptor: Acceptor,
    qemu: SocketAddr,
    /// No server takes a link.
    is_busy: AtomicBool,
    sessions: Mutex<HashMap<String, Links>>,
    notices: Mutex<Vec<String>>,
    ended: Mutex<Sender<Ended>>,
}

impl Switchboard for Board {
    fn holds(&self, session: &str) -> bool {
        self.sessions.lock().unwrap().contains_key(session)
    }

    fn hand_on(&self, session: &str, socket: TcpStream, peer: &str) -> Result<(), TcpStream> {
        match self.sessions.lock().unwrap().get(session) {
            Some(links) if !self.is_busy.load(Ordering::Acquire) => {
                links.send((socket, peer.into())).unwrap();
                Ok(())
            }
            _ => Err(socket),
        }
    }

    fn open(&self, promise: Promise) -> Result<(), String> {
        assert_eq!(promise.owner.names, ["source.example"]);
        let name = promise.hello.name.clone();
        if name.as_deref() != Some("door:49152") {
            return Err("no such door".into());
        }
        let config = ServerConfig {
            qat: None,
            targets: vec![(name, QemuAddress::Tcp(self.qemu))],
            acceptor: Some(self.acceptor.clone()),
            decompress_threads: 2,
            page_size: u32::try_from(PAGE).unwrap(),
            grants: Grants::default(),
            resume: WATCHDOG,
            silence: SILENCE,
            delta_cache: promise.hello.delta_cache,
            seed: None,
            history: promise.hello.histories.map_or(0, Histories::bytes),
        };
        let host = TestHost::new(self.ended.lock().unwrap().clone());
        let server = Server::new(config, Arc::new(host)).unwrap();
        let (links, taken) = mpsc::channel();
        self.sessions.lock().unwrap().insert(promise.hello.session.clone(), links);
        std::thread::spawn(move || server.carry(&promise, &taken).unwrap());
        Ok(())
    }

    fn notice(&self, text: &str) {
        self.notices.lock().unwrap().push(text.into());
    }
}

/// A front that runs, and the QEMU behind its sessions.
pub(crate) struct Site {
    folder: tempfile::TempDir,
    board: Arc<Board>,
    qemu: TcpListener,
    pub(crate) address: SocketAddr,
    pub(crate) ended: Receiver<Ended>,
    stop: Arc<AtomicBool>,
}

impl Site {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &[]).unwrap();
        let qemu = TcpListener::bind("127.0.0.1:0").unwrap();
        let (ended, ends) = mpsc::channel();
        let board = Arc::new(Board {
            acceptor: acceptor.clone(),
            qemu: qemu.local_addr().unwrap(),
            is_busy: AtomicBool::new(false),
            sessions: Mutex::default(),
            notices: Mutex::default(),
            ended: Mutex::new(ended),
        });
        let grants = Grants::default();
        let page_size = u32::try_from(PAGE).unwrap();
        let (delta_cache, history) = (DELTA_CACHE, HISTORY);
        let config = FrontConfig { acceptor, page_size, grants, delta_cache, history };
        let front = Front::new(config, board.clone());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        std::thread::spawn(move || {
            front.run(&listener, || !stopping.load(Ordering::Acquire)).unwrap();
        });
        Self { folder, board, qemu, address, ended: ends, stop }
    }

    pub(crate) fn connector(&self) -> Connector {
        Connector::new(&credentials(&self.folder, "source.example"), "127.0.0.1").unwrap()
    }

    fn source(&self, name: &str, delta_cache: u64) -> Result<Source, RelayError> {
        let options = Options {
            connector: Some(self.connector()),
            name: Some(name.into()),
            resume: WATCHDOG,
            delta_cache,
            ..Options::default()
        };
        Source::connect(&config(self.address, options))
    }

    fn dial(&self, hello: &Hello) -> SessionError {
        dial(&self.address.to_string(), Some(&self.connector()), hello).unwrap_err()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// QEMU's connections by TCP.
struct Door(TcpListener);

impl Entrance for Door {
    fn prepare(&self) -> io::Result<()> {
        self.0.set_nonblocking(true)
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        Ok(self.0.accept()?.0.into())
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn address(&self) -> String {
        "the door".into()
    }
}

#[test]
fn a_session_is_carried_by_another_server_and_qemu_s_bytes_by_tcp() {
    bounded(|| {
        let site = Site::new();
        let source = Arc::new(site.source("door:49152", 1 << 20).unwrap());
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = door.local_addr().unwrap();
        source.accept_on(Arc::new(Door(door))).unwrap();
        let running = source.clone();
        let relay = std::thread::spawn(move || running.run(|_| {}, || b"{}".to_vec()));
        let streams = single(2500);
        let mut qemu = TcpStream::connect(at).unwrap();
        qemu.set_read_timeout(Some(WATCHDOG)).unwrap();
        let (mut writing, bytes) = (qemu.try_clone().unwrap(), streams.main.clone());
        let writer = std::thread::spawn(move || writing.write_all(&bytes).unwrap());
        let (mut destination, _) = site.qemu.accept().unwrap();
        let mut got = vec![0; streams.main.len()];
        destination.read_exact(&mut got).unwrap();
        assert_same(&got, &streams.main, "main");
        destination.write_all(&SHUT_OK).unwrap();
        let mut shut = [0; 8];
        qemu.read_exact(&mut shut).unwrap();
        assert_eq!(shut, SHUT_OK);
        writer.join().unwrap();
        drop((qemu, destination));
        let end = relay.join().unwrap().expect("the source relay succeeds");
        assert!(end.return_path);
        let (name, end) = site.ended.recv_timeout(WATCHDOG).unwrap();
        assert_eq!(name.as_deref(), Some("door:49152"));
        assert!(end.unwrap().confirmed);
        // All links had passes: none was a stranger.
        let notices = site.board.notices.lock().unwrap();
        assert!(notices.is_empty(), "{notices:?}");
    });
}

/// A door whose QEMU may have left without a sign in its connections.
struct Left(Door, AtomicBool);

impl Entrance for Left {
    fn prepare(&self) -> io::Result<()> {
        self.0.prepare()
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        self.0.accept()
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.0.readiness()
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn has_left(&self, _: &QemuSocket) -> bool {
        self.1.load(Ordering::Acquire)
    }

    fn address(&self) -> String {
        self.0.address()
    }
}

/// W20: the end of a TCP connection waits at the source, behind bytes that the relay has no credit
/// to read.
#[test]
fn a_source_that_left_in_an_outage_does_not_have_its_tag_delivered() {
    bounded(|| {
        let receiving = Receiving::resuming(&[None], Grants::default(), None, RESUME);
        let listener = receiving.qemu(None);
        let cutter = Cutter::new(receiving.address, None);
        let options = Options { links: 1, resume: RESUME, ..Options::default() };
        let source = Arc::new(Source::connect(&config(cutter.address, options)).unwrap());
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut qemu = TcpStream::connect(door.local_addr().unwrap()).unwrap();
        let door = Arc::new(Left(Door(door), AtomicBool::new(false)));
        source.accept_on(door.clone()).unwrap();
        let running = source.clone();
        let relay = std::thread::spawn(move || running.run(|_| {}, || b"{}".to_vec()));
        let main = single(50).main;
        qemu.write_all(&main[..1000]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, 1000), &main[..1000], "main");
        let until = Instant::now() + WATCHDOG;
        let wait = |is_done: &dyn Fn() -> bool| {
            while !is_done() {
                assert!(Instant::now() < until, "it never happens");
                std::thread::sleep(A_WHILE / 10);
            }
        };
        cutter.hold();
        wait(&|| source.session().has_lost_its_links());
        qemu.write_all(&main[1000..]).unwrap();
        let read = || source.counters().plain.load(Ordering::Relaxed);
        wait(&|| read() == main.len() as u64);
        // Its last STILL_OPEN is queued.
        std::thread::sleep(A_WHILE);
        door.1.store(true, Ordering::Release);
        cutter.release();
        wait(&|| !source.session().has_lost_its_links());
        std::thread::sleep(A_WHILE);
        drop(qemu);
        let got = read_rest(&destination);
        let (tag, got) = (tag_at(&main), 1000 + got.len());
        assert!(got <= tag, "what starts the VM, at {tag}, was delivered, {got} bytes in all");
        relay.join().unwrap().unwrap_err();
        receiving.result().unwrap_err();
    });
}

#[test]
fn hellos_that_open_no_session_get_the_reason() {
    bounded(|| {
        let site = Site::new();
        let error = site.source("door:1", 0).unwrap_err().to_string();
        assert!(error.contains("no such door"), "{error}");
        let door = Hello { name: Some("door:49152".into()), ..hello() };
        // An older client, which cannot open link 0 again.
        let error = site.dial(&Hello { again: false, ..door.clone() }).to_string();
        assert!(error.contains("the same platen on both hosts"), "{error}");
        let error = site.dial(&Hello { again: true, page_size: 65536, ..door.clone() }).to_string();
        assert!(error.contains("page size 65536"), "{error}");
        // A link of an unknown session, with and without a pass.
        for pass in [true, false] {
            let token = Some("7".repeat(32));
            let link = Hello { again: true, token, pass, ..door.clone() };
            let error = site.dial(&link).to_string();
            assert!(error.contains("no such session"), "{error}");
        }
        assert!(site.board.sessions.lock().unwrap().is_empty());
    });
}

/// The source is told to come again, and does not: the session ends.
#[test]
fn a_session_whose_link_does_not_return_ends() {
    bounded(|| {
        let site = Site::new();
        let asked = Hello { name: Some("door:49152".into()), again: true, ..hello() };
        let connector = site.connector();
        let peer = site.address.to_string();
        let (_, welcome) = dial(&peer, Some(&connector), &asked).unwrap();
        assert!(welcome.again && welcome.pass);
        let (_, end) = site.ended.recv_timeout(WATCHDOG).unwrap();
        let error = end.unwrap_err().to_string();
        assert!(error.contains("has not opened its first link again"), "{error}");
    });
}

/// A source that learns that its session is gone ends its migration.
#[test]
fn a_session_whose_process_takes_no_link_now_is_not_said_to_be_gone() {
    bounded(|| {
        let site = Site::new();
        let asked = Hello { name: Some("door:49152".into()), again: true, ..hello() };
        let connector = site.connector();
        let peer = site.address.to_string();
        let (_, welcome) = dial(&peer, Some(&connector), &asked).unwrap();
        let link = Hello { token: Some(welcome.token), pass: true, ..asked };
        site.board.is_busy.store(true, Ordering::Release);
        let error = site.dial(&link);
        let ends = matches!(error, SessionError::Refused { .. } | SessionError::Over { .. });
        assert!(!ends, "{error}");
        site.board.is_busy.store(false, Ordering::Release);
        dial(&peer, Some(&connector), &link).unwrap();
    });
}

/// The identifier of a session can be read on the network, in the passes of its links.
#[test]
fn a_session_s_identifier_opens_no_second_session() {
    bounded(|| {
        let site = Site::new();
        let asked = Hello { name: Some("door:49152".into()), again: true, ..hello() };
        let connector = site.connector();
        let peer = site.address.to_string();
        let (_, welcome) = dial(&peer, Some(&connector), &asked).unwrap();
        let error = site.dial(&asked);
        assert!(matches!(error, SessionError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("the session exists already"), "{error}");
        // The first one is as it was: its owner opens its link.
        let link = Hello { token: Some(welcome.token), pass: true, ..asked };
        dial(&peer, Some(&connector), &link).unwrap();
    });
}
