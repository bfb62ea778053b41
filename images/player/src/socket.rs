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
const MOST: usize = 1 << 16;
/// Length of a read, bytes.
const CHUNK: usize = 64 << 10;

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

    /// Waits for a message.
    pub(crate) fn next(&mut self) -> Result<Message, PlayError> {
        loop {
            if let Some((message, _)) = self.message() {
                return Ok(message);
            }
            self.poll(PollFlags::IN, None)?;
            self.read()?;
        }
    }

    /// Writes all of `bytes`, and reads whenever the socket is full: a QEMU that waits for room in
    /// its return path reads nothing.
    pub(crate) fn send(&mut self, mut bytes: &[u8]) -> Result<(), PlayError> {
        self.written += bytes.len() as u64;
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.poll(PollFlags::IN | PollFlags::OUT, None)?;
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
