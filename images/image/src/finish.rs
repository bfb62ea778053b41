//! The end of a save: the final numbers of units, tables of packs, and the files that are linked.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::rand;

use crate::disk;
use crate::file::{LinkError, NewFile};
use crate::layout::{Form, MAX_INDEX, MAX_PACKS, MAX_SLOTS};
use crate::map::PageMap;
use crate::pack::{pack_path, Base, PackIndex, PackRef, PageHash, PACKS};
use crate::sharing::Sharing;
use crate::store::Store;
use crate::unit_file::Sealing;
use crate::{Block, RamBlock, Summary, UnitEntry, WriteError};

/// The final place of a unit: the number of its file among those that are being written, and its
/// number there.
pub(crate) type Place = (usize, u64);

/// The final numbers of the slots of files that are being written.
pub(crate) struct OwnSlots {
    /// The first of these slots.
    pub(crate) first: u64,
    /// Final place of each unit, in the order in which their filling began.
    pub(crate) places: Vec<Place>,
    pub(crate) unit_pages: u64,
}

impl OwnSlots {
    /// The file of a slot, and the slot's final number in it; `None` for a slot that the store had.
    pub(crate) fn place(&self, slot: u64) -> Option<(usize, u64)> {
        let slot = slot.checked_sub(self.first)?;
        let unit = usize::try_from(slot / self.unit_pages).expect("a unit in memory");
        let (file, number) = self.places[unit];
        Some((file, number * self.unit_pages + slot % self.unit_pages))
    }
}

/// A table of packs: the save's own packs, and some of the packs with which it shares pages.
pub(crate) struct Table {
    pub(crate) refs: Vec<PackRef>,
    /// Number of slots in all packs.
    slots: u64,
    /// First slot of each pack in the table, by the pack's number among the shared ones.
    first: HashMap<usize, u64>,
    /// First slot of each of the save's own packs.
    own: Vec<u64>,
}

impl Table {
    pub(crate) fn new(
        sharing: &Sharing,
        used: &BTreeSet<usize>,
        own: &[NewPack],
        unit_pages: u64,
    ) -> Self {
        let shared = used.iter().map(|&pack| (sharing.refs()[pack], Ok(pack)));
        let own_packs = own.iter().enumerate().map(|(nth, pack)| (pack.of, Err(nth)));
        let mut packs: Vec<_> = shared.chain(own_packs).collect();
        packs.sort_by_key(|(of, _)| of.id);
        let mut this =
            Self { refs: Vec::new(), slots: 0, first: HashMap::new(), own: vec![0; own.len()] };
        for (of, pack) in packs {
            match pack {
                Ok(pack) => {
                    this.first.insert(pack, this.slots);
                }
                Err(nth) => this.own[nth] = this.slots,
            }
            this.slots += of.units * unit_pages;
            this.refs.push(of);
        }
        this
    }

    /// Whether a reader accepts the table.
    pub(crate) fn is_readable(&self) -> bool {
        self.refs.len() <= MAX_PACKS && self.slots <= MAX_SLOTS
    }

    /// The number in the table of a slot of the save's own pack `nth`.
    pub(crate) fn own_slot(&self, (nth, slot): (usize, u64)) -> u64 {
        self.own[nth] + slot
    }

    /// The number in the table of a slot of a shared pack.
    pub(crate) fn slot(&self, sharing: &Sharing, slot: u64) -> u64 {
        let pack = sharing.pack_of(slot);
        self.first[&pack] + slot - sharing.first_slot(pack)
    }
}

