//! Pages that a save shares with the packs of its store: equal pages, and pages that changed
//! little.

use std::collections::{HashMap, HashSet};
use std::fs::{read_dir, File};
use std::path::Path;

use delta::page_hash;

use crate::pack::{open_pack, Base, Pack, PackRef, PageHash, PACKS};
use crate::packs::{Packs, Places};
use crate::save::Parts;
use crate::units::MAX_BASE_UNITS;
use crate::{Block, Content, Damage, Image, RamBlock, Shape, Units};

/// Maximum number of packs that a save shares pages with: a restore opens all of them.
const MAX_PACKS: usize = 200;
/// The most pages of the store that a save finds by their hash, and the most of its own pages: 56
/// GiB each. As many fill a hash table of 16 Mi buckets, which takes 400 MiB.
const MAX_PAGES: u64 = (16 << 20) / 8 * 7;
/// A page is stored as a difference while at most one in this many of its words has changed. Crate
/// `delta` measures the same limit.
const CHANGED: usize = 2;

/// The pages that a store holds, for one save.
pub(crate) struct Sharing {
    key: [u8; 32],
    /// The packs, as an image without blocks.
    packs: Image,
    refs: Vec<PackRef>,
    /// The slots of the store's pages, by hash.
    stored: HashMap<PageHash, u64>,
    /// The slots of the save's own pages, by hash, and their maximum number.
    own: HashMap<PageHash, u64>,
    max_own: u64,
    /// Whether the stored bytes of each unit match their checksum; `None` until the unit was read.
    sound: Vec<Option<bool>>,
    units: Units,
    parent: Option<Parent>,
    /// Parts of the store that are damaged and were left out.
    pub(crate) damaged: u64,
}

/// The save with which pages are compared.
struct Parent {
    places: Places,
    blocks: HashMap<String, Block>,
    /// The block of the same name, for each block of the save.
    by_number: Vec<Option<String>>,
}

