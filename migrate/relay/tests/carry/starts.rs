//! Source relays that start, fail to start, and end before the migration; and answers for a lost
//! session.

use crate::bad_peers::send_main;
use crate::harness::{
    bounded, config, read_exactly, read_rest, Options, Receiving, Sending, WATCHDOG,
};
use crate::identity::single;
use crate::resume::hello;
use relay::{Host, RelayError, Server, ServerConfig, Source, UnixAddress};
use session::{dial, Grants, Hello, SessionError};
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::sync::{mpsc, Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longer than any test runs.
const RESUME: Duration = Duration::from_secs(3600);

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
    let until = std::time::Instant::now() + WATCHDOG;
    loop {
        match connect() {
            Ok(source) => return source,
            Err(error) if error.to_string().contains("in progress") => {
                assert!(std::time::Instant::now() < until, "{error}");
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_peer_that_comes_up_late_is_waited_for() {
    bounded(|| {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
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
        delta_cache: 0,
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
fn a_session_without_a_migration_does_not_use_up_once() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        let (address, running) = once(Arc::new(Carries), folder.path(), RESUME);
        let listener = std::os::unix::net::UnixListener::bind(folder.path().join("dst")).unwrap();
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
        let qemu = std::os::unix::net::UnixStream::connect(&path).unwrap();
        (&qemu).write_all(&single(3).main[..100]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, 100);
        drop(qemu);
        sending.join().unwrap().unwrap_err();
        running.join().unwrap();
    });
}

/// W28: the links are lost, the receiver has stopped waiting, and the source asks after that.
#[test]
fn a_receiver_for_one_migration_answers_for_one_that_was_lost() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        let resume = Duration::from_millis(500);
        let (address, running) = once(Arc::new(Carries), folder.path(), resume);
        let listener = std::os::unix::net::UnixListener::bind(folder.path().join("dst")).unwrap();
        let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
        let (link, welcome) = dial(&address.to_string(), None, &greeting).unwrap();
        let main = b"QEVM\0\0\0\x03";
        let link = send_main(link, main);
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, main.len());
        drop(link);
        // The receiver has given up.
        assert_eq!(read_rest(&destination), b"");
        let asking = Hello { token: Some(welcome.token), ask: true, ..greeting };
        let error = dial(&address.to_string(), None, &asking).unwrap_err();
        assert!(matches!(error, SessionError::Over { committed: false, .. }), "{error}");
        // The source was answered, and the receiver ends.
        running.join().unwrap();
    });
}

/// Runs a session to its end, and passes on what it says.
struct Says(Mutex<mpsc::Sender<String>>);

impl Host for Says {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &relay::Destination) {
        let _ = destination.run(Vec::new);
    }

    fn notice(&self, text: &str) {
        let _ = self.0.lock().unwrap().send(text.into());
    }
}

/// W28: the destination QEMU ends while no link is up, so that nobody can tell the source.
#[test]
fn a_receiver_for_one_migration_answers_for_one_that_ended_during_an_outage() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        let (sender, notices) = mpsc::channel();
        let host = Arc::new(Says(Mutex::new(sender)));
        let (address, running) = once(host, folder.path(), RESUME);
        let listener = std::os::unix::net::UnixListener::bind(folder.path().join("dst")).unwrap();
        let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
        let (link, welcome) = dial(&address.to_string(), None, &greeting).unwrap();
        let main = b"QEVM\0\0\0\x03";
        let link = send_main(link, main);
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, main.len());
        drop(link);
        while !notices.recv_timeout(WATCHDOG).unwrap().contains("waiting up to") {}
        drop(destination);
        while !notices.recv_timeout(WATCHDOG).unwrap().contains("answering for up to") {}
        let asking = Hello { token: Some(welcome.token), ask: true, ..greeting };
        let error = dial(&address.to_string(), None, &asking).unwrap_err();
        assert!(matches!(error, SessionError::Over { committed: false, .. }), "{error}");
        running.join().unwrap();
    });
}

#[test]
fn what_ends_a_relay_is_said_as_it_is() {
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
