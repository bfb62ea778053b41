//! Lines over a unix socket, with a deadline for every operation and a limit on their length.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::QmpError;

/// The longest line accepted. QEMU's longest (`query-qmp-schema`) has about 200 KiB.
pub(crate) const MAX_LINE: usize = 16 << 20;

/// A connected socket and the bytes read from it that do not make a line yet.
#[derive(Debug)]
pub(crate) struct LineSocket {
    stream: UnixStream,
    buffer: Vec<u8>,
    /// Length of the buffer's front that is known to hold no line end.
    searched: usize,
    /// Whether a command was sent in part only: QEMU would read the next one as its rest.
    torn: bool,
}

/// Why no line was read, before the operation under way is known.
#[derive(Debug)]
pub(crate) enum ReadFailure {
    TimedOut,
    Closed,
    TooLong,
    Torn,
    Garbage(String),
    Io(io::Error),
}

impl ReadFailure {
    pub(crate) fn during(self, what: &str, timeout: Duration) -> QmpError {
        let during = what.to_owned();
        match self {
            Self::TimedOut => {
                QmpError::TimedOut { command: during, seconds: timeout.as_secs_f64() }
            }
            Self::Closed => QmpError::Closed { during },
            Self::TooLong => QmpError::LineTooLong { during, limit: MAX_LINE },
            Self::Torn => QmpError::Torn { command: during },
            Self::Garbage(got) => QmpError::Garbage { during, got },
            Self::Io(source) => QmpError::Io { during, source },
        }
    }
}

impl From<io::Error> for ReadFailure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }
}

impl LineSocket {
    /// The process at the other end, as it was when it began to listen.
    pub(crate) fn peer_pid(&self) -> Option<i32> {
        Some(rustix::net::sockopt::socket_peercred(&self.stream).ok()?.pid.as_raw_pid())
    }

    /// Connects to the socket at `path`. Its backlog may be full, since one client at a time is
    /// served. A blocking connect would then wait for ever, so this one retries until the deadline.
    pub(crate) fn connect(
        path: &Path,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Self, QmpError> {
        let failed = |source: io::Error| QmpError::Connect { path: path.to_owned(), source };
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => {}
            Ok(_) => return Err(QmpError::NotASocket { path: path.to_owned() }),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(QmpError::Missing { path: path.to_owned() });
            }
            Err(error) => return Err(failed(error)),
        }
        let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(|errno| failed(errno.into()))?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                    thread::sleep(RETRY);
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    let seconds = timeout.as_secs_f64();
                    return Err(QmpError::NoGreeting { path: path.to_owned(), seconds });
                }
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false).map_err(failed)?;
        Ok(Self::over(stream))
    }

    /// Wraps an existing connection.
    pub(crate) fn over(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new(), searched: 0, torn: false }
    }

    /// Reads the next line, without its end; skips empty lines.
    pub(crate) fn read_line(&mut self, deadline: Instant) -> Result<Vec<u8>, ReadFailure> {
        let mut tried = false;
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                while line.last().is_some_and(u8::is_ascii_whitespace) {
                    line.pop();
                }
                if line.is_empty() {
                    continue;
                }
                return Ok(line);
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > MAX_LINE {
                return Err(ReadFailure::TooLong);
            }
            // Bytes that have arrived are read even when there is no time to wait for more.
            let wait = match left(deadline) {
                Ok(left) => left,
                Err(_) if !tried => MOMENT,
                Err(failure) => return Err(failure),
            };
            tried = true;
            let mut chunk = [0; CHUNK];
            self.stream.set_read_timeout(Some(wait))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ReadFailure::Closed),
                Ok(len) => self.buffer.extend_from_slice(&chunk[..len]),
                Err(error) if again(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends `line` and a line end.
    pub(crate) fn write_line(
        &mut self,
        mut line: String,
        deadline: Instant,
    ) -> Result<(), ReadFailure> {
        if self.torn {
            return Err(ReadFailure::Torn);
        }
        line.push('\n');
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            let sent = left(deadline)
                .and_then(|left| Ok(self.stream.set_write_timeout(Some(left))?))
                .and_then(|()| match self.stream.write(rest) {
                    Ok(len) => Ok(len),
                    Err(error) if again(&error) => Ok(0),
                    Err(error) => Err(error.into()),
                })
                .inspect_err(|_| self.torn = rest.len() < line.len())?;
            rest = &rest[sent..];
        }
        Ok(())
    }
}

/// The time left. The socket would take a timeout of zero as no timeout.
fn left(deadline: Instant) -> Result<Duration, ReadFailure> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ReadFailure::TimedOut),
        left => Ok(left),
    }
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

const CHUNK: usize = 16 << 10;
const RETRY: Duration = Duration::from_millis(10);
const MOMENT: Duration = Duration::from_millis(1);
