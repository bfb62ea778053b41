//! W6: links over TLS carry the same bytes. A peer with the wrong identity gets nothing and does no
//! harm.

use crate::harness::{
    assert_same, bounded, carries_to, destination_qemu, keep_alive, read_exactly, read_rest,
    source_qemu, tag_at, Noise, Options, Reader, Receiving, Sending, Streams, WATCHDOG,
};
use crate::identity::{multifd, single};
use codec::Codec;
use session::{dial, Grants, Hello, SessionError, Verdict};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};
use stream::synth::Style;
use tls::{Acceptor, Authority, Connector, Credentials, TlsError};

/// A CA, and a receiver with its certificate.
struct Site {
    folder: tempfile::TempDir,
    receiving: Receiving,
}

impl Site {
    fn new(allowed: &[&str]) -> Self {
        Self::with_targets(&[None], allowed)
    }

    fn with_targets(targets: &[Option<&str>], allowed: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let allowed: Vec<_> = allowed.iter().map(|name| (*name).to_string()).collect();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &allowed).unwrap();
        let receiving = Receiving::secured(targets, Grants::default(), Some(acceptor));
        Self { folder, receiving }
    }

    /// A source host with a certificate of this CA.
    fn host(&self, name: &str) -> Connector {
        Connector::new(&credentials(&self.folder, name), "127.0.0.1").unwrap()
    }

    fn options(&self, links: u16) -> Options {
        Options { links, connector: Some(self.host("source.example")), ..Options::default() }
    }

    fn dial(&self, connector: Option<&Connector>) -> String {
        loop {
            match dial(&self.receiving.address.to_string(), connector, &hello()) {
                // A thread of one end got no CPU for seconds.
                Err(SessionError::Tls(TlsError::Late { .. })) => {}
                Err(error) => return error.to_string(),
                Ok(_) => panic!("it was let in"),
            }
        }
    }
}

pub(crate) fn credentials(folder: &tempfile::TempDir, name: &str) -> Credentials {
    let dir = Authority::at(folder.path()).issue(&[name.into()], 9, true).unwrap().dir;
    load(&dir)
}

fn load(dir: &Path) -> Credentials {
    let file = |name: &str| dir.join(name);
    Credentials::load(&file("ca.pem"), &file("cert.pem"), &file("key.pem")).unwrap()
}

fn hello() -> Hello {
    Hello { links: 2, codecs: vec!["zstd".into()], ..Hello::of_one_link(4096).unwrap() }
}

#[test]
fn every_byte_arrives_over_tls_on_one_link_and_on_four() {
    bounded(|| {
        for links in [1, 4] {
            let site = Site::new(&[]);
            carries_to(&site.receiving, &single(2500), site.options(links), 0, Reader::Prompt);
            assert_eq!(site.receiving.server.strangers(), 0);
        }
        let site = Site::new(&["other.example", "source.example"]);
        let streams = multifd(Style::Qemu92, 3, 5000);
        let options = Options { codec: Codec::Raw, ..site.options(4) };
        carries_to(&site.receiving, &streams, options, 30_011, Reader::Prompt);
    });
}

