//! The backing device of a store: its header, its free blocks, and what has failed.
//!
//! ```text
//!  block 0   header: magic, version, block size, blocks, the store's id, generation, checksum
//!  block 1.. a page as it is, or a directory and objects (`writeback.rs`)
//! ```
//!
//! The device says whose it is and nothing about what is in its blocks: that is in the slot table,
//! so that it is worth nothing without the store, and there is nothing to be repaired on it.
//! Formatting takes a device that is empty or was a backing device before, and nothing else. Of a
//! file that is empty means: nothing but holes; of a block device, zeros wherever file systems,
//! partition tables, arrays and the like say what they are.
//!
//! What the kernel was asked to write outlives a server that is killed. So blocks are noted in the
//! superblock while they are written, and a server that finds such a note of another one's keeps
//! them out of use: what was meant for pages that were never out might land on other ones. No call
//! tells when such a write is over: a flush of a disk counts only writes that are done, and nobody
//! has the killed process's ring. So it is for as long as the store lives; that is at most one run
//! of a batch for each server that was killed while it wrote.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::blocks::Blocks;
use crate::disk::{name_of, number_of, Block, Disk};
use crate::inject;
use crate::layout::PAGE;
use crate::slot::{State, Word, MAX_BLOCKS};
use crate::store::Store;
use crate::superblock::{noted_runs, MAX_RUN};
use crate::sync::{AtomicU64, Ordering};

/// "platenBK", little endian.
const MAGIC: u64 = u64::from_le_bytes(*b"platenBK");

/// Changes with anything that another version would read wrongly.
const VERSION: u64 = 1;

/// Words of the header, the checksum behind them.
const WORDS: usize = 6;

/// How long reads that fail are tried again, from the first of them on until one succeeds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks that have to be zero on a device that is not ours yet, at a time: its first ones
/// (partition tables, file systems, swap, LVM, arrays, btrfs at 64 KiB), and its last (partition
/// tables' second copy, arrays of the old kinds).
const EMPTY: u32 = 32;

/// Where the first partition and the first volume of LVM begin, 1 MiB: a device whose beginning was
/// wiped.
const FIRST_PARTITION: u32 = 256;

/// Where btrfs has its second superblock, 64 MiB.
const SECOND_COPY: u32 = 16_384;

/// Free blocks that are looked at before the longest run so far will do.
const LOOK_AT: u32 = 1 << 16;

/// Why a backing device cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// It has something else on it.
    #[error("{name} is no backing device and not empty: its block {block} has data; wipe it to give it to platen, all of it or with zeros wherever something begins")]
    Foreign {
        /// The device.
        name: String,
        /// The first block that is not zero.
        block: u32,
    },
    /// It is a file that somebody has written to.
    #[error("{name} is no backing device and not empty: a file with data in it; name another one, or delete it")]
    ForeignFile {
        /// The file.
        name: String,
    },
    /// It is not one, or was not before this store's server was replaced.
    #[error("{name} is no backing device: its first word is {got:016x}")]
    Magic {
        /// The device.
        name: String,
        /// The word found.
        got: u64,
    },
    /// Of another version.
    #[error("{name}: backing device of format version {got}, this program has {VERSION}")]
    Version {
        /// The device.
        name: String,
        /// The version found.
        got: u64,
    },
    /// Its header is damaged.
    #[error("{name}: checksum of its header is {got:08x}, its bytes have {expected:08x}")]
    Checksum {
        /// The device.
        name: String,
        /// What is stated.
        got: u64,
        /// What its words have.
        expected: u64,
    },
    /// A header that says what none can.
    #[error("{name}: its header says {what} {got}, expected {expected}")]
    Header {
        /// The device.
        name: String,
        /// Which of its numbers.
        what: &'static str,
        /// The one found.
        got: u64,
        /// What it may be.
        expected: u64,
    },
    /// It is another store's.
    #[error("{name} belongs to the store {got:016x}, this one is {expected:016x}")]
    Store {
        /// The device.
        name: String,
        /// The store's id that it has.
        got: u64,
        /// This store's.
        expected: u64,
    },
    /// A server after this one has had it.
    #[error("{name} was last used by server {got} of its store, this is server {most}")]
    Generation {
        /// The device.
        name: String,
        /// The number of the server that it has.
        got: u64,
        /// This server's.
        most: u64,
    },
    /// It is shorter than it was.
    #[error("{name} has {have} blocks of {PAGE} bytes, its header says {need}")]
    Truncated {
        /// The device.
        name: String,
        /// Blocks there are.
        have: u64,
        /// Blocks there were.
        need: u64,
    },
    /// It has no room.
    #[error("{name} has {have} blocks of {PAGE} bytes, a header and one page need 2")]
    Small {
        /// The device.
        name: String,
        /// Blocks there are.
        have: u64,
    },
    /// The store is in use, or has one already.
    #[error("{name}: a store takes its backing device before it has workers, and one only")]
    Late {
        /// The device.
        name: String,
    },
    /// The kernel refused.
    #[error("cannot {action} {name}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The device.
        name: String,
        /// The kernel's word.
        source: io::Error,
    },
}

