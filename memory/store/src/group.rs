//! Groups: pages that are compressed together.
//!
//! The caller of `put_group` has read and compressed the pages before, without a pin. So each page
//! is pinned and compared with the bytes that were read before its entry changes. The comparison is
//! of bytes, not of entries: a page that was written twice may have the same entry again. A page
//! that was written meanwhile does not join.
//!
//! A server killed while it makes a group leaves a group with some of its pages or none; the other
//! pages' entries are unchanged. Recovery frees the objects of a group without pages.

use std::sync::Arc;

use crate::entry::{Member, Object, State, Word, MAX_MEMBERS, MAX_OBJECT, TAGS};
use crate::group_buffer::{GroupBuffer, Seen, HEADER, MAX_GAP, MAX_PAYLOAD};
use crate::inject;
use crate::object::{checksum, locate};
use crate::page::{GetError, PutError};
use crate::record::PIECES;
use crate::slot::Slot;
use crate::stats::add;
use crate::store::Store;
use crate::worker::{slot_of, Pin, Worker};

/// A page's place in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// The page's position.
    pub position: usize,
    /// Pages in the payload, also those that are no longer in the group.
    pub members: usize,
    /// The payload's tag, as its maker gave it.
    pub tag: u8,
    /// Whether the buffer already had the group.
    pub had: bool,
}

/// Why no group was made. The store has not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The reserve has nothing to spare, or the limit is reached. A later attempt may succeed.
    #[error("no room to spare for a group of {members} pages, {len} bytes")]
    Full {
        /// Pages of the group.
        members: usize,
        /// Bytes of the payload.
        len: usize,
    },
    /// The caller's pages or payload cannot make a group.
    #[error("group of {members} pages, {len} bytes with tag {tag}, expected 1 to {MAX_MEMBERS} pages in order, at most {MAX_GAP} apart, 1 to {MAX_PAYLOAD} bytes, a tag below {TAGS}")]
    Members {
        /// Pages of the group.
        members: usize,
        /// Bytes of the payload.
        len: usize,
        /// The payload's tag.
        tag: u8,
    },
}

