//! The pages of a store by number, with their hashes: a migration to the store's host need not
//! carry them (W29b of the wire protocol).

use std::collections::{HashMap, HashSet};
use std::fs::{read_dir, File};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use crate::pack::{open_pack, Pack, PageHash, PACKS};
use crate::packs::Packs;
use crate::save::Parts;
use crate::sharing::pack_id;
use crate::store::{Store, STORE_FILE};
use crate::{Content, Damage, Image, Shape, Units, WriteError, MAX_UNIT};

/// The most packs that are opened, the newest first.
const MAX_PACKS: usize = 64;

/// The packs of a store, or of one save. Pages are numbered from 0, in the order of packs, units
/// and pages. The open packs stay readable when the store is collected.
#[derive(Debug)]
pub struct SeedPacks {
    key: [u8; 32],
    /// The packs, as an image without blocks.
    packs: Image,
    /// The packs' places among all, in the order of the offer.
    order: Vec<usize>,
    /// The number of the first page of each unit, and one more than that of the last page.
    firsts: Vec<u32>,
    /// Of a save: whether each page is one of its own. Its packs have pages of other saves, too.
    own: Option<Vec<bool>>,
}

impl SeedPacks {
    /// Opens the store at `path`, or the packs of the save at `path`, whose guests have pages of
    /// `page_size` bytes: the newest packs, up to the one with which they have `most` pages or
    /// more. A pack that is damaged, or whose units have another size than the newest pack's, is
    /// left out.
    ///
    /// # Errors
    ///
    /// There is neither a store nor a save of a store; errors of the file system.
    pub fn open(path: &Path, page_size: usize, most: u32) -> Result<Self, WriteError> {
        let failed = |source| WriteError::Store { path: path.to_owned(), source };
        let (store, names, save) = match Store::open(path)? {
            Some(store) => {
                let packs = all_packs(store.folder()).map_err(failed)?;
                (store, packs, None)
            }
            None => {
                let Some((store, _)) = Store::of(path)? else {
                    let none = std::io::ErrorKind::NotFound.into();
                    return Err(failed(Damage::io(STORE_FILE, none)));
                };
                let save = Parts::open(path).map_err(failed)?;
                let packs: Vec<u128> = save.packs.iter().map(|pack| pack.id).collect();
                (store, packs, Some(save))
            }
        };
        let opened = open_newest(store.folder(), &names, page_size, most);
        let (packs, shape) = opened.map_err(failed)?;
        let newest: HashMap<u128, usize> = names.iter().copied().zip(0..).collect();
        let packs = Packs::new(packs, shape);
        let mut order: Vec<usize> = (0..packs.packs.len()).collect();
        order.sort_by_key(|&at| newest.get(&packs.packs[at].id));
        let mut firsts = vec![0_u32];
        for unit in &packs.units {
            firsts.push(firsts.last().map_or(0, |first| first.saturating_add(unit.pages)));
        }
        let own = save.map(|save| own_pages(&save, &packs, shape, &firsts));
        let io = |error| failed(Damage::io("the folder", error));
        let file = File::open(store.folder()).map_err(io)?;
        let packs = Image::of_packs(file.into(), shape, packs);
        Ok(Self { key: *store.key(), packs, order, firsts, own })
    }

    /// The key of the hashes.
    pub fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// The number of pages.
    pub fn pages(&self) -> u32 {
        self.firsts.last().copied().unwrap_or(0)
    }

    /// Passes the hashes of the pages of each undamaged unit to `give`, in runs, with the number of
    /// the first page of a run; ends when `give` returns false. Of a save only its own pages are
    /// offered. Reads every unit with such pages.
    pub fn offer(&self, give: &mut dyn FnMut(u32, &[[u8; 16]]) -> bool) {
        let (mut units, mut sound) = (Units::new(), HashMap::new());
        let mut is_sound = |unit: u64| {
            *sound.entry(unit).or_insert_with(|| units.check(&self.packs, unit).is_ok())
        };
        let unit_pages = self.packs.shape().unit_pages();
        for pack in self.order.iter().map(|&at| &self.packs.packs().packs[at]) {
            let Ok(hashes) = pack.hashes() else { continue };
            let (mut hashes, _) = hashes.as_chunks::<{ size_of::<PageHash>() }>();
            for unit in pack.first..pack.first + pack.units {
                let at = usize::try_from(unit).expect("a unit in memory");
                let pages = (self.firsts[at + 1] - self.firsts[at]) as usize;
                let Some((of_unit, rest)) = hashes.split_at_checked(pages) else { break };
                hashes = rest;
                if !self.is_wanted(self.firsts[at], pages) {
                    continue;
                }
                let has_bases = match self.packs.bases(unit) {
                    None => true,
                    Some(None) => false,
                    Some(Some(bases)) => {
                        let units: HashSet<u64> =
                            bases.iter().map(|base| base.slot / unit_pages).collect();
                        units.into_iter().all(&mut is_sound)
                    }
                };
                let is_whole = has_bases && is_sound(unit);
                if is_whole && !self.give_unit(self.firsts[at], of_unit, give) {
                    return;
                }
            }
        }
    }

    /// Whether one of the `pages` pages from number `first` on may be offered.
    fn is_wanted(&self, first: u32, pages: usize) -> bool {
        let own = self.own.as_ref().map(|own| &own[first as usize..][..pages]);
        own.is_none_or(|own| own.contains(&true))
    }

