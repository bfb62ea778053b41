//! Writing pages to the backing device and reading them back.
//!
//! A page leaves memory by one compare-and-swap of its entry, after its bytes are on the device,
//! and only if it still is what was read: a page written meanwhile stays. Until then the page is in
//! memory, so a failed write or a killed server loses nothing. Blocks that no entry names are free;
//! the next server finds them from the table. The exception is blocks that a killed server was just
//! writing: they are recorded in the superblock and not used (`backing.rs`).
//!
//! # Reading without a pin
//!
//! A reader waits for the device, and a writer of the page must not wait for the reader. So the
//! reader has no pin: it loads the entry, reads the block, and loads the entry again. If the entry
//! has changed, the block may have been freed and written for other pages; the reader discards the
//! bytes and starts over. If the entry is the same, the block was this page's all along, unless the
//! same bytes were written back to the same block again. In any case the bytes must match the
//! checksum in the entry, whose seed includes the page's number. A block with another checksum is
//! read again before the read fails.

use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use crate::backing_device::Stopped;
use crate::batch::{find, object, Batch, Outgoing, Was};
use crate::disk::Block;
use crate::entry::{Backed, Object, State, Word, MAX_OBJECT, TAGS};
use crate::inject;
use crate::object::{checksum, locate};
use crate::page::{GetError, Page, PutError};
use crate::slot::Slot;
use crate::store::Store;
use crate::superblock;
use crate::sync::{fence_read, fence_write};
use crate::worker::{slot_of, Pin, Worker};

/// Pauses before the retries of a failed read: two seconds in all. A page that cannot be read is
/// lost to the process that swapped it out, and a disk that is resetting comes back.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(600),
    Duration::from_millis(1200),
];

/// The outcome of writing a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Pages that are on the device now, and no longer in memory.
    pub pages: u64,
    /// Pages that were changed or in use meanwhile; they stay in memory.
    pub changed: u64,
    /// Blocks written.
    pub blocks: u64,
    /// Pages without a free block; they stay in memory.
    pub left: u64,
}

/// Why a batch, or the rest of it, was not written. Its pages are still in memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteBackError {
    /// There is no backing device.
    #[error("the store has no backing device")]
    None,
    /// A write failed, now or earlier, and writing has stopped.
    #[error("{why}")]
    Stopped {
        /// The failure.
        why: Stopped,
        /// The counts of the writes before it.
        done: WrittenBack,
    },
}

/// Buffer of one block, with the page that it was read for.
pub struct BackBuffer {
    block: Box<Block>,
    /// The page and its entry, after a successful read.
    read: Option<(u64, Word)>,
}

impl BackBuffer {
    /// An empty buffer of 4096 bytes.
    pub fn new() -> Self {
        Self { block: Box::new(Block::ZERO), read: None }
    }
}

impl Default for BackBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for BackBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackBuffer").field("read", &self.read).finish_non_exhaustive()
    }
}

impl Worker {
    /// Writes a batch to the backing device, in runs as long as adjacent free blocks allow, and
    /// removes from memory each page that has not changed. The batch is empty afterwards, also
    /// after an error. Waits for the device; one thread at a time.
    ///
    /// # Errors
    ///
    /// [`WriteBackError`].
    pub fn write_back(&mut self, batch: &mut Batch) -> Result<WrittenBack, WriteBackError> {
        let done = self.write_runs(batch);
        batch.clear();
        done
    }

    fn write_runs(&self, batch: &Batch) -> Result<WrittenBack, WriteBackError> {
        let store = Arc::clone(self.store());
        let backing = store.backing.get().ok_or(WriteBackError::None)?;
        let mut done = WrittenBack::default();
        let stopped = |why, done| WriteBackError::Stopped { why, done };
        let is_stopped = || backing.stopped().map_or(Ok(()), |why| Err(stopped(why, done)));
        // First without the lock: a thread that reads the header holds it as long as the device
        // does not answer.
        is_stopped()?;
        let mut writer = backing.lock();
        is_stopped()?;
        let mut first = 0;
        while first < batch.blocks() {
            let want = u32::try_from(batch.blocks() - first).expect("batches are in memory");
            let Some(run) = backing.take(&mut writer, want) else { break };
            inject::step();
            let end = first + run.len();
            let superblock = store.heap.map.superblock();
            // A later server must not use these blocks: the kernel may write to them after we are
            // killed.
            let noted = match superblock::note_run(superblock, &run) {
                Ok(noted) => noted,
                Err(servers) => {
                    run.for_each(|block| backing.drop_hold(block));
                    return Err(stopped(backing.stop(Stopped::Killed { servers }), done));
                }
            };
            inject::step();
            fence_write();
            let written = backing.write(&mut writer, run.start, &batch.blocks[first..end]);
            inject::step();
            superblock::clear_run(superblock, noted);
            inject::step();
            if let Err(why) = written {
                run.for_each(|block| backing.drop_hold(block));
                return Err(stopped(why, done));
            }
            done.blocks += run.len() as u64;
            superblock::add_written(superblock, superblock::today(), run.len() as u64);
            // A partly filled block may have got objects after the next block was started.
            for page in batch.pages.iter().filter(|page| (first..end).contains(&page.block)) {
                let block = run.start + u32::try_from(page.block - first).expect("in the run");
                backing.blocks().hold(block);
                if self.give_way(&store, page, batch, block) {
                    done.pages += 1;
                } else {
                    backing.drop_hold(block);
                    done.changed += 1;
                }
                inject::step();
            }
            // Drops the writer's reference: a block whose pages all changed becomes free.
            run.for_each(|block| backing.drop_hold(block));
            first = end;
        }
        done.left = batch.pages.iter().filter(|page| page.block >= first).count() as u64;
        Ok(done)
    }

