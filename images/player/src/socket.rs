//! The socket to QEMU. A blocked write keeps reading, so that the two ends cannot deadlock.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::back::{Message, ReturnPath};
use crate::PlayError;

/// Maximum number of queued messages. A QEMU has one request for each thread that waits for a page.
pub(crate) const MOST: usize = 1 << 16;
/// Length of a read, bytes.
const CHUNK: usize = 64 << 10;

/// Total time limit of a [`Wait`]. QEMU needs milliseconds on a host that is not overloaded.
const PATIENCE: Duration = Duration::from_secs(600);

/// A wait for a step of QEMU that the restore needs.
pub(crate) struct Wait {
    what: &'static str,
    until: Instant,
}

impl Wait {
    /// Begins to wait for `what`.
    pub(crate) fn begin(what: &'static str) -> Self {
        Self { what, until: Instant::now() + PATIENCE }
    }

    /// Fails once the time is over.
    pub(crate) fn check(&self) -> Result<(), PlayError> {
        self.left().map(|_| ())
    }

    fn left(&self) -> Result<Duration, PlayError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(PlayError::Silent { what: self.what, seconds: PATIENCE.as_secs() });
        }
        Ok(left)
    }
}

/// Both directions of the connection.
pub(crate) struct Socket {
    stream: UnixStream,
    pub(crate) back: ReturnPath,
    /// Messages in order, with the time at which each was read.
    inbox: VecDeque<(Message, Instant)>,
    chunk: Box<[u8]>,
    /// Bytes written.
    pub(crate) written: u64,
}

impl Socket {
    pub(crate) fn new(stream: UnixStream) -> Result<Self, PlayError> {
        stream.set_nonblocking(true).map_err(PlayError::read)?;
        let (back, inbox, chunk) = (ReturnPath::default(), VecDeque::new(), vec![0; CHUNK]);
        Ok(Self { stream, back, inbox, chunk: chunk.into_boxed_slice(), written: 0 })
    }

    /// Removes the oldest queued message.
    pub(crate) fn message(&mut self) -> Option<(Message, Instant)> {
        self.inbox.pop_front()
    }

    /// Reads all available bytes without waiting.
    pub(crate) fn read(&mut self) -> Result<(), PlayError> {
        loop {
            match self.stream.read(&mut self.chunk) {
                // Queued messages come first: QEMU closes right after its last message.
                Ok(0) if !self.inbox.is_empty() => return Ok(()),
                Ok(0) => return Err(PlayError::Closed),
                Ok(len) => self.back.push(&self.chunk[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return if self.inbox.is_empty() { Err(PlayError::Closed) } else { Ok(()) };
                }
                Err(error) => return Err(PlayError::read(error)),
            }
            let now = Instant::now();
            while let Some(message) = self.back.message()? {
                if self.inbox.len() == MOST {
                    return Err(PlayError::Back(format!("more than {MOST} messages at once")));
                }
                self.inbox.push_back((message, now));
            }
        }
    }

    /// Waits up to `limit` for bytes, and reads them.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<(), PlayError> {
        self.poll(PollFlags::IN, Some(limit))?;
        self.read()
    }

    /// Waits for a message, as long as `wait` permits.
    pub(crate) fn next(&mut self, wait: &Wait) -> Result<Message, PlayError> {
        loop {
            if let Some((message, _)) = self.message() {
                // Messages of another kind must not extend the wait.
                wait.check()?;
                return Ok(message);
            }
            self.wait(wait.left()?)?;
        }
    }

    /// Writes all of `bytes`, and reads whenever the socket is full: a QEMU that waits for room in
    /// its return path reads nothing. A QEMU that is stopped is waited for.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), PlayError> {
        self.send_while(bytes, None)
    }

    /// As [`Self::send`], as long as `wait` permits.
    pub(crate) fn send_within(&mut self, bytes: &[u8], wait: &Wait) -> Result<(), PlayError> {
        self.send_while(bytes, Some(wait))
    }

    fn send_while(&mut self, mut bytes: &[u8], wait: Option<&Wait>) -> Result<(), PlayError> {
        self.written += bytes.len() as u64;
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = wait.map(Wait::left).transpose()?;
                    self.poll(PollFlags::IN | PollFlags::OUT, left)?;
                    self.read()?;
                }
                Err(error) => return Err(PlayError::write(error)),
            }
        }
        Ok(())
    }

    fn poll(&self, flags: PollFlags, limit: Option<Duration>) -> Result<(), PlayError> {
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut [PollFd::new(&self.stream, flags)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(PlayError::read(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other messages do not extend a wait.
    #[test]
    fn a_wait_ends_at_its_time_whatever_arrives() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(here).unwrap();
        there.write_all(&[0, 2, 0, 4, 0, 0, 0, 9].repeat(2)).unwrap();
        let wait = Wait::begin("PONG 1");
        assert_eq!(socket.next(&wait).unwrap(), Message::Pong(9));
        let over = Wait { what: "PONG 1", until: Instant::now() };
        let said = socket.next(&over).unwrap_err().to_string();
        assert!(said.contains("has not sent PONG 1 for 600 s"), "{said}");
    }

    #[test]
    fn a_reader_that_reads_nothing_is_waited_for_until_the_time_is_over() {
        let (here, _there) = UnixStream::pair().unwrap();
        let mut socket = Socket::new(here).unwrap();
        let wait = Wait { what: "an answer", until: Instant::now() + Duration::from_millis(50) };
        let error = socket.send_within(&vec![0; 16 << 20], &wait).unwrap_err();
        assert!(matches!(error, PlayError::Silent { what: "an answer", .. }), "{error}");
    }
}
