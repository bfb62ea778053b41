//! The end of a save: numbers that the units get, tables of packs, and the files that are linked.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::rand;

use crate::file::NewFile;
use crate::layout::{Form, MAX_INDEX};
use crate::map::PageMap;
use crate::pack::{pack_path, Base, PackIndex, PackRef, PageHash};
use crate::sharing::Sharing;
use crate::store::Store;
use crate::unit_file::Sealing;
use crate::{Block, RamBlock, Summary, UnitEntry, WriteError};

/// How the slots of a file that is being written get their final numbers.
pub(crate) struct OwnSlots {
    /// The first of them.
    pub(crate) first: u64,
    /// Final number of each unit, in the order in which their filling began.
    pub(crate) numbers: Vec<u64>,
    pub(crate) unit_pages: u64,
}

impl OwnSlots {
    /// The final number of a slot, counted from 0; `None` for a slot of another pack.
    pub(crate) fn number(&self, slot: u64) -> Option<u64> {
        let slot = slot.checked_sub(self.first)?;
        let unit = usize::try_from(slot / self.unit_pages).expect("a unit in memory");
        Some(self.numbers[unit] * self.unit_pages + slot % self.unit_pages)
    }
}

/// A table of packs that is a part of those that a save shares with.
pub(crate) struct Table {
    pub(crate) refs: Vec<PackRef>,
    /// First slot of each pack in the table, by its number among those shared with.
    first: HashMap<usize, u64>,
    /// First slot of the save's own pack.
    pub(crate) own: u64,
}

impl Table {
    pub(crate) fn new(
        sharing: &Sharing,
        used: &BTreeSet<usize>,
        own: Option<PackRef>,
        unit_pages: u64,
    ) -> Self {
        let shared = used.iter().map(|&pack| (sharing.refs()[pack], Some(pack)));
        let mut packs: Vec<_> = shared.chain(own.map(|own| (own, None))).collect();
        packs.sort_by_key(|(of, _)| of.id);
        let mut this = Self { refs: Vec::new(), first: HashMap::new(), own: 0 };
        let mut slots = 0;
        for (of, pack) in packs {
            match pack {
                Some(pack) => {
                    this.first.insert(pack, slots);
                }
                None => this.own = slots,
            }
            slots += of.units * unit_pages;
            this.refs.push(of);
        }
        this
    }

    /// Number in the table of a slot of a pack that is shared with.
    pub(crate) fn slot(&self, sharing: &Sharing, slot: u64) -> u64 {
        let pack = sharing.pack_of(slot);
        self.first[&pack] + slot - sharing.first_slot(pack)
    }
}

/// The packs that hold the pages of `blocks`, and the base pages of those stored as differences.
pub(crate) fn used(
    sharing: &Sharing,
    blocks: &[(RamBlock, PageMap)],
    own: &OwnSlots,
    bases: &BTreeSet<usize>,
) -> BTreeSet<usize> {
    let mut used = bases.clone();
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

/// A pack that is complete.
pub(crate) struct NewPack {
    pub(crate) of: PackRef,
    pub(crate) bytes: u64,
    new: NewFile,
}

impl NewPack {
    /// Writes hashes and index of a pack, and makes it durable.
    pub(crate) fn finish(
        sharing: &Sharing,
        units: Vec<UnitEntry>,
        file: Sealing,
        filled: Vec<(Vec<PageHash>, Vec<Base>)>,
        bases: &BTreeSet<usize>,
        unit_pages: u64,
    ) -> Result<Self, WriteError> {
        let table = Table::new(sharing, bases, None, unit_pages);
        let (mut hashes, mut differences) = (Vec::new(), HashMap::new());
        for ((of_unit, mut bases), number) in filled.into_iter().zip(0..) {
            hashes.extend(of_unit);
            for base in &mut bases {
                base.slot = table.slot(sharing, base.slot);
            }
            if !bases.is_empty() {
                differences.insert(number, bases.into());
            }
        }
        let hashes = hashes.concat();
        if hashes.len() as u64 > MAX_INDEX {
            return Err(WriteError::TooLong { what: "the number of new pages" });
        }
        // Two packs with the same pages have different names: one of them may be damaged.
        let nonce = random()?;
        let count = units.len() as u64;
        let index = PackIndex { nonce, bases: table.refs, units, differences };
        let index = index.to_bytes().ok_or(WriteError::TooLong { what: "the index" })?;
        let (new, trailer) = file.seal(Form::Pack, &hashes, &index)?;
        let of = PackRef { id: trailer.hash, units: count };
        Ok(Self { of, bytes: trailer.file_len, new })
    }

    /// The file, and the path that it is to get.
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
    /// The store's lock: until the save is linked, no save names its packs.
    pub(crate) _lock: Option<File>,
}

impl Finished {
    /// Links the image to its path, durably.
    ///
    /// # Errors
    ///
    /// Errors of the file system; a file that has appeared at the path meanwhile.
    pub fn link(self) -> Result<Summary, WriteError> {
        for (new, path) in self.files {
            new.link(&path).map_err(|source| name(&path, source))?;
        }
        Ok(self.summary)
    }

    /// Gives all files owner and mode of the file that the save is to replace.
    pub(crate) fn take_access(&self, former: &File) -> io::Result<()> {
        self.files.iter().try_for_each(|(new, _)| new.take_access(former))
    }

    /// Puts the save in the place of the file that has its name, durably.
    pub(crate) fn replace(mut self) -> Result<Summary, WriteError> {
        let save = self.files.pop();
        for (new, path) in self.files {
            new.link(&path).map_err(|source| name(&path, source))?;
        }
        if let Some((new, path)) = save {
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

/// The packs of base pages.
pub(crate) fn base_packs(
    sharing: &Sharing,
    filled: &[(Vec<PageHash>, Vec<Base>)],
) -> BTreeSet<usize> {
    let bases = filled.iter().flat_map(|(_, bases)| bases);
    bases.map(|base| sharing.pack_of(base.slot)).collect()
}
