//! A pack: units that the saves of a store share, with the hashes of their pages.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::index::{put, read_unit, Cursor, UnitEntry};
use crate::layout::{
    pack_header, Form, Trailer, HEADER_LEN, MAX_INDEX, MAX_PACKS, MAX_SLOTS, TRAILER_LEN,
};
use crate::part::{part, read_at};
use crate::{Damage, ImageFile, Shape};
use varint::{unzigzag, zigzag};

pub(crate) use delta::PageHash;

/// The least length of an entry of a table of packs, bytes.
const REF_LEN: usize = 17;

/// A pack in a table of packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackRef {
    /// The hash over the pack's file, which is its name.
    pub id: u128,
    /// The number of the pack's units.
    pub units: u64,
}

/// The base page of a difference, and the checksum of the resulting page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) slot: u64,
    pub(crate) checksum: u64,
}

/// The index of a pack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PackIndex {
    /// Random bytes, so that no two packs have the same name.
    pub(crate) nonce: [u8; 16],
    /// Packs of the base pages. Slots of base pages count through these packs.
    pub(crate) bases: Vec<PackRef>,
    pub(crate) units: Vec<UnitEntry>,
    /// The base pages of each unit that holds differences.
    pub(crate) differences: HashMap<u64, Box<[Base]>>,
}

/// Appends a table of packs.
pub(crate) fn put_refs(out: &mut Vec<u8>, refs: &[PackRef]) {
    put(out, refs.len() as u64);
    for pack in refs {
        out.extend(pack.id.to_be_bytes());
        put(out, pack.units);
    }
}

/// Reads a table of packs; returns it and the number of slots that its packs may have.
pub(crate) fn read_refs(
    cursor: &mut Cursor<'_>,
    shape: Shape,
) -> Result<(Vec<PackRef>, u64), Damage> {
    let count = cursor.number("no number of packs")?;
    if count > (cursor.left() / REF_LEN) as u64 {
        return Err(cursor.bad("more packs than the index has room for"));
    }
    // A reader opens all of them, and holds their units in memory.
    if count > MAX_PACKS as u64 {
        return Err(cursor.bad("more than 4096 packs"));
    }
    let (mut refs, mut slots) = (Vec::<PackRef>::new(), 0_u64);
    for _ in 0..count {
        let id = u128::from_be_bytes(cursor.array("no name of a pack")?);
        let units = cursor.number("no number of units")?;
        let total = units.checked_mul(shape.unit_pages()).and_then(|n| slots.checked_add(n));
        slots = total.filter(|&n| n <= MAX_SLOTS).ok_or_else(|| cursor.bad("too many units"))?;
        if refs.last().is_some_and(|last| last.id >= id) {
            return Err(cursor.bad("packs that are not in the order of their names"));
        }
        refs.push(PackRef { id, units });
    }
    Ok((refs, slots))
}

impl PackIndex {
    /// Encodes the index; `None` if it exceeds the limits.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut out = self.nonce.to_vec();
        put_refs(&mut out, &self.bases);
        put(&mut out, self.units.len() as u64);
        let mut expected = 0;
        for (unit, number) in self.units.iter().zip(0..) {
            put(&mut out, u64::from(unit.len));
            out.extend(unit.checksum.to_be_bytes());
            let bases = self.differences.get(&number);
            put(&mut out, u64::from(unit.pages) * 2 + u64::from(bases.is_some()));
            for base in bases.into_iter().flatten() {
                put(&mut out, zigzag(base.slot.wrapping_sub(expected).cast_signed()));
                out.extend(base.checksum.to_be_bytes());
                expected = base.slot + 1;
            }
        }
        (out.len() as u64 <= MAX_INDEX).then_some(out)
    }

    /// Decodes the index of a pack whose units end at `units_end`.
    pub(crate) fn from_bytes(bytes: &[u8], shape: Shape, units_end: u64) -> Result<Self, Damage> {
        let mut cursor = Cursor::new(bytes);
        let nonce = cursor.array("no nonce")?;
        let (bases, slots) = read_refs(&mut cursor, shape)?;
        let count = cursor.number("no number of units")?;
        // An entry has at least 10 bytes. This check bounds the allocation below.
        if count > (cursor.left() / 10) as u64 {
            return Err(cursor.bad("more units than the index has room for"));
        }
        let mut units = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        let mut differences = HashMap::new();
        let (mut offset, mut expected) = (HEADER_LEN as u64, 0_u64);
        for number in 0..count {
            let (len, checksum) = read_unit(&mut cursor, shape)?;
            let head = cursor.number("no number of pages of a unit")?;
            let pages = u32::try_from(head / 2).ok();
            let pages = pages.filter(|&n| (1..=shape.unit_pages()).contains(&n.into()));
            let pages = pages.ok_or_else(|| cursor.bad("a unit with another number of pages"))?;
            if head % 2 == 1 {
                let mut list = Vec::new();
                for _ in 0..pages {
                    let step = unzigzag(cursor.number("no base page")?);
                    let slot = expected.wrapping_add_signed(step);
                    if slot >= slots {
                        return Err(cursor.bad("a base page that does not exist"));
                    }
                    expected = slot + 1;
                    let checksum = u64::from_be_bytes(cursor.array("no checksum of a page")?);
                    list.push(Base { slot, checksum });
                }
                differences.insert(number, list.into());
            }
            units.push(UnitEntry { file: 0, pages, offset, len, checksum });
            offset += u64::from(len);
        }
        if offset != units_end {
            return Err(cursor.bad("units that do not end where the hashes begin"));
        }
        cursor.end()?;
        Ok(Self { nonce, bases, units, differences })
    }
}