/// Why nothing more is written back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// A write has failed.
    Write {
        /// The kernel's number.
        errno: i32,
        /// The first block of the write.
        block: u32,
    },
    /// The header has not been read since a server took the device over. Pages on the device are
    /// read meanwhile as far as it gives them: their checksums say that they are right.
    Unread {
        /// The kernel's number, if it was tried.
        errno: Option<i32>,
    },
    /// It was read, and is not this store's.
    Foreign,
    /// As many servers were killed while they wrote to it as the store can keep account of.
    Killed {
        /// How many.
        servers: u32,
    },
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Write { errno, block } => {
                write!(f, "writing block {block} failed: {}", name_of(errno))?;
                if errno == Errno::NOSPC.raw_os_error() {
                    write!(f, ": make room there, and ask again")?;
                }
                Ok(())
            }
            Self::Unread { errno: None } => write!(f, "its header is not yet read"),
            Self::Unread { errno: Some(errno) } => {
                write!(f, "reading its header failed: {}", name_of(errno))
            }
            Self::Foreign => write!(f, "its header is not this store's"),
            Self::Killed { servers } => {
                write!(f, "{servers} servers were killed while they wrote to it")
            }
        }
    }
}

/// What a backing device has and has done, since this server has it; blocks of 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingStats {
    /// What it was called when it was given to the store.
    pub name: String,
    /// Blocks for pages.
    pub blocks: u64,
    /// Those that are free.
    pub free: u64,
    /// Those that are not used because a server was killed while it wrote them: the kernel may
    /// still do that, however late, and nothing tells when it is over.
    pub doubtful: u64,
    /// Whether it goes around the page cache.
    pub direct: bool,
    /// Blocks read.
    pub bd_reads: u64,
    /// Blocks written.
    pub bd_writes: u64,
    /// Reads that failed, or gave other bytes than were written.
    pub failed_reads: u64,
    /// Writes of a run of blocks that failed.
    pub failed_writes: u64,
    /// Why nothing more is written, if so.
    pub stopped: Option<Stopped>,
}

/// Of one store.
#[derive(Debug)]
pub(crate) struct Backing {
    disk: Box<dyn Disk>,
    name: String,
    blocks: Blocks,
    /// Blocks that are kept out of use.
    doubtful: u64,
    /// Held while blocks are written: nobody else waits for it.
    writer: Mutex<Writer>,
    stopped: Mutex<Option<Stopped>>,
    reads: AtomicU64,
    writes: AtomicU64,
    failed_reads: AtomicU64,
    failed_writes: AtomicU64,
    /// When the first of the reads failed since which none has succeeded.
    failing: Mutex<Option<Instant>>,
}

/// What the one thread has that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Where to look for free blocks first.
    next: u32,
}

