//! What a server and the process that trains for it share: a file of samples, a question and an answer.
//!
//! ```text
//!  0      question: magic, round, phase, samples, bytes of the dictionary there is, level, percent, checksum
//!  512    answer:   magic, round, phase, bytes, gain (of 10000), checksum of all of it
//!  4096   samples: pages, every third of them held out
//!  ...    the dictionary there is: 16 KiB
//!  ...    the new one: 16 KiB
//! ```
//!
//! A server of swap may not ask for memory, so it writes samples only when the other process has seen to it that the
//! file has some ([`Phase::Ready`]), and by system calls: a mapping would need page tables. Whatever is read here is the
//! other process's, which may have died in the middle of it, or hold anything: it is checked, and used for nothing
//! but what the server then tries for itself.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use device::PAGE;
use rustix::fs::{
    fallocate, fcntl_add_seals, ftruncate, memfd_create, FallocateFlags, MemfdFlags, SealFlags,
};
use store::MAX_DICTIONARY;

/// Pages that a dictionary is trained on and judged by, two thirds and one.
pub(crate) const SAMPLES: usize = 768;

/// "platenTR", little endian.
const MAGIC: u64 = u64::from_le_bytes(*b"platenTR");

const QUESTION: u64 = 0;
const ANSWER: u64 = 512;
const SAMPLES_AT: u64 = PAGE as u64;
const PLACE: u64 = 16 << 10;
const CURRENT_AT: u64 = SAMPLES_AT + (SAMPLES * PAGE) as u64;
const RESULT_AT: u64 = CURRENT_AT + PLACE;
const LEN: u64 = RESULT_AT + PLACE;

const _: () = assert!(MAX_DICTIONARY as u64 <= PLACE);

/// Where a round is; each side says its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Phase {
    /// The server wants a dictionary.
    Asked = 1,
    /// The trainer has seen to memory.
    Ready = 2,
    /// The server has written samples.
    Given = 3,
    /// The trainer has one that pays.
    Done = 4,
    /// It has none.
    NoGain = 5,
}

impl Phase {
    fn read(word: u64) -> Option<Self> {
        [Self::Asked, Self::Ready, Self::Given, Self::Done, Self::NoGain]
            .into_iter()
            .find(|phase| *phase as u64 == word)
    }
}

/// What the server wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) round: u64,
    pub(crate) phase: Phase,
    pub(crate) samples: usize,
    /// Bytes of the dictionary that there is; 0 for none.
    pub(crate) current: usize,
    pub(crate) level: i32,
}

/// What the trainer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) phase: Phase,
    /// Bytes of the dictionary.
    pub(crate) len: usize,
    /// What it brings on what was held out, of 10000.
    pub(crate) gain: u64,
}

/// The file.
#[derive(Debug)]
pub struct Ground(File);

