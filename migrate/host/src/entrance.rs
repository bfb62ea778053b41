//! A carrier's connections of QEMU: first those that the service has accepted, then those at the
//! door.

use crate::listener::{DoorListener, BACKLOG};
use crate::peer_user::{may_write, AllowedUsers};
use crate::wanted::{place_of, wanted};
use relay::{Entrance, QemuSocket};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use stream::{Kind, Tokeniser};

/// Bytes of a main connection within which QEMU asks for a return path: header, configuration and
/// first commands are far shorter.
const HEAD: usize = 64 << 10;
/// Page size while these bytes are read: no page is in front of that request.
const PAGE: usize = 4096;
/// Why a connection with another original destination is refused.
pub(crate) const OTHER_WAY: &str =
    "a migration that came another way (by the door's address, or by \
                                    interception) has this door: migrate again when it has ended";

/// The door of one migration.
pub struct DoorEntrance {
    listener: DoorListener,
    first: Mutex<VecDeque<QemuSocket>>,
    /// The original destination of the first connections. A connection with another one is another
    /// VM's.
    wanted: Option<SocketAddr>,
    allowed: AllowedUsers,
    refused: Box<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for DoorEntrance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DoorEntrance").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl DoorEntrance {
    /// Creates the entrance. The connections in `first` were checked before and come first.
    /// `refused` gets the reason why a connection was reset, unless its user may not connect: such
    /// a user may cause any number of resets.
    pub fn new(
        listener: DoorListener,
        first: Vec<QemuSocket>,
        allowed: AllowedUsers,
        refused: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        let wanted = first.first().and_then(place_of);
        let (first, refused) = (Mutex::new(first.into()), Box::new(refused));
        Self { listener, first, wanted, allowed, refused }
    }

    /// Resets every connection that waits.
    pub fn refuse_waiting(&self) {
        while let Ok(socket) = self.next() {
            reset(socket);
        }
    }

    /// Whether the source QEMU of the first connections has left, as after a cancel. A source that
    /// awaits an answer has then failed. Without a return path a source may leave when it has
    /// written its stream, so that one does not count.
    pub fn source_has_left(&self) -> bool {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.iter().any(|socket| awaits_answer(socket) && has_left(socket))
    }

    /// The next connection; `WouldBlock` when none waits any more that was there at the call.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn next(&self) -> io::Result<QemuSocket> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if let Some(socket) = first {
            return Ok(socket);
        }
        // At most as many as can have waited at the call: a user who may not connect, and does so
        // again and again, must not hold up the migration.
        for _ in 0..=BACKLOG {
            let socket = self.listener.accept()?;
            if has_closed(&socket) {
                continue;
            }
            let is_ours = self.wanted.is_none() || place_of(&socket) == self.wanted;
            match (self.allowed.check(&socket), is_ours) {
                (Ok(()), true) => return Ok(socket),
                (Ok(()), false) => (self.refused)(OTHER_WAY),
                (Err(_), _) => {}
            }
            reset(socket);
        }
        Err(ErrorKind::WouldBlock.into())
    }
}

impl Entrance for DoorEntrance {
    fn prepare(&self) -> io::Result<()> {
        self.listener.set_nonblocking()
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        self.next()
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// A TCP port cannot be taken from its listener, and the folder of unix sockets is the
    /// service's.
    fn is_ours(&self) -> bool {
        true
    }

    /// The service has the door, too. A VM in doubt must not keep others from migrating.
    fn returns(&self) -> bool {
        true
    }

    fn has_left(&self, socket: &QemuSocket) -> bool {
        has_left(socket)
    }

    fn address(&self) -> String {
        self.listener.address().map_or("the door".into(), |address| format!("door {address}"))
    }
}

/// Whether the other end has closed a connection without writing a byte. Its user cannot be found
/// then.
pub(crate) fn has_closed(socket: &QemuSocket) -> bool {
    match recv(socket, &mut [0; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, got)) => got == 0,
        Err(error) => ![Errno::AGAIN, Errno::INTR].contains(&error),
    }
}