/// Says on `disk` that it is the backing device of `store` from now on. What it had is forgotten.
///
/// # Errors
///
/// [`BackingError`]: nothing is written to a device that is neither empty nor was a backing device.
pub fn format_backing(disk: &dyn Disk, name: &str, store: &Store) -> Result<(), BackingError> {
    let mut block = Block::ZERO;
    let ours = match disk.read(0, &mut block) {
        Ok(()) => was_ours(&block),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(error) => return Err(io_error("read", name)(error)),
    };
    if ours {
        look_for_new_owners(disk, name)?;
    } else {
        match disk.is_hole().map_err(io_error("examine", name))? {
            Some(true) => {}
            Some(false) => return Err(BackingError::ForeignFile { name: name.to_owned() }),
            None => look_for_others(disk, name)?,
        }
    }
    disk.make_room().map_err(io_error("make room in", name))?;
    let have = blocks(disk, name)?;
    let header = header(have, store.id(), store.generation());
    disk.write(0, std::slice::from_ref(&header)).map_err(io_error("write the header of", name))
}

/// Whether a device begins with a header of ours, and with nothing else: whoever has it now may
/// have left the first bytes as they were.
fn was_ours(block: &Block) -> bool {
    let words = words(block);
    let rest = &block.0[(WORDS + 1) * 8..];
    words[0] == MAGIC && words[WORDS] == sum(&words[..WORDS]) && rest.iter().all(|&byte| byte == 0)
}

