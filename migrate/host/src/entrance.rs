//! A carrier's connections of QEMU: those that the service has accepted, then those at the door.

use crate::peer_user::AllowedUsers;
use relay::{Entrance, QemuSocket};
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The door of one migration.
#[derive(Debug)]
pub struct DoorEntrance {
    listener: TcpListener,
    first: Mutex<VecDeque<TcpStream>>,
    allowed: AllowedUsers,
}

impl DoorEntrance {
    /// `first` come before those at the door; they have been checked.
    pub fn new(listener: TcpListener, first: Vec<TcpStream>, allowed: AllowedUsers) -> Self {
        Self { listener, first: Mutex::new(first.into()), allowed }
    }

    /// Resets every connection that waits.
    pub fn refuse_waiting(&self) {
        while let Ok(socket) = self.next() {
            reset(socket);
        }
    }

    /// The next connection; `WouldBlock` when none waits.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next(&self) -> io::Result<TcpStream> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if let Some(socket) = first {
            return Ok(socket);
        }
        loop {
            let (socket, there) = self.listener.accept()?;
            let here: SocketAddr = socket.local_addr()?;
            match self.allowed.check(here, there) {
                Ok(()) => return Ok(socket),
                Err(_) => reset(socket),
            }
        }
    }
}

impl Entrance for DoorEntrance {
    fn prepare(&self) -> io::Result<()> {
        self.listener.set_nonblocking(true)
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        self.next().map(QemuSocket::from)
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// A TCP port cannot be taken from its listener.
    fn is_ours(&self) -> bool {
        true
    }

    fn address(&self) -> String {
        self.listener.local_addr().map_or("the door".into(), |address| format!("door {address}"))
    }
}

/// Closes a connection such that the other end's calls fail at once.
pub fn reset(socket: TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}
