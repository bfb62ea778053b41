//! The connections to QEMU (unix sockets, or TCP on this host), and the addresses at which the
//! destination QEMU listens.

use crate::error::RelayError;
use crate::unix::UnixAddress;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::connect_unspec;
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a TCP connection on this host may take. It waits only for a full backlog.
const CONNECT: Duration = Duration::from_millis(500);
/// Bytes to QEMU that the kernel may hold before QEMU's own kernel buffer. They count as delivered.
/// Bytes that are still there when the VM stops add to its downtime.
const SEND_BUFFER: usize = 256 << 10;
/// How long a reset may take to arrive behind the end of the other end's bytes. If it arrives
/// later, a migration without a return path is reported as unconfirmed instead of failed.
const RESET_NS: i64 = 100_000_000;
/// How long threads that wait in the socket may take to return after its shutdown.
const LEAVE: Duration = Duration::from_millis(500);

/// A connection to QEMU.
#[derive(Debug)]
pub enum QemuSocket {
    /// A unix socket.
    Unix(UnixStream),
    /// TCP, to an address of this host.
    Tcp(TcpStream),
}

impl QemuSocket {
    /// Shuts down reading, writing or both, as `how` states.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.shutdown(how),
            Self::Tcp(socket) => socket.shutdown(how),
        }
    }

    /// Ends both directions, and a write in which QEMU waits.
    ///
    /// The shutdown of a unix socket ends the other end's writes. The shutdown of a TCP socket only
    /// tells the other end that no more bytes come: while the receive buffer here is full, its
    /// write goes on waiting. A reset ends that write.
    pub(crate) fn abort(&self) {
        let _ = self.shutdown(Shutdown::Both);
        let Self::Tcp(socket) = self else { return };
        let until = Instant::now() + LEAVE;
        // EBUSY: another thread is still inside a call on this socket, which the shutdown ends.
        while connect_unspec(socket) == Err(Errno::BUSY) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sets whether calls fail with `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.set_nonblocking(nonblocking),
            Self::Tcp(socket) => socket.set_nonblocking(nonblocking),
        }
    }

    /// Whether the other end, which has closed, had bytes unread. A unix socket shows that at the
    /// end of its bytes. TCP shows it with a reset, which may still be under way.
    pub(crate) fn is_reset(&self) -> bool {
        let Self::Tcp(socket) = self else { return false };
        let mut fds = [PollFd::new(socket, PollFlags::empty())];
        let wait = Timespec { tv_sec: 0, tv_nsec: RESET_NS };
        matches!(poll(&mut fds, Some(&wait)), Ok(1..)) && fds[0].revents().contains(PollFlags::ERR)
    }
}

impl From<UnixStream> for QemuSocket {
    fn from(socket: UnixStream) -> Self {
        Self::Unix(socket)
    }
}

impl From<TcpStream> for QemuSocket {
    fn from(socket: TcpStream) -> Self {
        // Small messages (return path, device state) must not wait for an acknowledgement.
        let _ = socket.set_nodelay(true);
        Self::Tcp(socket)
    }
}

impl AsFd for QemuSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Read for &QemuSocket {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            QemuSocket::Unix(socket) => { socket }.read(out),
            QemuSocket::Tcp(socket) => { socket }.read(out),
        }
    }
}

impl Write for &QemuSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            QemuSocket::Unix(socket) => { socket }.write(bytes),
            QemuSocket::Tcp(socket) => { socket }.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The address at which the destination QEMU listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QemuAddress {
    /// `unix:PATH`.
    Unix(UnixAddress),
    /// `tcp:HOST:PORT`, an address of this host.
    Tcp(SocketAddr),
}

impl From<UnixAddress> for QemuAddress {
    fn from(address: UnixAddress) -> Self {
        Self::Unix(address)
    }
}

impl fmt::Display for QemuAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(address) => address.fmt(f),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl QemuAddress {
    /// Refuses a path at which a file other than a socket exists.
    ///
    /// # Errors
    /// The path names a file of another kind.
    pub(crate) fn check_target(&self) -> Result<(), RelayError> {
        match self {
            Self::Unix(address) => address.check_target(),
            Self::Tcp(_) => Ok(()),
        }
    }

    /// Makes one attempt to connect.
    pub(crate) fn connect(&self) -> Result<QemuSocket, RelayError> {
        match self {
            Self::Unix(address) => address.connect(Duration::ZERO, || false).map(QemuSocket::from),
            Self::Tcp(address) => {
                let failed = |source| RelayError::Deliver { address: self.to_string(), source };
                let socket = TcpStream::connect_timeout(address, CONNECT).map_err(failed)?;
                let sized = set_socket_send_buffer_size(&socket, SEND_BUFFER);
                sized.map_err(|error| failed(error.into()))?;
                Ok(socket.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, QemuSocket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let qemu = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (qemu, listener.accept().unwrap().0.into())
    }

    /// QEMU is in a write that no process reads: a shutdown alone would leave it there.
    #[test]
    fn an_aborted_connection_ends_the_write_that_waits_in_it() {
        let (mut qemu, ours) = pair();
        let (sender, wrote) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            let bytes = vec![7; 1 << 20];
            let error = loop {
                match qemu.write_all(&bytes) {
                    Ok(()) => drop(sender.send(())),
                    Err(error) => break error,
                }
            };
            error.kind()
        });
        // Until it does not get on.
        while wrote.recv_timeout(Duration::from_millis(300)).is_ok() {}
        ours.abort();
        let kind = writer.join().unwrap();
        assert!(matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{kind:?}");
    }

    #[test]
    fn a_peer_that_closes_with_unread_bytes_differs_from_one_that_has_read_them() {
        let (qemu, ours) = pair();
        drop(qemu);
        assert_eq!({ &ours }.read(&mut [0; 1]).unwrap(), 0);
        assert!(!ours.is_reset());
        // Bytes for a socket that is closed.
        { &ours }.write_all(&[7; 10]).unwrap();
        // On a busy machine the kernel may carry out the reset later than a relay waits for it.
        let until = Instant::now() + Duration::from_secs(60);
        while !ours.is_reset() {
            assert!(Instant::now() < until, "no reset comes");
        }
    }

    #[test]
    fn a_port_without_a_listener_is_named() {
        // At an address of its own: another test may get the port of one that all use.
        let listener = TcpListener::bind("127.80.76.1:0").unwrap();
        let address = QemuAddress::Tcp(listener.local_addr().unwrap());
        drop(listener);
        let error = address.connect().unwrap_err();
        assert!(error.is_absence(), "{error:?}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
}