/// Marks of those who leave the first 4096 bytes as they were: block, byte, and what is there. In
/// front of them a header of ours stays though the disk is somebody else's by now.
const NEW_OWNERS: [(u32, usize, &[u8]); 3] = [
    // Linux's md, metadata 1.2: its magic number.
    (1, 0, &0xa92b_4efc_u32.to_le_bytes()),
    // bcachefs and bcache: UUIDs of theirs.
    (1, 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    (1, 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
];

/// ZFS's uberblocks: 128 KiB behind as many, every 1024 bytes at most.
const UBERBLOCKS: Range<u32> = 32..64;
const UBERBLOCK: u64 = 0x00ba_b10c;

/// Refuses what was ours, and has the mark of somebody who has taken it since.
fn look_for_new_owners(disk: &dyn Disk, name: &str) -> Result<(), BackingError> {
    let have = blocks(disk, name)?;
    let mut block = Block::ZERO;
    for at in [1].into_iter().chain(UBERBLOCKS).filter(|&at| at < have) {
        disk.read(at, &mut block).map_err(io_error("read", name))?;
        let marked = NEW_OWNERS
            .iter()
            .any(|&(of, byte, mark)| of == at && block.0[byte..].starts_with(mark));
        let words = block.0.chunks(1024).map(|part| part.first_chunk::<8>());
        let zfs = UBERBLOCKS.contains(&at)
            && words.flatten().any(|&word| {
                u64::from_le_bytes(word) == UBERBLOCK || u64::from_be_bytes(word) == UBERBLOCK
            });
        if marked || zfs {
            return Err(BackingError::Foreign { name: name.to_owned(), block: at });
        }
    }
    Ok(())
}

/// Refuses a block device that has something on it.
fn look_for_others(disk: &dyn Disk, name: &str) -> Result<(), BackingError> {
    // The end of the disk, which may be behind what entries can name.
    let have = disk.blocks().map_err(io_error("find the size of", name))?;
    let have = u32::try_from(have).map_err(|_| {
        let error = io::Error::new(io::ErrorKind::Unsupported, "it has 16 TiB or more");
        io_error("examine the end of", name)(error)
    })?;
    let mut block = Block::ZERO;
    let first = 0..EMPTY;
    let partition = FIRST_PARTITION..FIRST_PARTITION + EMPTY;
    let last = have.saturating_sub(EMPTY)..have;
    for at in first.chain(partition).chain([SECOND_COPY]).chain(last).filter(|&at| at < have) {
        disk.read(at, &mut block).map_err(io_error("read", name))?;
        if block.0.iter().any(|&byte| byte != 0) {
            return Err(BackingError::Foreign { name: name.to_owned(), block: at });
        }
    }
    Ok(())
}

impl Store {
    /// Takes the device that this store was [given](format_backing): what its servers wrote back
    /// can be read again, and more can be written.
    ///
    /// # Errors
    ///
    /// [`BackingError`]; then reading what is on it fails, and everything else goes on.
    pub fn set_backing(&self, disk: Box<dyn Disk>, name: &str) -> Result<(), BackingError> {
        self.has_room(name)?;
        let have = blocks(&*disk, name)?;
        let mut block = Block::ZERO;
        disk.read(0, &mut block).map_err(io_error("read", name))?;
        let count = check(&block, name, self.id(), self.generation(), have)?;
        // If it cannot be written: what is on it can be read.
        let stopped = self.sign(&*disk, count).err();
        self.install(disk, name, count, stopped)
    }

    /// Takes the device that an earlier server of this store had, which need not answer just now:
    /// nobody is to wait for it but who reads what is on it. Nothing is written to it until
    /// [`retry_backing`](Self::retry_backing) has seen its header.
    ///
    /// # Errors
    ///
    /// [`BackingError::Late`], and a size that cannot be known.
    pub fn take_backing(&self, disk: Box<dyn Disk>, name: &str) -> Result<(), BackingError> {
        self.has_room(name)?;
        let have = disk.blocks().map_err(io_error("find the size of", name))?;
        let have = u32::try_from(have).unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS);
        // Of one that has got shorter meanwhile no entry is forgotten.
        let last = self.heap.map.table().iter().filter_map(|slot| match slot.load().state() {
            Some(State::Backed(at)) => Some(at.block),
            _ => None,
        });
        let count = last.max().map_or(have, |last| have.max(last.saturating_add(1)));
        self.install(disk, name, count, Some(Stopped::Unread { errno: None }))
    }

    fn has_room(&self, name: &str) -> Result<(), BackingError> {
        if self.working.load(Ordering::Acquire) != 0 || self.backing.get().is_some() {
            return Err(BackingError::Late { name: name.to_owned() });
        }
        Ok(())
    }

    fn install(
        &self,
        disk: Box<dyn Disk>,
        name: &str,
        count: u32,
        stopped: Option<Stopped>,
    ) -> Result<(), BackingError> {
        let blocks = Blocks::new(count.max(2));
        for slot in self.heap.map.table() {
            if let Some(State::Backed(at)) = slot.load().state() {
                if !blocks.count_one(at.block) {
                    slot.store(Word::LOST);
                    self.lost.fetch_add(1, Ordering::Relaxed);
                    let counter = &self.counters[crate::store::MAX_WORKERS].backed;
                    crate::stats::sub(counter, 1);
                }
            }
        }
        inject::step();
        let doubtful = noted_runs(self.heap.map.superblock()).flatten();
        let doubtful = doubtful.filter(|&block| blocks.shut(block)).count() as u64;
        let backing = Backing {
            disk,
            name: name.to_owned(),
            blocks,
            doubtful,
            writer: Mutex::new(Writer { next: 1 }),
            stopped: Mutex::new(stopped),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            failed_reads: AtomicU64::new(0),
            failing: Mutex::new(None),
            failed_writes: AtomicU64::new(u64::from(matches!(
                stopped,
                Some(Stopped::Write { .. })
            ))),
        };
        let late = |_| BackingError::Late { name: name.to_owned() };
        self.backing.set(backing).map_err(late)
    }

    /// Writes the header: which server of which store has the device.
    fn sign(&self, disk: &dyn Disk, count: u32) -> Result<(), Stopped> {
        let header = header(count, self.id(), self.generation());
        let written = disk.write(0, std::slice::from_ref(&header));
        written.map_err(|error| Stopped::Write { errno: number_of(&error), block: 0 })
    }

    /// Whether there is a backing device.
    pub fn has_backing(&self) -> bool {
        self.backing.get().is_some()
    }

    /// The backing device's counters.
    pub fn backing_stats(&self) -> Option<BackingStats> {
        let backing = self.backing.get()?;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(BackingStats {
            name: backing.name.clone(),
            blocks: u64::from(backing.blocks.count() - 1),
            free: u64::from(backing.blocks.free()),
            doubtful: backing.doubtful,
            direct: backing.disk.is_direct(),
            bd_reads: of(&backing.reads),
            bd_writes: of(&backing.writes),
            failed_reads: of(&backing.failed_reads),
            failed_writes: of(&backing.failed_writes),
            stopped: *backing.stopped(),
        })
    }

    /// Bytes that others may still store on the file system of the backing device; `None` if it is
    /// in none.
    pub fn backing_space(&self) -> Option<u64> {
        self.backing.get()?.disk.free()
    }

    /// Lets writing begin again after a failure: somebody has seen to it.
    pub fn resume_backing(&self) {
        // Whoever asked for the device was told.
        let _ = self.retry_backing();
        if let Some(backing) = self.backing.get() {
            backing.stopped().take_if(|stopped| matches!(stopped, Stopped::Write { .. }));
        }
    }

    /// Looks at a device that was [taken](Self::take_backing) unseen, if that is still to be done,
    /// and lets writing begin if it is this store's. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`BackingError::Io`] when it cannot be read: try again later. Any other is for good: what it still gives is
    /// read, and nothing is written to it.
    pub fn retry_backing(&self) -> Result<(), BackingError> {
        let Some(backing) = self.backing.get() else { return Ok(()) };
        let _writer = backing.lock();
        if !matches!(*backing.stopped(), Some(Stopped::Unread { .. })) {
            return Ok(());
        }
        let (disk, name) = (&*backing.disk, &*backing.name);
        let mut block = Block::ZERO;
        if let Err(error) = disk.read(0, &mut block) {
            *backing.stopped() = Some(Stopped::Unread { errno: Some(number_of(&error)) });
            return Err(io_error("read", name)(error));
        }
        let count = backing.blocks.count();
        let checked = blocks(disk, name)
            .and_then(|have| check(&block, name, self.id(), self.generation(), have));
        *backing.stopped() = match checked {
            Ok(_) => self.sign(disk, count).err(),
            Err(_) => Some(Stopped::Foreign),
        };
        checked.map(drop)
    }

    /// Blocks that servers of this store have written to the backing device today, from midnight
    /// UTC on.
    pub fn written_today(&self) -> u64 {
        crate::superblock::written(self.heap.map.superblock(), crate::writeback::today())
    }
}

impl Backing {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Writer> {
        // Nothing is left half done by a panic while it is held.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why nothing more is written.
    pub(crate) fn stopped(&self) -> MutexGuard<'_, Option<Stopped>> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// An entry does not name the block any more.
    pub(crate) fn leave(&self, block: u32) {
        self.blocks.leave(block);
    }

    /// Reads a block that an entry names; the kernel's number if that fails.
    pub(crate) fn read(&self, block: u32, out: &mut Block) -> Result<(), i32> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let read = self.disk.read(block, out).map_err(|error| number_of(&error));
        if read.is_ok() {
            *self.failing() = None;
        }
        read
    }

    /// After a read that failed: whether it is worth while to ask again. A disk that answers nobody
    /// for some time does not make everybody wait for as long again.
    #[cold]
    pub(crate) fn may_recover(&self) -> bool {
        self.failing().get_or_insert_with(Instant::now).elapsed() < PATIENCE
    }

    fn failing(&self) -> MutexGuard<'_, Option<Instant>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read failed, and not because the page was written meanwhile.
    #[cold]
    pub(crate) fn count_failed_read(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes up to `want` free blocks that lie one behind the other, as many as can be had.
    pub(crate) fn take(&self, writer: &mut Writer, want: u32) -> Option<Range<u32>> {
        if self.blocks.free() == 0 {
            return None;
        }
        let count = self.blocks.count();
        let start = if (1..count).contains(&writer.next) { writer.next } else { 1 };
        let want = want.min(MAX_RUN);
        let (mut best, mut run) = (0..0, start..start);
        for (looked, block) in (0..).zip((start..count).chain(1..start)) {
            if block != run.end {
                run = block..block;
            }
            if !self.blocks.is_free(block) {
                run = block + 1..block + 1;
                continue;
            }
            run.end = block + 1;
            if run.len() > best.len() {
                best = run.clone();
            }
            if best.len() == want as usize || looked >= LOOK_AT && !best.is_empty() {
                break;
            }
        }
        if best.is_empty() {
            return None;
        }
        best.clone().for_each(|block| self.blocks.take(block));
        writer.next = best.end;
        Some(best)
    }

    /// Writes blocks that the caller has taken.
    pub(crate) fn write(&self, _: &mut Writer, at: u32, blocks: &[Block]) -> Result<(), Stopped> {
        match self.disk.write(at, blocks) {
            Ok(()) => {
                self.writes.fetch_add(blocks.len() as u64, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                self.failed_writes.fetch_add(1, Ordering::Relaxed);
                Err(self.stop(Stopped::Write { errno: number_of(&error), block: at }))
            }
        }
    }

    /// Nothing more is written.
    pub(crate) fn stop(&self, why: Stopped) -> Stopped {
        *self.stopped() = Some(why);
        why
    }
}

/// Blocks of a device, as many as entries can name.
fn blocks(disk: &dyn Disk, name: &str) -> Result<u32, BackingError> {
    let have = disk.blocks().map_err(io_error("find the size of", name))?;
    if have < 2 {
        return Err(BackingError::Small { name: name.to_owned(), have });
    }
    Ok(u32::try_from(have).unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS))
}

fn io_error<'a>(
    action: &'static str,
    name: &'a str,
) -> impl FnOnce(io::Error) -> BackingError + use<'a> {
    move |source| {
        // Its own name for it says nothing to a person.
        let eof = source.kind() == io::ErrorKind::UnexpectedEof;
        let source = if eof { Errno::IO.into() } else { source };
        BackingError::Io { action, name: name.to_owned(), source }
    }
}