    /// Passes those pages of a unit to `give` that may be offered; false when `give` returns false.
    fn give_unit(
        &self,
        first: u32,
        hashes: &[PageHash],
        give: &mut dyn FnMut(u32, &[PageHash]) -> bool,
    ) -> bool {
        let Some(own) = &self.own else { return give(first, hashes) };
        let own = &own[first as usize..][..hashes.len()];
        let mut end = 0;
        own.chunk_by(|one, other| one == other).all(|run| {
            let begin = end;
            end += run.len();
            let number = first + u32::try_from(begin).expect("below a unit's pages");
            !run[0] || give(number, &hashes[begin..end])
        })
    }
}

/// Reads pages of a seed. Each thread has its own.
#[derive(Debug)]
pub struct SeedReader {
    packs: Arc<SeedPacks>,
    units: Units,
    /// A unit of differences as pages, and its number.
    differences: Option<u64>,
    plain: Vec<u8>,
}

impl SeedReader {
    /// Creates a reader without buffers.
    pub fn new(packs: Arc<SeedPacks>) -> Self {
        Self { packs, units: Units::new(), differences: None, plain: Vec::new() }
    }

    /// Reads page `number`.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the unit; there is no such page, or of a save it is none of its own.
    pub fn read(&mut self, number: u32) -> Result<&[u8], Damage> {
        let packs = &self.packs;
        // The peer of a migration chooses the number.
        if packs.own.as_ref().is_some_and(|own| own.get(number as usize) == Some(&false)) {
            return Err(Damage::OfAnotherSave);
        }
        let behind = packs.firsts.partition_point(|first| *first <= number);
        if behind == packs.firsts.len() {
            return Err(Damage::Place { unit: packs.packs.index().units.len() as u64 });
        }
        let (unit, nth) = (behind as u64 - 1, number - packs.firsts[behind - 1]);
        let shape = packs.packs.shape();
        if packs.packs.bases(unit).is_none() {
            let slot = unit * shape.unit_pages() + u64::from(nth);
            return self.units.base(&packs.packs, slot);
        }
        if self.differences != Some(unit) {
            self.differences = None;
            self.plain.resize(shape.unit_bytes(), 0);
            self.units.read(&packs.packs, unit, &mut self.plain)?;
            self.differences = Some(unit);
        }
        let (at, size) = (nth as usize * shape.page_size(), shape.page_size());
        Ok(&self.plain[at..at + size])
    }
}

/// The packs in the folder, the newest first.
fn all_packs(folder: &Path) -> Result<Vec<u128>, Damage> {
    let io = |error| Damage::io("the folder of packs", error);
    let mut packs = Vec::new();
    for entry in read_dir(folder.join(PACKS)).map_err(io)? {
        let entry = entry.map_err(io)?;
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        if let Some(id) = pack_id(&entry.file_name()) {
            packs.push((modified.unwrap_or(SystemTime::UNIX_EPOCH), id));
        }
    }
    packs.sort_unstable_by(|one, other| other.cmp(one));
    Ok(packs.into_iter().map(|(_, id)| id).collect())
}

/// Whether each page of `packs` is one of the save. `firsts` as in [`SeedPacks`].
fn own_pages(save: &Parts, packs: &Packs, shape: Shape, firsts: &[u32]) -> Vec<bool> {
    let mut own = vec![false; firsts.last().map_or(0, |pages| *pages as usize)];
    if save.shape != shape {
        return own;
    }
    let places = packs.places(&save.packs, shape);
    for extent in save.index.blocks.iter().flat_map(|block| &block.extents) {
        let Content::Slot(first) = extent.content else { continue };
        for slot in (first..first + extent.pages).filter_map(|slot| places.slot(slot)) {
            let unit = usize::try_from(slot / shape.unit_pages()).expect("a unit in memory");
            let nth = usize::try_from(slot % shape.unit_pages()).expect("below a unit's pages");
            // A forged save may name a page that its unit does not have.
            let of_unit = &mut own[firsts[unit] as usize..firsts[unit + 1] as usize];
            if let Some(page) = of_unit.get_mut(nth) {
                *page = true;
            }
        }
    }
    own
}

/// Opens the first packs of `names` that have `most` pages, in the order of their names, and their
/// shape. The last one may have more: a pack can be larger than any `most`.
fn open_newest(
    folder: &Path,
    names: &[u128],
    page_size: usize,
    most: u32,
) -> Result<(Vec<(u128, Pack)>, Shape), Damage> {
    let (mut packs, mut left) = (Vec::new(), u64::from(most));
    let mut shape = None;
    for &id in names {
        let Ok(file) = open_pack(folder, id) else { continue };
        let Ok(pack) = Pack::over(file, id) else { continue };
        let is_of_size = pack.shape.page_size() == page_size;
        if !is_of_size || *shape.get_or_insert(pack.shape) != pack.shape {
            continue;
        }
        left = left.saturating_sub(pack.pages());
        packs.push((id, pack));
        if left == 0 || packs.len() == MAX_PACKS {
            break;
        }
    }
    packs.sort_by_key(|(id, _)| *id);
    let shape = shape.map_or_else(|| Shape::new(page_size, MAX_UNIT), Ok)?;
    Ok((packs, shape))
}
