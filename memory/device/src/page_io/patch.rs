//! A write of part of a page edits the page in the store.

use store::{Change, ModifyError, Page};

use super::{encode, PageIo, LONGEST};
use crate::counters::add;
use crate::request::{Errno, PAGE};
use codec::Codec;

impl PageIo {
    /// Changes a part of a page.
    pub(crate) fn patch(&mut self, index: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        let range = at.checked_add(bytes.len()).filter(|&end| end <= PAGE).map(|end| at..end);
        let Some(range) = range else {
            add(&self.counters().invalid_io, 1);
            return Err(Errno::Invalid);
        };
        add(&self.counters().pages_written, 1);
        loop {
            match self.edit(index, range.start, bytes) {
                Err(ModifyError::Grouped { .. } | ModifyError::Backed { .. }) => {
                    self.take_out_of_store(index)?;
                }
                Ok(()) => return Ok(()),
                Err(ModifyError::Put(error)) => return Err(self.refused(&error)),
                Err(_) => return Err(Errno::Io),
            }
        }
    }

    /// Tries once to change a part of a page; counts damage.
    fn edit(&mut self, index: u64, at: usize, bytes: &[u8]) -> Result<(), ModifyError> {
        let range = at..at + bytes.len();
        let Self { records, worker, encoder, reader, coded, object, plain, .. } = self;
        let mut damage = None;
        let modified = worker.modify(index, object, |page, object| {
            if let Err(found) = reader.unpack(index, page, object, plain) {
                damage = Some(found);
                return None;
            }
            plain[range.clone()].copy_from_slice(bytes);
            let (encoded, tag) = encode(encoder, &records.dictionaries, plain, coded);
            let (tag, payload) = match encoded.codec {
                Codec::SameFilled => {
                    let word = coded.first_chunk().expect("longer than a word");
                    return Some(Change::Same(u64::from_le_bytes(*word)));
                }
                codec if codec != Codec::Raw && encoded.len <= LONGEST => {
                    (tag, &coded[..encoded.len])
                }
                _ => (Codec::Raw.to_wire(), &plain[..]),
            };
            object[..payload.len()].copy_from_slice(payload);
            Some(Change::Object { tag, len: payload.len() })
        });
        if let Some(damage) = damage {
            self.damaged(damage);
        } else if let Err(ModifyError::Get(error)) = &modified {
            self.damaged(error.clone().into());
        }
        modified
    }

    /// Stores a page of a group as an object of its own, or brings a page back from the backing
    /// device, for which it waits.
    fn take_out_of_store(&mut self, index: u64) -> Result<(), Errno> {
        let Self { reader, worker, plain, records, place, .. } = self;
        let slot = records.slot(*place);
        let fetched = slot.while_waiting(|| reader.fetch(worker, index, true, plain));
        let page = match fetched {
            Ok(page @ (Page::Grouped | Page::Backed)) => page,
            Ok(_) => return Ok(()),
            Err(damage) => return Err(self.damaged(damage)),
        };
        let dictionaries = &self.records.dictionaries;
        let (encoded, tag) = encode(&mut self.encoder, dictionaries, &self.plain, &mut self.coded);
        let form = match encoded.codec {
            codec if codec != Codec::SameFilled && encoded.len <= LONGEST => {
                (tag, &self.coded[..encoded.len])
            }
            _ => (Codec::Raw.to_wire(), &self.plain[..]),
        };
        let left = match page {
            Page::Backed => self.reader.bring_back(&mut self.worker, index, form),
            _ => self.worker.ungroup(index, self.reader.group(), form, false),
        };
        // If the page was written meanwhile, there is nothing to do either.
        left.map(drop).map_err(|error| self.refused(&error))
    }
}
