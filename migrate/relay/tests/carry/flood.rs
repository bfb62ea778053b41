//! W5, W5a: a flood of connections from the address of the peer itself does not keep its links out.

use crate::harness::{
    assert_same, bounded, read_exactly, Options, Receiving, Sending, SHUT_OK, WATCHDOG,
};
use crate::identity::single;
use crate::resume::hello;
use crate::secured::credentials;
use session::{dial, Grants, Hello};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tls::{Acceptor, Authority, Connector};

/// Connections of a flood: several times as many as a receiver lets wait.
const FLOOD: usize = 400;
/// So many of them have been turned away when the flood has had its effect.
const TURNED_AWAY: usize = 200;

/// A network that holds up each handshake but the first, until the receiver's port was flooded from
/// the same address.
struct Floodgate {
    address: SocketAddr,
    first: Arc<Mutex<Vec<TcpStream>>>,
}

impl Floodgate {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let first = Arc::new(Mutex::new(Vec::new()));
        let sockets = first.clone();
        std::thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
                if number == 0 {
                    let both = [&client, &server].map(|socket| socket.try_clone().unwrap());
                    sockets.lock().unwrap().extend(both);
                }
                let (from, into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || copy(&from, &into));
                std::thread::spawn(move || {
                    // The client gets the server's answer only when the flood is there.
                    if number == 0 || has_answered(&server) {
                        let flood = if number == 0 { Vec::new() } else { flood(to) };
                        copy(&server, &client);
                        drop(flood);
                    }
                });
            }
        });
        Self { address, first }
    }

    /// Cuts the first link.
    fn cut(&self) {
        for socket in self.first.lock().unwrap().iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Passes bytes on until one side ends.
fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// Waits until the server has answered the beginning of the handshake.
fn has_answered(server: &TcpStream) -> bool {
    matches!(server.peek(&mut [0]), Ok(1..))
}

/// Connections that send nothing. Returns when the receiver has turned many of them away, the
/// oldest first: whatever waited before them would be turned away too.
fn flood(to: SocketAddr) -> Vec<TcpStream> {
    let flood: Vec<_> = (0..FLOOD).filter_map(|_| TcpStream::connect(to).ok()).collect();
    for mut socket in &flood[..TURNED_AWAY] {
        socket.set_read_timeout(Some(WATCHDOG)).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    }
    flood
}

#[test]
fn a_flood_from_the_peer_s_address_does_not_block_its_links() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &[]).unwrap();
        let resume = WATCHDOG;
        let receiving = Receiving::resuming(&[None], Grants::default(), Some(acceptor), resume);
        let listener = receiving.qemu(None);
        let gate = Floodgate::new(receiving.address);
        let connector = Connector::new(&credentials(&folder, "source.example"), "127.0.0.1");
        let connector = Some(connector.unwrap());
        let options = Options { links: 1, connector, resume, ..Options::default() };
        let sending = Sending::new(&receiving, gate.address, options);
        let sent = single(300).main;
        let source = sending.connect();
        (&source).write_all(&sent[..5000]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, 5000), &sent[..5000], "its beginning");
        gate.cut();
        let (rest, to) = (sent[5000..].to_vec(), source.try_clone().unwrap());
        let writer = std::thread::spawn(move || (&to).write_all(&rest));
        assert_same(&read_exactly(&destination, sent.len() - 5000), &sent[5000..], "its rest");
        writer.join().unwrap().unwrap();
        (&destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&source, 8), SHUT_OK);
        drop((source, destination));
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

/// A receiver that was started anew does not know the session: its answer ends the wait.
#[test]
fn a_link_whose_pass_does_not_count_gets_its_answer() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &[]).unwrap();
        let receiving = Receiving::secured(&[None], Grants::default(), Some(acceptor));
        let to = receiving.address.to_string();
        let connector = Connector::new(&credentials(&folder, "source.example"), "127.0.0.1");
        let token = Some("0".repeat(32));
        let again = Hello { token, pass: true, ..hello() };
        let error = dial(&to, Some(&connector.unwrap()), &again).unwrap_err();
        assert!(error.to_string().contains("no such session"), "{error}");
    });
}

#[test]
fn a_partial_or_invalid_pass_is_refused() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        Authority::at(folder.path()).init(false).unwrap();
        let acceptor = Acceptor::new(&credentials(&folder, "127.0.0.1"), &[]).unwrap();
        let receiving = Receiving::secured(&[None], Grants::default(), Some(acceptor));
        for (bytes, why) in
            [(b"RELINK".to_vec(), "only 6 of"), (b"RELINK\r\r".repeat(8), "neither")]
        {
            let mut stranger = TcpStream::connect(receiving.address).unwrap();
            stranger.write_all(&bytes).unwrap();
            stranger.shutdown(Shutdown::Write).unwrap();
            let until = Instant::now() + WATCHDOG;
            while !receiving.host.notices.lock().unwrap().join("\n").contains(why) {
                assert!(Instant::now() < until, "nothing is said of {why}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
}
