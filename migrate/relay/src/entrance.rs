//! The socket at which the source QEMU's connections arrive: the relay's own, or one that its
//! application has.

use crate::qemu_socket::QemuSocket;
use crate::unix::Listening;
use rustix::fd::{AsFd, BorrowedFd};
use std::io;

/// The socket at which the source QEMU's connections arrive.
pub trait Entrance: Send + Sync {
    /// Makes [`accept`](Self::accept) return without waiting.
    ///
    /// # Errors
    /// The kernel's error.
    fn prepare(&self) -> io::Result<()>;
    /// The next connection; `WouldBlock` when none waits.
    ///
    /// # Errors
    /// The kernel's error.
    fn accept(&self) -> io::Result<QemuSocket>;
    /// A descriptor that becomes readable when a connection waits. It need not report connections
    /// that waited before [`prepare`](Self::prepare).
    fn readiness(&self) -> BorrowedFd<'_>;
    /// Whether QEMU's connections still arrive here.
    fn is_ours(&self) -> bool;
    /// Whether another process accepts here once the session has ended, although the migration may
    /// be in doubt for long.
    fn returns(&self) -> bool {
        false
    }
    /// Whether the source QEMU has closed or shut down a connection whose end has not come: with
    /// TCP the end waits at the source, behind bytes for which there is no room here.
    fn has_left(&self, socket: &QemuSocket) -> bool {
        let _ = socket;
        false
    }
    /// The address, for messages.
    fn address(&self) -> String;
}

impl Entrance for Listening {
    fn prepare(&self) -> io::Result<()> {
        self.listener.set_nonblocking(true)
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        let (socket, _) = self.listener.accept()?;
        Ok(socket.into())
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn is_ours(&self) -> bool {
        Listening::is_ours(self)
    }

    fn address(&self) -> String {
        Listening::address(self).to_string()
    }
}
