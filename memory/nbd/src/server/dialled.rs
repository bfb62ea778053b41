//! A server's connections to itself, for the kernel's client. Other clients come after them: the
//! memory of a server that replaces another was allocated in advance, and suffices for these
//! connections alone.

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};

use device::Backend;

use super::Server;

impl<B: Backend> Server<B> {
    /// Connects to this server itself, by no path: the path of its listener may be gone, or lead to
    /// another server by now. [`run`](Self::run) serves the connection like one that it accepts.
    ///
    /// # Errors
    ///
    /// The kernel has no socket, or the server has stopped.
    pub fn dial(&self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut open = self.open();
        if open.stopped {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        open.dialled.push_back(ours);
        drop(open);
        self.wake();
        Ok(theirs)
    }

    /// Accepts other clients from now on, though connections of [`dial`](Self::dial) are missing.
    pub fn admit_others(&self) {
        self.open().awaited = 0;
        self.wake();
    }

    /// Whether other clients wait for connections of [`dial`](Self::dial).
    pub(super) fn others_wait(&self) -> bool {
        self.open().awaited > 0
    }

    /// Notes that connection `number` has all of its memory.
    pub(super) fn has_memory(&self, number: u64) {
        let mut open = self.open();
        if open.awaited > 0 && open.streams.get(&number).is_some_and(|client| client.dialled) {
            open.awaited -= 1;
            drop(open);
            self.wake();
        }
    }

    /// The next connection, and whether it is one of [`dial`](Self::dial).
    pub(super) fn accept(&self, listener: &UnixListener) -> io::Result<(UnixStream, bool)> {
        let mut open = self.open();
        if let Some(stream) = open.dialled.pop_front() {
            return Ok((stream, true));
        }
        // Under the lock, so that no later call of `dial` goes unnoticed.
        let _ = rustix::io::read(&self.dialled, &mut [0; 8]);
        if open.awaited > 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        drop(open);
        listener.accept().map(|(stream, _)| (stream, false))
    }

    /// Makes [`run`](Self::run) look at `open` again.
    fn wake(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.dialled, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerOptions;
    use device::{Device, DeviceOptions};
    use std::sync::Arc;
    use store::{Options, Store};

    #[test]
    fn a_client_that_has_connected_waits_for_the_connections_of_the_server_to_itself() {
        let store = Store::create(64, Options::default()).unwrap();
        let device = Device::new(&store, &DeviceOptions::default()).unwrap();
        let options = ServerOptions { dialled: 2, ..ServerOptions::default() };
        let server = Server::new(Arc::new(device), options).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let others_wait = || {
            assert!(server.others_wait());
            assert_eq!(server.accept(&listener).unwrap_err().kind(), ErrorKind::WouldBlock);
        };
        others_wait();
        let dialled = [(); 2].map(|()| server.dial().unwrap());
        for (number, _) in (1..).zip(&dialled) {
            let (stream, is_dialled) = server.accept(&listener).unwrap();
            assert!(is_dialled);
            server.enter(number, &stream, true, 0).unwrap();
        }
        // They are accepted, and have no memory yet.
        others_wait();
        server.has_memory(1);
        others_wait();
        server.has_memory(2);
        assert!(!server.others_wait());
        assert!(!server.accept(&listener).unwrap().1, "the client is none of these connections");
    }
}
