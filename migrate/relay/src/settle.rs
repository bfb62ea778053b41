//! Finds when the socket of a source QEMU in postcopy may be closed, so that the source pauses.
//!
//! At two moments a closed socket would make the source fail and run its VM beside the
//! destination's:
//!
//! * QEMU 10.2 and later: the PONG of the packaged state is in its socket, and its migration thread
//!   has not seen it. Another thread reads the PONG, and the migration thread looks once for each
//!   section that it writes. So QEMU is given a second for the first thread, and the second thread
//!   shows by sections that begin later ([`Sections`]). The time of a section has no bound: QEMU
//!   looks at its clock once in 64 pages, and a huge page counts as one.
//! * QEMU 8.2 and later: it has sent all its memory and waits for SHUT. The end of its stream then
//!   waits in its socket, or was read before. It may also wait in the sender's buffer (TCP), or in
//!   QEMU's write to a full socket, where only reading on shows it.
//!
//! A source that has more memory to send is read no further than that. Its next write may be the
//! one of its end: no rule excludes that, but the time between the last look and the closing is
//! short, and the socket is empty.

mod follow;
mod last;
mod sections;

use crate::sockets::{is_open, wait_readable};
use follow::Follow;
use last::ends_stream;
pub(crate) use last::LastBytes;
use rustix::fd::AsFd;
use rustix::io::{ioctl_fionread, Errno};
use rustix::net::sockopt::socket_domain;
use rustix::net::{recv, AddressFamily, RecvFlags};
pub(crate) use sections::Sections;
use sections::ROUND;
use std::time::{Duration, Instant};
use stream::Tokeniser;

/// Pause between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(25);
/// The longest time for which a look reads, where QEMU is not to wait in a write. It is most of the
/// time: a section of huge pages may have 128 MiB.
const READ: Duration = Duration::from_millis(100);
/// The most bytes that the kernel holds for the sender of a TCP connection, beside those that wait
/// at the receiver.
const SEND_BUFFER: u64 = 16 << 20;
/// A queue that has not grown for this long is full, or its writer has nothing more. A rate limit
/// makes QEMU wait for 100 ms.
const STABLE: Duration = Duration::from_millis(300);
/// More bytes than QEMU writes at once (32 pages and their heads).
const WRITE: u64 = 512 << 10;
/// The longest time for which a source is read that always has some more bytes, as under a rate
/// limit.
const DRAIN: Duration = Duration::from_secs(5);
/// With fewer bytes in the socket, QEMU waits in no write.
const FULL: usize = 32 << 10;
/// The longest time from one look to the next one, on a busy machine.
const GAP: Duration = Duration::from_millis(200);
/// The most bytes that a kernel holds for a socket.
const MOST: usize = 64 << 20;

/// The state of a source QEMU in postcopy whose bytes go nowhere any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    /// It has memory to send: it pauses when its socket closes.
    Pauses,
    /// It has sent all, and must not see its socket close before SHUT.
    Sent,
    /// It has closed its end itself.
    Closed,
}

/// Looks at the socket of such a source until its state is known.
#[derive(Debug)]
pub(crate) struct Settle {
    /// `None` once it is in postcopy for good.
    reading: Option<Reading>,
    /// The bytes that were read.
    follow: Follow,
    /// Set once its queue has not grown for [`STABLE`].
    draining: Option<Draining>,
    queue: usize,
    since: Instant,
    looked: Instant,
}

/// How far a source is read whose end may be behind the bytes that wait.
#[derive(Debug)]
struct Draining {
    /// Bytes that it may have written before, or was writing.
    left: u64,
    /// Those of them that are not read yet and waited in the socket at first.
    waiting: u64,
    /// Bytes have come behind these, or the source was in no write. Before that, it may be in the
    /// write of its end, and not get to run.
    has_more: bool,
    until: Instant,
}

/// The bytes that are read from a source that may not have seen its PONG.
#[derive(Debug)]
struct Reading {
    sections: Sections,
    read: u64,
    /// When bytes were last read.
    at: Option<Instant>,
}

impl Reading {
    /// Whether it is time to read.
    fn is_due(&self, now: Instant) -> bool {
        self.sections.are_long(self.read)
            || self.at.is_none_or(|at| now.saturating_duration_since(at) >= ROUND)
    }

