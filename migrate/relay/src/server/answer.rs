//! Whether a peer has got the answer to its question (W28).

use super::greeting::limit;
use session::{Link, HELLO_TIMEOUT};
use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

/// How long a peer that has got an answer may take to ask again, if it could not use the answer.
pub(super) const ANSWERED: Duration = Duration::from_secs(5);

/// Waits for the end of a link on which an answer was written. True if the peer's host has
/// acknowledged the answer, and the peer has then closed the link in order. A peer closes its link
/// also when no answer comes in time, and then asks again.
pub(super) fn has_arrived(link: &Link) -> bool {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let mut socket = link.socket();
    while Instant::now() < deadline {
        match limit(socket, deadline).and_then(|()| socket.read(&mut [0; 512])) {
            Ok(0) => return link.is_acknowledged(),
            // The end of TLS.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A peer that closes with an answer unread resets the connection.
            Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, Link) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (peer, listener.accept().unwrap().0.into())
    }

    #[test]
    fn an_answer_counts_when_its_peer_has_read_it_and_closed() {
        let (mut peer, mut link) = pair();
        link.write_all(b"answer").unwrap();
        peer.read_exact(&mut [0; 6]).unwrap();
        peer.write_all(b"the end").unwrap();
        drop(peer);
        assert!(has_arrived(&link));
    }

    #[test]
    fn an_answer_that_its_peer_has_not_read_does_not_count() {
        let (peer, mut link) = pair();
        link.write_all(b"answer").unwrap();
        assert_eq!(peer.peek(&mut [0]).unwrap(), 1);
        drop(peer);
        assert!(!has_arrived(&link), "it was closed before");
        let (_peer, mut link) = pair();
        link.write_all(b"answer").unwrap();
        assert!(!has_arrived(&link), "it was never closed");
    }
}
