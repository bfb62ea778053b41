//! Pages out to the backing device and back.
//!
//! A page leaves memory when its bytes are on the device and its entry says so, in one
//! compare-and-swap that finds it as it was read: what was written meanwhile stays. Until then it
//! is where it was, so that a write that fails, or a server that is killed, costs nothing. Blocks
//! that no entry names are free; which those are, the next server finds out from the table. But for
//! those that a killed server was writing just then: they are noted in the superblock, and left
//! alone (`backing.rs`).
//!
//! ```text
//!  a page as it is takes a block. Objects share one, which begins with its directory:
//!  | "plat", 0 | objects (4 bytes) | 16 bytes each: page (8), at (2), length (2), tag (1), 0 | ... | objects |
//! ```
//!
//! # Reading without a pin
//!
//! A reader waits for the device, and a writer of the page must not wait for that. So the reader
//! holds nothing: it takes the entry, reads the block it names, and looks at the entry again. If
//! that is another by now, the block may have been freed and written for other pages, and what was
//! read counts for nothing; the reader begins again with what is there. If it is the same, the
//! block was this page's all along, unless the same bytes came back to the same block. The checksum
//! in the entry, which begins with the page's number, has to be that of the bytes in any case. A
//! block with another checksum is read once more before the page is given up.

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

/// The tag that a page of 4096 bytes comes back with: a block that is full of it has no room for
/// its own.
pub const WHOLE_TAG: u8 = 0;

/// "plat", little endian.
const MAGIC: u32 = u32::from_le_bytes(*b"plat");
const HEADER: usize = 8;
const ENTRY: usize = 16;

/// How long a reader waits before each time that it asks a device again which has failed: two
/// seconds in all. What it cannot read is lost to whoever has swapped it out, and a disk that is
/// busy with itself comes back.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(600),
    Duration::from_millis(1200),
];

/// Objects in a block.
const MOST: usize = MAX_HOLDS as usize - 1;

/// Whether a page could be added to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// It is in it.
    Yes,
    /// The batch is full, and has to be written first.
    Full,
    /// It fits no block: neither 4096 bytes, nor 4072 or fewer; or its tag is out of range.
    Unfit,
}

/// A page of a batch.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    index: u64,
    /// What its entry has to be.
    was: Was,
    /// Which block of the batch, where in it, and how long.
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
    /// In the group of this number and stamp.
    Grouped((u32, u64)),
}

/// Pages on their way out. All memory is taken when it is made.
pub struct Batch {
    blocks: Box<[Block]>,
    /// How many of them may be used.
    most: usize,
    used: usize,
    /// The block that objects go to, how many are in it, and where they begin.
    open: Option<(usize, usize, usize)>,
    pages: Vec<Outgoing>,
}

impl Batch {
    /// One of so many blocks of 4096 bytes.
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

    /// Pages that it has.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Blocks that it takes.
    pub fn blocks(&self) -> usize {
        self.used
    }

    /// From now on it is full with so many blocks, or all that it was made with.
    pub fn set_limit(&mut self, blocks: u64) {
        self.most = usize::try_from(blocks).unwrap_or(usize::MAX).min(self.blocks.len());
    }

    /// Forgets all of it.
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

    /// Adds a page of the group that `group` has, as an object of its own.
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

/// What became of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Pages that are on the device now, and in memory no longer.
    pub pages: u64,
    /// Pages that were written, read or in use meanwhile, and stay in memory.
    pub changed: u64,
    /// Blocks written.
    pub blocks: u64,
    /// Pages that there was no free block for; they stay in memory.
    pub left: u64,
}

/// Why a batch, or the rest of it, was not written. Its pages are in memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteBackError {
    /// There is nothing to write to.
    #[error("the store has no backing device")]
    None,
    /// A write failed, now or before: nothing more is written.
    #[error("{0}")]
    Stopped(Stopped),
}

/// One block that was read, and what it was read for.
pub struct BackBuffer {
    block: Box<Block>,
    /// The entry, if the block has the page.
    read: Option<(u64, Word)>,
}

impl BackBuffer {
    /// An empty one, of 4096 bytes.
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
    /// Writes a batch to the backing device, in runs as long as free blocks lie together, and lets
    /// each of its pages out of memory that is what it was. The batch is empty then, whatever came
    /// of it. Waits for the device; one thread at a time.
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
            // Whoever finds this has to leave the blocks alone: the kernel may write to them when
            // we are gone.
            let noted = match superblock::note_run(superblock, &run) {
                Ok(noted) => noted,
                Err(servers) => {
                    run.for_each(|block| backing.leave(block));
                    return Err(WriteBackError::Stopped(backing.stop(Stopped::Killed { servers })));
                }
            };
            inject::step();
            fence_write();
            let written = backing.write(&mut writer, run.start, &batch.blocks[first..end]);
            inject::step();
            superblock::forget_run(superblock, noted);
            inject::step();
            if let Err(stopped) = written {
                run.for_each(|block| backing.leave(block));
                return Err(WriteBackError::Stopped(stopped));
            }
            done.blocks += run.len() as u64;
            superblock::add_written(superblock, superblock::today(), run.len() as u64);
            // An open block may have got more after the next was begun.
            for page in batch.pages.iter().filter(|page| (first..end).contains(&page.block)) {
                let block = run.start + u32::try_from(page.block - first).expect("in the run");
                backing.blocks().hold(block);
                if self.give_way(&store, page, batch, block) {
                    done.pages += 1;
                } else {
                    backing.leave(block);
                    done.changed += 1;
                }
                inject::step();
            }
            // Those that nobody wants after all are free.
            run.for_each(|block| backing.leave(block));
            first = end;
        }
        done.left = batch.pages.iter().filter(|page| page.block >= first).count() as u64;
        Ok(done)
    }

    /// Swaps in that a page is on the device, if it is what it was.
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
        // The pin went with the word.
        mem::forget(pin);
        inject::step();
        self.forget(pinned);
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

    /// Reads page `index` from the backing device to the beginning of `out`, checked:
    /// [`Page::Object`], or `None` if it is not there any more, and then [`get`](Self::get) has it.
    /// Waits for the device. Gives a page that was stored as it is the tag [`WHOLE_TAG`].
    ///
    /// # Errors
    ///
    /// No such page; what the device did not give, or gave wrong.
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
                // The entry is the same, but it may have been another meanwhile: the page was
                // written with the same bytes, and went out again to the same block.
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

    /// Stores `bytes` in memory for a page that `buffer` was [read](Self::read_back) for, if it is
    /// on the backing device still; whether it was.
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
        self.forget(seen);
        self.count_word(word);
        Ok(true)
    }
}

/// Whether a read that failed with this number may succeed when it is tried again: not at the end
/// of the device, nor where the medium has lost what was there.
fn may_pass(errno: i32) -> bool {
    errno != 0 && ![Errno::NODATA, Errno::INVAL].contains(&Errno::from_raw_os_error(errno))
}

/// Whether the entry is what it was before its block was read.
fn unchanged(slot: &Slot, word: Word) -> bool {
    fence_read();
    slot.load() == word
}

/// What the checksum of an object on the device begins with: as if it lay in its smallest class.
fn object(len: usize, tag: u8) -> Object {
    let len = u32::try_from(len).expect("4096 at most");
    Object { slab: 0, index: 0, len, bump: 0, tag }
}

/// The object of a page in a block: tag and bytes. The block may be anything.
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
