//! Writes an image from pages that arrive in any order.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codec::{checksum, DecodeError, Settings, SettingsError};
use pages::{Arena, Slot};
use pipeline::{Pool, PoolConfig, Popped, Reorder, Results};
use xxhash_rust::xxh3::Xxh3;

use crate::compress::{room, Context, Encode, Encoded};
use crate::extents::Content;
use crate::file::NewFile;
use crate::layout::{header, Part, Trailer, MAX_BLOCKS, MAX_RAM, TRAILER_LEN};
use crate::map::PageMap;
use crate::{Block, Index, RamBlock, Shape, State, UnitEntry, HEADER_LEN};

/// Options for writing an image.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Codec and level for the units.
    pub settings: Settings,
    /// Plain bytes in a full unit.
    pub unit_bytes: usize,
    /// Compression threads.
    pub threads: usize,
}

/// Default of [`Options::unit_bytes`]; `docs/image.md` has the figures behind it.
const UNIT_BYTES: usize = 128 << 10;

impl Default for Options {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        Self { settings: Settings::default(), unit_bytes: UNIT_BYTES, threads }
    }
}

/// The reason that no image was written. There is no file at its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The file system failed.
    #[error("cannot {what} {path}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// Path of the image.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Memory or threads could not be allocated.
    #[error("cannot set up compression")]
    SetUp(#[source] io::Error),
    /// The codec could not be set up.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Page or unit size outside the format's limits.
    #[error(transparent)]
    Shape(#[from] crate::Damage),
    /// A unit does not decode to its pages: this host's memory or a codec is faulty.
    #[error("unit {unit} does not decode to its pages ({error}): check this host's memory, and save again")]
    Unit {
        /// Number of the unit.
        unit: u64,
        /// The codec's error.
        error: DecodeError,
    },
    /// A RAM block outside the format's limits.
    #[error("RAM block '{name}' of {len} bytes: {what}")]
    Blocks {
        /// Name of the block.
        name: String,
        /// Length of the block, bytes.
        len: u64,
        /// The violated limit.
        what: &'static str,
    },
    /// The index or the state exceeds its limit.
    #[error("{what} exceeds the limit of an image")]
    TooLong {
        /// The part that is too long.
        what: &'static str,
    },
}

/// Pages and bytes of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Length of the file, bytes.
    pub file_bytes: u64,
    /// Pages in slots, superseded ones included.
    pub slots: u64,
    /// Pages in slots that a later version of the page supersedes.
    pub superseded: u64,
    /// Pages received as zero, each version counted.
    pub zero: u64,
    /// Pages received as same-filled with another word, each version counted.
    pub filled: u64,
    /// Pages never received; 0 until the image is finished.
    pub unsent: u64,
}

/// Writes one image. Dropping the writer leaves no file.
pub struct Writer {
    new: NewFile,
    path: PathBuf,
    shape: Shape,
    hash: Box<Xxh3>,
    at: u64,
    blocks: Vec<(RamBlock, PageMap)>,
    lanes: Arc<Pool<Encode>>,
    results: Arc<Results<Encoded>>,
    order: Reorder<Encoded>,
    plain: Arc<Arena>,
    stored: Arc<Arena>,
    /// The unit that is being filled, and its bytes so far.
    filling: Option<(Slot, usize)>,
    submitted: u64,
    units: Vec<UnitEntry>,
    summary: Summary,
}

impl Writer {
    /// Begins the image that will be linked to `path`.
    ///
    /// # Errors
    ///
    /// `path` exists, the folder cannot be written, a setting is out of range, or memory or threads
    /// cannot be allocated.
    pub fn create(path: &Path, options: Options) -> Result<Self, WriteError> {
        // The page size of most guests, until `blocks` sets it.
        let shape = Shape::new(pages::PAGE_SIZE, options.unit_bytes)?;
        let (settings, unit_bytes) = (options.settings, options.unit_bytes);
        let threads = options.threads.max(1);
        let mut contexts = Vec::with_capacity(threads);
        for _ in 0..threads {
            contexts.push(Context::new(settings, unit_bytes)?);
        }
        let new = NewFile::create(path).map_err(|source| WriteError::Io {
            what: "create",
            path: path.to_owned(),
            source,
        })?;
        let config = PoolConfig { threads, name: "image", ..PoolConfig::default() };
        let lanes = Pool::new(config, |_| contexts.pop().expect("one for each thread"))
            .map_err(WriteError::SetUp)?;
        // The depth of the lanes, the unit that is being filled, and one that waits for room.
        let slots = lanes.depth() + 2;
        let arena = |bytes| Arena::new(slots, bytes).map_err(WriteError::SetUp);
        Ok(Self {
            new,
            path: path.to_owned(),
            shape,
            hash: Box::new(Xxh3::new()),
            at: 0,
            blocks: Vec::new(),
            lanes,
            results: Results::new(slots),
            order: Reorder::new(slots),
            plain: arena(unit_bytes)?,
            stored: arena(room(unit_bytes))?,
            filling: None,
            submitted: 0,
            units: Vec::new(),
            summary: Summary::default(),
        })
    }

