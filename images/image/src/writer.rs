//! Writes an image, or a save of a store, from pages that arrive in any order.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codec::checksum;
use pages::Slot;

use crate::extents::Content;
use crate::file::NewFile;
use crate::finish::{
    block, random, used, Finished, InStore, NewPack, OwnSlots, PackPages, Place, Table, PACK_PAGES,
};
use crate::layout::{header, Form, MAX_BLOCKS, MAX_RAM};
use crate::map::PageMap;
use crate::pack::{Base, PageHash, PACKS};
use crate::save::SaveIndex;
use crate::sharing::{has_room, Sharing};
use crate::store::Store;
use crate::unit_file::{Sealing, UnitFile};
use crate::{Image, Index, Options, RamBlock, Shape, State, Summary, WriteError};

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

    /// Finds or makes the slot of a page.
    fn store(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<u64, WriteError> {
        let Some(target) = &mut self.target else { return self.put(PAGES, bytes, None, None) };
        let sharing = &mut target.sharing;
        let hash = sharing.hash(bytes);
        if let Some(slot) = sharing.find(&hash) {
            self.summary.shared += 1;
            return Ok(slot);
        }
        let slot = match sharing.difference(block, page, bytes, &mut self.difference) {
            None => self.put(PAGES, bytes, Some(hash), None)?,
            Some(slot) => {
                self.summary.differences += 1;
                let base = Base { slot, checksum: checksum(bytes) };
                let difference = std::mem::take(&mut self.difference);
                let put = self.put(DIFFERENCES, &difference, Some(hash), Some(base));
                self.difference = difference;
                put?
            }
        };
        self.sharing().add(hash, slot);
        Ok(slot)
    }

    fn sharing(&mut self) -> &mut Sharing {
        &mut self.target.as_mut().expect("a save of a store").sharing
    }

    /// The slot at which the units of this file begin. Slots below it are the store's.
    fn own(&self) -> u64 {
        let units = self.target.as_ref().map_or(0, |target| target.sharing.units());
        units * self.shape.unit_pages()
    }

    /// Copies a page or a difference into the next slot of its kind, and returns the slot.
    fn put(
        &mut self,
        kind: usize,
        bytes: &[u8],
        hash: Option<PageHash>,
        base: Option<Base>,
    ) -> Result<u64, WriteError> {
        let size = self.shape.unit_pages();
        if let (Some(fill), Some(base)) = (&self.filling[kind], base) {
            if !has_room(&fill.bases, base.slot, size) {
                self.submit(kind)?;
            }
        }
        if self.filling[kind].is_none() {
            let (slot, number) = (self.file.buffer()?, self.places.len());
            self.places.push((usize::MAX, u64::MAX));
            let fill = Fill { slot, filled: 0, number, hashes: Vec::new(), bases: Vec::new() };
            self.filling[kind] = Some(fill);
        }
        let own = self.own();
        let fill = self.filling[kind].as_mut().expect("just begun");
        let nth = fill.filled / bytes.len();
        fill.slot[fill.filled..fill.filled + bytes.len()].copy_from_slice(bytes);
        fill.filled += bytes.len();
        fill.hashes.extend(hash);
        fill.bases.extend(base);
        let slot = own + fill.number as u64 * size + nth as u64;
        self.summary.slots += 1;
        if fill.filled == self.shape.unit_bytes() {
            self.submit(kind)?;
        }
        if self.target.as_ref().is_some_and(|of| of.pages.hashes.len() >= of.pack_pages) {
            self.end_pack()?;
        }
        Ok(slot)
    }

    /// Completes the pack that is being written, and begins another one.
    fn end_pack(&mut self) -> Result<(), WriteError> {
        self.submit(PAGES)?;
        self.submit(DIFFERENCES)?;
        let target = self.target.as_mut().expect("a save of a store");
        let new = NewFile::create_in(&target.store.folder().join(PACKS), "new")
            .map_err(|source| io("create", &self.path, source))?;
        let (units, file) = self.file.next(new)?;
        let pages = std::mem::take(&mut target.pages);
        let unit_pages = self.shape.unit_pages();
        target.packs.push(NewPack::finish(&target.sharing, units, file, pages, unit_pages)?);
        self.file.begin(Form::Pack, self.shape)
    }

    /// Ends the unit of this kind, if one is being filled.
    fn submit(&mut self, kind: usize) -> Result<(), WriteError> {
        let Some(Fill { slot, filled, number, hashes, bases }) = self.filling[kind].take() else {
            return Ok(());
        };
        let nth = self.file.submit(slot, filled, self.shape.page_size())?;
        let mut file = 0;
        if let Some(target) = &mut self.target {
            file = target.packs.len();
            target.pages.add(nth, &hashes, bases);
        }
        self.places[number] = (file, nth);
        Ok(())
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

    /// Writes everything and makes it durable. The image is not linked to its path yet.
    ///
    /// # Errors
    ///
    /// Errors of the file system; units that do not decode; a state or an index beyond the limits.
    pub fn finish(mut self, state: &State) -> Result<Finished, WriteError> {
        if self.blocks.is_none() {
            // The VM has no RAM. `blocks` writes the header.
            self.blocks(self.shape.page_size(), &[])?;
        }
        self.submit(PAGES)?;
        self.submit(DIFFERENCES)?;
        let state = state.to_bytes().ok_or(WriteError::TooLong { what: "the device state" })?;
        let mut summary = self.summary();
        let blocks = self.blocks.take().expect("set above");
        summary.unsent = blocks.iter().map(|(_, map)| map.unsent()).sum();
        let unit_pages = self.shape.unit_pages();
        let own = OwnSlots { first: self.own(), places: self.places, unit_pages };
        let (units, file) = self.file.finish()?;
        let too_long = WriteError::TooLong { what: "the index" };
        let Some(Target { store, sharing, lock, identity, mut packs, pages, .. }) = self.target
        else {
            let number = |slot| own.place(slot).expect("this file has all slots").1;
            let blocks = blocks.into_iter().map(|entry| block(entry, number)).collect();
            let index = Index { slots: summary.slots, units, blocks };
            let index = index.to_bytes().ok_or(too_long)?;
            let (new, trailer) = file.seal(Form::Image, &state, &index)?;
            summary.file_bytes = trailer.file_len;
            return Ok(Finished { files: vec![(new, self.path)], summary, target: None });
        };
        // A save without new pages has no pack of its own.
        if !pages.hashes.is_empty() {
            packs.push(NewPack::finish(&sharing, units, file, pages, unit_pages)?);
        }
        let used = used(&sharing, &blocks, &own, &packs);
        let table = Table::new(&sharing, &used, &packs, unit_pages);
        if !table.is_readable() {
            return Err(WriteError::TooLong { what: "the table of packs" });
        }
        let number = |slot| match own.place(slot) {
            Some(place) => table.own_slot(place),
            None => table.slot(&sharing, slot),
        };
        let blocks = blocks.into_iter().map(|entry| block(entry, number)).collect();
        let index = SaveIndex { identity, packs: table.refs, blocks };
        let bytes = index.to_bytes().ok_or(too_long)?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let new = NewFile::create_in(store.folder(), &name)
            .map_err(|source| io("create", &self.path, source))?;
        let mut save = Sealing::new(new, &self.path);
        save.append(&header(Form::Save, self.shape))?;
        let (new, trailer) = save.seal(Form::Save, &state, &bytes)?;
        summary.file_bytes = trailer.file_len + packs.iter().map(|pack| pack.bytes).sum::<u64>();
        let mut files: Vec<_> = packs.into_iter().map(|pack| pack.named(&store)).collect();
        files.push((new, self.path));
        let target = InStore { store, packs: index.packs, _lock: lock };
        Ok(Finished { files, summary, target: Some(target) })
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
