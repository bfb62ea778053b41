use crate::{Acceptor, Authority, Channel, Connector, Credentials, TlsError};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn ends() -> (tempfile::TempDir, Connector, Acceptor) {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::at(folder.path());
    authority.init(false).unwrap();
    let load = |dir: &Path| {
        let file = |name: &str| dir.join(name);
        Credentials::load(&file("ca.pem"), &file("cert.pem"), &file("key.pem")).unwrap()
    };
    let [a, b] = ["a.example", "b.example"]
        .map(|name| load(&authority.issue(&[name.into()], 9, false).unwrap().dir));
    let connector = Connector::new(&a, "b.example").unwrap();
    (folder, connector, Acceptor::new(&b, &[]).unwrap())
}

/// Forwards records in one direction, each through `change`.
fn pass(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(Vec<u8>) -> Vec<u8>) {
    let mut record = vec![0; 5];
    while from.read_exact(&mut record[..5]).is_ok() {
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(5 + length, 0);
        if from.read_exact(&mut record[5..]).is_err() || to.write_all(&change(record)).is_err() {
            break;
        }
        record = vec![0; 5];
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

type Ends = (Result<Channel, TlsError>, Result<Channel, TlsError>);

/// Both handshakes with a proxy in between.
fn through(
    connector: &Connector,
    acceptor: &Acceptor,
    forth: impl FnMut(Vec<u8>) -> Vec<u8> + Send,
    back: impl FnMut(Vec<u8>) -> Vec<u8> + Send,
    patience: u64,
) -> Ends {
    let ((client, near), (far, server)) = (pair(), pair());
    let limit = Instant::now() + Duration::from_millis(patience);
    thread::scope(|scope| {
        let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        scope.spawn(move || pass(from, to, forth));
        scope.spawn(move || pass(far, near, back));
        let serving = scope.spawn(move || acceptor.accept(&server, "client", limit));
        let connecting = scope.spawn(move || connector.connect(&client, "server", limit));
        (connecting.join().unwrap(), serving.join().unwrap())
    })
}

#[test]
fn a_hello_in_many_small_records_is_a_hello() {
    let (_folder, connector, acceptor) = ends();
    let cut = |record: Vec<u8>| {
        if record[0] != 22 {
            return record;
        }
        let piece = |body: &[u8]| {
            let length = u16::try_from(body.len()).unwrap().to_be_bytes();
            [&[22, 3, 3, length[0], length[1]][..], body].concat()
        };
        record[5..].chunks(100).flat_map(piece).collect()
    };
    let (client, server) = through(&connector, &acceptor, cut, cut, 60_000);
    client.unwrap();
    server.unwrap();
}

#[test]
fn handshakes_that_are_damaged_anywhere_are_refused_and_never_panic() {
    let (_folder, connector, acceptor) = ends();
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % below
    };
    for round in 0..150 {
        // One record of the handshake, which has five or six, is changed, truncated, doubled,
        // or followed by noise.
        let (which, how, seed) = (next(6), next(5), next(1 << 20));
        let mut seen = 0;
        let harm = move |mut record: Vec<u8>| {
            seen += 1;
            if seen != which % 3 + 1 {
                return record;
            }
            let at = seed % record.len();
            match how {
                0 => record[at] ^= 1 << (seed % 8),
                1 => record.truncate(at),
                2 => record = record.repeat(2),
                3 => record.extend([22, 3, 3, 0, 4, 1, 0, 0, 9]),
                _ => {
                    // Still a record, but its message states another length.
                    let at = (5 + seed % 4).min(record.len() - 1);
                    record[at] ^= 1 << (seed % 8);
                }
            }
            record
        };
        let same = |record: Vec<u8>| record;
        let (client, server) = match which < 3 {
            true => through(&connector, &acceptor, harm, same, 250),
            false => through(&connector, &acceptor, same, harm, 250),
        };
        // A change of the outer version, or behind the handshake, may go unnoticed; a
        // disagreement about keys may not.
        if let (Ok(client), Ok(server)) = (client, server) {
            assert_eq!(client.peer.names, ["b.example"], "round {round}");
            assert_eq!(server.peer.names, ["a.example"], "round {round}");
        }
    }
}

#[test]
fn keys_are_renewed_before_they_wear_out() {
    let (_folder, connector, acceptor) = ends();
    let (client, server) = pair();
    let limit = Instant::now() + Duration::from_secs(60);
    let serving = thread::spawn(move || (acceptor.accept(&server, "client", limit), server));
    let mut channel = connector.connect(&client, "server", limit).unwrap();
    channel.writer.renew_after(3);
    let (accepted, server) = serving.join().unwrap();
    let mut accepted = accepted.unwrap();
    let sent: Vec<u8> = (0..2_000_000u32).map(|i| i.to_le_bytes()[1]).collect();
    let expected = sent.clone();
    let reading = thread::spawn(move || {
        let mut got = vec![0; expected.len()];
        let mut done = 0;
        while done < got.len() {
            match accepted.reader.read(&server, &mut got[done..]) {
                Ok(0) => panic!("it ended after {done} bytes"),
                Ok(n) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert!(got == expected);
    });
    for piece in sent.chunks(100_000) {
        channel.writer.write_all(&client, &[piece], |_| false).unwrap();
        assert!(channel.writer.records_under_key() <= 3);
    }
    reading.join().unwrap();
}

/// A host that stood still until the deadline has passed.
#[test]
fn what_came_before_the_deadline_is_read_after_it() {
    let (mut client, server) = pair();
    client.write_all(&[7; 9]).unwrap();
    // Until the bytes are there.
    server.peek(&mut [0; 1]).unwrap();
    let mut got = [0; 9];
    super::fill(&server, &mut got, Instant::now()).unwrap();
    assert_eq!(got, [7; 9]);
    let late = super::fill(&server, &mut got, Instant::now()).unwrap_err();
    assert!(matches!(super::lost("client", &late), TlsError::Late { .. }), "{late}");
}

/// Such a peer would have a thread of the server for as long as it likes.
#[test]
fn a_peer_that_sends_byte_by_byte_behind_the_deadline_is_late() {
    let (mut client, server) = pair();
    client.set_nodelay(true).unwrap();
    let drip = thread::spawn(move || while client.write_all(&[7]).is_ok() {});
    server.peek(&mut [0; 1]).unwrap();
    let late = super::fill(&server, &mut vec![0; 16 << 20], Instant::now()).unwrap_err();
    assert!(matches!(super::lost("client", &late), TlsError::Late { .. }), "{late}");
    drop(server);
    drip.join().unwrap();
}
