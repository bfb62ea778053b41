//! Reads a group: its objects are copied while one of its pages is pinned, and checked after that.

use super::Grouped;
use crate::entry::{Member, Object, State, Word, MAX_OBJECT};
use crate::group_buffer::GroupBuffer;
use crate::inject;
use crate::object::{checksum, locate};
use crate::page::GetError;
use crate::record::PIECES;
use crate::slot::Slot;
use crate::worker::{Pin, Worker};

impl Worker {
    /// Reads the group of page `index` and verifies its checksums, unless the buffer has it. `None`
    /// if the page is in no group; then use [`get`](Self::get). After an error the buffer is empty.
    /// Resets the page's age.
    ///
    /// # Errors
    ///
    /// There is no such page, or the page or its group is damaged.
    pub fn get_group(
        &self,
        index: u64,
        buffer: &mut GroupBuffer,
    ) -> Result<Option<Grouped>, GetError> {
        self.read_group(index, buffer, true)
    }

    /// As [`get_group`](Self::get_group), without resetting the page's age.
    ///
    /// # Errors
    ///
    /// The errors of [`get_group`](Self::get_group).
    pub fn look_group(
        &self,
        index: u64,
        buffer: &mut GroupBuffer,
    ) -> Result<Option<Grouped>, GetError> {
        self.read_group(index, buffer, false)
    }

    fn read_group(
        &self,
        index: u64,
        buffer: &mut GroupBuffer,
        touch: bool,
    ) -> Result<Option<Grouped>, GetError> {
        let heap = &self.store().heap;
        let lost = GetError::Lost { index };
        let slot = usize::try_from(index).ok().and_then(|at| heap.map.table().get(at));
        let slot = slot.ok_or(GetError::Index { index, pages: self.store().pages() })?;
        let Ok(pinned) = slot.pin(touch) else { return Ok(None) };
        let pin = Pin(slot);
        inject::step();
        let Some(State::Member(Member { group, position })) = pinned.state() else {
            return Ok(None);
        };
        let record = heap.groups.record(&heap.map, group).ok_or(lost.clone())?;
        let this = (group, record.stamp());
        let had = buffer.group == Some(this);
        if !had {
            buffer.clear();
            let pieces = self.copy_pieces(record.pieces(), buffer).ok_or(lost.clone())?;
            drop(pin);
            inject::step();
            let bytes = buffer.bytes[..buffer.len].chunks(MAX_OBJECT);
            for (number, (piece, bytes)) in pieces.iter().zip(bytes).enumerate() {
                let (object, expected) = piece.ok_or(lost.clone())?;
                let got = checksum(heap.map.layout().piece_index(group, number), &object, bytes);
                if got != expected {
                    let len = bytes.len();
                    return Err(GetError::Checksum { index, len, expected, got });
                }
            }
            buffer.group = Some(this);
        }
        match buffer.member(position) {
            Some((members, page)) if page == index => {
                let position = position as usize;
                Ok(Some(Grouped { position, members, tag: buffer.tag, had }))
            }
            _ => {
                // Else the next page of this group would count as one that the caller has decoded.
                buffer.clear();
                Err(lost)
            }
        }
    }

    /// Copies the objects of a group, one of whose pages is pinned, and returns each with its
    /// stored checksum.
    fn copy_pieces(
        &self,
        pieces: &[Slot; PIECES],
        buffer: &mut GroupBuffer,
    ) -> Option<[Option<(Object, u32)>; PIECES]> {
        let map = &self.store().heap.map;
        let mut copied = [None; PIECES];
        for (piece, copied) in pieces.iter().zip(&mut copied) {
            let pinned = match piece.pin(false) {
                Ok(pinned) => pinned,
                // The previous piece was the last.
                Err(Word::ABSENT) => break,
                Err(_) => return None,
            };
            let _pin = Pin(piece);
            let Some(State::Object(object)) = pinned.state() else { return None };
            let (_, place) = locate(map, &object)?;
            // All pieces but the last are full, so each follows the other in the payload.
            let end = buffer.len + object.len as usize;
            let sum = map.read(place, buffer.bytes.get_mut(buffer.len..end)?);
            buffer.len = end;
            buffer.tag = object.tag;
            *copied = Some((object, sum));
        }
        Some(copied)
    }
}
