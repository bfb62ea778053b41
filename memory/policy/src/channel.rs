//! What a server and the process that trains for it say to each other, through a pair of stream
//! sockets that is made for this one training and for nobody else.
//!
//! ```text
//!  server  ─► question: magic, round, level, bytes of the dictionary that there is, checksum; that dictionary
//!          ─► a word (1) and a page, as often as there are samples; a word (0)
//!  trainer ─► answer: magic, round, bytes (0: none brings enough), gain (of 10000), checksum of the dictionary,
//!             checksum of all that; the dictionary
//! ```
//!
//! # Why a pair of sockets
//!
//! The two have nothing in common that one of them could hold while it waits for memory, which a
//! trainer may do, on a host that swaps to this very server. A file has an inode with a lock for
//! writers, a pipe has one mutex for both ends. Each socket of a pair has its own: a mutex that
//! only who *receives* from this end takes, and spin locks, under which nobody sleeps. What goes to
//! the other end has its memory before the other end's lock is taken.
//!
//! # What the server's end may cost its thread
//!
//! Each call says `MSG_DONTWAIT`, and is for a page at most (for 16 KiB once, with the dictionary
//! that there is). That flag keeps it from waiting for *room* (what the other end has not read is
//! 208 KiB at most, by `net.core.wmem_default`), not from the kernel's search for memory for the
//! bytes: a stream socket allocates with `GFP_KERNEL_ACCOUNT`. The thread is an I/O flusher
//! (`PR_SET_IO_FLUSHER`), which takes `__GFP_IO` and `__GFP_FS` out of that: it may look for memory
//! that is free for the taking and wait for that, but neither writes a page to a disk nor waits for
//! one that is being written. It holds no lock meanwhile, of ours or of the kernel's, that a thread
//! with requests could want; and one that is killed there is let out by the kernel. Nothing at all
//! is said while memory is short (`training.rs`). Receiving allocates nothing.
//!
//! Whatever comes from the other end may be half of something, or anything: it is checked, and used
//! for nothing but what the server then tries for itself. When one of the two ends, however it
//! does, the other hears it.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use device::PAGE;
use rustix::io::Errno;
use rustix::net::{recv, send, socketpair};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use store::MAX_DICTIONARY;

/// Pages that a dictionary is trained on and judged by, two thirds and one.
pub(crate) const SAMPLES: usize = 768;

/// "platenTQ", little endian.
const QUESTION: u64 = u64::from_le_bytes(*b"platenTQ");
/// "platenTA", little endian.
pub(crate) const ANSWER: u64 = u64::from_le_bytes(*b"platenTA");

const QUESTION_LEN: usize = 40;
pub(crate) const ANSWER_LEN: usize = 48;

const PAGE_FOLLOWS: u64 = 1;
const NO_MORE: u64 = 0;

/// The most that a server says at once.
const MOST: usize = QUESTION_LEN + MAX_DICTIONARY;

/// What the server wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) round: u64,
    pub(crate) level: i32,
}

/// What the trainer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Bytes of the dictionary; 0 for none.
    pub(crate) len: usize,
    /// What it brings on what was held out, of 10000.
    pub(crate) gain: u64,
}

/// Why nothing more comes from the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// It is gone.
    Gone,
    /// It has said what no trainer says.
    Lied,
}

/// The server's end, and what it holds for it: of a fixed size, made before it is needed.
#[derive(Debug)]
pub(crate) struct Channel {
    /// One for each training.
    socket: Option<OwnedFd>,
    round: u64,
    /// What is on its way: bytes of `out` from `sent` on, up to `len`.
    out: Box<[u8; MOST]>,
    len: usize,
    sent: usize,
    /// The answer, and how much of it and of what follows has come.
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

    /// Makes a new pair, whose other end it gives, and asks; `current` is the dictionary that there
    /// is, if there is one.
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

    /// Ends it, whatever was said.
    pub(crate) fn close(&mut self) {
        self.socket = None;
    }

    /// Sends of what is on its way as much as there is room for; whether that was all of it.
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

    /// Puts a sample on its way, after all else has gone.
    pub(crate) fn put_sample(&mut self, page: &[u8; PAGE]) {
        debug_assert!(self.sent == self.len, "something is on its way");
        self.out[..8].copy_from_slice(&PAGE_FOLLOWS.to_le_bytes());
        self.out[8..][..PAGE].copy_from_slice(page);
        (self.sent, self.len) = (0, 8 + PAGE);
    }

    /// Puts on its way that there are no more.
    pub(crate) fn put_end(&mut self) {
        debug_assert!(self.sent == self.len, "something is on its way");
        self.out[..8].copy_from_slice(&NO_MORE.to_le_bytes());
        (self.sent, self.len) = (0, 8);
    }

    /// What the trainer has made, when all of it has come: its dictionary is in `out`. `None` until
    /// then.
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

/// Receives what has come, if anything has.
fn take(socket: &OwnedFd, to: &mut [u8]) -> Result<usize, Over> {
    match recv(socket, to, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Err(Over::Gone),
        Ok((got, _)) => Ok(got),
        Err(error) if passes(error) => Ok(0),
        Err(_) => Err(Over::Gone),
    }
}

/// Whether it may go better later: no room, no memory.
fn passes(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM)
}

/// What the head of an answer says, with the checksum of what follows; `None` if that is nothing
/// that a trainer says in this round.
fn read_answer(head: &[u8; ANSWER_LEN], round: u64) -> Option<(Answer, u64)> {
    let [magic, of, len, gain, sum] = read_words(head)?;
    let len = usize::try_from(len).ok().filter(|&len| len <= MAX_DICTIONARY)?;
    (magic == ANSWER && of == round && gain <= 10_000).then_some((Answer { len, gain }, sum))
}

/// The trainer's side, which waits: the question, the dictionary that there is, and the samples.
pub(crate) fn hear(from: &mut impl Read) -> io::Result<(Question, Vec<u8>, Vec<u8>)> {
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

/// The trainer's answer: a dictionary and what it brings, or an empty one.
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

/// Words, and their checksum behind them. `LEN` is the bytes of all that.
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

/// The words, if they are whole.
fn read_words<const N: usize, const LEN: usize>(bytes: &[u8; LEN]) -> Option<[u64; N]> {
    const { assert!(LEN == 8 * (N + 1)) };
    let word =
        |nth: usize| bytes[nth * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    (word(N) == codec::checksum(&bytes[..8 * N])).then(|| std::array::from_fn(word))
}