/// The shared packs that hold pages of `blocks`, or base pages of those stored as differences.
pub(crate) fn used(
    sharing: &Sharing,
    blocks: &[(RamBlock, PageMap)],
    own: &OwnSlots,
    packs: &[NewPack],
) -> BTreeSet<usize> {
    let mut used: BTreeSet<usize> =
        packs.iter().flat_map(|pack| &pack.base_packs).copied().collect();
    // Neighbouring pages mostly lie in one unit.
    let mut last = None;
    for slot in blocks.iter().flat_map(|(_, map)| map.slots()).filter(|&slot| slot < own.first) {
        let unit = slot / own.unit_pages;
        if last.replace(unit) != Some(unit) {
            used.insert(sharing.pack_of(slot));
            used.extend(sharing.bases_of(slot).map(|base| sharing.pack_of(base)));
        }
    }
    used
}

/// Maximum number of pages in a pack that is written: 32 GiB. The writer holds their hashes in
/// memory, 128 MiB, until the pack is complete.
pub(crate) const PACK_PAGES: usize = 8 << 20;
// A table has room for 200 shared packs and for the writer's own, which fill all slots.
const _: () = assert!(MAX_SLOTS / PACK_PAGES as u64 + 200 <= MAX_PACKS as u64);
// A pack exceeds its maximum by less than two units.
const _: () = assert!((PACK_PAGES as u64 + 1024) * size_of::<PageHash>() as u64 <= MAX_INDEX);

/// The hashes and base pages of a pack that is being written.
#[derive(Default)]
pub(crate) struct PackPages {
    /// Hash of each page, in the order of units and pages.
    pub(crate) hashes: Vec<PageHash>,
    /// Base pages of each unit with differences.
    bases: Vec<(u64, Vec<Base>)>,
}

impl PackPages {
    /// Adds unit `number`, the next one.
    pub(crate) fn add(&mut self, number: u64, hashes: &[PageHash], bases: Vec<Base>) {
        self.hashes.extend_from_slice(hashes);
        if !bases.is_empty() {
            self.bases.push((number, bases));
        }
    }

    /// The packs of the base pages.
    fn base_packs(&self, sharing: &Sharing) -> BTreeSet<usize> {
        let bases = self.bases.iter().flat_map(|(_, bases)| bases);
        bases.map(|base| sharing.pack_of(base.slot)).collect()
    }
}

/// A pack that is complete.
pub(crate) struct NewPack {
    pub(crate) of: PackRef,
    pub(crate) bytes: u64,
    /// The packs that hold the base pages of its differences, by their number in the store.
    pub(crate) base_packs: BTreeSet<usize>,
    new: NewFile,
}

impl NewPack {
    /// Writes hashes and index of a pack, and makes it durable.
    pub(crate) fn finish(
        sharing: &Sharing,
        units: Vec<UnitEntry>,
        file: Sealing,
        pages: PackPages,
        unit_pages: u64,
    ) -> Result<Self, WriteError> {
        let base_packs = pages.base_packs(sharing);
        let table = Table::new(sharing, &base_packs, &[], unit_pages);
        let mut differences = HashMap::new();
        for (number, mut bases) in pages.bases {
            for base in &mut bases {
                base.slot = table.slot(sharing, base.slot);
            }
            differences.insert(number, bases.into());
        }
        // Two packs with the same pages have different names: one of them may be damaged.
        let nonce = random()?;
        let count = units.len() as u64;
        let index = PackIndex { nonce, bases: table.refs, units, differences };
        let index = index.to_bytes().ok_or(WriteError::TooLong { what: "the index" })?;
        let (new, trailer) = file.seal(Form::Pack, pages.hashes.as_flattened(), &index)?;
        let of = PackRef { id: trailer.hash, units: count };
        Ok(Self { of, bytes: trailer.file_len, base_packs, new })
    }

    /// The file, and the path that it will get.
    pub(crate) fn named(self, store: &Store) -> (NewFile, PathBuf) {
        (self.new, pack_path(store.folder(), self.of.id))
    }
}

/// An image that is complete and durable, but not linked to its path. Dropping it leaves no file.
#[derive(Debug)]
pub struct Finished {
    /// The files in the order in which they are linked; the image or the save is the last one.
    pub(crate) files: Vec<(NewFile, PathBuf)>,
    pub(crate) summary: Summary,
    pub(crate) target: Option<InStore>,
}

