//! Writes an image, or a save of a store, from pages that arrive in any order.

mod filling;
mod seal;

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pages::Slot;

use crate::extents::Content;
use crate::file::NewFile;
use crate::finish::{random, NewPack, PackPages, Place, PACK_PAGES};
use crate::layout::{Form, MAX_BLOCKS, MAX_RAM};
use crate::map::PageMap;
use crate::pack::{Base, PageHash, PACKS};
use crate::sharing::Sharing;
use crate::store::Store;
use crate::unit_file::UnitFile;
use crate::{Image, Options, RamBlock, Shape, Summary, WriteError};

/// Writes one image, or one save of a store. Dropping the writer leaves no file.
pub struct Writer {
    path: PathBuf,
    shape: Shape,
    file: UnitFile,
    blocks: Option<Vec<(RamBlock, PageMap)>>,
    target: Option<Target>,
    /// The units that are being filled: one with pages, one with differences.
    filling: [Option<Fill>; 2],
    /// Final places of the units, in the order in which their filling began.
    places: Vec<Place>,
    /// Room for a difference.
    difference: Vec<u8>,
    summary: Summary,
}

/// The store that a save is written to.
struct Target {
    store: Store,
    parent: Option<String>,
    without: HashSet<u128>,
    identity: u128,
    sharing: Sharing,
    /// Packs of this save that are complete, and the pages of the one that is being written.
    packs: Vec<NewPack>,
    pages: PackPages,
    /// Maximum number of pages in a pack.
    pack_pages: usize,
    /// Prevents the removal of packs that this save may refer to.
    lock: File,
}

/// A unit that is being filled.
struct Fill {
    slot: Slot,
    /// Bytes of the unit that are filled.
    filled: usize,
    /// Index of its final place.
    number: usize,
    hashes: Vec<PageHash>,
    bases: Vec<Base>,
}

impl Writer {
    /// Begins the image that will be linked to `path`.
    ///
    /// # Errors
    ///
    /// `path` exists, the folder cannot be written, a setting is out of range, or memory or threads
    /// cannot be allocated.
    pub fn create(path: &Path, options: Options) -> Result<Self, WriteError> {
        let new = NewFile::create(path).map_err(|source| io("create", path, source))?;
        Self::over(new, path, options, None)
    }

    /// Begins the save that will be linked to `name` in `store`. Pages are compared with those of
    /// the save `parent`.
    ///
    /// # Errors
    ///
    /// The errors of [`Writer::create`]; or no save may have the name, or the store cannot be read.
    pub fn create_in(
        store: &Store,
        name: &str,
        parent: Option<&str>,
        options: Options,
    ) -> Result<Self, WriteError> {
        let path = store.path(name)?;
        // Nothing may exist at the path.
        drop(NewFile::create(&path).map_err(|source| io("create", &path, source))?);
        Self::into_store(store, &path, parent, HashSet::new(), options)
    }

    /// As [`Writer::create_in`], for a save whose name may be free only when it is linked.
    ///
    /// # Errors
    ///
    /// The errors of [`Writer::create_in`].
    pub fn create_later(store: &Store, name: &str, options: Options) -> Result<Self, WriteError> {
        Self::into_store(store, &store.path(name)?, None, HashSet::new(), options)
    }

    /// As [`Writer::create_in`], without checking `path`, and without sharing the packs in
    /// `without`.
    pub(crate) fn into_store(
        store: &Store,
        path: &Path,
        parent: Option<&str>,
        without: HashSet<u128>,
        options: Options,
    ) -> Result<Self, WriteError> {
        let shape = Shape::new(pages::PAGE_SIZE, options.unit_bytes)?;
        let lock = store.lock_for_saving()?;
        let folder = store.folder();
        let sharing = Sharing::new(folder, *store.key(), parent, &without, shape)
            .map_err(|source| store.error(source))?;
        let new = NewFile::create_in(&folder.join(PACKS), "new")
            .map_err(|source| io("create", path, source))?;
        let parent = parent.map(Into::into);
        let (store, identity) = (store.clone(), random().map(u128::from_ne_bytes)?);
        let (packs, pages, pack_pages) = (Vec::new(), PackPages::default(), PACK_PAGES);
        let target =
            Target { store, parent, without, identity, sharing, packs, pages, pack_pages, lock };
        Self::over(new, path, options, Some(target))
    }