#[test]
fn a_refused_peer_gets_the_reason_and_a_migration_in_progress_continues() {
    bounded(|| {
        let site = Site::new(&["source.example"]);
        let streams = single(2500);
        let listener = site.receiving.qemu(None);
        let sending = Sending::new(&site.receiving, site.receiving.address, site.options(2));
        let socket = sending.connect();
        let half = streams.main.len() / 2;
        let (bytes, writing) = (streams.main.clone(), socket.try_clone().unwrap());
        let writer = std::thread::spawn(move || (&writing).write_all(&bytes[..half]).unwrap());
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, half), &streams.main[..half], "the first half");
        writer.join().unwrap();

        let said = site.dial(Some(&site.host("stranger.example")));
        assert!(said.contains("none of the names that it allows"), "{said}");
        let elsewhere = tempfile::tempdir().unwrap();
        Authority::at(elsewhere.path()).init(false).unwrap();
        let foreign = Connector::new(&credentials(&elsewhere, "source.example"), "127.0.0.1");
        let said = site.dial(Some(&foreign.unwrap()));
        assert!(said.contains("not signed by the CA that this end knows"), "{said}");
        // It trusts our CA, but its own certificate is another's.
        let dir = elsewhere.path().join("source.example");
        std::fs::copy(site.folder.path().join("ca.pem"), dir.join("ca.pem")).unwrap();
        let said = site.dial(Some(&Connector::new(&load(&dir), "127.0.0.1").unwrap()));
        assert!(said.contains("does not know the CA of this end's certificate"), "{said}");
        let misled =
            Connector::new(&credentials(&site.folder, "source.example"), "there.example").unwrap();
        let said = site.dial(Some(&misled));
        assert!(said.contains("is for 127.0.0.1, not for there.example"), "{said}");
        let said = site.dial(None);
        assert!(said.contains("this end takes TLS only"), "{said}");
        // Silence, half a handshake, noise.
        let idle: Vec<_> = [&b""[..], &[22, 3, 1, 2, 0, 1], &[0x55; 700]]
            .iter()
            .map(|bytes| {
                let mut socket = TcpStream::connect(site.receiving.address).unwrap();
                socket.write_all(bytes).unwrap();
                socket
            })
            .collect();

        let (bytes, writing) = (streams.main.clone(), socket.try_clone().unwrap());
        let writer = std::thread::spawn(move || (&writing).write_all(&bytes[half..]).unwrap());
        let rest = read_exactly(&destination, streams.main.len() - half);
        assert_same(&rest, &streams.main[half..], "the second half");
        writer.join().unwrap();
        (&destination).write_all(&crate::harness::SHUT_OK).unwrap();
        assert_eq!(read_exactly(&socket, 8), crate::harness::SHUT_OK);
        drop((destination, socket));
        sending.result().unwrap();
        site.receiving.result().unwrap();
        drop(idle);

        let until = Instant::now() + WATCHDOG;
        while site.receiving.server.strangers() < 8 {
            assert!(Instant::now() < until, "{} are counted", site.receiving.server.strangers());
            std::thread::sleep(Duration::from_millis(10));
        }
        // The notice of each follows.
        for words in [
            "is for stranger.example; allowed here: source.example",
            "does not know the CA of this end's certificate",
            "not signed by the CA that this end knows",
            "its name is not the one by which it was called",
            "started with --insecure",
            "does not speak TLS",
        ] {
            site.receiving.says(words);
        }
    });
}

#[test]
fn a_receiver_without_tls_reports_it_to_a_source_with_tls() {
    bounded(|| {
        let site = Site::new(&[]);
        let open = Receiving::new();
        let to = open.address.to_string();
        let error =
            dial(&to, Some(&site.host("source.example")), &hello()).unwrap_err().to_string();
        assert!(error.contains("without TLS: it was started with --insecure"), "{error}");
        open.says("this end was started with --insecure");
    });
}

#[test]
fn a_session_is_joined_by_its_own_certificate_only() {
    bounded(|| {
        let site = Site::new(&[]);
        let to = site.receiving.address.to_string();
        let owner = site.host("source.example");
        let mut hello = hello();
        let (link, welcome) = dial(&to, Some(&owner), &hello).unwrap();
        keep_alive(link);
        hello.link = 1;
        hello.token = Some(welcome.token);
        // Another host of the same CA that has obtained the token: it gets no link, and no answer
        // to a question, which would end the session.
        let thief = site.host("thief.example");
        let asking = Hello { ask: true, ..hello.clone() };
        for hello in [&hello, &asking] {
            match dial(&to, Some(&thief), hello) {
                Err(SessionError::Refused { reason, .. }) => {
                    assert!(reason.contains("not yours"), "{reason}")
                }
                other => panic!("{:?}", other.map(|(_, welcome)| welcome)),
            }
        }
        let _other = dial(&to, Some(&owner), &hello).unwrap();
        match dial(&to, Some(&owner), &asking) {
            Err(SessionError::Over {
                answer: Verdict { committed: false, .. }, reason, ..
            }) => {
                assert!(reason.contains("ends with this question"), "{reason}")
            }
            other => panic!("{:?}", other.map(|(_, welcome)| welcome)),
        }
    });
}

