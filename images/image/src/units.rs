//! Reads and decodes units, and turns differences into pages.

use std::collections::VecDeque;

use codec::{checksum, Decoder, UnitHeader};

use crate::pack::Base;
use crate::packs::OpenPack;
use crate::part::unread;
use crate::reads::ReadPart;
use crate::{Damage, Image};

/// Capacity of the cache of units that hold base pages. A writer puts differences from at most
/// [`MAX_BASE_UNITS`] units into one unit.
const CACHED: usize = MAX_BASE_UNITS;

/// Maximum number of units that hold the base pages of one unit: reading a unit decodes at most
/// this many others.
pub(crate) const MAX_BASE_UNITS: usize = 8;

/// Reads and decodes units. Each thread has its own.
pub struct Units {
    decoder: Decoder,
    stored: Vec<u8>,
    /// The number of the image to which `cache` belongs.
    of: u64,
    /// Decoded units with base pages, the newest last.
    cache: VecDeque<(u64, Box<[u8]>)>,
}

impl Units {
    /// Creates a reader without buffers. Buffers are allocated when they are needed.
    ///
    /// # Panics
    ///
    /// If memory for the codecs' contexts cannot be allocated.
    pub fn new() -> Self {
        Self { decoder: Decoder::new(), stored: Vec::new(), of: 0, cache: VecDeque::new() }
    }

    /// Reads the stored bytes of unit `unit` and compares their checksum; returns their offset in
    /// the file.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the unit.
    ///
    /// # Panics
    ///
    /// If there is no such unit.
    pub fn check(&mut self, image: &Image, unit: u64) -> Result<u64, Damage> {
        let entry = image.index().units[usize::try_from(unit).expect("a number below the count")];
        self.stored.resize(entry.len as usize, 0);
        let offset = entry.offset;
        let (file, nth, pack) = image.place(unit, entry.file);
        let listed =
            image.listed(ReadPart::Unit { unit: nth, offset, pack: pack.map(|pack| pack.id) });
        let read = file.read_exact_at(&mut self.stored, offset);
        drop(listed);
        if let Err(error) = read {
            // Not read again: another host may have been waited for already.
            let damage = unread(error, offset, self.stored.len(), &format!("unit {nth}"));
            return Err(in_pack(pack, damage));
        }
        if checksum(&self.stored) != entry.checksum {
            let end = offset + u64::from(entry.len) - 1;
            return Err(in_pack(pack, Damage::Unit { unit: nth, offset, end }));
        }
        Ok(offset)
    }

    /// Decodes unit `unit` to the front of `out` and returns the number of plain bytes. Rule I7.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the unit and its defect. The bytes in `out` are then unspecified.
    ///
    /// # Panics
    ///
    /// If there is no such unit, or `out` is shorter than a unit.
    pub fn read(&mut self, image: &Image, unit: u64, out: &mut [u8]) -> Result<usize, Damage> {
        let len = self.decode(image, unit, out)?;
        match image.bases(unit) {
            None => {}
            Some(Some(bases)) => self.apply(image, unit, bases, &mut out[..len])?,
            Some(None) => return Err(Damage::Place { unit }),
        }
        Ok(len)
    }

    /// Decodes a unit, without applying differences.
    pub(crate) fn decode(
        &mut self,
        image: &Image,
        unit: u64,
        out: &mut [u8],
    ) -> Result<usize, Damage> {
        let offset = self.check(image, unit)?;
        let entry = image.index().units[usize::try_from(unit).expect("a number below the count")];
        let (_, nth, pack) = image.place(unit, entry.file);
        let bad = |error| in_pack(pack, Damage::UnitDecode { unit: nth, offset, error });
        let header = UnitHeader::from_bytes(&self.stored).map_err(|error| bad(error.into()))?;
        let expected = u64::from(entry.pages) * image.shape().page_size() as u64;
        if u64::from(header.plain_len) != expected {
            let stated = u64::from(header.plain_len);
            return Err(in_pack(pack, Damage::UnitLength { unit: nth, offset, stated, expected }));
        }
        let out = &mut out[..header.plain_len as usize];
        self.decoder.decode(&header, &self.stored[UnitHeader::LEN..], out).map_err(bad)?;
        Ok(out.len())
    }

    /// Turns the differences in `out` into pages, and compares their checksums; rule I9.
    fn apply(
        &mut self,
        image: &Image,
        unit: u64,
        bases: &[Base],
        out: &mut [u8],
    ) -> Result<(), Damage> {
        let size = image.shape().page_size();
        for (nth, (base, page)) in bases.iter().zip(out.chunks_exact_mut(size)).enumerate() {
            let from = self.base(image, base.slot)?;
            for (byte, base) in page.iter_mut().zip(from) {
                *byte ^= base;
            }
            if checksum(page) != base.checksum {
                let entry = image.index().units[usize::try_from(unit).expect("below the count")];
                let (_, unit, pack) = image.place(unit, entry.file);
                return Err(in_pack(pack, Damage::Page { unit, nth }));
            }
        }
        Ok(())
    }

    /// The page in a slot of a unit without differences, from the cache if the unit is there.
    pub(crate) fn base(&mut self, image: &Image, slot: u64) -> Result<&[u8], Damage> {
        if self.of != image.nth() {
            self.cache.clear();
            self.of = image.nth();
        }
        let (unit, nth) = (slot / image.shape().unit_pages(), slot % image.shape().unit_pages());
        if let Some(at) = self.cache.iter().position(|(cached, _)| *cached == unit) {
            if at + 1 < self.cache.len() {
                let entry = self.cache.remove(at).expect("found");
                self.cache.push_back(entry);
            }
        } else {
            let room = image.shape().unit_bytes();
            let mut bytes = match self.cache.len() {
                CACHED.. => self.cache.pop_front().expect("CACHED is not 0").1,
                _ => vec![0; room].into_boxed_slice(),
            };
            self.decode(image, unit, &mut bytes)?;
            self.cache.push_back((unit, bytes));
        }
        let (_, bytes) = self.cache.back().expect("just added");
        let (nth, size) =
            (usize::try_from(nth).expect("below a unit's pages"), image.shape().page_size());
        Ok(&bytes[nth * size..(nth + 1) * size])
    }
}

/// Adds the name of the pack to a defect in it.
fn in_pack(pack: Option<&OpenPack>, damage: Damage) -> Damage {
    match pack {
        Some(pack) => Damage::Pack { id: pack.id, damage: Box::new(damage) },
        None => damage,
    }
}

impl Default for Units {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Units {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Units")
    }
}
