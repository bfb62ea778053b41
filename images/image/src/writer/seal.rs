//! Completes what a writer has written: an image, or the packs and the file of a save.

use super::{io, Target, Writer, DIFFERENCES, PAGES};
use crate::file::NewFile;
use crate::finish::{block, used, Finished, InStore, NewPack, OwnSlots, Table};
use crate::layout::{header, Form};
use crate::save::SaveIndex;
use crate::unit_file::Sealing;
use crate::{Index, State, WriteError};

impl Writer {
    /// Writes everything and makes it durable. The image is not linked to its path yet.
    ///
    /// # Errors
    ///
    /// Errors of the file system; units that do not decode; a state or an index beyond the limits.
    pub fn finish(mut self, state: &State) -> Result<Finished, WriteError> {
        if self.blocks.is_none() {
            // The VM has no RAM. `blocks` writes the header.
            self.blocks(self.shape.page_size(), &[])?;
        }
        self.submit(PAGES)?;
        self.submit(DIFFERENCES)?;
        let state = state.to_bytes().ok_or(WriteError::TooLong { what: "the device state" })?;
        let mut summary = self.summary();
        let blocks = self.blocks.take().expect("set above");
        summary.unsent = blocks.iter().map(|(_, map)| map.unsent()).sum();
        let unit_pages = self.shape.unit_pages();
        let own = OwnSlots { first: self.own(), places: self.places, unit_pages };
        let (units, file) = self.file.finish()?;
        let too_long = WriteError::TooLong { what: "the index" };
        let Some(Target { store, sharing, lock, identity, mut packs, pages, .. }) = self.target
        else {
            let number = |slot| own.place(slot).expect("this file has all slots").1;
            let blocks = blocks.into_iter().map(|entry| block(entry, number)).collect();
            let index = Index { slots: summary.slots, units, blocks };
            let index = index.to_bytes().ok_or(too_long)?;
            let (new, trailer) = file.seal(Form::Image, &state, &index)?;
            summary.file_bytes = trailer.file_len;
            return Ok(Finished { files: vec![(new, self.path)], summary, target: None });
        };
        // A save without new pages has no pack of its own.
        if !pages.hashes.is_empty() {
            packs.push(NewPack::finish(&sharing, units, file, pages, unit_pages)?);
        }
        let used = used(&sharing, &blocks, &own, &packs);
        let table = Table::new(&sharing, &used, &packs, unit_pages);
        if !table.is_readable() {
            return Err(WriteError::TooLong { what: "the table of packs" });
        }
        let number = |slot| match own.place(slot) {
            Some(place) => table.own_slot(place),
            None => table.slot(&sharing, slot),
        };
        let blocks = blocks.into_iter().map(|entry| block(entry, number)).collect();
        let index = SaveIndex { identity, packs: table.refs, blocks };
        let bytes = index.to_bytes().ok_or(too_long)?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let new = NewFile::create_in(store.folder(), &name)
            .map_err(|source| io("create", &self.path, source))?;
        let mut save = Sealing::new(new, &self.path);
        save.append(&header(Form::Save, self.shape))?;
        let (new, trailer) = save.seal(Form::Save, &state, &bytes)?;
        summary.file_bytes = trailer.file_len + packs.iter().map(|pack| pack.bytes).sum::<u64>();
        let mut files: Vec<_> = packs.into_iter().map(|pack| pack.named(&store)).collect();
        files.push((new, self.path));
        let target = InStore { store, packs: index.packs, _lock: lock };
        Ok(Finished { files, summary, target: Some(target) })
    }
}
