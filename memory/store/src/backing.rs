//! The backing device of a store: its header, its free blocks, and its failures.
//!
//! ```text
//!  block 0   header: magic, version, block size, blocks, the store's id, generation, checksum
//!  block 1.. a page as it is, or a directory and objects (`batch.rs`)
//! ```
//!
//! The header identifies the store that owns the device, and says nothing about the blocks: their
//! contents are described in the slot table. So the device is worth nothing without the store, and
//! nothing on it needs repair. Formatting takes only a device that is empty or was a backing device
//! before. A file is empty if it consists of holes; a block device, if it has zeros wherever file
//! systems, partition tables, arrays and the like have their signatures.
//!
//! A write that the kernel has accepted outlives a killed server. So the superblock records which
//! blocks are being written, and a server that finds such a record of another server never uses
//! these blocks: the late write could overwrite other pages. No call tells when such a write has
//! ended: a disk's flush covers only completed writes, and the killed process's ring is gone. So
//! the blocks stay out of use as long as the store lives: at most one run of a batch for each
//! server that was killed while it wrote.

use std::io;
use std::sync::MutexGuard;

use crate::backing_device::{Backing, BackingStats, Stopped, Writer};
use crate::backing_header::{
    blocks, check, header, io_error, look_for_new_owners, look_for_others, was_ours, BackingError,
};
use crate::blocks::Blocks;
use crate::disk::{number_of, Block, Disk};
use crate::entry::{State, Word, MAX_BLOCKS};
use crate::inject;
use crate::store::{Store, MAX_WORKERS};
use crate::superblock::{noted_runs, today, written};
use crate::sync::Ordering;

/// Makes `disk` the backing device of `store`. Its former data is lost.
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

impl Store {
    /// Takes the device that this store [formatted](format_backing): pages that its servers wrote
    /// back can be read again, and more can be written.
    ///
    /// # Errors
    ///
    /// [`BackingError`]; then pages on the device cannot be read, and everything else works.
    pub fn set_backing(&self, disk: Box<dyn Disk>, name: &str) -> Result<(), BackingError> {
        self.has_room(name)?;
        let have = blocks(&*disk, name)?;
        let mut block = Block::ZERO;
        disk.read(0, &mut block).map_err(io_error("read", name))?;
        let count = check(&block, name, self.id(), self.generation(), have)?;
        // A failed write of the header stops writing; pages on the device can still be read.
        let stopped = self.sign(&*disk, count).err();
        self.install(disk, name, count, stopped)
    }

    /// Takes the device of an earlier server of this store, which may not answer just now: only a
    /// reader of a page on it waits for it. Nothing is written to it until
    /// [`retry_backing`](Self::retry_backing) has read its header, which the caller calls, on a
    /// thread that may wait for the device, until it does.
    ///
    /// # Errors
    ///
    /// [`BackingError::Late`], or [`BackingError::Io`] if its size cannot be found.
    pub fn take_backing(&self, disk: Box<dyn Disk>, name: &str) -> Result<(), BackingError> {
        self.has_room(name)?;
        let have = disk.blocks().map_err(io_error("find the size of", name))?;
        let have = u32::try_from(have).unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS);
        // A device that has become shorter: the entries beyond its end still count.
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
                    let counter = &self.counters[MAX_WORKERS].backed;
                    crate::stats::sub(counter, 1);
                }
            }
        }
        inject::step();
        let doubtful = noted_runs(self.heap.map.superblock()).flatten();
        let doubtful = doubtful.filter(|&block| blocks.shut(block)).count() as u64;
        let backing = Backing::new(disk, name, blocks, doubtful, stopped);
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
        self.backing.get().map(Backing::stats)
    }

    /// Bytes free to other users on the backing file's file system; `None` if it is not in one.
    pub fn backing_space(&self) -> Option<u64> {
        self.backing.get()?.disk.free()
    }

    /// Resumes writing after a failure, at the request of the user, who has removed its cause. Does
    /// not wait for another thread that waits for the device.
    pub fn resume_backing(&self) {
        if let Some(backing) = self.backing.get() {
            if let Some(writer) = backing.try_lock() {
                // The call that took the device has reported the error.
                let _ = self.retry(backing, writer);
            }
            backing.stopped().take_if(|stopped| matches!(stopped, Stopped::Write { .. }));
        }
    }

    /// Reads the header of a device that was [taken](Self::take_backing) without it, if that is
    /// still to be done, and resumes writing if the device is this store's. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`BackingError::Io`] when it cannot be read: try again later. Any other error is final:
    /// pages that it still returns are read, and nothing is written to it.
    pub fn retry_backing(&self) -> Result<(), BackingError> {
        self.backing.get().map_or(Ok(()), |backing| self.retry(backing, backing.lock()))
    }

    fn retry(
        &self,
        backing: &Backing,
        _writer: MutexGuard<'_, Writer>,
    ) -> Result<(), BackingError> {
        if !matches!(*backing.stopped(), Some(Stopped::Unread { .. })) {
            return Ok(());
        }
        let (disk, name) = (&*backing.disk, &*backing.name);
        let mut block = Block::ZERO;
        if let Err(error) = disk.read(0, &mut block) {
            *backing.stopped() = Some(Stopped::Unread { errno: Some(number_of(&error)) });
            return Err(io_error("read", name)(error));
        }
        let count = backing.blocks().count();
        let checked = blocks(disk, name)
            .and_then(|have| check(&block, name, self.id(), self.generation(), have));
        *backing.stopped() = match checked {
            Ok(_) => self.sign(disk, count).err(),
            Err(_) => Some(Stopped::Foreign),
        };
        checked.map(drop)
    }

    /// Blocks that servers of this store have written to the backing device since midnight UTC.
    pub fn written_today(&self) -> u64 {
        written(self.heap.map.superblock(), today())
    }
}
