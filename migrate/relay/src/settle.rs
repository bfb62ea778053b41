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
//!   waits in its socket, or was read before. With TCP it may wait in the sender's buffer, where
//!   only reading on shows it.

mod sections;

use crate::sockets::{is_open, wait_readable};
use rustix::fd::AsFd;
use rustix::io::{ioctl_fionread, Errno};
use rustix::net::sockopt::socket_domain;
use rustix::net::{recv, AddressFamily, RecvFlags};
pub(crate) use sections::Sections;
use sections::{Heads, ROUND};
use std::time::{Duration, Instant};

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
    /// The last bytes that were read.
    last: LastBytes,
    queue: usize,
    since: Instant,
}

/// The bytes that are read from a source that may not have seen its PONG.
#[derive(Debug)]
struct Reading {
    sections: Sections,
    heads: Heads,
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

    /// Reads and drops what the source writes, and notes its `last` bytes. Returns the number of
    /// sections that begin there, if it has written any bytes.
    fn read(&mut self, socket: &impl AsFd, last: &mut LastBytes) -> Option<u64> {
        let time = if self.sections.are_long(self.read) { READ } else { Duration::ZERO };
        let until = Instant::now() + time;
        let (before, mut begun) = (self.read, 0);
        loop {
            match recv(socket, self.heads.room(), RecvFlags::DONTWAIT) {
                Ok((_, got @ 1..)) => {
                    self.read += got as u64;
                    last.feed(self.heads.fresh(got));
                    begun += self.heads.take(got);
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
    /// `answered`: the source has its PONG, and may not have seen it yet.
    pub(crate) fn new(answered: bool) -> Self {
        let reading = answered.then(|| Reading {
            sections: Sections::default(),
            heads: Heads::new(),
            read: 0,
            at: None,
        });
        Self { reading, last: LastBytes::default(), queue: 0, since: Instant::now() }
    }

    /// Looks once; call it every [`LOOK`]. Where the source may not have seen its PONG, this reads
    /// what it writes and drops it: QEMU sends such pages again when the migration is recovered.
    pub(crate) fn look(&mut self, socket: &impl AsFd) -> Option<Settled> {
        if !is_open(socket) {
            return Some(Settled::Closed);
        }
        if let Some(reading) = &mut self.reading {
            let now = Instant::now();
            if waiting(socket) == 0 {
                let is_silent = now.saturating_duration_since(self.since) >= STABLE;
                return (is_silent && self.last.end_stream()).then_some(Settled::Sent);
            }
            if !reading.is_due(now) {
                return None;
            }
            let from = reading.read;
            let begun = reading.read(socket, &mut self.last)?;
            let now = Instant::now();
            (self.since, reading.at) = (now, Some(now));
            let read = (from, reading.read);
            if reading.sections.come(now, read, begun, || buffered(socket)) {
                self.reading = None;
            }
            return None;
        }
        let (now, queue) = (Instant::now(), waiting(socket));
        if queue != self.queue {
            (self.queue, self.since) = (queue, now);
        }
        if now.saturating_duration_since(self.since) < STABLE {
            return None;
        }
        let is_end = if queue == 0 {
            // The end may have been read with the sections that have shown that the source has seen
            // its PONG, or by a `drain` that was not over then.
            self.last.end_stream()
        } else if is_unix(socket) {
            is_end(socket, queue)
        } else {
            // The end may wait at the sender. Whatever the source has written has come once
            // nothing waits here.
            self.drain(socket)?;
            self.last.end_stream()
        };
        Some(if is_end { Settled::Sent } else { Settled::Pauses })
    }

    /// Reads and drops what has come; `None` if more comes all the time.
    fn drain(&mut self, socket: &impl AsFd) -> Option<()> {
        let until = Instant::now() + READ;
        let mut bytes = vec![0; 64 << 10];
        while Instant::now() < until {
            match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, got @ 1..)) => self.last.feed(&bytes[..got]),
                Err(Errno::INTR) => {}
                Ok(_) | Err(_) => return Some(()),
            }
        }
        None
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

/// Collects the last bytes of a stream in postcopy.
#[derive(Debug, Default)]
pub(crate) struct LastBytes(Vec<u8>);

impl LastBytes {
    /// Adds `bytes` of the stream.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(&bytes[bytes.len().saturating_sub(LONGEST_END)..]);
        self.0.drain(..self.0.len().saturating_sub(LONGEST_END));
    }

    /// Whether the bytes so far end a stream.
    pub(crate) fn end_stream(&self) -> bool {
        ends_stream(&self.0)
    }
}

/// Bytes of the longest end that [`ends_stream`] looks for.
const LONGEST_END: usize = 14;

/// The end of RAM's last section (a record EOS, then a footer unless the machine has none), then
/// the end-of-stream tag. A page may end like that by chance, which only keeps the socket open.
fn ends_stream(bytes: &[u8]) -> bool {
    const EOS: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x10];
    const FOOTER: usize = 5;
    let Some((0, before)) = bytes.split_last() else { return false };
    let with_footer = before.len().checked_sub(FOOTER).is_some_and(|at| before[at] == 0x7e);
    // Fewer bytes than a section's end: its beginning was read before.
    before.len() < EOS.len() + FOOTER || with_footer || before.ends_with(&EOS)
}

#[cfg(test)]
mod tests {
    use super::sections::tests::NEXT;
    use super::sections::{ROOM, ROUNDS, SHORT};
    use super::*;
    use rustix::net::sockopt::set_socket_send_buffer_size;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;