    /// Sets the guest's page size in bytes and its RAM blocks, before the first page.
    ///
    /// # Errors
    ///
    /// Sizes or blocks outside the format's limits; errors of the file system.
    ///
    /// # Panics
    ///
    /// If the blocks are set already.
    pub fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), WriteError> {
        assert!(self.at == 0, "a VM has one block table");
        self.shape = Shape::new(page_size, self.shape.unit_bytes())?;
        self.append(&header(self.shape))?;
        let page = self.shape.page_size() as u64;
        let (mut names, mut ram) = (HashMap::new(), 0_u64);
        for block in blocks {
            ram = ram.saturating_add(block.len);
            let what = if block.len % page != 0 {
                "its length is not a multiple of the page size"
            } else if ram > MAX_RAM || blocks.len() > MAX_BLOCKS {
                "an image has at most 16 TiB of RAM in 4096 blocks"
            } else if block.name.len() > 255 || names.insert(&block.name, ()).is_some() {
                "its name is too long, or another block has it"
            } else {
                self.blocks.push((block.clone(), PageMap::new(block.len / page)));
                continue;
            };
            let (name, len) = (block.name.clone(), block.len);
            return Err(WriteError::Blocks { name, len, what });
        }
        Ok(())
    }

    /// Adds `bytes` as the last version of page `page` in block number `block`.
    ///
    /// # Errors
    ///
    /// Errors of the file system; units that do not decode.
    ///
    /// # Panics
    ///
    /// If there is no such block or page, or `bytes` is not a page.
    pub fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), WriteError> {
        assert_eq!(bytes.len(), self.shape.page_size(), "a page has the page size");
        match pages::same_filled(bytes) {
            Some(0) => self.zero(block, page),
            Some(word) => {
                self.summary.filled += 1;
                self.note(block, page, Content::Filled(word.to_le_bytes()));
            }
            None => {
                let slot = self.put(bytes)?;
                self.note(block, page, Content::Slot(slot));
            }
        }
        Ok(())
    }

    /// Adds zero as the last version of page `page` in block number `block`.
    ///
    /// # Panics
    ///
    /// If there is no such block or page.
    pub fn zero(&mut self, block: usize, page: u64) {
        self.summary.zero += 1;
        self.note(block, page, Content::Zero);
    }

    fn note(&mut self, block: usize, page: u64, content: Content) {
        let map = &mut self.blocks[block].1;
        assert!(page < map.pages(), "page {page} of a block of {}", map.pages());
        if let Content::Slot(_) = map.set(page, content) {
            self.summary.superseded += 1;
        }
    }

    /// Copies a page into the next slot and returns the slot's number.
    fn put(&mut self, bytes: &[u8]) -> Result<u64, WriteError> {
        let (mut slot, filled) = match self.filling.take() {
            Some(filling) => filling,
            None => (self.free(|this| this.plain.take())?, 0),
        };
        slot[filled..filled + bytes.len()].copy_from_slice(bytes);
        let filled = filled + bytes.len();
        self.summary.slots += 1;
        if filled == self.shape.unit_bytes() {
            self.submit(slot, filled)?;
        } else {
            self.filling = Some((slot, filled));
        }
        Ok(self.summary.slots - 1)
    }

    fn submit(&mut self, plain: Slot, plain_len: usize) -> Result<(), WriteError> {
        let stored = self.free(|this| this.stored.take())?;
        let mut job = Encode { number: self.submitted, plain, plain_len, stored };
        self.submitted += 1;
        while let Err(back) = self.lanes.try_submit(job, &self.results) {
            job = back;
            self.collect()?;
        }
        while let Some(encoded) = self.results.pop() {
            self.arrived(encoded)?;
        }
        Ok(())
    }

    /// Calls `take` until it gives a slot; collects units in between.
    fn free(&mut self, take: impl Fn(&Self) -> Option<Slot>) -> Result<Slot, WriteError> {
        loop {
            match take(self) {
                Some(slot) => return Ok(slot),
                None => self.collect()?,
            }
        }
    }

    /// Waits for one encoded unit.
    fn collect(&mut self) -> Result<(), WriteError> {
        match self.results.pop_until(None) {
            Popped::Item(encoded) => self.arrived(encoded),
            Popped::Timeout | Popped::Closed => unreachable!("no deadline, and open"),
        }
    }

    /// Accepts an encoded unit and writes all units that are next in order.
    fn arrived(&mut self, encoded: Encoded) -> Result<(), WriteError> {
        self.order.insert(encoded.number, encoded).expect("numbered here, and window for all");
        while let Some(encoded) = self.order.pop() {
            if let Err(error) = encoded.verdict {
                return Err(WriteError::Unit { unit: encoded.number, error });
            }
            let len = u32::try_from(encoded.len).expect("a unit is short");
            let entry = UnitEntry { offset: self.at, len, checksum: encoded.checksum };
            self.append(&encoded.stored[..encoded.len])?;
            self.units.push(entry);
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        let written = self.new.file().write_all(bytes);
        written.map_err(|source| self.io("write", source))
    }

    fn io(&self, what: &'static str, source: io::Error) -> WriteError {
        WriteError::Io { what, path: self.path.clone(), source }
    }

    /// Counts so far. `file_bytes` covers only the units that are written.
    pub fn summary(&self) -> Summary {
        Summary { file_bytes: self.at, ..self.summary }
    }

    /// Writes everything and makes it durable. The image is not linked to its path yet.
    ///
    /// # Errors
    ///
    /// Errors of the file system; units that do not decode; a state or an index beyond the limits.
    pub fn finish(mut self, state: &State) -> Result<Finished, WriteError> {
        if self.at == 0 {
            // A VM without RAM. `blocks` writes the header.
            self.blocks(self.shape.page_size(), &[])?;
        }
        if let Some((slot, filled)) = self.filling.take() {
            self.submit(slot, filled)?;
        }
        while (self.units.len() as u64) < self.submitted {
            self.collect()?;
        }
        self.lanes.join();
        self.summary.unsent = self.blocks.iter().map(|(_, map)| map.unsent()).sum();
        let state = state.to_bytes().ok_or(WriteError::TooLong { what: "the device state" })?;
        let index = Index {
            slots: self.summary.slots,
            units: std::mem::take(&mut self.units),
            blocks: std::mem::take(&mut self.blocks).into_iter().map(block).collect(),
        };
        let index = index.to_bytes().ok_or(WriteError::TooLong { what: "the index" })?;
        let part = |offset, bytes: &[u8]| Part {
            offset,
            len: bytes.len() as u64,
            checksum: checksum(bytes),
        };
        let state_part = part(self.at, &state);
        self.append(&state)?;
        let index_part = part(self.at, &index);
        self.append(&index)?;
        let trailer = Trailer {
            state: state_part,
            index: index_part,
            file_len: self.at + TRAILER_LEN as u64,
            hash: self.hash.digest128(),
        };
        self.append(&trailer.to_bytes())?;
        self.new.sync().map_err(|source| self.io("write", source))?;
        let summary = self.summary();
        debug_assert!(summary.file_bytes >= (HEADER_LEN + TRAILER_LEN) as u64);
        Ok(Finished { new: self.new, path: self.path, summary })
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("path", &self.path).finish_non_exhaustive()
    }
}

/// An image that is complete and durable, but not linked to its path. Dropping it leaves no file.
#[derive(Debug)]
pub struct Finished {
    new: NewFile,
    path: PathBuf,
    summary: Summary,
}

impl Finished {
    /// Links the image to its path, durably.
    ///
    /// # Errors
    ///
    /// Errors of the file system; a file that has appeared at the path meanwhile.
    pub fn link(self) -> Result<Summary, WriteError> {
        let Self { new, path, summary } = self;
        new.link().map_err(|source| WriteError::Io { what: "name", path, source })?;
        Ok(summary)
    }

    /// Counts of the finished image.
    pub fn summary(&self) -> Summary {
        self.summary
    }
}

fn block((block, map): (RamBlock, PageMap)) -> Block {
    let RamBlock { name, host_page, .. } = block;
    Block { name, pages: map.pages(), host_page, extents: map.extents() }
}
