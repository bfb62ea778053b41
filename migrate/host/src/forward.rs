//! Connections that go past platen: copied to another address, in the clear, in both directions.

use crate::entrance::reset;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the host may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How often a door is looked at for further connections.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes copied at a time.
const PIECE: usize = 256 << 10;

/// Copies each connection that `next` returns to `to` and back, until all have ended and `next`
/// says `WouldBlock`. `copied` counts the bytes for `to`.
///
/// # Errors
/// A connection to `to` cannot be made; the connection that wanted it is reset.
pub fn forward(
    next: impl Fn() -> io::Result<TcpStream>,
    to: &str,
    copied: &AtomicU64,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        loop {
            match next() {
                Ok(near) => {
                    let far = match dial(to) {
                        Ok(far) => far,
                        Err(error) => {
                            reset(near);
                            return Err(error);
                        }
                    };
                    threads.push(scope.spawn(move || splice(&near, &far, copied)));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if threads.iter().all(|thread| thread.is_finished()) {
                        return Ok(());
                    }
                    std::thread::sleep(LOOK);
                }
                Err(error) => return Err(error),
            }
        }
    })
}

fn dial(to: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in to.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(socket) => {
                let _ = socket.set_nodelay(true);
                return Ok(socket);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Copies both directions; an end of one goes on as such.
fn splice(near: &TcpStream, far: &TcpStream, copied: &AtomicU64) {
    std::thread::scope(|scope| {
        scope.spawn(|| copy(far, near, &AtomicU64::new(0)));
        copy(near, far, copied);
    });
}

fn copy(mut from: &TcpStream, mut to: &TcpStream, copied: &AtomicU64) {
    let mut bytes = vec![0; PIECE];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(got) if to.write_all(&bytes[..got]).is_ok() => {
                copied.fetch_add(got as u64, Ordering::Relaxed);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A failure of either is one of both.
            _ => {
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AllowedUsers, DoorEntrance};
    use std::net::TcpListener;

    #[test]
    fn bytes_and_ends_go_both_ways() {
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        door.set_nonblocking(true).unwrap();
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = target.local_addr().unwrap().to_string();
        let mut client = TcpStream::connect(door.local_addr().unwrap()).unwrap();
        let first = loop {
            if let Ok((socket, _)) = door.accept() {
                break socket;
            }
        };
        first.set_nonblocking(false).unwrap();
        let entrance = DoorEntrance::new(door, vec![first], AllowedUsers::default());
        let copied = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let forwarding = scope.spawn(|| forward(|| entrance.next(), &to, &copied));
            let (mut server, _) = target.accept().unwrap();
            client.write_all(b"hello").unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            let mut got = String::new();
            server.read_to_string(&mut got).unwrap();
            server.write_all(b"and back").unwrap();
            drop(server);
            let mut back = String::new();
            client.read_to_string(&mut back).unwrap();
            assert_eq!((got.as_str(), back.as_str()), ("hello", "and back"));
            forwarding.join().unwrap().unwrap();
        });
        assert_eq!(copied.into_inner(), 5);
    }
}
