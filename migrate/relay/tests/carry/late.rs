//! A peer too busy for its half of TLS, or a source too busy for its half or its hello: the source
//! tries again, and no session is left behind.

use crate::fronts::Site as FrontSite;
use crate::harness::{bounded, carries_by, config, Options, Reader, Receiving, Sending, WATCHDOG};
use crate::identity::single;
use crate::secured::credentials;
use crate::starts::RESUME;
use relay::{RelayError, Source, SourceConfig};
use session::{Grants, SessionError};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;
use tls::{Acceptor, Authority, Connector, TlsError};

/// The bytes of one connection that the network loses.
#[derive(Clone, Copy, PartialEq)]
enum Lost {
    /// The peer's answers to a handshake that it has seen the beginning of: it is busy.
    Answers,
    /// Everything from the source, until the peer closes the connection: the source is busy.
    Questions,
    /// The last record from the source until then, which is the hello: the source is busy behind
    /// the handshake.
    Hello,
}

/// A network that loses something of one connection.
struct Network {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Network {
    fn new(to: SocketAddr, nth: usize) -> Self {
        Self::losing(Lost::Answers, to, nth)
    }

    fn losing(lost: Lost, to: SocketAddr, nth: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = connections.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let number = count.fetch_add(1, Ordering::Relaxed);
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
                let (back, forth) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let loses = |what| lost == what && number == nth;
                let (no_answers, no_questions) = (loses(Lost::Answers), loses(Lost::Questions));
                let no_hello = loses(Lost::Hello);
                std::thread::spawn(move || match (no_questions, no_hello) {
                    (true, _) => drop(io::copy(&mut &client, &mut io::sink())),
                    (_, true) => drop(pass_all_but_the_last_record(&client, &forth)),
                    _ => pass(&client, &forth),
                });
                std::thread::spawn(move || match no_answers {
                    true => drop(io::copy(&mut &server, &mut io::sink())),
                    false => pass(&server, &back),
                });
            }
        });
        Self { address, connections }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Passes a client's records on, those with encrypted bytes only when the next one comes. So the
/// handshake is whole as soon as the client has sent its hello, and the hello stays here.
fn pass_all_but_the_last_record(mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    const ENCRYPTED: u8 = 23;
    let mut held = Vec::new();
    loop {
        let mut record = vec![0; 5];
        from.read_exact(&mut record)?;
        to.write_all(&std::mem::take(&mut held))?;
        let length = u16::from_be_bytes([record[3], record[4]]);
        record.resize(5 + usize::from(length), 0);
        from.read_exact(&mut record[5..])?;
        match record[0] {
            ENCRYPTED => held = record,
            _ => to.write_all(&record)?,
        }
    }
}

/// A receiver over TLS, and a CA.
struct Site {
    folder: tempfile::TempDir,
    receiving: Receiving,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &[]).unwrap();
        let receiving = Receiving::resuming(&[None], Grants::default(), Some(acceptor), RESUME);
        Self { folder, receiving }
    }

    /// Through `network`, with patience for a busy peer.
    fn config(&self, network: &Network, links: u16) -> SourceConfig {
        let credentials = credentials(&self.folder, "source.example");
        let connector = Some(Connector::new(&credentials, "127.0.0.1").unwrap());
        let options = Options { links, connector, resume: RESUME, ..Options::default() };
        SourceConfig { answer_timeout: WATCHDOG, ..config(network.address, options) }
    }

    /// A whole migration by `source`.
    fn carries(&self, source: Source) {
        let start = |receiving: &Receiving| Sending::running(source, receiving, "src");
        carries_by(&self.receiving, &single(500), start, 0, Reader::Prompt);
    }
}

/// The error of a source that asks once, through a network that loses nothing.
fn refused_at_once(to: SocketAddr, config: impl Fn(&Network) -> SourceConfig) -> String {
    loop {
        let network = Network::new(to, usize::MAX);
        let mut said = Vec::new();
        let result =
            Source::connect_with(&config(&network), None, &mut |text| said.push(text.to_string()));
        let error = result.unwrap_err().to_string();
        // A thread that got no CPU for 5 s makes a handshake late: then it rightly asks again.
        if !said.iter().any(|text| text.contains("to answer")) {
            assert_eq!(network.connections(), 1, "{said:?}");
            return error;
        }
    }
}

fn is_late(error: &RelayError) -> bool {
    matches!(error, RelayError::Session(SessionError::Tls(TlsError::Late { .. })))
}

#[test]
fn a_peer_that_leaves_its_first_handshake_unanswered_is_asked_again() {
    bounded(|| {
        let site = Site::new();
        let network = Network::new(site.receiving.address, 0);
        let mut said = Vec::new();
        let config = site.config(&network, 1);
        let source = Source::connect_with(&config, None, &mut |text| said.push(text.to_string()));
        let source = source.expect("the second attempt");
        assert!(network.connections() >= 2);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("did not come in time; waiting up to"), "{said:?}");
        site.carries(source);
    });
}

/// W5: the peer closes a connection whose handshake has not come in 5 s.
#[test]
fn a_source_that_was_itself_too_late_for_its_handshake_asks_again() {
    bounded(|| {
        let site = Site::new();
        let network = Network::losing(Lost::Questions, site.receiving.address, 0);
        let source = Source::connect(&site.config(&network, 1)).expect("the second attempt");
        assert!(network.connections() >= 2);
        site.carries(source);
    });
}

