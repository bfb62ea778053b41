//! A session that fails to open leaves its QEMU as the application had found it.

use crate::harness::{bounded, SILENCE, WATCHDOG};
use crate::resume::hello;
use relay::{Destination, Host, Server, ServerConfig, UnixAddress};
use rustix::net::sockopt::set_socket_linger;
use session::{dial, encode_preamble, Grants, Hello};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Prepared,
    Served(String),
    Said(String),
}

/// Tells what is asked of it, and prepares its QEMU no further before `gate` opens.
struct Tells {
    seen: Mutex<Sender<Seen>>,
    gate: Mutex<Receiver<()>>,
}

impl Tells {
    fn tell(&self, seen: Seen) {
        let _ = self.seen.lock().unwrap().send(seen);
    }
}

impl Host for Tells {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        self.tell(Seen::Prepared);
        let _ = self.gate.lock().unwrap().recv();
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &Destination) {
        let error = destination.run(Vec::new).unwrap_err();
        self.tell(Seen::Served(error.to_string()));
    }

    fn notice(&self, text: &str) {
        self.tell(Seen::Said(text.into()));
    }
}

struct Rig {
    folder: tempfile::TempDir,
    server: Arc<Server>,
    address: SocketAddr,
    seen: Receiver<Seen>,
    gate: Sender<()>,
    running: JoinHandle<()>,
}

impl Rig {
    fn new(grants: Grants) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ((told, seen), (gate, closed)) = (mpsc::channel(), mpsc::channel());
        let host = Arc::new(Tells { seen: Mutex::new(told), gate: Mutex::new(closed) });
        let config = ServerConfig {
            qat: None,
            targets: vec![(None, UnixAddress::from(folder.path().join("dst")).into())],
            acceptor: None,
            decompress_threads: 1,
            page_size: 4096,
            grants,
            resume: Duration::from_secs(30),
            silence: SILENCE,
            delta_cache: 0,
            seed: None,
            history: 0,
        };
        let server = Server::new(config, host).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = server.clone();
        let running = std::thread::spawn(move || serving.run(&listener, false).unwrap());
        Self { folder, server, address, seen, gate, running }
    }

    fn next(&self) -> Seen {
        self.seen.recv_timeout(WATCHDOG).expect("something is seen")
    }

    fn end(self) {
        self.server.stop();
        self.running.join().unwrap();
        drop(self.folder);
    }
}

/// Regression: only the session was removed, so that QEMU kept the settings of a migration that
/// never came, and nothing said that its target was free again.
#[test]
fn a_session_whose_first_link_is_lost_at_once_is_served_to_its_end() {
    bounded(|| {
        let rig = Rig::new(Grants::default());
        let mut source = TcpStream::connect(rig.address).unwrap();
        let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
        source.write_all(&encode_preamble("x", &greeting).unwrap()).unwrap();
        assert_eq!(rig.next(), Seen::Prepared);
        // The welcome cannot be written to a connection that was reset.
        set_socket_linger(&source, Some(Duration::ZERO)).unwrap();
        drop(source);
        rig.gate.send(()).unwrap();
        let Seen::Served(error) = rig.next() else { panic!("it is not served") };
        assert!(error.contains("first link could not be set up"), "{error}");
        let Seen::Said(text) = rig.next() else { panic!("nothing is said") };
        assert_eq!(text, "no migration has begun: the target is free again");
        rig.end();
    });
}

/// Regression: QEMU was prepared first, and kept the settings.
#[test]
fn no_qemu_is_prepared_for_a_session_that_gets_no_memory() {
    bounded(|| {
        // More than a process can map.
        let grants = Grants { chunk_bytes: 1 << 44, ..Grants::default() };
        let rig = Rig::new(grants);
        rig.gate.send(()).unwrap();
        let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
        let error = dial(&rig.address.to_string(), None, &greeting).unwrap_err().to_string();
        assert!(error.contains("cannot map"), "{error}");
        rig.server.stop();
        rig.running.join().unwrap();
        assert!(rig.seen.try_iter().all(|seen| seen != Seen::Prepared), "it was prepared");
    });
}