    const END: [u8; 19] = [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 0];

    fn settled(settle: &mut Settle, socket: &impl AsFd) -> Settled {
        loop {
            if let Some(settled) = settle.look(socket) {
                return settled;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_source_that_has_sent_all_differs_from_one_that_waits_to_send() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.write_all(&[7; 5000]).unwrap();
        assert_eq!(settled(&mut Settle::new(false), &ours), Settled::Pauses);
        qemu.write_all(&END).unwrap();
        assert_eq!(settled(&mut Settle::new(false), &ours), Settled::Sent);
        // Nothing was taken away.
        let mut all = vec![0; 5019];
        (&ours).read_exact(&mut all).unwrap();
        assert_eq!(settled(&mut Settle::new(false), &ours), Settled::Pauses);
        drop(qemu);
        assert_eq!(settled(&mut Settle::new(false), &ours), Settled::Closed);
    }

    /// With TCP the end may be where this end cannot look: the receiver's buffer is full.
    #[test]
    fn a_source_that_has_sent_all_by_tcp_is_known_when_its_end_waits_at_the_sender() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for end in [&END[..], &[7; 19]] {
            let mut qemu = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (ours, _) = listener.accept().unwrap();
            set_socket_send_buffer_size(&qemu, 4 << 20).unwrap();
            let bytes = vec![7; 16 << 10];
            qemu.set_nonblocking(true).unwrap();
            // Until the receiver's buffer is full, and the rest waits at the sender.
            let (mut sent, mut last, mut full) = (0, 0, 0);
            while sent < full + (128 << 10) {
                sent += qemu.write(&bytes).unwrap();
                std::thread::sleep(Duration::from_millis(2));
                if waiting(&ours) != last {
                    (last, full) = (waiting(&ours), sent);
                }
            }
            qemu.write_all(end).unwrap();
            let expected = if end == END { Settled::Sent } else { Settled::Pauses };
            assert_eq!(settled(&mut Settle::new(false), &ours), expected, "after {sent}");
        }
    }

    #[test]
    fn the_end_is_known_however_the_bytes_are_cut() {
        let stream = [&[9; 100][..], &END].concat();
        for piece in 1..=stream.len() {
            let mut last = LastBytes::default();
            stream.chunks(piece).for_each(|bytes| last.feed(bytes));
            assert!(last.end_stream(), "in pieces of {piece}");
        }
        let mut last = LastBytes::default();
        last.feed(&stream[..stream.len() - 1]);
        assert!(!last.end_stream());
    }

    #[test]
    fn the_end_is_known_with_and_without_a_footer() {
        assert!(ends_stream(&END) && ends_stream(&END[12..]));
        let bare = [&[9; 100][..], &END[..13], &[0]].concat();
        assert!(ends_stream(&bare));
        for cut in 1..7 {
            assert!(!ends_stream(&END[..END.len() - cut]), "{cut} bytes before");
        }
        assert!(!ends_stream(&[&[9; 100][..], &[0]].concat()) && !ends_stream(&[]));
    }

    /// A section of huge pages may take any time, in which the source does not look for its PONG.
    #[test]
    fn a_source_with_its_pong_does_not_settle_within_a_section() {
        let (qemu, ours) = UnixStream::pair().unwrap();
        let writer = qemu.try_clone().unwrap();
        let writer = std::thread::spawn(move || while (&writer).write_all(&[7; 9000]).is_ok() {});
        let begin = Instant::now();
        let mut settle = Settle::new(true);
        while begin.elapsed() < 3 * ROUND * ROUNDS
            || settle.reading.as_ref().is_some_and(|reading| reading.read < 4 * SHORT)
        {
            assert_eq!(settle.look(&ours), None);
        }
        qemu.shutdown(std::net::Shutdown::Both).unwrap();
        writer.join().unwrap();
    }

    /// A source that has sent all cannot pause: it is read no more than it takes.
    #[test]
    fn a_source_with_its_pong_is_read_slowly_while_its_sections_are_short() {
        let (qemu, ours) = UnixStream::pair().unwrap();
        let section = [&[7; 64 * 4104][..], &NEXT].concat();
        let writer = qemu.try_clone().unwrap();
        let writer = std::thread::spawn(move || while (&writer).write_all(&section).is_ok() {});
        let (mut settle, mut read) = (Settle::new(true), 0);
        while let Some(reading) = &settle.reading {
            read = reading.read;
            assert_eq!(settle.look(&ours), None);
            std::thread::sleep(LOOK);
        }
        let rounds = u64::from(ROUNDS + 1) * ROOM as u64;
        assert!(read < rounds + SHORT, "{read}");
        qemu.shutdown(std::net::Shutdown::Both).unwrap();
        writer.join().unwrap();
    }

    /// A source that writes a section now and then, as a rate limit makes it do.
    #[test]
    fn a_source_with_its_pong_is_read_for_a_second_before_it_may_pause() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        let begin = Instant::now();
        let mut settle = Settle::new(true);
        // It is stopped: no time shows anything.
        while begin.elapsed() < 2 * STABLE {
            assert_eq!(settle.look(&ours), None);
            std::thread::sleep(LOOK);
        }
        let begin = Instant::now();
        // It writes until it has been seen for so long, however late the looks come.
        let seen = Arc::new(AtomicBool::new(false));
        let over = seen.clone();
        let writer = std::thread::spawn(move || {
            let section = [&[7; 900][..], &NEXT].concat();
            while !over.load(Ordering::Acquire) && qemu.write_all(&section).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
            qemu
        });
        while settle.reading.is_some() {
            assert_eq!(settle.look(&ours), None);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begin.elapsed() >= ROUND * ROUNDS, "{:?}", begin.elapsed());
        seen.store(true, Ordering::Release);
        assert_eq!(settled(&mut settle, &ours), Settled::Pauses);
        drop(ours);
        writer.join().unwrap();
    }

    /// Its end comes with the sections that show that it has seen its PONG, and all of it is read.
    #[test]
    fn a_source_that_ends_its_stream_as_it_is_seen_to_have_its_pong_has_sent_all() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        let section = [&[7; 900][..], &NEXT].concat();
        let mut settle = Settle::new(true);
        let is_old = |settle: &Settle| {
            settle.reading.as_ref().is_some_and(|reading| reading.sections.is_old())
        };
        while !is_old(&settle) {
            qemu.write_all(&section).unwrap();
            assert_eq!(settle.look(&ours), None);
            std::thread::sleep(LOOK);
        }
        while waiting(&ours) > 0 {
            assert_eq!(settle.look(&ours), None);
            std::thread::sleep(LOOK);
        }
        qemu.write_all(&[&section[..], &[7; 500], &NEXT[..13], &END].concat()).unwrap();
        assert_eq!(settled(&mut settle, &ours), Settled::Sent);
    }

    #[test]
    fn a_source_that_ends_its_stream_when_it_has_its_pong_is_not_read_on() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.write_all(&[&[7; 3000][..], &END].concat()).unwrap();
        assert_eq!(settled(&mut Settle::new(true), &ours), Settled::Sent);
    }
}