/// W5, as above, and the source was late behind the handshake.
#[test]
fn a_source_that_was_too_late_for_its_hello_asks_again() {
    bounded(|| {
        let site = Site::new();
        let network = Network::losing(Lost::Hello, site.receiving.address, 0);
        let mut said = Vec::new();
        let config = site.config(&network, 1);
        let source = Source::connect_with(&config, None, &mut |text| said.push(text.to_string()));
        let source = source.expect("the second attempt");
        assert_eq!(network.connections(), 2);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("hello did not come within 5 s"), "{said:?}");
        site.carries(source);
    });
}

#[test]
fn a_source_without_tls_that_was_too_late_for_its_hello_asks_again() {
    bounded(|| {
        let receiving = Receiving::resuming(&[None], Grants::default(), None, RESUME);
        let network = Network::losing(Lost::Questions, receiving.address, 0);
        let options = Options { links: 1, resume: RESUME, ..Options::default() };
        let patient = SourceConfig { answer_timeout: WATCHDOG, ..config(network.address, options) };
        let source = Source::connect(&patient).expect("the second attempt");
        assert_eq!(network.connections(), 2);
        let start = |receiving: &Receiving| Sending::running(source, receiving, "src");
        carries_by(&receiving, &single(500), start, 0, Reader::Prompt);
    });
}

#[test]
fn a_hello_that_is_late_is_sent_once_without_patience() {
    bounded(|| {
        let site = Site::new();
        let network = Network::losing(Lost::Hello, site.receiving.address, 0);
        let once = SourceConfig { answer_timeout: Duration::ZERO, ..site.config(&network, 1) };
        let error = Source::connect(&once).unwrap_err();
        assert!(matches!(error, RelayError::Session(SessionError::HelloLate { .. })), "{error}");
        assert_eq!(network.connections(), 1);
        site.carries(Source::connect(&site.config(&network, 1)).expect("the target is free"));
    });
}

/// The peer may have read the hello: it has not waited as long as for a late one.
#[test]
fn a_peer_that_closes_the_connection_at_the_hello_is_asked_once() {
    bounded(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let network = Network::new(listener.local_addr().unwrap(), usize::MAX);
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let options = Options { links: 1, resume: RESUME, ..Options::default() };
        let patient = SourceConfig { answer_timeout: WATCHDOG, ..config(network.address, options) };
        let error = Source::connect(&patient).unwrap_err();
        let is_lost = matches!(error, RelayError::Session(SessionError::LinkLost { .. }));
        assert!(is_lost, "{error}");
        assert_eq!(network.connections(), 1);
    });
}

/// It may be no platen, which is known at once.
#[test]
fn a_peer_that_closes_the_connection_at_once_is_asked_once() {
    bounded(|| {
        let site = Site::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let error = refused_at_once(address, |network| site.config(network, 1));
        assert!(error.contains("it closed the connection during the handshake"), "{error}");
    });
}

#[test]
fn without_patience_the_first_attempt_decides_and_leaves_the_target_free() {
    bounded(|| {
        let site = Site::new();
        let network = Network::new(site.receiving.address, 0);
        let config = site.config(&network, 1);
        let once = SourceConfig { answer_timeout: Duration::ZERO, ..config.clone() };
        let error = Source::connect(&once).unwrap_err();
        assert!(is_late(&error), "{error}");
        assert_eq!(network.connections(), 1);
        site.carries(Source::connect(&config).expect("no session has the target"));
    });
}

/// W26: the migration begins with the links that there are.
#[test]
fn a_further_link_whose_handshake_is_unanswered_comes_later() {
    bounded(|| {
        let site = Site::new();
        let network = Network::new(site.receiving.address, 1);
        let source = Source::connect(&site.config(&network, 2)).expect("one link is enough");
        while network.connections() < 3 {
            std::thread::sleep(Duration::from_millis(10));
        }
        site.carries(source);
    });
}

/// W4a: the process of the session is slow to start, or the source's second hello is late.
#[test]
fn a_link_that_is_opened_again_and_left_unanswered_is_opened_once_more() {
    for lost in [Lost::Answers, Lost::Hello] {
        opened_once_more(lost);
    }
}

fn opened_once_more(lost: Lost) {
    bounded(move || {
        let site = FrontSite::new();
        let network = Network::losing(lost, site.address, 1);
        let options = Options {
            links: 1,
            connector: Some(site.connector()),
            name: Some("door:49152".into()),
            ..Options::default()
        };
        let patient = SourceConfig { answer_timeout: WATCHDOG, ..config(network.address, options) };
        let source = Source::connect(&patient).expect("the third connection");
        assert!(network.connections() >= 3);
        drop(source);
        let (_, end) = site.ended.recv_timeout(WATCHDOG).unwrap();
        let error = end.unwrap_err().to_string();
        assert!(error.contains("before a migration began"), "{error}");
    });
}

#[test]
fn a_peer_that_refuses_a_certificate_or_speaks_another_protocol_is_asked_once() {
    bounded(|| {
        let site = Site::new();
        let elsewhere = tempfile::tempdir().unwrap();
        Authority::at(elsewhere.path()).init(false).unwrap();
        let foreign = Connector::new(&credentials(&elsewhere, "source.example"), "127.0.0.1");
        let foreign = Some(foreign.unwrap());
        let to = site.receiving.address;
        let error = refused_at_once(to, |network| SourceConfig {
            connector: foreign.clone(),
            ..site.config(network, 1)
        });
        assert!(error.contains("not signed by the CA"), "{error}");
        let error = refused_at_once(to, |network| SourceConfig {
            connector: None,
            ..site.config(network, 1)
        });
        assert!(error.contains("this end takes TLS only"), "{error}");
    });
}