/// The store of a save that is complete.
#[derive(Debug)]
pub(crate) struct InStore {
    pub(crate) store: Store,
    /// The packs that the save names and that have not been looked for yet: its own, and those of
    /// others.
    pub(crate) packs: Vec<PackRef>,
    /// The store's lock. Until the save is linked, no save names its packs.
    pub(crate) _lock: File,
}

impl InStore {
    /// Makes the names of the packs durable, and looks for each pack. A process that died may have
    /// linked one that this save shares, without making its name durable. On NFS a lock can be
    /// lost, and another host has removed packs then.
    fn secure_packs(&mut self) -> Result<(), WriteError> {
        if self.packs.is_empty() {
            return Ok(());
        }
        let folder = self.store.folder().join(PACKS);
        disk::sync_folder(&folder).map_err(|source| name(&folder, source))?;
        disk::refresh(&folder);
        for pack in std::mem::take(&mut self.packs) {
            let path = pack_path(self.store.folder(), pack.id);
            disk::named(&path).map_err(|source| WriteError::PackGone { path, source })?;
        }
        Ok(())
    }
}

impl Finished {
    /// Links the image to its path, and makes the link durable.
    ///
    /// # Errors
    ///
    /// The file system fails, a file has appeared at the path meanwhile, or a shared pack is gone.
    /// There is no image then, except after [`WriteError::Stays`].
    pub fn link(mut self) -> Result<Summary, WriteError> {
        self.link_packs()?;
        if let Some((new, path)) = self.files.pop() {
            new.link(&path).map_err(|error| match error {
                LinkError::Nameless(source) => name(&path, source),
                LinkError::Stays(source) => WriteError::Stays { path: path.clone(), source },
            })?;
        }
        Ok(self.summary)
    }

    /// Links the packs, and makes sure that all packs which the save names are there, durably.
    /// Another save may share one as soon as it has its name, so each keeps it after an error. A
    /// collection removes those that no save names.
    pub(crate) fn link_packs(&mut self) -> Result<(), WriteError> {
        let packs = self.files.len().saturating_sub(1);
        for (new, path) in self.files.drain(..packs) {
            new.link_shared(&path).map_err(|source| name(&path, source))?;
        }
        self.target.as_mut().map_or(Ok(()), InStore::secure_packs)
    }

    /// Gives all files the owner and mode of the file that the save will replace.
    pub(crate) fn take_access(&self, former: &File) -> io::Result<()> {
        self.files.iter().try_for_each(|(new, _)| new.take_access(former))
    }

    /// Puts the save in the place of the file that has its name, and makes that durable.
    pub(crate) fn replace(mut self) -> Result<Summary, WriteError> {
        self.link_packs()?;
        if let Some((new, path)) = self.files.pop() {
            new.replace(&path).map_err(|source| name(&path, source))?;
        }
        Ok(self.summary)
    }

    /// Counts of the finished image.
    pub fn summary(&self) -> Summary {
        self.summary
    }
}

/// Random bytes.
pub(crate) fn random() -> Result<[u8; 16], WriteError> {
    let mut bytes = [0; 16];
    let filled = rand::fill(&mut bytes);
    filled.map_err(|_| WriteError::SetUp(io::Error::other("the host gives no random bytes")))?;
    Ok(bytes)
}

fn name(path: &Path, source: io::Error) -> WriteError {
    WriteError::Io { what: "name", path: path.to_owned(), source }
}

/// A RAM block with its pages.
pub(crate) fn block((of, map): (RamBlock, PageMap), number: impl Fn(u64) -> u64) -> Block {
    let RamBlock { name, host_page, .. } = of;
    Block { name, pages: map.pages(), host_page, extents: map.extents(number) }
}
