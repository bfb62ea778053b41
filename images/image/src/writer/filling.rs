//! The slots of pages: found among those of the store, or the next ones of the units that are being
//! filled.

use codec::checksum;

use super::{io, Fill, Writer, DIFFERENCES, PAGES};
use crate::file::NewFile;
use crate::finish::NewPack;
use crate::layout::Form;
use crate::pack::{Base, PageHash, PACKS};
use crate::sharing::{has_room, Sharing};
use crate::WriteError;

impl Writer {
    /// Finds or makes the slot of a page.
    pub(super) fn store(
        &mut self,
        block: usize,
        page: u64,
        bytes: &[u8],
    ) -> Result<u64, WriteError> {
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
    pub(super) fn own(&self) -> u64 {
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
    pub(super) fn submit(&mut self, kind: usize) -> Result<(), WriteError> {
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
}