#[test]
fn one_receiver_serves_the_machines_it_allows_and_no_other() {
    bounded(|| {
        let site = Site::with_targets(&[Some("web"), Some("db")], &[]);
        let to = site.receiving.address.to_string();
        for (name, words) in [(Some("mail"), "'mail' is allowed here"), (None, "web, db")] {
            let mut hello = hello();
            hello.name = name.map(str::to_string);
            match dial(&to, Some(&site.host("source.example")), &hello) {
                Err(SessionError::Refused { reason, .. }) => {
                    assert!(reason.contains(words), "{reason}")
                }
                other => panic!("{:?}", other.map(|(_, welcome)| welcome)),
            }
        }
        let plans = [("web", single(900)), ("db", multifd(Style::Qemu72, 2, 900))];
        let running: Vec<_> = plans
            .iter()
            .map(|(name, streams)| {
                let qemu = site.receiving.qemu(Some(name));
                let destination = destination_qemu(qemu, streams, Reader::Prompt);
                let options = Options { name: Some((*name).into()), ..site.options(2) };
                let sending = Sending::new(&site.receiving, site.receiving.address, options);
                let source = source_qemu(sending.path.clone(), streams.clone(), 0);
                (destination, sending, source)
            })
            .collect();
        for ((destination, sending, source), (_, streams)) in running.into_iter().zip(&plans) {
            let received = destination.join().unwrap();
            assert_same(&received.main, &streams.main, "main");
            assert!(received.channels == streams.channels);
            source.join().unwrap();
            sending.result().unwrap();
            site.receiving.result().unwrap();
        }
    });
}

/// The damage to the first connection's ciphertext after a number of bytes from client to server.
#[derive(Clone, Copy)]
enum Harm {
    /// Both directions are cut.
    Cut,
    /// No more bytes are forwarded, and the end looks like an orderly one.
    Truncate,
    /// One bit is flipped.
    Flip,
}

/// A forwarder that does damage once.
fn harmful(to: SocketAddr, after: usize, harm: Harm) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(to).unwrap();
        let (mut back_from, mut back_to) =
            (server.try_clone().unwrap(), client.try_clone().unwrap());
        let back = std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(Shutdown::Write);
        });
        let mut bytes = vec![0; 1 << 16];
        let mut done = 0;
        let mut harmed = false;
        while let Ok(n @ 1..) = (&client).read(&mut bytes) {
            let at = after.saturating_sub(done);
            if !harmed && at < n {
                harmed = true;
                match harm {
                    Harm::Flip => bytes[at] ^= 4,
                    Harm::Cut => {
                        let _ = (&server).write_all(&bytes[..at]);
                        let _ = server.shutdown(Shutdown::Both);
                        let _ = client.shutdown(Shutdown::Both);
                        break;
                    }
                    Harm::Truncate => {
                        let _ = (&server).write_all(&bytes[..at]);
                        let _ = server.shutdown(Shutdown::Write);
                        break;
                    }
                }
            }
            done += n;
            if (&server).write_all(&bytes[..n]).is_err() {
                break;
            }
        }
        back.join().unwrap();
    });
    address
}

#[test]
fn ciphertext_that_is_cut_truncated_or_changed_frees_the_source_and_delivers_nothing_wrong() {
    bounded(|| {
        let mut noise = Noise(21);
        // More than can be in flight: a source that has sent everything when the damage shows is in
        // doubt, and rightly does not go on (W23).
        let pages: Vec<_> = (0..8000).map(|_| noise.bytes(4096)).collect();
        let sent = stream::synth::main_stream(Style::Qemu92, 4096, &pages);
        let streams = Streams { main: sent, channels: Vec::new() };
        // Within records, and at the length of one.
        for after in [60_000, 777_777, 5 + 16_384 + 17] {
            for harm in [Harm::Cut, Harm::Truncate, Harm::Flip] {
                let site = Site::new(&[]);
                let listener = site.receiving.qemu(None);
                let through = harmful(site.receiving.address, after, harm);
                let sending = Sending::new(&site.receiving, through, site.options(1));
                let source = sending.connect();
                // Without its end: with STILL_OPEN under way the source would rightly be in doubt.
                let early = streams.main.len() / 3 * 2;
                let (bytes, to) = (streams.main[..early].to_vec(), source.try_clone().unwrap());
                let writer = std::thread::spawn(move || {
                    let _ = (&to).write_all(&bytes);
                });
                listener.set_nonblocking(true).unwrap();
                assert_eq!(read_rest(&source), b"", "the source VM goes on");
                writer.join().unwrap();
                sending.result().unwrap_err();
                let error = site.receiving.result().unwrap_err().to_string();
                let words = match harm {
                    Harm::Flip => &["does not authenticate", "no record"][..],
                    Harm::Truncate => &["cut off without a closing message"][..],
                    Harm::Cut => &["cut off without a closing message", "was lost"][..],
                };
                assert!(words.iter().any(|words| error.contains(words)), "{error}");
                if let Ok((destination, _)) = listener.accept() {
                    destination.set_nonblocking(false).unwrap();
                    let got = read_rest(&destination);
                    assert_same(&got, &streams.main[..got.len()], "what was delivered");
                    assert!(got.len() < tag_at(&streams.main), "the tag was delivered");
                }
            }
        }
    });
}
