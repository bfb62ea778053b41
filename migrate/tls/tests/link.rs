//! Links over real sockets: refusals and their messages on both sides, data that gets through, and
//! the effect of damage. The record layer is tested against rustls's own connections, so that both
//! ends cannot be wrong in the same way.

#[path = "link/strangers.rs"]
mod strangers;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tls::{Acceptor, Authority, Channel, Connector, Credentials, TlsError};

struct Hosts {
    folder: tempfile::TempDir,
}

impl Hosts {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        Self { folder }
    }

    fn host(&self, name: &str) -> PathBuf {
        Authority::at(self.folder.path()).issue(&[name.into()], 30, true).unwrap().dir
    }

    fn credentials(&self, name: &str) -> Credentials {
        load(&self.host(name))
    }
}

fn load(dir: &Path) -> Credentials {
    Credentials::load(&dir.join("ca.pem"), &dir.join("cert.pem"), &dir.join("key.pem")).unwrap()
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

type Shaken = Result<Channel, TlsError>;

/// Both handshakes, and the sockets.
fn shake(connector: Connector, acceptor: Acceptor) -> ((Shaken, TcpStream), (Shaken, TcpStream)) {
    let (client, server) = sockets();
    let serving = thread::spawn(move || (acceptor.accept(&server, "client", soon()), server));
    let shaken = connector.connect(&client, "server", soon());
    ((shaken, client), serving.join().unwrap())
}

/// The errors of both sides when one refuses the other.
fn refusal(connector: Connector, acceptor: Acceptor) -> (String, String) {
    let (client, server) = sockets();
    let serving =
        thread::spawn(move || acceptor.accept(&server, "client", soon()).unwrap_err().to_string());
    let client_says = match connector.connect(&client, "server", soon()) {
        Err(error) => error.to_string(),
        // In TLS 1.3 the handshake ends for a client before its certificate has been checked; the
        // alert arrives with the first read.
        Ok(mut channel) => {
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            read(&mut channel.reader, &client, &mut [0; 9]).unwrap_err().to_string()
        }
    };
    (client_says, serving.join().unwrap())
}

fn both(hosts: &Hosts) -> (Connector, Acceptor) {
    let (a, b) = (hosts.credentials("a.example"), hosts.credentials("b.example"));
    (Connector::new(&a, "b.example").unwrap(), Acceptor::new(&b, &[]).unwrap())
}

/// Waits until something can be read, then reads.
fn read(reader: &mut tls::Reader, socket: &TcpStream, out: &mut [u8]) -> io::Result<usize> {
    loop {
        match reader.read(socket, out) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn never(_: &io::Error) -> bool {
    false
}

/// Reads to the end in pieces of odd sizes.
fn read_all(channel: &mut tls::Reader, socket: &TcpStream) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    let sizes = [1, 48, 20, 557_056, 7, 16_385, 16_384, 100_000];
    let mut piece = vec![0; 557_056];
    for size in sizes.into_iter().cycle() {
        match channel.read(socket, &mut piece[..size]) {
            Ok(0) => return Ok(all),
            Ok(n) => all.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("the sizes go round")
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[2]
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn bytes_flow_both_ways_at_once_and_the_end_is_signalled() {
    let hosts = Hosts::new();
    let (connector, acceptor) = both(&hosts);
    let ((client, client_socket), (server, server_socket)) = shake(connector, acceptor);
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.peer.names, ["b.example"]);
    assert_eq!(server.peer.names, ["a.example"]);
    let sent = noise(3_000_001);
    thread::scope(|scope| {
        for (writer, socket) in
            [(&mut client.writer, &client_socket), (&mut server.writer, &server_socket)]
        {
            let sent = &sent;
            scope.spawn(move || {
                let mut rest = &sent[..];
                for size in [0, 1, 68, 16_384, 544_324, 16_383, 16_385, usize::MAX] {
                    let (now, behind) = rest.split_at(size.min(rest.len()));
                    let (head, body) = now.split_at(now.len().min(48));
                    writer.write_all(socket, &[head, &[], body], never).unwrap();
                    rest = behind;
                }
                writer.close(socket);
                socket.shutdown(Shutdown::Write).unwrap();
            });
        }
        for (reader, socket) in
            [(&mut client.reader, &client_socket), (&mut server.reader, &server_socket)]
        {
            let sent = &sent;
            scope.spawn(move || {
                assert!(read_all(reader, socket).unwrap() == *sent);
                assert_eq!(reader.read(socket, &mut [0; 5]).unwrap(), 0, "the end stays the end");
            });
        }
    });
}

fn stock_client(dir: &Path) -> rustls::ClientConfig {
    let certificate = CertificateDer::from_pem_file(dir.join("cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(dir.join("ca.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key)
        .unwrap()
}

/// rustls's own client against our server, with every suite; with `rekey` new keys in the middle.
fn against_rustls(suite: rustls::SupportedCipherSuite, rekey: bool) {
    let hosts = Hosts::new();
    let acceptor = Acceptor::new(&hosts.credentials("b.example"), &[]).unwrap();
    let (client, server) = sockets();
    let sent = noise(700_000);
    let expected = sent.clone();
    let serving = thread::spawn(move || {
        let mut channel = acceptor.accept(&server, "client", soon()).unwrap();
        let mut got = vec![0; expected.len()];
        let mut done = 0;
        while done < got.len() {
            done += read(&mut channel.reader, &server, &mut got[done..]).unwrap();
        }
        assert!(got == expected);
        // And back, with new keys of ours if the client requested them.
        channel.writer.write_all(&server, &[&got[..5], &got[5..]], never).unwrap();
        channel.writer.close(&server);
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read(&mut channel.reader, &server, &mut got).unwrap(), 0, "a clean end");
    });
    let dir = hosts.host("a.example");
    let mut config = stock_client(&dir);
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.cipher_suites = vec![suite];
    let roots = {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(dir.join("ca.pem")).unwrap()).unwrap();
        roots
    };
    let fresh = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    config = fresh.with_client_cert_resolver(config.client_auth_cert_resolver.clone());
    let name = ServerName::try_from("b.example").unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, client);
    stream.write_all(&sent[..300_000]).unwrap();
    if rekey {
        stream.conn.refresh_traffic_keys().unwrap();
    }
    stream.write_all(&sent[300_000..]).unwrap();
    stream.flush().unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == sent);
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    serving.join().unwrap();
}

#[test]
fn records_match_the_standard_for_every_cipher() {
    use rustls::crypto::aws_lc_rs::cipher_suite as suites;
    for suite in [
        suites::TLS13_AES_128_GCM_SHA256,
        suites::TLS13_AES_256_GCM_SHA384,
        suites::TLS13_CHACHA20_POLY1305_SHA256,
    ] {
        against_rustls(suite, false);
    }
}

#[test]
fn a_peer_that_updates_its_keys_is_followed_and_answered() {
    against_rustls(rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, true);
}

#[test]
fn a_certificate_of_another_ca_is_refused_with_the_reason_on_both_sides() {
    let (ours, theirs) = (Hosts::new(), Hosts::new());
    // The client finds the server's certificate wrong.
    let connector = Connector::new(&theirs.credentials("a.example"), "b.example").unwrap();
    let acceptor = Acceptor::new(&ours.credentials("b.example"), &[]).unwrap();
    let (client, server) = refusal(connector, acceptor);
    assert!(client.contains("not signed by the CA that this end knows"), "{client}");
    assert!(server.contains("does not know the CA of this end's certificate"), "{server}");
    // The server finds the client's certificate wrong.
    let mixed = theirs.host("a.example");
    std::fs::copy(ours.folder.path().join("ca.pem"), mixed.join("ca.pem")).unwrap();
    let connector = Connector::new(&load(&mixed), "b.example").unwrap();
    let acceptor = Acceptor::new(&ours.credentials("b.example"), &[]).unwrap();
    let (client, server) = refusal(connector, acceptor);
    assert!(server.contains("not signed by the CA that this end knows"), "{server}");
    assert!(client.contains("does not know the CA of this end's certificate"), "{client}");
}

#[test]
fn a_wrong_name_is_refused_with_the_reason_on_both_sides() {
    let hosts = Hosts::new();
    let (a, b) = (hosts.credentials("a.example"), hosts.credentials("10.0.0.2"));
    let connector = Connector::new(&a, "c.example").unwrap();
    let (client, server) = refusal(connector, Acceptor::new(&b, &[]).unwrap());
    assert!(client.contains("is for 10.0.0.2, not for c.example"), "{client}");
    assert!(server.contains("its name is not the one by which it was called"), "{server}");

    let connector = Connector::new(&a, "10.0.0.2").unwrap();
    let allowed = ["c.example".to_string(), "d.example".to_string()];
    let (client, server) = refusal(connector, Acceptor::new(&b, &allowed).unwrap());
    assert!(server.contains("is for a.example; allowed here: c.example, d.example"), "{server}");
    assert!(client.contains("none of the names that it allows"), "{client}");

    let connector = Connector::new(&a, "10.0.0.2").unwrap();
    let allowed = ["c.example".to_string(), "a.example".to_string()];
    let ((client, _), (server, _)) = shake(connector, Acceptor::new(&b, &allowed).unwrap());
    client.unwrap();
    server.unwrap();
}

#[test]
fn a_revoked_certificate_is_refused_by_either_end_and_another_of_the_same_name_is_not() {
    let hosts = Hosts::new();
    let (stolen, b) = (hosts.credentials("a.example"), hosts.credentials("b.example"));
    let number = stolen.fingerprint().unwrap();
    let careful = b.clone().refusing(vec![number]).unwrap();
    let connect = |from: &Credentials, to: &str| Connector::new(from, to).unwrap();
    let (client, server) =
        refusal(connect(&stolen, "b.example"), Acceptor::new(&careful, &[]).unwrap());
    assert!(server.contains(&format!("for a.example, {number}, is revoked")), "{server}");
    assert!(client.contains("on its list of revoked ones"), "{client}");
    // The thief answers in the host's place.
    let ((client, _), _) =
        shake(connect(&careful, "a.example"), Acceptor::new(&stolen, &[]).unwrap());
    let client = client.unwrap_err().to_string();
    assert!(client.contains(&format!("for a.example, {number}, is revoked")), "{client}");
    // The host has a new certificate.
    let renewed = hosts.credentials("a.example");
    let ((client, _), (server, _)) =
        shake(connect(&renewed, "b.example"), Acceptor::new(&careful, &[]).unwrap());
    client.unwrap();
    server.unwrap();
    let said = stolen.refusing(vec![number]).unwrap_err().to_string();
    assert!(said.contains("cert.pem") && said.contains("needs a new one"), "{said}");
}

#[test]
fn a_client_without_a_certificate_is_refused_with_the_reason() {
    let hosts = Hosts::new();
    let (client, server) = sockets();
    let acceptor = Acceptor::new(&hosts.credentials("b.example"), &[]).unwrap();
    let serving =
        thread::spawn(move || acceptor.accept(&server, "client", soon()).unwrap_err().to_string());
    let mut config = stock_client(&hosts.host("a.example"));
    config.client_auth_cert_resolver = Arc::new(NoCertificate);
    let name = ServerName::try_from("b.example").unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, client);
    let error = stream.read(&mut [0; 9]).unwrap_err().to_string();
    assert!(error.contains("CertificateRequired"), "{error}");
    let server = serving.join().unwrap();
    assert!(server.contains("shows no certificate"), "{server}");
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(
        &self,
        _: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// The client writes through a proxy that changes the ciphertext; returns what the server reads.
fn damaged(change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> (Vec<u8>, io::Error) {
    let hosts = Hosts::new();
    let (connector, acceptor) = both(&hosts);
    let ((client, client_socket), (server, server_socket)) = shake(connector, acceptor);
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    // The test reads the writer's output from the wire, changes it and sends it on.
    let (mut wire, tap) = sockets();
    let len = client.writer.write_all(&tap, &[&noise(100_000)], never).unwrap();
    client.writer.close(&tap);
    drop(tap);
    let mut bytes = Vec::new();
    wire.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, len + 24);
    (&client_socket).write_all(&change(bytes)).unwrap();
    client_socket.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    let mut piece = [0; 70_000];
    loop {
        match read(&mut server.reader, &server_socket, &mut piece) {
            Ok(0) => return (got, io::Error::other("a clean end")),
            Ok(n) => got.extend_from_slice(&piece[..n]),
            Err(error) => return (got, error),
        }
    }
}

#[test]
fn damage_and_truncation_are_detected_and_no_later_byte_is_read() {
    const RECORD: usize = 16_384 + 22;
    let plain = noise(100_000);
    let (got, error) = damaged(|bytes| bytes);
    assert!(got == plain && error.to_string() == "a clean end", "{error}");
    // Every kind of position in the second record: header, first and last byte, type, tag.
    for at in [0, 1, 3, 4, 5, 5 + 16_383, 5 + 16_384, RECORD - 1] {
        let (got, error) = damaged(|mut bytes| {
            bytes[RECORD + at] ^= 1;
            bytes
        });
        assert!(got == plain[..16_384], "{} bytes, changed at {at}", got.len());
        assert!(
            TlsError::of(&error).is_some() || error.kind() == io::ErrorKind::UnexpectedEof,
            "{error}"
        );
    }
    // Truncated at a record's end and within one: neither is a regular end.
    for cut in [RECORD, RECORD + 1, 3 * RECORD - 1, 5 * RECORD + 700] {
        let (got, error) = damaged(|mut bytes| {
            bytes.truncate(cut);
            bytes
        });
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        assert!(got == plain[..cut / RECORD * 16_384]);
    }
    // A record doubled, missing, or swapped with another.
    let twice = damaged(|bytes| [&bytes[..RECORD], &bytes].concat());
    let missing = damaged(|bytes| [&bytes[..RECORD], &bytes[2 * RECORD..]].concat());
    let swapped = damaged(|bytes| {
        [&bytes[..RECORD], &bytes[2 * RECORD..3 * RECORD], &bytes[RECORD..]].concat()
    });
    for (got, error) in [twice, missing, swapped] {
        assert!(got == plain[..16_384]);
        assert!(error.to_string().contains("does not authenticate"), "{error}");
    }
}

#[test]
fn a_socket_that_accepts_few_bytes_at_a_time_loses_none() {
    let hosts = Hosts::new();
    let (connector, acceptor) = both(&hosts);
    let ((client, client_socket), (server, server_socket)) = shake(connector, acceptor);
    let (mut client, mut server) = (client.unwrap(), server.unwrap());
    client_socket.set_write_timeout(Some(Duration::from_millis(3))).unwrap();
    server_socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    let sent = noise(8_000_000);
    let expected = sent.clone();
    let blocked = Arc::new(AtomicUsize::new(0));
    let has_blocked = blocked.clone();
    let reading = thread::spawn(move || {
        // Reads only after the writer has run into its timeout.
        let until = soon();
        while has_blocked.load(Ordering::SeqCst) == 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let mut got = vec![0; expected.len()];
        let (mut done, mut timeouts) = (0, 0);
        while done < got.len() {
            let end = got.len().min(done + 557_056);
            match read(&mut server.reader, &server_socket, &mut got[done..end]) {
                Ok(0) => panic!("it ended after {done} bytes"),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => timeouts += 1,
                Err(error) => panic!("{error}"),
            }
            if timeouts < 20 {
                // Pauses a few more times.
                thread::sleep(Duration::from_millis(5));
                timeouts += 1;
            }
        }
        assert!(got == expected);
    });
    for frame in sent.chunks(557_056) {
        let go_on = |error: &io::Error| {
            blocked.fetch_add(1, Ordering::SeqCst);
            // The second: with a timeout, if this process was stopped meanwhile.
            matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        };
        client.writer.write_all(&client_socket, &[frame], go_on).unwrap();
    }
    reading.join().unwrap();
    assert!(
        blocked.load(Ordering::SeqCst) > 0,
        "the socket never was full, so this has shown nothing"
    );
}