impl Worker {
    /// Stores these pages, in ascending order, as one payload: the first `len` bytes of the
    /// buffer's [room](GroupBuffer::room). A page joins only if it still is what was `seen` and no
    /// other thread pins it. Returns a bit for each page that joined. Ages do not change.
    ///
    /// A concurrent write waits at most for the comparison of one page, and the reserve for writes
    /// is not used.
    ///
    /// # Errors
    ///
    /// [`GroupError`].
    pub fn put_group(
        &mut self,
        seen: &[Seen<'_>],
        tag: u8,
        len: usize,
        buffer: &mut GroupBuffer,
    ) -> Result<u32, GroupError> {
        let members = seen.len();
        let wrong = GroupError::Members { members, len, tag };
        let sound = tag < TAGS && (1..=MAX_PAYLOAD).contains(&len);
        let there = seen.last().is_some_and(|last| last.index < self.store().pages());
        if !sound || !there {
            return Err(wrong);
        }
        buffer.clear();
        buffer.write_header(seen, len).ok_or(wrong)?;
        let full = GroupError::Full { members, len };
        let store = Arc::clone(self.store());
        let heap = &store.heap;
        let parts = u32::try_from(members).expect("32 at most") + 1;
        let Ok(group) = heap.groups.take(&heap.map, &heap.regions, parts) else {
            return Err(full);
        };
        inject::step();
        let record = heap.groups.record(&heap.map, group).expect("it was just taken");
        add(&self.counters().groups, 1);
        for (number, piece) in buffer.bytes[..HEADER + len].chunks(MAX_OBJECT).enumerate() {
            let index = heap.map.layout().piece_index(group, number);
            let Ok((object, _)) = self.place_spare(index, tag, piece) else {
                (0..parts).for_each(|_| self.drop_part(group));
                return Err(full);
            };
            let old = record.pieces()[number].publish(Word::object(object));
            debug_assert_eq!(old, Word::ABSENT);
            add(&self.counters().bytes, u64::from(object.len));
            inject::step();
        }
        let mut joined = 0;
        for (position, seen) in (0_u32..).zip(seen) {
            let word = Word::member(Member { group, position });
            if self.exchange_unchanged(&store, seen, word) {
                joined |= 1 << position;
            } else {
                self.drop_part(group);
            }
            inject::step();
        }
        self.drop_part(group);
        Ok(joined)
    }

    /// Stores `bytes` for a page if it still is what was `seen`; returns whether it was. The page's
    /// age does not change. A concurrent write waits at most for the comparison of one page, and
    /// the reserve for writes is not used.
    ///
    /// # Errors
    ///
    /// The errors of [`put`](Self::put).
    pub fn replace_unchanged(
        &mut self,
        seen: &Seen<'_>,
        tag: u8,
        bytes: &[u8],
    ) -> Result<bool, PutError> {
        if tag >= TAGS {
            return Err(PutError::Object { len: bytes.len(), tag });
        }
        let store = Arc::clone(self.store());
        slot_of(&store, seen.index)?;
        let (object, claimed) = self.place_spare(seen.index, tag, bytes)?;
        let done = self.exchange_unchanged(&store, seen, Word::object(object));
        if !done {
            store.heap.release(claimed);
        }
        Ok(done)
    }

    /// Stores `bytes` for a page and removes it from its group, if that is still the one in
    /// `buffer`; returns whether it was. The page's age does not change. With `spare` the reserve
    /// for writes is not used.
    ///
    /// # Errors
    ///
    /// The errors of [`put`](Self::put).
    pub fn ungroup(
        &mut self,
        index: u64,
        buffer: &GroupBuffer,
        (tag, bytes): (u8, &[u8]),
        spare: bool,
    ) -> Result<bool, PutError> {
        if tag >= TAGS {
            return Err(PutError::Object { len: bytes.len(), tag });
        }
        let store = Arc::clone(self.store());
        let slot = slot_of(&store, index)?;
        let (object, claimed) = if spare {
            self.place_spare(index, tag, bytes)?
        } else {
            self.place(index, tag, bytes)?
        };
        let done = match slot.pin(false) {
            Ok(pinned) => {
                let pin = Pin(slot);
                // The pin keeps the record alive, so that the stamp is that of the page's group.
                let here = self.group_of(&store, pinned).is_some_and(|at| Some(at) == buffer.group);
                here && self.exchange(pin, pinned, Word::object(object))
            }
            Err(_) => false,
        };
        if !done {
            store.heap.release(claimed);
        }
        Ok(done)
    }

    /// Number and stamp of the group that a pinned entry names.
    pub(crate) fn group_of(&self, store: &Store, pinned: Word) -> Option<(u32, u64)> {
        let Some(State::Member(member)) = pinned.state() else { return None };
        let record = store.heap.groups.record(&store.heap.map, member.group)?;
        Some((member.group, record.stamp()))
    }

    /// Replaces the entry by `new` if the page still is what was `seen`.
    fn exchange_unchanged(&self, store: &Store, seen: &Seen<'_>, new: Word) -> bool {
        let Ok(slot) = slot_of(store, seen.index) else { return false };
        let Ok(pinned) = slot.pin(false) else { return false };
        let pin = Pin(slot);
        inject::step();
        let Some(State::Object(object)) = pinned.state() else { return false };
        if object.tag != seen.tag || object.len as usize != seen.bytes.len() {
            return false;
        }
        let Some((_, place)) = locate(&store.heap.map, &object) else { return false };
        let mut bytes = [0; MAX_OBJECT];
        let bytes = &mut bytes[..seen.bytes.len()];
        store.heap.map.read(place, bytes);
        bytes == seen.bytes && self.exchange(pin, pinned, new)
    }

    /// Replaces the entry that the caller has pinned by `new`, unless other threads pin it too.
    fn exchange(&self, pin: Pin<'_>, pinned: Word, new: Word) -> bool {
        if !pin.0.relocate(pinned, new) {
            return false;
        }
        // `relocate` has dropped the pin.
        std::mem::forget(pin);
        inject::step();
        self.release_word(pinned);
        self.count_word(new);
        true
    }

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

    /// The current number of pages in the group of page `index`; `None` if it is in none.
    pub fn members(&self, index: u64) -> Option<u32> {
        let store = self.store();
        let slot = slot_of(store, index).ok()?;
        let pinned = slot.pin(false).ok()?;
        // The pin keeps the record alive.
        let _pin = Pin(slot);
        let State::Member(member) = pinned.state()? else { return None };
        Some(store.heap.groups.record(&store.heap.map, member.group)?.parts())
    }
}