    /// Replaces the page's entry by one that names the block, if the page has not changed.
    fn give_way(&self, store: &Store, page: &Outgoing, batch: &Batch, block: u32) -> bool {
        let Ok(slot) = slot_of(store, page.index) else { return false };
        let Ok(pinned) = slot.pin(false) else { return false };
        let pin = Pin(slot);
        inject::step();
        let here = match (pinned.state(), page.was) {
            (Some(State::Object(object)), Was::Object(tag)) => {
                object.tag == tag
                    && object.len as usize == page.len
                    && self.has_bytes(&object, &batch.blocks[page.block].0[page.at..][..page.len])
            }
            (Some(State::Member(_)), Was::Grouped(place)) => {
                self.group_of(store, pinned) == Some(place)
            }
            _ => false,
        };
        let word = Word::backed(Backed { block, whole: page.whole, sum: page.sum });
        if !here || !slot.supersede(pinned, word) {
            return false;
        }
        // `supersede` has dropped the pin.
        mem::forget(pin);
        inject::step();
        self.release_word(pinned);
        self.count_word(word);
        true
    }

    /// Whether a pinned object has these bytes.
    fn has_bytes(&self, object: &Object, bytes: &[u8]) -> bool {
        let map = &self.store().heap.map;
        let Some((_, place)) = locate(map, object) else { return false };
        let mut stored = [0; MAX_OBJECT];
        let stored = &mut stored[..bytes.len()];
        map.read(place, stored);
        stored == bytes
    }

    /// Reads page `index` from the backing device to the start of `out`, verified. Returns
    /// [`Page::Object`], or `None` if the page is no longer on the device; then use
    /// [`get`](Self::get). Waits for the device. The tag of an uncompressed page is
    /// [`WHOLE_TAG`](crate::WHOLE_TAG).
    ///
    /// # Errors
    ///
    /// [`GetError::Index`], [`GetError::NoBacking`], [`GetError::Backing`],
    /// [`GetError::BackedChecksum`].
    pub fn read_back(
        &self,
        index: u64,
        buffer: &mut BackBuffer,
        out: &mut [u8; MAX_OBJECT],
    ) -> Result<Option<Page>, GetError> {
        buffer.read = None;
        let store = self.store();
        let slot = usize::try_from(index).ok().and_then(|at| store.heap.map.table().get(at));
        let slot = slot.ok_or(GetError::Index { index, pages: store.pages() })?;
        let mut pauses = PAUSES.iter();
        let mut again = true;
        loop {
            let word = slot.load_backed();
            let Some(State::Backed(at)) = word.state() else { return Ok(None) };
            let Some(backing) = store.backing.get() else {
                return Err(GetError::NoBacking { index });
            };
            let block = at.block;
            let read = backing.read(block, &mut buffer.block);
            inject::step();
            if !unchanged(slot, word) {
                continue;
            }
            if let Err(errno) = read {
                backing.count_failed_read();
                let pause = pauses.next().filter(|_| may_pass(errno) && backing.may_recover());
                if let Some(&pause) = pause {
                    thread::sleep(pause);
                    continue;
                }
                return Err(GetError::Backing { index, block, errno });
            }
            let found = find(&buffer.block, index, at.whole);
            let got =
                found.map_or(0, |(tag, bytes)| checksum(index, &object(bytes.len(), tag), bytes));
            let Some((tag, bytes)) = found.filter(|_| got == at.sum) else {
                // The entry is the same, but may have changed in between: the page was written with
                // the same bytes, and written back to the same block.
                if mem::take(&mut again) {
                    continue;
                }
                backing.count_failed_read();
                return Err(GetError::BackedChecksum { index, block, expected: at.sum, got });
            };
            out[..bytes.len()].copy_from_slice(bytes);
            let len = bytes.len();
            buffer.read = Some((index, word));
            return Ok(Some(Page::Object { tag, len }));
        }
    }

    /// Stores `bytes` in memory for a page that [`read_back`](Self::read_back) read into `buffer`,
    /// if the page still is on the device; returns whether it was.
    ///
    /// # Errors
    ///
    /// The errors of [`put`](Self::put).
    pub fn bring_back(
        &mut self,
        index: u64,
        buffer: &BackBuffer,
        tag: u8,
        bytes: &[u8],
    ) -> Result<bool, PutError> {
        if tag >= TAGS {
            return Err(PutError::Object { len: bytes.len(), tag });
        }
        let store = Arc::clone(self.store());
        let slot = slot_of(&store, index)?;
        let Some((_, seen)) = buffer.read.filter(|&(read, _)| read == index) else {
            return Ok(false);
        };
        let (object, claimed) = self.place(index, tag, bytes)?;
        let word = Word::object(object);
        if !slot.fill_in(seen, word) {
            store.heap.release(claimed);
            return Ok(false);
        }
        inject::step();
        self.release_word(seen);
        self.count_word(word);
        Ok(true)
    }
}

/// Whether a retry of a read with this errno may succeed: not beyond the end of the device, nor
/// where the medium has lost the data.
fn may_pass(errno: i32) -> bool {
    errno != 0 && ![Errno::NODATA, Errno::INVAL].contains(&Errno::from_raw_os_error(errno))
}

/// Whether the entry has not changed since before its block was read.
fn unchanged(slot: &Slot, word: Word) -> bool {
    fence_read();
    slot.load() == word
}
