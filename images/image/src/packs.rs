//! Several packs, whose units share one numbering.

use std::collections::HashMap;

use crate::index::UnitEntry;
use crate::layout::Trailer;
use crate::pack::{Base, Pack, PackRef};
use crate::part::part;
use crate::{Content, Damage, Extent, ImageFile, Shape};

/// One of the packs.
#[derive(Debug)]
pub(crate) struct OpenPack {
    pub(crate) file: ImageFile,
    pub(crate) id: u128,
    pub(crate) trailer: Trailer,
    /// Number of its first unit.
    pub(crate) first: u64,
    pub(crate) units: u64,
}

/// Packs in ascending order of their names. Their units are numbered through all packs.
#[derive(Debug, Default)]
pub(crate) struct Packs {
    pub(crate) packs: Vec<OpenPack>,
    pub(crate) units: Vec<UnitEntry>,
    /// The base pages of each unit that holds differences; `None` if one of their packs is not
    /// among these packs.
    pub(crate) differences: HashMap<u64, Option<Box<[Base]>>>,
}

/// The packs of a table: begin and end of their slots in the table, and their first slot in
/// [`Packs`] if they are there.
pub(crate) struct Places(Vec<(u64, u64, Option<u64>)>);

impl Places {
    /// The number in [`Packs`] of a slot of the table.
    pub(crate) fn slot(&self, slot: u64) -> Option<u64> {
        let at = self.0.partition_point(|(_, end, _)| *end <= slot);
        let (begin, _, first) = self.0.get(at)?;
        Some((*first)? + (slot - begin))
    }
}

impl Packs {
    /// Numbers the units of `packs`, which are in ascending order of their names.
    pub(crate) fn new(packs: Vec<(u128, Pack)>, shape: Shape) -> Self {
        let mut this = Self::default();
        let mut differences = Vec::new();
        for ((id, pack), number) in packs.into_iter().zip(0..) {
            let first = this.units.len() as u64;
            let units = pack.index.units.len() as u64;
            this.units.extend(pack.index.units.iter().map(|u| UnitEntry { file: number, ..*u }));
            this.packs.push(OpenPack { file: pack.file, id, trailer: pack.trailer, first, units });
            differences.push((first, pack.index.bases, pack.index.differences));
        }
        let is_difference = |unit| {
            let of = this.packs.partition_point(|pack| pack.first <= unit) - 1;
            differences[of].2.contains_key(&(unit - this.packs[of].first))
        };
        let mut all = HashMap::new();
        for (first, refs, units) in &differences {
            let places = this.places(refs, shape);
            for (unit, bases) in units {
                let bases = bases.iter().map(|base| {
                    let slot = places.slot(base.slot)?;
                    let unit = slot / shape.unit_pages();
                    let is_page = this.has(slot, 1, shape) && !is_difference(unit);
                    is_page.then_some(Base { slot, ..*base })
                });
                all.insert(first + unit, bases.collect());
            }
        }
        this.differences = all;
        this
    }

    /// The places in these packs of the slots of another table.
    pub(crate) fn places(&self, refs: &[PackRef], shape: Shape) -> Places {
        let size = shape.unit_pages();
        let (mut end, mut packs) = (0u64, Vec::with_capacity(refs.len()));
        for of in refs {
            let begin = end;
            end = end.saturating_add(of.units.saturating_mul(size));
            let at = self.packs.binary_search_by_key(&of.id, |pack| pack.id).ok();
            let pack = at.map(|at| &self.packs[at]).filter(|pack| pack.units == of.units);
            packs.push((begin, end, pack.map(|pack| pack.first * size)));
        }
        Places(packs)
    }

    /// Whether the `run` slots from `slot` on hold pages.
    fn has(&self, slot: u64, run: u64, shape: Shape) -> bool {
        let size = shape.unit_pages();
        let (mut at, end) = (slot, slot + run);
        while at < end {
            let unit = usize::try_from(at / size).ok().and_then(|unit| self.units.get(unit));
            let behind = end.min(at - at % size + size);
            if unit.is_none_or(|unit| behind - at / size * size > u64::from(unit.pages)) {
                return false;
            }
            at = behind;
        }
        true
    }

    /// Checks that the packs hold the pages of `extent`.
    pub(crate) fn check(&self, extent: &Extent, shape: Shape) -> Result<(), Damage> {
        let Content::Slot(slot) = extent.content else { return Ok(()) };
        let size = shape.unit_pages();
        let unit = slot / size;
        if !self.has(slot, extent.pages, shape) {
            return Err(Damage::Place { unit });
        }
        for unit in unit..=(slot + extent.pages - 1) / size {
            if self.differences.get(&unit).is_some_and(Option::is_none) {
                return Err(Damage::Place { unit });
            }
        }
        Ok(())
    }

    /// The table of these packs.
    pub(crate) fn refs(&self) -> Vec<PackRef> {
        self.packs.iter().map(|pack| PackRef { id: pack.id, units: pack.units }).collect()
    }
}

/// Opens the packs of a table.
pub(crate) fn open_all(
    refs: &[PackRef],
    shape: Shape,
    open: &mut dyn FnMut(u128) -> std::io::Result<ImageFile>,
) -> Result<Packs, Damage> {
    let mut packs = Vec::new();
    for of in refs {
        let named = |damage| Damage::Pack { id: of.id, damage: Box::new(damage) };
        let file = open(of.id).map_err(|error| named(Damage::io("the file", error)))?;
        let pack = Pack::over(file, of.id)?;
        if pack.shape != shape {
            let (page_size, unit_bytes) =
                (pack.shape.page_size() as u64, pack.shape.unit_bytes() as u64);
            return Err(named(Damage::Shape { page_size, unit_bytes }));
        }
        if pack.index.units.len() as u64 != of.units {
            let what = "another number of units than the save names";
            return Err(named(Damage::IndexForm { what, at: 0 }));
        }
        packs.push((of.id, pack));
    }
    Ok(Packs::new(packs, shape))
}

impl OpenPack {
    /// Reads the hashes of all pages, of 16 bytes each, in the order of units and pages.
    pub(crate) fn hashes(&self) -> Result<Vec<u8>, Damage> {
        let of = self.trailer.first;
        let named = |damage| Damage::Pack { id: self.id, damage: Box::new(damage) };
        let end = (of.offset + of.len).saturating_sub(1);
        let damage = Damage::Hashes { offset: of.offset, end };
        let bytes = part(&self.file, of, "the hashes of pages").map_err(named)?;
        bytes.ok_or_else(|| named(damage))
    }
}