    /// Gives this save the identity of `image`: both hold the same VM.
    pub(crate) fn keep_identity(&mut self, image: &Image) {
        self.target.as_mut().expect("a save of a store").identity = image.identity();
    }

    /// Sets the maximum number of pages in a pack, and of own pages that are found by their hash.
    #[cfg(test)]
    pub(crate) fn limit(&mut self, pages: usize) {
        let target = self.target.as_mut().expect("a save of a store");
        target.pack_pages = pages;
        target.sharing.set_max_own(pages as u64);
    }

    fn over(
        new: NewFile,
        path: &Path,
        options: Options,
        target: Option<Target>,
    ) -> Result<Self, WriteError> {
        Ok(Self {
            path: path.to_owned(),
            // The page size of most guests, until `blocks` sets it.
            shape: Shape::new(pages::PAGE_SIZE, options.unit_bytes)?,
            file: UnitFile::new(new, path, options)?,
            blocks: None,
            target,
            filling: [None, None],
            places: Vec::new(),
            difference: vec![0; pages::PAGE_SIZE],
            summary: Summary::default(),
        })
    }

    /// Sets the guest's page size in bytes and its RAM blocks, before the first page.
    ///
    /// # Errors
    ///
    /// Sizes or blocks are outside the format's limits; errors of the file system.
    ///
    /// # Panics
    ///
    /// If the blocks are set already.
    pub fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), WriteError> {
        assert!(self.blocks.is_none(), "a VM has one block table");
        let shape = Shape::new(page_size, self.shape.unit_bytes())?;
        let form = if self.target.is_some() { Form::Pack } else { Form::Image };
        self.file.begin(form, shape)?;
        if let Some(target) = &mut self.target {
            if shape != self.shape {
                let (folder, key) = (target.store.folder(), *target.store.key());
                let (parent, without) = (target.parent.as_deref(), &target.without);
                let sharing = Sharing::new(folder, key, parent, without, shape);
                target.sharing = sharing.map_err(|source| target.store.error(source))?;
            }
            target.sharing.blocks(blocks);
        }
        self.shape = shape;
        self.difference.resize(page_size, 0);
        let page = self.shape.page_size() as u64;
        let (mut names, mut ram) = (HashSet::new(), 0_u64);
        let mut maps = Vec::new();
        for block in blocks {
            ram = ram.saturating_add(block.len);
            let what = if block.len % page != 0 {
                "its length is not a multiple of the page size"
            } else if ram > MAX_RAM || blocks.len() > MAX_BLOCKS {
                "an image has at most 16 TiB of RAM in 4096 blocks"
            } else if block.name.len() > 255 || !names.insert(&block.name) {
                "its name is too long, or another block has it"
            } else {
                maps.push((block.clone(), PageMap::new(block.len / page)));
                continue;
            };
            let (name, len) = (block.name.clone(), block.len);
            return Err(WriteError::Blocks { name, len, what });
        }
        self.blocks = Some(maps);
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
                let slot = self.store(block, page, bytes)?;
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
        let map = &mut self.blocks.as_mut().expect("blocks are set before pages")[block].1;
        assert!(page < map.pages(), "page {page} of a block of {}", map.pages());
        let before = map.set(page, content);
        if matches!(before, Content::Slot(_)) && before != content {
            self.summary.superseded += 1;
        }
    }

    /// Counters of the devices of all compression threads; none without [`Options::device`].
    pub fn accelerators(&self) -> &[Arc<qat::Counters>] {
        self.file.accelerators()
    }

    /// Counts so far. `file_bytes` covers only the units that are written.
    pub fn summary(&self) -> Summary {
        let target = self.target.as_ref();
        let damaged = target.map_or(0, |target| target.sharing.damaged);
        let packs = target.into_iter().flat_map(|target| &target.packs);
        let complete: u64 = packs.map(|pack| pack.bytes).sum();
        Summary { file_bytes: complete + self.file.len(), damaged, ..self.summary }
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Units with pages.
const PAGES: usize = 0;
/// Units with differences.
const DIFFERENCES: usize = 1;

fn io(what: &'static str, path: &Path, source: std::io::Error) -> WriteError {
    WriteError::Io { what, path: path.to_owned(), source }
}
