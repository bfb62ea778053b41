//! Batches of pages for the backing device, and the form of its blocks.
//!
//! ```text
//!  an uncompressed page takes a block. Objects share one, which begins with a directory:
//!  | "plat", 0 | objects (4 bytes) | 16 bytes each: page (8), at (2), length (2), tag (1), 0 | ... | objects |
//! ```

use crate::blocks::MAX_HOLDS;
use crate::disk::Block;
use crate::entry::{Object, MAX_OBJECT, TAGS};
use crate::group_buffer::{GroupBuffer, Seen};
use crate::layout::PAGE;
use crate::object::checksum;

/// The tag of a page of 4096 bytes that was read back: an uncompressed page fills its block, which
/// has no room for a tag.
pub const WHOLE_TAG: u8 = 0;

/// "plat", little endian.
const MAGIC: u32 = u32::from_le_bytes(*b"plat");
const HEADER: usize = 8;
const ENTRY: usize = 16;

/// The most objects in a block.
const MOST: usize = MAX_HOLDS as usize - 1;

/// Whether a page could be added to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The page was added.
    Yes,
    /// The batch is full: write it first.
    Full,
    /// The page fits no block (its length is neither 4096 nor at most 4072), or its tag is out of
    /// range.
    Unfit,
}

/// A page of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing {
    pub(crate) index: u64,
    /// The state that the page must still have when its entry changes.
    pub(crate) was: Was,
    /// The block in the batch, the offset in it, and the length.
    pub(crate) block: usize,
    pub(crate) at: usize,
    pub(crate) len: usize,
    pub(crate) sum: u32,
    pub(crate) whole: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Was {
    /// An object with this tag and the same bytes.
    Object(u8),
    /// In the group with this number and stamp.
    Grouped((u32, u64)),
}

/// Pages to be written back. All memory is allocated when it is made.
pub struct Batch {
    pub(crate) blocks: Box<[Block]>,
    /// How many blocks may be used.
    most: usize,
    used: usize,
    /// The block being filled, the objects in it, and where they begin.
    open: Option<(usize, usize, usize)>,
    pub(crate) pages: Vec<Outgoing>,
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

    /// Bytes of heap of a batch of this many blocks.
    pub fn memory(blocks: usize) -> usize {
        let blocks = blocks.max(1);
        // The allocator aligns the blocks.
        blocks * (size_of::<Block>() + MOST * size_of::<Outgoing>()) + align_of::<Block>()
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

/// The seed of the checksum of an object on the device: as if it were in its smallest class.
pub(crate) fn object(len: usize, tag: u8) -> Object {
    let len = u32::try_from(len).expect("4096 at most");
    Object { slab: 0, index: 0, len, bump: 0, tag }
}

/// Finds the object of a page in a block: tag and bytes. The block may have any contents.
pub(crate) fn find(block: &Block, index: u64, whole: bool) -> Option<(u8, &[u8])> {
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
