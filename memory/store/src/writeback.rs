//! Writing pages to the backing device and reading them back.
//!
//! A page leaves memory by one compare-and-swap of its entry, after its bytes are on the device,
//! and only if it still is what was read: a page written meanwhile stays. Until then the page is in
//! memory, so a failed write or a killed server loses nothing. Blocks that no entry names are free;
//! the next server finds them from the table. The exception is blocks that a killed server was just
//! writing: they are recorded in the superblock and not used (`backing.rs`).
//!
//! ```text
//!  an uncompressed page takes a block. Objects share one, which begins with a directory:
//!  | "plat", 0 | objects (4 bytes) | 16 bytes each: page (8), at (2), length (2), tag (1), 0 | ... | objects |
//! ```
//!
//! # Reading without a pin
//!
//! A reader waits for the device, and a writer of the page must not wait for the reader. So the
//! reader has no pin: it loads the entry, reads the block, and loads the entry again. If the entry
//! has changed, the block may have been freed and written for other pages; the reader discards the
//! bytes and starts over. If the entry is the same, the block was this page's all along, unless the
//! same bytes were written back to the same block again. In any case the bytes must match the
//! checksum in the entry, whose seed includes the page's number. A block with another checksum is
//! read once more before the read fails.

use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use crate::backing_device::Stopped;
use crate::blocks::MAX_HOLDS;
use crate::disk::Block;
use crate::group::{GroupBuffer, Seen};
use crate::inject;
use crate::layout::PAGE;
use crate::object::{checksum, locate};
use crate::page::{GetError, Page, PutError};
use crate::slot::{Backed, Object, Slot, State, Word, MAX_OBJECT, TAGS};
use crate::store::Store;
use crate::superblock;
use crate::sync::{fence_read, fence_write};
use crate::worker::{slot_of, Pin, Worker};

/// The tag of a page of 4096 bytes that was read back: an uncompressed page fills its block, which
/// has no room for a tag.
pub const WHOLE_TAG: u8 = 0;

/// "plat", little endian.
const MAGIC: u32 = u32::from_le_bytes(*b"plat");
const HEADER: usize = 8;
const ENTRY: usize = 16;

/// Pauses before the retries of a failed read: two seconds in all. A page that cannot be read is
/// lost to the process that swapped it out, and a disk that is resetting comes back.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(600),
    Duration::from_millis(1200),
];

/// The most objects in a block.
const MOST: usize = MAX_HOLDS as usize - 1;

/// Whether a page could be added to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The page was added.
    Yes,
    /// The batch is full: write it first.
    Full,
    /// It fits no block (its length is neither 4096 nor at most 4072), or its tag is out of range.
    Unfit,
}

/// A page of a batch.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    index: u64,
    /// The state that the page must still have when its entry changes.
    was: Was,
    /// The block in the batch, the offset in it, and the length.
    block: usize,
    at: usize,
    len: usize,
    sum: u32,
    whole: bool,
}

#[derive(Clone, Copy, Debug)]
enum Was {
    /// An object with this tag and the same bytes.
    Object(u8),
    /// In the group with this number and stamp.
    Grouped((u32, u64)),
}

/// Pages to be written back. All memory is allocated when it is made.
pub struct Batch {
    blocks: Box<[Block]>,
    /// How many blocks may be used.
    most: usize,
    used: usize,
    /// The block being filled, the objects in it, and where they begin.
    open: Option<(usize, usize, usize)>,
    pages: Vec<Outgoing>,
}