fn words(block: &Block) -> [u64; WORDS + 1] {
    let mut words = [0; WORDS + 1];
    for (word, bytes) in words.iter_mut().zip(block.0.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    words
}

fn header(blocks: u32, store: u64, generation: u64) -> Block {
    let words = [MAGIC, VERSION, PAGE as u64, u64::from(blocks), store, generation];
    let mut block = Block::ZERO;
    for (word, bytes) in words.iter().chain([&sum(&words)]).zip(block.0.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    block
}

fn sum(words: &[u64]) -> u64 {
    let sum = words.iter().fold(0, |sum, word| crc32c::crc32c_append(sum, &word.to_le_bytes()));
    u64::from(sum)
}

/// The number of blocks, the header among them, if this is the header of the store `id`'s device.
pub(crate) fn check(
    block: &Block,
    name: &str,
    id: u64,
    generation: u64,
    have: u32,
) -> Result<u32, BackingError> {
    let name = || name.to_owned();
    let got = words(block);
    let [magic, version, size, blocks, store, last, stated] = got;
    if magic != MAGIC {
        return Err(BackingError::Magic { name: name(), got: magic });
    }
    if version != VERSION {
        return Err(BackingError::Version { name: name(), got: version });
    }
    let expected = sum(&got[..WORDS]);
    if stated != expected {
        return Err(BackingError::Checksum { name: name(), got: stated, expected });
    }
    let wrong = |what, got, expected| BackingError::Header { name: name(), what, got, expected };
    if size != PAGE as u64 {
        return Err(wrong("blocks of", size, PAGE as u64));
    }
    if store != id {
        return Err(BackingError::Store { name: name(), got: store, expected: id });
    }
    if last > generation {
        return Err(BackingError::Generation { name: name(), got: last, most: generation });
    }
    let count = u32::try_from(blocks).ok().filter(|count| (2..=MAX_BLOCKS).contains(count));
    let count = count.ok_or_else(|| wrong("blocks:", blocks, MAX_BLOCKS.into()))?;
    if have < count {
        return Err(BackingError::Truncated { name: name(), have: have.into(), need: blocks });
    }
    Ok(count)
}
