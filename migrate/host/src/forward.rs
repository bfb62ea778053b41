//! Forwarded connections: their bytes are copied to another address, unencrypted, in both
//! directions.

use crate::entrance::reset;
use relay::QemuSocket;
use rustix::net::{recv, RecvFlags};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use stream::Kind;

/// How long the host may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval of checks of a door for further connections.
const LOOK: Duration = Duration::from_millis(20);
/// The mark of a connection that no rule of `platen host intercept` redirects to a door ("plat").
pub const MARK: u32 = 0x706c_6174;
/// The reason for refusing a connection that was silent at first and then begins a migration.
const LATE: &str =
    "it was silent for seconds and then began a migration, which would have gone in \
                    the clear: migrate again";
/// Bytes copied at a time.
const PIECE: usize = 256 << 10;

/// Reasons to refuse a connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Care {
    /// Refuse a connection to `to` that cannot be marked: the rules would redirect it back here.
    pub unmarked: bool,
    /// Refuse QEMU's stream: the client was silent, and turns out to be a migration.
    pub migrations: bool,
}

/// Copies the bytes of each connection that `next` returns to `to` and back, until `next` returns
/// `WouldBlock` and all have ended. `copied` counts the bytes to `to`.
///
/// # Errors
/// A connection to `to` cannot be made, or is refused. The connection that needed it is reset.
pub fn forward(
    next: impl Fn() -> io::Result<QemuSocket>,
    to: &str,
    copied: &AtomicU64,
    care: Care,
) -> io::Result<()> {
    let refused = AtomicBool::new(false);
    let refused = &refused;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        loop {
            match next() {
                Ok(near) => {
                    let far = match dial(to, care) {
                        Ok(far) => far,
                        Err(error) => {
                            reset(near);
                            return Err(error);
                        }
                    };
                    threads.push(scope.spawn(move || splice(&near, &far, copied, care, refused)));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if threads.iter().all(|thread| thread.is_finished()) {
                        return match refused.load(Ordering::Relaxed) {
                            true => Err(io::Error::other(LATE)),
                            false => Ok(()),
                        };
                    }
                    std::thread::sleep(LOOK);
                }
                Err(error) => return Err(error),
            }
        }
    })
}

fn dial(to: &str, care: Care) -> io::Result<QemuSocket> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in to.to_socket_addrs()? {
        match unled(address, care) {
            Ok(socket) => return Ok(TcpStream::from(socket).into()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects to `to`. The connection gets the mark that exempts it from the rules of this host, if
/// the service may set it.
fn unled(to: SocketAddr, care: Care) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    // The rules redirect connections of root and of QEMU's users. The service's own connections are
    // redirected only if it runs as one of them.
    if let Err(error) = socket.set_mark(MARK) {
        if care.unmarked {
            let user = rustix::process::geteuid().as_raw();
            return Err(io::Error::other(format!(
                "user {user} is one of those whose connections are intercepted, and the service, \
                 which runs as the same user, may not mark its own ({error}): have it run as \
                 another user"
            )));
        }
    }
    socket.connect_timeout(&to.into(), CONNECT)?;
    Ok(socket)
}

/// Copies the bytes in both directions, and forwards the end of each direction.
fn splice(
    near: &QemuSocket,
    far: &QemuSocket,
    copied: &AtomicU64,
    care: Care,
    refused: &AtomicBool,
) {
    std::thread::scope(|scope| {
        scope.spawn(|| copy(far, near, &AtomicU64::new(0)));
        if care.migrations && begins_a_migration(near) {
            refused.store(true, Ordering::Relaxed);
            let _ = near.shutdown(Shutdown::Both);
            let _ = far.shutdown(Shutdown::Both);
            return;
        }
        copy(near, far, copied);
    });
}

/// Waits for the client's first bytes, and returns whether they are QEMU's.
fn begins_a_migration(near: &QemuSocket) -> bool {
    let mut first = [0; 8];
    let got = loop {
        match recv(near, &mut first[..], RecvFlags::PEEK) {
            Err(rustix::io::Errno::INTR) => {}
            got => break got.map_or(0, |(_, got)| got),
        }
    };
    // QEMU writes more than these bytes at once.
    matches!(stream::classify(&first[..got]), Some(Kind::Main | Kind::Recovery | Kind::Multifd))
}

fn copy(mut from: &QemuSocket, mut to: &QemuSocket, copied: &AtomicU64) {
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
            // A failure of one direction ends both.
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
    use crate::{AllowedUsers, DoorEntrance, DoorListener};
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
        let door = DoorListener::Tcp(door);
        let entrance = DoorEntrance::new(door, vec![first.into()], AllowedUsers::default(), |_| {});
        let copied = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let forwarding =
                scope.spawn(|| forward(|| entrance.next(), &to, &copied, Care::default()));
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

    #[test]
    fn a_migration_behind_a_silence_is_refused_and_a_server_that_speaks_first_is_not() {
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = target.local_addr().unwrap().to_string();
        let care = Care { migrations: true, ..Care::default() };
        for (says, passes) in [(&b"QEVM\0\0\0\x03and more"[..], false), (b"as an NBD client", true)]
        {
            let (mut client, near) = {
                let (client, near) = std::os::unix::net::UnixStream::pair().unwrap();
                (client, std::sync::Mutex::new(Some(QemuSocket::from(near))))
            };
            let next = || near.lock().unwrap().take().ok_or(ErrorKind::WouldBlock.into());
            let copied = AtomicU64::new(0);
            std::thread::scope(|scope| {
                let forwarding = scope.spawn(|| forward(next, &to, &copied, care));
                let (mut server, _) = target.accept().unwrap();
                server.write_all(b"NBDMAGIC").unwrap();
                let mut first = [0; 8];
                client.read_exact(&mut first).unwrap();
                assert_eq!(&first, b"NBDMAGIC");
                client.write_all(says).unwrap();
                let _ = client.shutdown(Shutdown::Write);
                let mut got = Vec::new();
                let _ = server.read_to_end(&mut got);
                drop(server);
                assert_eq!(got, if passes { says } else { b"" });
                let error = forwarding.join().unwrap().err().map(|error| error.to_string());
                assert_eq!(error.is_none(), passes, "{error:?}");
            });
        }
    }
}