/// Whether the other end writes no more.
pub(crate) fn has_ended(socket: &QemuSocket) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Whether this is a main connection whose bytes so far ask for a return path.
fn awaits_answer(socket: &QemuSocket) -> bool {
    let mut bytes = vec![0; HEAD];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let Ok((_, got)) = recv(socket, &mut bytes[..], flags) else { return false };
    let Some(kind @ (Kind::Main | Kind::Recovery)) = stream::classify(&bytes[..got]) else {
        return false;
    };
    let mut tokeniser = Tokeniser::new(kind, PAGE);
    tokeniser.feed(&bytes[..got], &mut Vec::new());
    tokeniser.facts().return_path
}

/// Whether no process has the other end any more, or has shut it down. The end of a TCP connection
/// waits behind bytes for which there is no room here, so the kernel is asked about the other end
/// itself.
fn has_left(socket: &QemuSocket) -> bool {
    if has_ended(socket) {
        return true;
    }
    let QemuSocket::Tcp(socket) = socket else { return false };
    let left = || -> io::Result<bool> {
        let (here, there) = (socket.local_addr()?, socket.peer_addr()?);
        // A kernel that knows nothing of this end would know nothing of the other one.
        Ok(!may_write(there, wanted(socket)?)? && may_write(here, there)?)
    };
    left().unwrap_or(false)
}

/// Closes a connection such that the other end's calls fail at once.
pub fn reset(socket: impl Into<QemuSocket>) {
    let socket = socket.into();
    if let QemuSocket::Tcp(socket) = &socket {
        let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    }
    drop(socket);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// The header of a stream, then the command that opens the return path.
    const ASKS: &[u8] = b"QEVM\0\0\0\x03\x08\0\x01\0\0";

    #[test]
    fn a_source_has_left_if_it_awaits_an_answer_and_has_closed() {
        let door = TcpListener::bind("127.80.79.2:0").unwrap();
        let address = door.local_addr().unwrap();
        let came = |bytes: &[u8]| {
            let mut source = TcpStream::connect(address).unwrap();
            source.write_all(bytes).unwrap();
            let socket = door.accept().unwrap().0;
            socket.peek(&mut [0; 1]).unwrap();
            (source, QemuSocket::from(socket))
        };
        let entrance = |first| {
            let door = DoorListener::Tcp(door.try_clone().unwrap());
            DoorEntrance::new(door, vec![first], AllowedUsers::default(), |_| {})
        };
        // Without a return path a source may be done.
        for (bytes, counts) in [(ASKS, true), (&b"QEVM\0\0\0\x03\0"[..], false)] {
            let (source, socket) = came(bytes);
            let entrance = entrance(socket);
            assert!(!entrance.source_has_left());
            drop(source);
            assert_eq!(entrance.source_has_left(), counts, "{bytes:?}");
        }
        // Its last bytes and its end wait at the source: there is no room for them here.
        let (source, socket) = came(ASKS);
        source.set_nonblocking(true).unwrap();
        let bytes = vec![7; 64 << 10];
        while { &source }.write(&bytes).is_ok() {}
        let entrance = entrance(socket);
        assert!(!entrance.source_has_left());
        // As QEMU does at a cancel, before it closes.
        source.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(entrance.source_has_left());
        drop(source);
        assert!(entrance.source_has_left());
    }

    #[test]
    fn users_who_may_not_connect_and_do_so_all_the_time_hold_up_nothing() {
        let door = TcpListener::bind("127.80.79.1:0").unwrap();
        door.set_nonblocking(true).unwrap();
        let address = door.local_addr().unwrap();
        let door = DoorListener::Tcp(door);
        let entrance = DoorEntrance::new(door, Vec::new(), AllowedUsers(Vec::new()), |_| {});
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let _ = TcpStream::connect(address);
                    }
                });
            }
            for _ in 0..3 {
                let error = entrance.next().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