impl Ground {
    /// Makes the file: all of it but the first page has no memory yet.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn make() -> io::Result<Self> {
        let fd = memfd_create("platen-train", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, LEN)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        fallocate(&fd, FallocateFlags::empty(), 0, PAGE as u64)?;
        Ok(Self(fd.into()))
    }

    /// The file that somebody else made.
    ///
    /// # Errors
    ///
    /// Another length than it has.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let len = file.metadata()?.len();
        if len == LEN {
            return Ok(Self(file));
        }
        let error = format!("training file of {len} bytes, expected {LEN}");
        Err(io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Another descriptor of it.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.0.try_clone().map(OwnedFd::from)
    }

    /// Memory for all of it: for the trainer, which may wait.
    pub(crate) fn populate(&self) -> io::Result<()> {
        Ok(fallocate(&self.0, FallocateFlags::empty(), 0, LEN)?)
    }

    /// Gives all memory but the first page's back.
    pub(crate) fn release(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // It stays until the next round then.
        let _ = fallocate(&self.0, flags, SAMPLES_AT, LEN - SAMPLES_AT);
    }

    pub(crate) fn ask(&self, question: &Question) -> io::Result<()> {
        let Question { round, phase, samples, current, level } = *question;
        let level = u64::from_le_bytes(i64::from(level).to_le_bytes());
        let words = [MAGIC, round, phase as u64, samples as u64, current as u64, level];
        self.put(QUESTION, &words)
    }

    /// What the server wants just now; `None` if that is nothing that makes sense.
    pub(crate) fn question(&self) -> Option<Question> {
        let [round, phase, samples, current, level] = self.get(QUESTION)?;
        let question = Question {
            round,
            phase: Phase::read(phase)?,
            samples: usize::try_from(samples).ok().filter(|&n| n <= SAMPLES)?,
            current: usize::try_from(current).ok().filter(|&n| n <= MAX_DICTIONARY)?,
            level: i32::try_from(i64::from_le_bytes(level.to_le_bytes())).ok()?,
        };
        Some(question)
    }

    /// Says how far the trainer is in `round`; with a dictionary if it has one.
    pub(crate) fn answer(&self, round: u64, answer: &Answer, dictionary: &[u8]) -> io::Result<()> {
        self.0.write_all_at(dictionary, RESULT_AT)?;
        let Answer { phase, len, gain } = *answer;
        let sum = codec::checksum(dictionary);
        self.put(ANSWER, &[MAGIC, round, phase as u64, len as u64, gain, sum])
    }

    /// How far the trainer is in `round`, and its dictionary in `out` if it has one. `None` while it has said nothing
    /// about this round that is whole.
    pub(crate) fn answered(
        &self,
        round: u64,
        out: &mut [u8; MAX_DICTIONARY],
    ) -> Option<Result<Answer, Lie>> {
        let [of, phase, len, gain, sum] = self.get(ANSWER)?;
        let phase = Phase::read(phase).filter(|_| of == round)?;
        match phase {
            Phase::Done => {}
            Phase::Ready | Phase::NoGain => return Some(Ok(Answer { phase, len: 0, gain: 0 })),
            // What the server says, not the trainer.
            Phase::Asked | Phase::Given => return Some(Err(Lie)),
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let bytes = out.get_mut(..len).filter(|bytes| !bytes.is_empty());
        let Some(bytes) = bytes.filter(|_| gain <= 10_000) else { return Some(Err(Lie)) };
        let whole = self.0.read_exact_at(bytes, RESULT_AT).is_ok() && codec::checksum(bytes) == sum;
        Some(if whole { Ok(Answer { phase, len, gain }) } else { Err(Lie) })
    }

    pub(crate) fn put_sample(&self, number: usize, page: &[u8; PAGE]) -> io::Result<()> {
        debug_assert!(number < SAMPLES);
        self.0.write_all_at(page, SAMPLES_AT + (number * PAGE) as u64)
    }

    pub(crate) fn samples(&self, count: usize) -> io::Result<Vec<u8>> {
        let mut all = vec![0; count.min(SAMPLES) * PAGE];
        self.0.read_exact_at(&mut all, SAMPLES_AT)?;
        Ok(all)
    }

    pub(crate) fn put_current(&self, dictionary: &[u8]) -> io::Result<()> {
        self.0.write_all_at(dictionary, CURRENT_AT)
    }

    pub(crate) fn current(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len.min(MAX_DICTIONARY)];
        self.0.read_exact_at(&mut bytes, CURRENT_AT)?;
        Ok(bytes)
    }

    /// Words and their checksum, in one write.
    fn put(&self, at: u64, words: &[u64; 6]) -> io::Result<()> {
        let mut bytes = [0; 56];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let sum = codec::checksum(&bytes[..48]);
        bytes[48..].copy_from_slice(&sum.to_le_bytes());
        self.0.write_all_at(&bytes, at)
    }

    /// The words behind the magic number, if they are whole.
    fn get(&self, at: u64) -> Option<[u64; 5]> {
        let mut bytes = [0; 56];
        self.0.read_exact_at(&mut bytes, at).ok()?;
        let word = |nth: usize| {
            bytes[nth * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let whole = word(0) == MAGIC && word(6) == codec::checksum(&bytes[..48]);
        whole.then(|| std::array::from_fn(|nth| word(nth + 1)))
    }
}

/// The trainer has said what no trainer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lie;
