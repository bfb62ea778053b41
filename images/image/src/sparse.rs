//! Finds the packs of a store of which its saves use little.

use std::collections::{HashMap, HashSet};

use crate::store::Store;
use crate::{Content, Image, WriteError};

/// Packs are rewritten once at least one in this many of the store's bytes is unused. A pack is
/// rewritten if at least one in this many of its own bytes is.
const UNUSED: u64 = 4;

/// How the saves of a store use its packs.
pub(crate) struct Sparse {
    /// The packs to be rewritten.
    pub(crate) packs: HashSet<u128>,
    /// The saves that cannot be read, each with the reason.
    pub(crate) unreadable: Vec<(String, String)>,
}

impl Store {
    /// Finds the packs to be rewritten.
    pub(crate) fn sparse(&self) -> Result<Sparse, WriteError> {
        let mut packs: HashMap<u128, Used> = HashMap::new();
        let (mut needed, mut unreadable) = (HashSet::new(), Vec::new());
        for name in self.names()? {
            match Image::open(&self.folder.join(&name)) {
                Ok(image) if image.is_save() => mark(&image, &mut packs),
                Ok(_) => {}
                // The save stays as it is, for a user who can still repair the disk, and so do all
                // of its packs.
                Err(damage) => {
                    needed.extend(self.read(&name)?);
                    if !self.is_gone(&name) {
                        unreadable.push((name, damage.chain()));
                    }
                }
            }
        }
        packs.retain(|id, _| !needed.contains(id));
        let bytes: u64 = packs.values().map(|used| used.bytes).sum();
        let unused: u64 = packs.values().map(Used::unused).sum();
        if unused * UNUSED < bytes || unused == 0 {
            return Ok(Sparse { packs: HashSet::new(), unreadable });
        }
        let is_sparse = |used: &Used| used.unused() * UNUSED >= used.bytes;
        let sparse = packs.iter().filter(|(_, used)| is_sparse(used)).map(|(id, _)| *id).collect();
        Ok(Sparse { packs: sparse, unreadable })
    }
}

/// The use of one pack's slots by saves.
#[derive(Default)]
struct Used {
    /// Stored bytes of its units.
    bytes: u64,
    /// Stored length, pages and used pages of each unit. A unit has at most 128 pages.
    units: Vec<(u32, u32, u128)>,
}

impl Used {
    /// Bytes that no save uses. The unused part of a unit is that of its pages.
    fn unused(&self) -> u64 {
        let of = |(len, pages, used): &(u32, u32, u128)| {
            let unused = u64::from(*pages).saturating_sub(used.count_ones().into());
            u64::from(*len) * unused / u64::from(*pages).max(1)
        };
        self.units.iter().map(of).sum()
    }
}

/// Marks the slots that `image` uses.
fn mark(image: &Image, packs: &mut HashMap<u128, Used>) {
    let per = image.shape().unit_pages();
    for pack in &image.packs().packs {
        let used = packs.entry(pack.id).or_default();
        if used.units.is_empty() {
            let first = usize::try_from(pack.first).expect("units in memory");
            let count = usize::try_from(pack.units).expect("units in memory");
            let units = &image.index().units[first..first + count];
            used.units = units.iter().map(|u| (u.len, u.pages, 0)).collect();
            used.bytes = units.iter().map(|unit| u64::from(unit.len)).sum();
        }
    }
    let mut mark = |slot: u64| {
        let unit = slot / per;
        let file = image.index().units[usize::try_from(unit).expect("in memory")].file;
        let pack = &image.packs().packs[file as usize];
        let used = packs.get_mut(&pack.id).expect("added above");
        let local = usize::try_from(unit - pack.first).expect("in memory");
        used.units[local].2 |= 1 << (slot % per);
    };
    for extent in image.index().blocks.iter().flat_map(|block| &block.extents) {
        let Content::Slot(slot) = extent.content else { continue };
        for slot in slot..slot + extent.pages {
            mark(slot);
            if let Some(Some(bases)) = image.bases(slot / per) {
                let nth = usize::try_from(slot % per).expect("below a unit's pages");
                mark(bases[nth].slot);
            }
        }
    }
}
