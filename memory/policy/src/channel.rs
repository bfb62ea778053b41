//! The protocol between a server and its trainer process, over a pair of stream sockets made for
//! this one training.
//!
//! ```text
//!  server  ─► question: magic, round, level, length of the current dictionary, checksum;
//!             that dictionary
//!          ─► for each sample 1 (64 bits) and a page; then 0 (64 bits)
//!  trainer ─► answer: magic, round, length (0: none gains enough), gain (of 10000), checksum of the
//!             dictionary, checksum of all that; the dictionary
//! ```
//!
//! # Why a socket pair
//!
//! A trainer may wait for memory, on a host that swaps to this very server, so the two must share
//! no lock that the trainer could hold meanwhile. A file's inode has a lock for writers; a pipe has
//! one mutex for both ends. Each socket of a pair has its own locks: a mutex that only a receiver
//! at this end takes, and spin locks, which are not held while sleeping. A sender allocates before
//! it takes the other end's lock.
//!
//! # What the channel may cost the server's thread
//!
//! Each call has `MSG_DONTWAIT` and at most one page (16 KiB once, with the current dictionary).
//! The flag avoids a wait for *room* (unread data is limited to 208 KiB by
//! `net.core.wmem_default`), but not the kernel's search for memory: a stream socket allocates with
//! `GFP_KERNEL_ACCOUNT`. The thread is an I/O flusher (`PR_SET_IO_FLUSHER`), which removes
//! `__GFP_IO` and `__GFP_FS`: the allocation may wait for clean pages to be reclaimed, but neither
//! writes a page to a disk nor waits for such a write. Meanwhile the thread holds no lock, of ours
//! or of the kernel's, that an I/O thread could need, and a kill ends the allocation. While memory
//! is short the server sends nothing at all (`training.rs`). Receiving allocates nothing.
//!
//! The peer's data may be truncated or arbitrary. It is checked, and a dictionary in it is used
//! only after the server has tried it. When one end exits for any reason, the other end sees the
//! end of the stream.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use device::PAGE;
use rustix::io::Errno;
use rustix::net::{recv, send, socketpair};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use store::MAX_DICTIONARY;

/// Sample pages: two thirds train a dictionary, one third judges it.
pub(crate) const SAMPLES: usize = 768;

/// "platenTQ", little endian.
const QUESTION: u64 = u64::from_le_bytes(*b"platenTQ");
/// "platenTA", little endian.
pub(crate) const ANSWER: u64 = u64::from_le_bytes(*b"platenTA");

const QUESTION_LEN: usize = 40;
pub(crate) const ANSWER_LEN: usize = 48;

const PAGE_FOLLOWS: u64 = 1;
const NO_MORE: u64 = 0;

/// The longest message of the server.
const MOST: usize = QUESTION_LEN + MAX_DICTIONARY;

/// The server's question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) round: u64,
    pub(crate) level: i32,
}

/// The trainer's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Length of the dictionary in bytes; 0 for none.
    pub(crate) len: usize,
    /// Its gain on the held-out samples, of 10000.
    pub(crate) gain: u64,
}

/// Why the exchange is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// The peer has closed its end.
    Gone,
    /// The peer's data is invalid.
    Lied,
}

/// The server's end, with buffers of a fixed size that are allocated in advance.
#[derive(Debug)]
pub(crate) struct Channel {
    /// Each training has a new one.
    socket: Option<OwnedFd>,
    round: u64,
    /// The message being sent: bytes `sent..len` of `out` remain.
    out: Box<[u8; MOST]>,
    len: usize,
    sent: usize,
    /// The answer's header, and how many bytes of the header and of the dictionary behind it have
    /// arrived.
    head: [u8; ANSWER_LEN],
    received: usize,
}

impl Channel {
    pub(crate) fn new() -> Self {
        Self {
            socket: None,
            round: 0,
            out: Box::new([0; MOST]),
            len: 0,
            sent: 0,
            head: [0; ANSWER_LEN],
            received: 0,
        }
    }

    /// Makes a new pair, starts to send the question, and returns the other end. `current` is the
    /// current dictionary, or empty.
    pub(crate) fn open(&mut self, question: &Question, current: &[u8]) -> io::Result<OwnedFd> {
        self.close();
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let level = u64::from_le_bytes(i64::from(question.level).to_le_bytes());
        let current = &current[..current.len().min(MAX_DICTIONARY)];
        let head: [u8; QUESTION_LEN] =
            words([QUESTION, question.round, level, current.len() as u64]);
        self.out[..QUESTION_LEN].copy_from_slice(&head);
        self.out[QUESTION_LEN..][..current.len()].copy_from_slice(current);
        (self.sent, self.len) = (0, QUESTION_LEN + current.len());
        (self.socket, self.round, self.received) = (Some(ours), question.round, 0);
        Ok(theirs)
    }

    /// Ends the exchange.
    pub(crate) fn close(&mut self) {
        self.socket = None;
    }

    /// Sends as much of the message as there is room for; returns whether all of it is sent.
    pub(crate) fn flush(&mut self) -> Result<bool, Over> {
        let Some(socket) = &self.socket else { return Err(Over::Gone) };
        if self.sent < self.len {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(socket, &self.out[self.sent..self.len], flags) {
                Ok(sent) => self.sent += sent,
                Err(error) if passes(error) => {}
                Err(_) => return Err(Over::Gone),
            }
        }
        Ok(self.sent == self.len)
    }