impl Sharing {
    /// Reads the packs of the store in `folder` with units of `shape`, except the packs in
    /// `without`. `parent` is the name of the save with which pages are compared.
    pub(crate) fn new(
        folder: &Path,
        key: [u8; 32],
        parent: Option<&str>,
        without: &HashSet<u128>,
        shape: Shape,
    ) -> Result<Self, Damage> {
        let io = |error| Damage::io("the folder of packs", error);
        let mut damaged = 0;
        // Without its parent a save is complete, but larger.
        let parent = parent.and_then(|name| {
            let parts = Parts::open(&folder.join(name));
            let parts = parts.inspect_err(|error| damaged += is_damage(error)).ok()?;
            // The slots of a save with units of another shape stand for other pages.
            (parts.shape == shape).then_some(parts)
        });
        let named: HashSet<u128> =
            parent.iter().flat_map(|parts| &parts.packs).map(|pack| pack.id).collect();
        let mut largest = Vec::new();
        for entry in read_dir(folder.join(PACKS)).map_err(io)? {
            let entry = entry.map_err(io)?;
            let Some(id) = pack_id(&entry.file_name()) else { continue };
            if !without.contains(&id) {
                largest.push((entry.metadata().map_or(0, |metadata| metadata.len()), id));
            }
        }
        // The packs of the parent save are taken first, and then the largest.
        largest.sort_unstable_by_key(|pack| (!named.contains(&pack.1), std::cmp::Reverse(*pack)));
        largest.truncate(MAX_PACKS);
        let mut packs = Vec::new();
        for (_, id) in largest {
            match open_pack(folder, id)
                .map_err(|error| Damage::io("the file", error))
                .and_then(|file| Pack::over(file, id))
            {
                Ok(pack) if pack.shape == shape => packs.push((id, pack)),
                Ok(_) => {}
                Err(error) => damaged += is_damage(&error),
            }
        }
        let mut left = MAX_PAGES;
        packs.retain(|(_, pack)| match left.checked_sub(pack.pages()) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        packs.sort_by_key(|(id, _)| *id);
        let packs = Packs::new(packs, shape);
        let mut stored = HashMap::new();
        for pack in &packs.packs {
            let hashes = pack.hashes().inspect_err(|error| damaged += is_damage(error));
            let hashes = hashes.unwrap_or_default();
            let mut hashes = hashes.chunks_exact(size_of::<PageHash>());
            stored.reserve(hashes.len());
            for unit in pack.first..pack.first + pack.units {
                let entry = packs.units[usize::try_from(unit).expect("a unit in memory")];
                let usable = !matches!(packs.differences.get(&unit), Some(None));
                for (slot, hash) in
                    (unit * shape.unit_pages()..).zip(hashes.by_ref().take(entry.pages as usize))
                {
                    if usable {
                        stored.insert(hash.try_into().expect("the length of a hash"), slot);
                    }
                }
            }
        }
        let (sound, refs) = (vec![None; packs.units.len()], packs.refs());
        let file = File::open(folder).map_err(io)?;
        let packs = Image::of_packs(file.into(), shape, packs);
        let parent = parent.map(|parts| Parent::over(parts, packs.packs(), shape));
        let (own, units) = (HashMap::new(), Units::new());
        let max_own = MAX_PAGES;
        Ok(Self { key, packs, refs, stored, own, max_own, sound, units, parent, damaged })
    }

    /// The number of units in the packs.
    pub(crate) fn units(&self) -> u64 {
        self.sound.len() as u64
    }

    /// The packs.
    pub(crate) fn refs(&self) -> &[PackRef] {
        &self.refs
    }

    /// Number of the pack that holds `slot`.
    pub(crate) fn pack_of(&self, slot: u64) -> usize {
        let unit = slot / self.packs.shape().unit_pages();
        self.packs.packs().packs.partition_point(|pack| pack.first <= unit) - 1
    }

    /// First slot of a pack.
    pub(crate) fn first_slot(&self, pack: usize) -> u64 {
        self.packs.packs().packs[pack].first * self.packs.shape().unit_pages()
    }

    /// Slots of the base pages of the unit with `slot`, if it holds differences.
    pub(crate) fn bases_of(&self, slot: u64) -> impl Iterator<Item = u64> + '_ {
        let unit = slot / self.packs.shape().unit_pages();
        let bases = self.packs.bases(unit).and_then(Option::as_ref);
        bases.into_iter().flatten().map(|base| base.slot)
    }

    /// Sets the names of the blocks of the VM that is saved.
    pub(crate) fn blocks(&mut self, blocks: &[RamBlock]) {
        let Some(parent) = &mut self.parent else { return };
        let known =
            |block: &RamBlock| parent.blocks.contains_key(&block.name).then(|| block.name.clone());
        parent.by_number = blocks.iter().map(known).collect();
    }

    pub(crate) fn hash(&self, page: &[u8]) -> PageHash {
        page_hash(&self.key, page)
    }

    /// The slot of a page with this hash, if its unit is sound.
    pub(crate) fn find(&mut self, hash: &PageHash) -> Option<u64> {
        if let Some(slot) = self.own.get(hash) {
            return Some(*slot);
        }
        let slot = *self.stored.get(hash)?;
        let unit = slot / self.packs.shape().unit_pages();
        if !self.is_sound(unit) {
            return None;
        }
        let bases: Vec<u64> = match self.packs.bases(unit) {
            None => return Some(slot),
            Some(_) => self.bases_of(slot).collect(),
        };
        let mut units: Vec<u64> =
            bases.iter().map(|slot| slot / self.packs.shape().unit_pages()).collect();
        units.dedup();
        units.iter().all(|&unit| self.is_sound(unit)).then_some(slot)
    }

    /// Compares the checksum of a unit's stored bytes, once: a page of a unit that the disk has
    /// lost is stored again.
    fn is_sound(&mut self, unit: u64) -> bool {
        let at = usize::try_from(unit).expect("a unit in memory");
        if let Some(sound) = self.sound[at] {
            return sound;
        }
        let checked = self.units.check(&self.packs, unit);
        self.damaged += checked.as_ref().map_or_else(is_damage, |_| 0);
        self.sound[at] = Some(checked.is_ok());
        checked.is_ok()
    }