/// An open pack whose header, trailer and index are verified.
#[derive(Debug)]
pub(crate) struct Pack {
    pub(crate) file: ImageFile,
    pub(crate) shape: Shape,
    pub(crate) trailer: Trailer,
    pub(crate) index: PackIndex,
}

/// Path of pack `id` in the folder of a store.
pub(crate) fn pack_path(store: &Path, id: u128) -> PathBuf {
    store.join(pack_name(id))
}

/// Name of pack `id` in the folder of its store: a hexadecimal number in folder `packs`.
pub fn pack_name(id: u128) -> String {
    format!("{PACKS}/{id:032x}")
}

/// Opens pack `id` of a store. A symbolic link is refused: `gc`, which may run as root, would copy
/// pages of a pack that the store's owner cannot read. A FIFO does not block.
pub(crate) fn open_pack(store: &Path, id: u128) -> std::io::Result<ImageFile> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).expect("flags of open(2)");
    let file = File::options().read(true).custom_flags(flags).open(pack_path(store, id))?;
    Ok(file.into())
}

/// Name of the folder of packs.
pub(crate) const PACKS: &str = "packs";

impl Pack {
    /// Opens a pack whose name has to be `id`.
    pub(crate) fn over(file: ImageFile, id: u128) -> Result<Self, Damage> {
        let named = |damage| Damage::Pack { id, damage: Box::new(damage) };
        let pack = Self::read(file).map_err(named)?;
        if pack.trailer.hash != id {
            return Err(named(Damage::Trailer));
        }
        Ok(pack)
    }

    fn read(file: ImageFile) -> Result<Self, Damage> {
        let len = file.len().map_err(|error| Damage::io("its length", error))?;
        if len < (HEADER_LEN + TRAILER_LEN) as u64 {
            return Err(Damage::Short { len });
        }
        let mut head = [0; HEADER_LEN];
        read_at(&file, &mut head, 0, "the header")?;
        let shape = pack_header(&head)?;
        let mut tail = [0; TRAILER_LEN];
        read_at(&file, &mut tail, len - TRAILER_LEN as u64, "the trailer")?;
        let trailer = Trailer::from_bytes(&tail, len, Form::Pack)?;
        let end = len - TRAILER_LEN as u64 - 1;
        let index = part(&file, trailer.index, "the index")?
            .ok_or(Damage::Index { offset: trailer.index.offset, end })?;
        let index = PackIndex::from_bytes(&index, shape, trailer.first.offset)?;
        let pages: u64 = index.units.iter().map(|unit| u64::from(unit.pages)).sum();
        if pages.checked_mul(size_of::<PageHash>() as u64) != Some(trailer.first.len) {
            return Err(Damage::IndexForm {
                what: "another number of pages than of hashes",
                at: 0,
            });
        }
        Ok(Self { file, shape, trailer, index })
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> u64 {
        self.trailer.first.len / size_of::<PageHash>() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> (PackIndex, Shape, u64) {
        let shape = Shape::new(4096, 64 << 10).unwrap();
        let unit = |pages, offset, len| UnitEntry { file: 0, pages, offset, len, checksum: 9 };
        let base = |slot| Base { slot, checksum: 0x0102_0304_0506_0708 };
        let bases = vec![PackRef { id: 5, units: 3 }, PackRef { id: 1 << 100, units: 2 }];
        let differences = HashMap::from([(1, Box::from([base(70), base(3)]))]);
        let units = vec![unit(16, 64, 1000), unit(2, 1064, 300)];
        (PackIndex { nonce: [7; 16], bases, units, differences }, shape, 1364)
    }

    #[test]
    fn it_comes_back_and_any_cut_or_more_is_refused() {
        let (index, shape, end) = index();
        let bytes = index.to_bytes().unwrap();
        assert_eq!(PackIndex::from_bytes(&bytes, shape, end), Ok(index));
        for len in 0..bytes.len() {
            assert!(PackIndex::from_bytes(&bytes[..len], shape, end).is_err(), "cut at {len}");
        }
        assert!(PackIndex::from_bytes(&[&bytes[..], &[0]].concat(), shape, end).is_err());
        assert!(PackIndex::from_bytes(&bytes, shape, end + 1).is_err());
    }

    #[test]
    fn numbers_beyond_the_limits_are_refused_by_name() {
        let (index, shape, end) = index();
        let refused = |change: fn(&mut PackIndex)| {
            let mut index = index.clone();
            change(&mut index);
            let bytes = index.to_bytes().unwrap();
            PackIndex::from_bytes(&bytes, shape, end).unwrap_err().to_string()
        };
        assert!(refused(|i| i.units[0].pages = 17).contains("another number of pages"));
        assert!(refused(|i| i.units[0].pages = 0).contains("another number of pages"));
        assert!(refused(|i| i.units[0].len = 1 << 20).contains("another length"));
        assert!(refused(|i| i.bases[1].units = 1).contains("base page that does not exist"));
        for units in [1 << 60, MAX_SLOTS / 16 - 2] {
            let mut index = index.clone();
            index.bases[1].units = units;
            let refused = PackIndex::from_bytes(&index.to_bytes().unwrap(), shape, end);
            assert!(refused.unwrap_err().to_string().contains("too many units"), "{units}");
        }
        let mut largest = index.clone();
        largest.bases[1].units = MAX_SLOTS / 16 - 3;
        let bytes = largest.to_bytes().unwrap();
        assert_eq!(PackIndex::from_bytes(&bytes, shape, end), Ok(largest));
        assert!(refused(|i| i.bases[0].id = 1 << 101).contains("order"));
    }
}