impl Batch {
    /// An empty batch of this many blocks of 4096 bytes.
    pub fn new(blocks: usize) -> Self {
        let blocks = blocks.max(1);
        Self {
            blocks: vec![Block::ZERO; blocks].into_boxed_slice(),
            most: blocks,
            used: 0,
            open: None,
            pages: Vec::with_capacity(blocks * MOST),
        }
    }

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.used
    }

    /// Limits the batch to this many blocks, at most those that it was made with.
    pub fn set_limit(&mut self, blocks: u64) {
        self.most = usize::try_from(blocks).unwrap_or(usize::MAX).min(self.blocks.len());
    }

    /// Removes all pages.
    pub fn clear(&mut self) {
        self.used = 0;
        self.open = None;
        self.pages.clear();
    }

    /// Adds an object as it was `seen`.
    pub fn add(&mut self, seen: &Seen<'_>) -> Added {
        let tag = if seen.bytes.len() == MAX_OBJECT { WHOLE_TAG } else { seen.tag };
        self.push(seen.index, Was::Object(seen.tag), tag, seen.bytes)
    }

    /// Adds a page of the group in `group`, as an object of its own.
    pub fn add_grouped(&mut self, index: u64, group: &GroupBuffer, tag: u8, bytes: &[u8]) -> Added {
        let Some(place) = group.place() else { return Added::Unfit };
        self.push(index, Was::Grouped(place), tag, bytes)
    }

    fn push(&mut self, index: u64, was: Was, tag: u8, bytes: &[u8]) -> Added {
        let whole = bytes.len() == MAX_OBJECT;
        let fits = (1..=PAGE - HEADER - ENTRY).contains(&bytes.len());
        if tag >= TAGS || !(fits || whole && tag == WHOLE_TAG) {
            return Added::Unfit;
        }
        let object = object(bytes.len(), tag);
        let sum = checksum(index, &object, bytes);
        let len = bytes.len();
        if whole {
            let Some(block) = self.next() else { return Added::Full };
            self.blocks[block].0.copy_from_slice(bytes);
            self.pages.push(Outgoing { index, was, block, at: 0, len, sum, whole });
            return Added::Yes;
        }
        let room = |&(_, count, begin): &(usize, usize, usize)| {
            count < MOST && HEADER + ENTRY * (count + 1) + len <= begin
        };
        let (block, count, begin) = match self.open.filter(room) {
            Some(open) => open,
            None => {
                let Some(block) = self.next() else { return Added::Full };
                self.blocks[block].0.fill(0);
                self.blocks[block].0[..4].copy_from_slice(&MAGIC.to_le_bytes());
                (block, 0, PAGE)
            }
        };
        let at = begin - len;
        let bytes_of = &mut self.blocks[block].0;
        bytes_of[at..begin].copy_from_slice(bytes);
        let count_of = u32::try_from(count + 1).expect("32 at most");
        bytes_of[4..8].copy_from_slice(&count_of.to_le_bytes());
        let entry = &mut bytes_of[HEADER + ENTRY * count..][..ENTRY];
        entry[..8].copy_from_slice(&index.to_le_bytes());
        let short = |n: usize| u16::try_from(n).expect("4096 at most").to_le_bytes();
        entry[8..10].copy_from_slice(&short(at));
        entry[10..12].copy_from_slice(&short(len));
        entry[12] = tag;
        self.open = Some((block, count + 1, at));
        self.pages.push(Outgoing { index, was, block, at, len, sum, whole });
        Added::Yes
    }

    fn next(&mut self) -> Option<usize> {
        let block = self.used;
        (block < self.most).then(|| {
            self.used += 1;
            block
        })
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch")
            .field("pages", &self.pages.len())
            .field("blocks", &self.used)
            .finish_non_exhaustive()
    }
}

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
    /// There is nothing to write to.
    #[error("the store has no backing device")]
    None,
    /// A write failed, now or earlier: writing has stopped.
    #[error("{0}")]
    Stopped(Stopped),
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
        let mut writer = backing.lock();
        if let Some(stopped) = *backing.stopped() {
            return Err(WriteBackError::Stopped(stopped));
        }
        let mut done = WrittenBack::default();
        let mut first = 0;
        while first < batch.used {
            let want = u32::try_from(batch.used - first).expect("batches are in memory");
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
                    return Err(WriteBackError::Stopped(backing.stop(Stopped::Killed { servers })));
                }
            };
            inject::step();
            fence_write();
            let written = backing.write(&mut writer, run.start, &batch.blocks[first..end]);
            inject::step();
            superblock::clear_run(superblock, noted);
            inject::step();
            if let Err(stopped) = written {
                run.for_each(|block| backing.drop_hold(block));
                return Err(WriteBackError::Stopped(stopped));
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
    /// [`get`](Self::get). Waits for the device. The tag of an uncompressed page is [`WHOLE_TAG`].
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
    /// Those of [`put`](Self::put).
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

/// The seed of the checksum of an object on the device: as if it were in its smallest class.
fn object(len: usize, tag: u8) -> Object {
    let len = u32::try_from(len).expect("4096 at most");
    Object { slab: 0, index: 0, len, bump: 0, tag }
}

/// Finds the object of a page in a block: tag and bytes. The block may have any contents.
fn find(block: &Block, index: u64, whole: bool) -> Option<(u8, &[u8])> {
    let bytes = &block.0;
    if whole {
        return Some((WHOLE_TAG, bytes));
    }
    let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let count = usize::try_from(word(4)?).ok()?;
    if word(0)? != MAGIC || count > MOST {
        return None;
    }
    bytes[HEADER..].chunks_exact(ENTRY).take(count).find_map(|entry| {
        let [page @ .., _, _, _, _, _, _, _, _] = entry.first_chunk::<ENTRY>()?;
        let short = |at: usize| usize::from(u16::from_le_bytes([entry[at], entry[at + 1]]));
        let (at, len, tag) = (short(8), short(10), entry[12]);
        let sound =
            u64::from_le_bytes(*page) == index && (1..=MAX_OBJECT).contains(&len) && tag < TAGS;
        sound.then(|| bytes.get(at..at + len)).flatten().map(|bytes| (tag, bytes))
    })
}