    /// Adds a page of the save itself. Beyond the maximum number, equal pages are stored again.
    pub(crate) fn add(&mut self, hash: PageHash, slot: u64) {
        if (self.own.len() as u64) < self.max_own {
            self.own.insert(hash, slot);
        }
    }

    #[cfg(test)]
    pub(crate) fn set_max_own(&mut self, pages: u64) {
        self.max_own = pages;
    }

    /// Writes the difference of `bytes` from the parent's page to `out`, and returns the slot of
    /// the base page; `None` if there is none, or too much has changed.
    ///
    /// The base page is never a difference itself: where the parent's page is one, its base page
    /// is taken. Reading a page needs at most one other.
    pub(crate) fn difference(
        &mut self,
        block: usize,
        page: u64,
        bytes: &[u8],
        out: &mut [u8],
    ) -> Option<u64> {
        let size = self.packs.shape().unit_pages();
        let parent = self.parent.as_ref()?;
        let name = parent.by_number.get(block)?.as_ref()?;
        let Content::Slot(slot) = parent.blocks[name].content(page)? else { return None };
        let slot = parent.places.slot(slot)?;
        let slot = match self.packs.bases(slot / size) {
            None => slot,
            Some(bases) => {
                let nth = usize::try_from(slot % size).expect("below a unit's pages");
                bases.as_ref()?.get(nth)?.slot
            }
        };
        let unit = usize::try_from(slot / size).expect("a unit in memory");
        // A forged parent may name a page that its unit does not have. A reader refuses such a
        // base.
        let has_page = slot % size < self.packs.index().unit_pages(slot / size);
        if !has_page || self.sound[unit] == Some(false) {
            return None;
        }
        let base = match self.units.base(&self.packs, slot) {
            Ok(base) => base,
            Err(error) => {
                self.sound[unit] = Some(false);
                self.damaged += is_damage(&error);
                return None;
            }
        };
        let mut changed = 0;
        let words = bytes.chunks_exact(8).zip(base.chunks_exact(8)).zip(out.chunks_exact_mut(8));
        for ((new, old), out) in words {
            let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
            let difference = word(new) ^ word(old);
            changed += usize::from(difference != 0);
            out.copy_from_slice(&difference.to_ne_bytes());
        }
        (changed <= bytes.len() / 8 / CHANGED).then_some(slot)
    }
}

/// 1 for a part that is damaged, 0 for one that another process has removed, or that this user may
/// not read.
fn is_damage(error: &Damage) -> u64 {
    u64::from(!error.is_withheld())
}

impl Parent {
    fn over(parts: Parts, packs: &Packs, shape: Shape) -> Self {
        let places = packs.places(&parts.packs, shape);
        let blocks = parts.index.blocks.into_iter().map(|block| (block.name.clone(), block));
        Self { places, blocks: blocks.collect(), by_number: Vec::new() }
    }
}

/// The id of the pack that a file's name states; `None` if the name is no pack's.
pub(crate) fn pack_id(name: &std::ffi::OsStr) -> Option<u128> {
    let name = name.to_str().filter(|name| name.len() == 32)?;
    let is_hex = name.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_hex.then(|| u128::from_str_radix(name, 16).ok())?
}

/// Whether a unit with base pages `bases` has room for a difference from `slot`, so that a reader
/// decodes at most [`MAX_BASE_UNITS`] other units.
pub(crate) fn has_room(bases: &[Base], slot: u64, unit_pages: u64) -> bool {
    let mut units = [u64::MAX; MAX_BASE_UNITS];
    let mut count = 0;
    for unit in bases.iter().map(|base| base.slot / unit_pages) {
        if !units[..count].contains(&unit) {
            units[count] = unit;
            count += 1;
        }
    }
    count < MAX_BASE_UNITS || units.contains(&(slot / unit_pages))
}
