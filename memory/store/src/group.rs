//! Groups: pages that are compressed together.
//!
//! The caller of `put_group` has read and compressed the pages before, without a pin. So each page
//! is pinned and compared with the bytes that were read before its entry changes. The comparison is
//! of bytes, not of entries: a page that was written twice may have the same entry again. A page
//! that was written meanwhile does not join.
//!
//! A server killed while it makes a group leaves a group with some of its pages or none; the other
//! pages' entries are unchanged. Recovery frees the objects of a group without pages.

mod reading;

use std::sync::Arc;

use crate::entry::{Member, State, Word, MAX_MEMBERS, MAX_OBJECT, TAGS};
use crate::group_buffer::{GroupBuffer, Seen, HEADER, MAX_GAP, MAX_PAYLOAD};
use crate::inject;
use crate::object::locate;
use crate::page::PutError;
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