    /// Starts to send a sample; the last message must be sent.
    pub(crate) fn put_sample(&mut self, page: &[u8; PAGE]) {
        debug_assert!(self.sent == self.len, "something is on its way");
        self.out[..8].copy_from_slice(&PAGE_FOLLOWS.to_le_bytes());
        self.out[8..][..PAGE].copy_from_slice(page);
        (self.sent, self.len) = (0, 8 + PAGE);
    }

    /// Starts to send the end of the samples.
    pub(crate) fn put_end(&mut self) {
        debug_assert!(self.sent == self.len, "something is on its way");
        self.out[..8].copy_from_slice(&NO_MORE.to_le_bytes());
        (self.sent, self.len) = (0, 8);
    }

    /// The trainer's answer with its dictionary in `out`; `None` until all of it has arrived.
    pub(crate) fn receive(
        &mut self,
        out: &mut [u8; MAX_DICTIONARY],
    ) -> Result<Option<Answer>, Over> {
        let socket = self.socket.as_ref().ok_or(Over::Gone)?;
        if let Some(rest) = self.head.get_mut(self.received..).filter(|rest| !rest.is_empty()) {
            self.received += take(socket, rest)?;
        }
        if self.received < ANSWER_LEN {
            return Ok(None);
        }
        let (answer, sum) = read_answer(&self.head, self.round).ok_or(Over::Lied)?;
        let had = self.received - ANSWER_LEN;
        if had < answer.len {
            self.received += take(socket, &mut out[had..answer.len])?;
        }
        if self.received < ANSWER_LEN + answer.len {
            return Ok(None);
        }
        if codec::checksum(&out[..answer.len]) == sum {
            Ok(Some(answer))
        } else {
            Err(Over::Lied)
        }
    }
}

/// Receives the bytes that have arrived, if any.
fn take(socket: &OwnedFd, to: &mut [u8]) -> Result<usize, Over> {
    match recv(socket, to, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Err(Over::Gone),
        Ok((got, _)) => Ok(got),
        Err(error) if passes(error) => Ok(0),
        Err(_) => Err(Over::Gone),
    }
}

/// Whether a retry may succeed: the failure was a lack of room or of memory.
fn passes(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM)
}

/// Parses the answer's header; returns it with the checksum of what follows, or `None` if it is not
/// a valid answer in this round.
fn read_answer(head: &[u8; ANSWER_LEN], round: u64) -> Option<(Answer, u64)> {
    let [magic, of, len, gain, sum] = read_words(head)?;
    let len = usize::try_from(len).ok().filter(|&len| len <= MAX_DICTIONARY)?;
    (magic == ANSWER && of == round && gain <= 10_000).then_some((Answer { len, gain }, sum))
}

/// The trainer's side, which blocks: receives the question, the current dictionary and the samples.
pub(crate) fn receive(from: &mut impl Read) -> io::Result<(Question, Vec<u8>, Vec<u8>)> {
    let nothing = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let mut head = [0; QUESTION_LEN];
    from.read_exact(&mut head)?;
    let [magic, round, level, current] =
        read_words(&head).ok_or_else(|| nothing("the question is damaged"))?;
    let level = i32::try_from(i64::from_le_bytes(level.to_le_bytes())).ok();
    let current = usize::try_from(current).ok().filter(|&len| len <= MAX_DICTIONARY);
    let (Some(level), Some(current), QUESTION) = (level, current, magic) else {
        return Err(nothing("nobody asks for a dictionary"));
    };
    let mut dictionary = vec![0; current];
    from.read_exact(&mut dictionary)?;
    let mut samples = Vec::with_capacity(SAMPLES * PAGE);
    let mut word = [0; 8];
    loop {
        from.read_exact(&mut word)?;
        match u64::from_le_bytes(word) {
            NO_MORE => break,
            PAGE_FOLLOWS if samples.len() < SAMPLES * PAGE => {
                let at = samples.len();
                samples.resize(at + PAGE, 0);
                from.read_exact(&mut samples[at..])?;
            }
            _ => return Err(nothing("these are no samples")),
        }
    }
    Ok((Question { round, level }, dictionary, samples))
}

/// Sends the trainer's answer: a dictionary and its gain, or an empty one.
pub(crate) fn answer(
    to: &mut impl Write,
    round: u64,
    dictionary: &[u8],
    gain: u64,
) -> io::Result<()> {
    let sum = codec::checksum(dictionary);
    let head: [u8; ANSWER_LEN] = words([ANSWER, round, dictionary.len() as u64, gain, sum]);
    to.write_all(&head)?;
    to.write_all(dictionary)
}

/// Encodes 64-bit values with their checksum at the end. `LEN` is the total length in bytes.
pub(crate) fn words<const N: usize, const LEN: usize>(words: [u64; N]) -> [u8; LEN] {
    const { assert!(LEN == 8 * (N + 1)) };
    let mut bytes = [0; LEN];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let sum = codec::checksum(&bytes[..8 * N]);
    bytes[8 * N..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Decodes the values, if their checksum is right.
fn read_words<const N: usize, const LEN: usize>(bytes: &[u8; LEN]) -> Option<[u64; N]> {
    const { assert!(LEN == 8 * (N + 1)) };
    let word =
        |nth: usize| bytes[nth * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    (word(N) == codec::checksum(&bytes[..8 * N])).then(|| std::array::from_fn(word))
}
