//! A store's backing device in use: its free blocks, reads and writes, and failures.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::blocks::Blocks;
use crate::disk::{name_of, number_of, Block, Disk};
use crate::superblock::MAX_RUN;
use crate::sync::{AtomicU64, Ordering};

/// How long failing reads are retried: from the first failure until a read succeeds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks to examine before the longest free run found so far is good enough.
const LOOK_AT: u32 = 1 << 16;

/// Why writeback has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// A write has failed.
    Write {
        /// The kernel's errno.
        errno: i32,
        /// The first block of the write.
        block: u32,
    },
    /// The header has not been read since a server took the device over. Pages that the device
    /// returns are read meanwhile: their checksums prove them.
    Unread {
        /// The kernel's errno, if a read was tried.
        errno: Option<i32>,
    },
    /// The header was read, and is not this store's.
    Foreign,
    /// The store's record of servers that were killed while they wrote is full.
    Killed {
        /// The number of such servers.
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

/// A backing device's state and counters since this server took it; blocks of 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingStats {
    /// The device's name, as given to the store.
    pub name: String,
    /// Blocks for pages.
    pub blocks: u64,
    /// Free blocks.
    pub free: u64,
    /// Blocks that are not used because a server was killed while it wrote them: the kernel may
    /// still complete that write, and nothing tells when.
    pub doubtful: u64,
    /// Whether the device uses direct I/O.
    pub direct: bool,
    /// Blocks read.
    pub bd_reads: u64,
    /// Blocks written.
    pub bd_writes: u64,
    /// Reads that failed or returned other bytes than were written.
    pub failed_reads: u64,
    /// Writes of a run of blocks that failed.
    pub failed_writes: u64,
    /// Why writeback has stopped, if it has.
    pub stopped: Option<Stopped>,
}

/// The backing device of one store.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) disk: Box<dyn Disk>,
    pub(crate) name: String,
    blocks: Blocks,
    /// Blocks that are never used.
    doubtful: u64,
    /// Held while blocks are written; only writers wait for it.
    writer: Mutex<Writer>,
    stopped: Mutex<Option<Stopped>>,
    reads: AtomicU64,
    writes: AtomicU64,
    failed_reads: AtomicU64,
    failed_writes: AtomicU64,
    /// When the first read failed since the last success.
    failing: Mutex<Option<Instant>>,
}

/// The writing thread's state.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Where the search for free blocks starts.
    next: u32,
}

impl Backing {
    /// `doubtful` of the blocks are never used.
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
        // A panic under this lock interrupts no update.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`lock`](Self::lock); `None` if another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Writer>> {
        match self.writer.try_lock() {
            Ok(writer) => Some(writer),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Why writeback has stopped.
    pub(crate) fn stopped(&self) -> MutexGuard<'_, Option<Stopped>> {
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Drops the reference of an entry that does not name the block any more.
    pub(crate) fn drop_hold(&self, block: u32) {
        self.blocks.drop_hold(block);
    }

    /// Reads a block that an entry names. The error is the kernel's errno.
    pub(crate) fn read(&self, block: u32, out: &mut Block) -> Result<(), i32> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let read = self.disk.read(block, out).map_err(|error| number_of(&error));
        if read.is_ok() {
            *self.failing() = None;
        }
        read
    }

    /// After a failed read, returns whether a retry is worthwhile. Once a disk has failed all reads
    /// for [`PATIENCE`], later reads fail at once instead of waiting as long again.
    #[cold]
    pub(crate) fn may_recover(&self) -> bool {
        self.failing().get_or_insert_with(Instant::now).elapsed() < PATIENCE
    }

    fn failing(&self) -> MutexGuard<'_, Option<Instant>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a failed read, unless the page was written meanwhile.
    #[cold]
    pub(crate) fn count_failed_read(&self) {
        self.failed_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a run of up to `want` adjacent free blocks, as long as can be found.
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

    /// Stops writeback.
    pub(crate) fn stop(&self, why: Stopped) -> Stopped {
        *self.stopped() = Some(why);
        why
    }
}
