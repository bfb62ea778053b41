//! A thread that serves the clients of one listening socket, one at a time, until it is dropped.

use rustix::event::{poll, PollFd, PollFlags};
use rustix::io::Errno;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Pause after an `accept` that failed, for example because the process is out of descriptors.
const AGAIN: Duration = Duration::from_millis(10);

/// A listening socket: Unix or TCP.
pub(crate) trait Listener: AsFd + Send + 'static {
    type Stream;

    fn set_nonblocking(&self) -> io::Result<()>;
    fn accept(&self) -> io::Result<Self::Stream>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    fn set_nonblocking(&self) -> io::Result<()> {
        Self::set_nonblocking(self, true)
    }

    fn accept(&self) -> io::Result<UnixStream> {
        Self::accept(self).map(|(stream, _)| stream)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    fn set_nonblocking(&self) -> io::Result<()> {
        Self::set_nonblocking(self, true)
    }

    fn accept(&self) -> io::Result<TcpStream> {
        Self::accept(self).map(|(stream, _)| stream)
    }
}

/// The thread. Dropping this waits for the current client's answer.
pub(crate) struct Endpoint {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// `serve` must bound the time for each client. Its errors concern only that client and are
    /// ignored.
    pub(crate) fn start<L: Listener>(
        name: &str,
        listener: L,
        serve: impl Fn(&L::Stream) -> io::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        listener.set_nonblocking()?;
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || loop {
            let mut fds =
                [PollFd::new(&stopped, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            match listener.accept() {
                Ok(stream) => {
                    let _ = serve(&stream);
                }
                Err(_) => thread::sleep(AGAIN),
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = rustix::io::write(self.stop.as_fd(), &[0]);
        if let Some(thread) = self.thread.take() {
            // The panic handler has reported a panic.
            let _ = thread.join();
        }
    }
}