    /// Reads and drops what the source writes. Returns the number of sections that begin there, if
    /// it has written any bytes.
    fn read(&mut self, socket: &impl AsFd, follow: &mut Follow) -> Option<u64> {
        let time = if self.sections.are_long(self.read) { READ } else { Duration::ZERO };
        let until = Instant::now() + time;
        let (before, mut begun) = (self.read, 0);
        loop {
            match follow.read(socket) {
                Ok((got @ 1.., more)) => {
                    self.read += got as u64;
                    begun += more;
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Ok(_) | Err(_) => break,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !wait_readable(socket, Some(left)) {
                break;
            }
        }
        (self.read > before).then_some(begun)
    }
}

impl Settle {
    /// `answered`: the source has its PONG, and may not have seen it yet. `parser` has read the
    /// stream so far. Without one, bytes that the guest has written may look like sections: then
    /// [`Settled::Pauses`] does not show that a source has seen its PONG.
    pub(crate) fn new(answered: bool, parser: Option<Tokeniser>) -> Self {
        let reading =
            answered.then(|| Reading { sections: Sections::default(), read: 0, at: None });
        let (follow, since) = (Follow::new(parser), Instant::now());
        Self { reading, follow, draining: None, queue: 0, since, looked: since }
    }

    /// Looks once; call it every [`LOOK`]. Where the source may not have seen its PONG, or its end
    /// may be behind what waits, this reads what it writes and drops it: QEMU sends such pages
    /// again when the migration is recovered.
    pub(crate) fn look(&mut self, socket: &impl AsFd) -> Option<Settled> {
        if !is_open(socket) {
            return Some(Settled::Closed);
        }
        self.skip_standstill();
        if let Some(reading) = &mut self.reading {
            let now = Instant::now();
            if waiting(socket) == 0 {
                let is_silent = now.saturating_duration_since(self.since) >= STABLE;
                return (is_silent && self.follow.ends_stream()).then_some(Settled::Sent);
            }
            if !reading.is_due(now) {
                return None;
            }
            let from = reading.read;
            let begun = reading.read(socket, &mut self.follow)?;
            if self.follow.has_end() {
                // A source that writes its end has seen the PONG.
                return Some(Settled::Sent);
            }
            let now = Instant::now();
            (self.since, reading.at) = (now, Some(now));
            let read = (from, reading.read);
            if reading.sections.come(now, read, begun, || buffered(socket)) {
                self.reading = None;
            }
            return None;
        }
        if self.draining.is_none() {
            let (now, queue) = (Instant::now(), waiting(socket));
            if queue != self.queue {
                (self.queue, self.since) = (queue, now);
            }
            if now.saturating_duration_since(self.since) < STABLE {
                return None;
            }
            let verdict = self.verdict(socket);
            if queue == 0 || verdict == Settled::Sent {
                return Some(verdict);
            }
            // The end may be behind what waits here: at the sender, or in a write of QEMU that
            // waits for room. No look shows it, and reading on does.
            let (left, waiting) = (hidden(socket), queue as u64);
            let has_more = queue < FULL;
            self.draining = Some(Draining { left, waiting, has_more, until: now + DRAIN });
        }
        self.drain(socket)
    }

    /// Time in which this process stood still shows nothing of the source.
    fn skip_standstill(&mut self) {
        let now = Instant::now();
        let still = now.saturating_duration_since(self.looked).saturating_sub(GAP);
        self.looked = now;
        self.since = (self.since + still).min(now);
        if let Some(draining) = &mut self.draining {
            draining.until += still;
        }
    }

    /// Reads and drops what has come, until nothing comes any more, or the source has certainly
    /// gone on behind the write in which it was found. It is read no further: it could not pause
    /// any more once it has sent all.
    fn drain(&mut self, socket: &impl AsFd) -> Option<Settled> {
        let draining = self.draining.as_mut()?;
        let until = Instant::now() + READ;
        loop {
            match self.follow.read(socket) {
                Ok((got @ 1.., _)) => {
                    self.since = Instant::now();
                    draining.left = draining.left.saturating_sub(got as u64);
                    draining.has_more |= got as u64 > draining.waiting;
                    draining.waiting = draining.waiting.saturating_sub(got as u64);
                    if self.follow.has_end() {
                        return Some(Settled::Sent);
                    }
                    if self.since >= until {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                // Nothing waits: the source is in no write, unless it is slow to go on with one.
                Ok(_) | Err(_) => break,
            }
        }
        let now = Instant::now();
        let is_silent = now.saturating_duration_since(self.since) >= STABLE;
        let is_late = is_silent || now >= draining.until;
        let is_over = draining.left == 0 || (draining.has_more && is_late);
        is_over.then(|| self.verdict(socket))
    }

    /// The state of a source that has written what was read and what waits, and nothing more.
    fn verdict(&self, socket: &impl AsFd) -> Settled {
        match self.follow.ends_with(&waiting_bytes(socket)) {
            true => Settled::Sent,
            false => Settled::Pauses,
        }
    }
}

/// The most bytes of a source that waits in a write, up to the end of that write.
fn hidden(socket: &impl AsFd) -> u64 {
    match is_unix(socket) {
        true => waiting(socket) as u64 + WRITE,
        false => buffered(socket) + WRITE,
    }
}

/// The bytes that a source may have written and that were not read.
pub(crate) fn buffered(socket: &impl AsFd) -> u64 {
    let queue = waiting(socket) as u64;
    // TCP fills the receiver's buffer before the sender's.
    if queue == 0 || is_unix(socket) {
        queue
    } else {
        queue + SEND_BUFFER
    }
}

fn is_unix(socket: &impl AsFd) -> bool {
    socket_domain(socket).is_ok_and(|domain| domain == AddressFamily::UNIX)
}

/// The number of bytes that wait in the socket.
fn waiting(socket: &impl AsFd) -> usize {
    let bytes = ioctl_fionread(socket).ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes.map_or(0, |bytes| bytes.min(MOST))
}

/// Whether bytes wait in the socket, and end as a stream in postcopy does.
pub(crate) fn waits_with_end(socket: &impl AsFd) -> bool {
    let queue = waiting(socket);
    queue > 0 && is_end(socket, queue)
}

/// Whether the `queue` bytes that wait in the socket end as a stream in postcopy does.
fn is_end(socket: &impl AsFd, queue: usize) -> bool {
    let bytes = peek(socket, queue);
    bytes.len() == queue && ends_stream(&bytes)
}

/// The bytes that wait in the socket, which stay there.
pub(crate) fn waiting_bytes(socket: &impl AsFd) -> Vec<u8> {
    peek(socket, waiting(socket))
}

fn peek(socket: &impl AsFd, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; most];
    let got = recv(socket, &mut bytes[..], RecvFlags::DONTWAIT | RecvFlags::PEEK);
    bytes.truncate(got.map_or(0, |(_, got)| got));
    bytes
}

#[cfg(test)]
mod tests;
