//! The pages of a store by number, with their hashes: a migration to the store's host need not
//! carry them (W29b of the wire protocol).

use std::collections::{HashMap, HashSet};
use std::fs::{read_dir, File};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use crate::pack::{open_pack, Pack, PackRef, PageHash, PACKS};
use crate::packs::Packs;
use crate::save::Parts;
use crate::sharing::pack_id;
use crate::store::{Store, STORE_FILE};
use crate::{Damage, Image, Shape, Units, WriteError, MAX_UNIT};

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
}

impl SeedPacks {
    /// Opens the store at `path`, or the packs of the save at `path`, whose guests have pages of
    /// `page_size` bytes: the newest packs, of at most `most` pages in all. A pack that is damaged,
    /// or whose units have another size than the newest pack's, is left out.
    ///
    /// # Errors
    ///
    /// There is neither a store nor a save of a store; errors of the file system.
    pub fn open(path: &Path, page_size: usize, most: u32) -> Result<Self, WriteError> {
        let failed = |source| WriteError::Store { path: path.to_owned(), source };
        let (store, names) = match Store::open(path)? {
            Some(store) => {
                let packs = all_packs(store.folder()).map_err(failed)?;
                (store, packs)
            }
            None => {
                let Some((store, _)) = Store::of(path)? else {
                    let none = std::io::ErrorKind::NotFound.into();
                    return Err(failed(Damage::io(STORE_FILE, none)));
                };
                let packs = packs_of_save(path).map_err(failed)?;
                (store, packs)
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
        let io = |error| failed(Damage::io("the folder", error));
        let file = File::open(store.folder()).map_err(io)?;
        let packs = Image::of_packs(file.into(), shape, packs);
        Ok(Self { key: *store.key(), packs, order, firsts })
    }

    /// The key of the hashes.
    pub fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// The number of pages.
    pub fn pages(&self) -> u32 {
        self.firsts.last().copied().unwrap_or(0)
    }

    /// Passes the hashes of the pages of each undamaged unit to `give`, with the number of the
    /// first one; ends when `give` returns false. Reads every byte of the packs.
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
                let has_bases = match self.packs.bases(unit) {
                    None => true,
                    Some(None) => false,
                    Some(Some(bases)) => {
                        let units: HashSet<u64> =
                            bases.iter().map(|base| base.slot / unit_pages).collect();
                        units.into_iter().all(&mut is_sound)
                    }
                };
                if has_bases && is_sound(unit) && !give(self.firsts[at], of_unit) {
                    return;
                }
            }
        }
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
    /// [`Damage`] names the unit; there is no such page.
    pub fn read(&mut self, number: u32) -> Result<&[u8], Damage> {
        let packs = &self.packs;
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

/// The packs that the save names.
fn packs_of_save(path: &Path) -> Result<Vec<u128>, Damage> {
    let file = File::open(path).map_err(|error| Damage::io("the save", error))?;
    let packs = Parts::read(&file.into())?.packs;
    Ok(packs.iter().map(|pack: &PackRef| pack.id).collect())
}

/// Opens the first packs of `names` that fit, in the order of their names, and their shape.
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
        let is_of_size = pack.shape.page_size() == page_size && pack.pages() <= left;
        if !is_of_size || *shape.get_or_insert(pack.shape) != pack.shape {
            continue;
        }
        left -= pack.pages();
        packs.push((id, pack));
        if packs.len() == MAX_PACKS {
            break;
        }
    }
    packs.sort_by_key(|(id, _)| *id);
    let shape = shape.map_or_else(|| Shape::new(page_size, MAX_UNIT), Ok)?;
    Ok((packs, shape))
}
