//! The backing device that a store has: its free blocks, its reads and writes, what has failed.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::blocks::Blocks;
use crate::disk::{name_of, number_of, Block, Disk};
use crate::superblock::MAX_RUN;
use crate::sync::{AtomicU64, Ordering};

/// How long reads that fail are tried again, from the first of them on until one succeeds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Free blocks that are looked at before the longest run so far will do.
const LOOK_AT: u32 = 1 << 16;

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
    pub(crate) disk: Box<dyn Disk>,
    pub(crate) name: String,
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

impl Backing {
    /// `doubtful` of the blocks are kept out of use.
    pub(crate) fn new(
        disk: Box<dyn Disk>,
        name: &str,
        blocks: Blocks,
        doubtful: u64,
        stopped: Option<Stopped>,
    ) -> Self {
        let failed_writes = u64::from(matches!(stopped, Some(Stopped::Write { .. })));
        Self {
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
            failed_writes: AtomicU64::new(failed_writes),
        }
    }

    pub(crate) fn stats(&self) -> BackingStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        BackingStats {
            name: self.name.clone(),
            blocks: u64::from(self.blocks.count() - 1),
            free: u64::from(self.blocks.free()),
            doubtful: self.doubtful,
            direct: self.disk.is_direct(),
            bd_reads: of(&self.reads),
            bd_writes: of(&self.writes),
            failed_reads: of(&self.failed_reads),
            failed_writes: of(&self.failed_writes),
            stopped: *self.stopped(),
        }
    }

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
