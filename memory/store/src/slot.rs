//! A slot of the table: the protocol by which threads read and change a page's entry.
//!
//! - A reader *pins*: it adds 1 to `pins` by a compare-and-swap against the entry that it read, so
//!   that the pinned entry is the one that names the object. It unpins after it has copied the
//!   bytes.
//! - A writer *publishes*: it waits until there is no pin, and swaps in the entry of an object
//!   whose bytes are already written. The writer then owns the old object, and frees it.
//! - Compaction *relocates*: it pins, copies, and swaps in the new place if its own pin is the only
//!   one. It then owns the old place.
//!
//! So a place is freed by exactly one thread, and only when no reader is in it. Recovery clears the
//! pins of a killed server.
//!
//! A page on the backing device is not pinned: its block may be overwritten while it is read. A
//! reader compares the entry again after the read. If the entry is unchanged and its checksum is
//! that of the bytes, they are the page's (`writeback.rs`).
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

use crate::entry::{Word, AGE, AGE_SHIFT, MAX_AGE, MAX_PINS, PIN, PINS};
use crate::sync::{both, relax, step, strong, AtomicU64, Ordering, Site};

/// One entry of the table. The module's documentation has the protocol.
#[derive(Debug)]
#[repr(transparent)]
pub struct Slot(AtomicU64);

impl Slot {
    /// An entry outside of a table.
    #[cfg(any(loom, test))]
    pub fn new(word: Word) -> Self {
        Self(AtomicU64::new(word.0))
    }

    /// The current entry; it may change at once.
    #[inline]
    pub fn load(&self) -> Word {
        Word(self.0.load(Ordering::Relaxed))
    }

    /// The current entry. If it names a block, the block's bytes are visible to a read of the
    /// device.
    #[inline]
    pub fn load_backed(&self) -> Word {
        // Pairs with the Release of `supersede`.
        Word(self.0.load(strong(Site::BackedAcquire, Ordering::Acquire)))
    }

    /// Writes unconditionally: for recovery, before other threads use the store.
    pub(crate) fn store(&self, word: Word) {
        self.0.store(word.0, Ordering::Relaxed);
    }

    /// Pins the object at its place until [`unpin`](Self::unpin); `Err` with the entry if it names
    /// no object or group. With `touch` resets the page's age.
    #[inline]
    pub fn pin(&self, touch: bool) -> Result<Word, Word> {
        let mut tries = 0;
        loop {
            let word = self.load();
            if !word.is_object() {
                return Err(word);
            }
            if word.pins() == MAX_PINS {
                relax(&mut tries);
                continue;
            }
            let pinned = (if touch { word.0 & !AGE } else { word.0 }) + PIN;
            // Pairs with the Release of `publish` or `relocate`: the bytes are there.
            let acquire = strong(Site::PinAcquire, Ordering::Acquire);
            if self.0.compare_exchange(word.0, pinned, acquire, Ordering::Relaxed).is_ok() {
                return Ok(Word(pinned));
            }
        }
    }

    /// Drops the caller's pin.
    #[inline]
    pub fn unpin(&self) {
        // Pairs with the Acquire of `publish` or `relocate`: our reads are over.
        self.0.fetch_sub(PIN, strong(Site::UnpinRelease, Ordering::Release));
    }

    /// Replaces the entry by `new` as soon as it is not pinned. The caller owns the object of the
    /// returned entry, and has to free it.
    #[inline]
    pub fn publish(&self, new: Word) -> Word {
        let mut tries = 0;
        loop {
            let word = self.load();
            if word.pins() != 0 && step(Site::PublishWaits) {
                relax(&mut tries);
                continue;
            }
            let order = both(Site::PublishAcquire, Site::PublishRelease);
            if self.0.compare_exchange(word.0, new.0, order, Ordering::Relaxed).is_ok() {
                return word;
            }
        }
    }

    /// Replaces the entry that the caller has pinned by `new`, the same page in another place or
    /// form, and ends the pin. If another thread pins it too, changes nothing and returns `false`.
    /// `pinned` is the value from `pin`. The page's age stays.
    #[inline]
    pub fn relocate(&self, pinned: Word, new: Word) -> bool {
        self.exchange(pinned, |word| Word(new.0 & !AGE | word.0 & AGE))
    }

    /// As [`relocate`](Self::relocate), but for new data: the age is reset, and `new` need not be
    /// an object.
    #[inline]
    pub fn supersede(&self, pinned: Word, new: Word) -> bool {
        self.exchange(pinned, |_| new)
    }

    /// Replaces the entry by `new` if it still is `seen`, which is no object.
    #[inline]
    pub fn fill_in(&self, seen: Word, new: Word) -> bool {
        debug_assert!(!seen.is_object());
        let order = both(Site::PublishAcquire, Site::PublishRelease);
        self.0.compare_exchange(seen.0, new.0, order, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn exchange(&self, pinned: Word, new: impl Fn(Word) -> Word) -> bool {
        let order = both(Site::MoveAcquire, Site::MoveRelease);
        // A reader that pinned and unpinned meanwhile changed at most the age, and its unpin must
        // be seen.
        let word = self.load();
        let alone = word.pins() == 1 || !step(Site::MoveAlone);
        let unmoved = (word.0 | AGE | PINS) == (pinned.0 | AGE | PINS);
        let new = new(word).0;
        alone && unmoved && self.0.compare_exchange(word.0, new, order, Ordering::Relaxed).is_ok()
    }

    /// Increments the object's age, up to [`MAX_AGE`], and returns it.
    pub(crate) fn grow_older(&self) -> Option<u8> {
        loop {
            let word = self.load();
            if !word.is_object() {
                return None;
            }
            if word.age() == MAX_AGE {
                return Some(MAX_AGE);
            }
            let older = word.0 + (1 << AGE_SHIFT);
            if self.0.compare_exchange(word.0, older, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return Some(word.age() + 1);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::entry::{Backed, Member, Object, State, MAX_BLOCKS};

    #[test]
    fn an_object_preserves_the_extremes_of_every_field() {
        for (slab, index, len, bump, tag) in
            [(0, 0, 1, 0, 0), ((1 << 27) - 1, 63, 4096, 3, 63), (0x55_5555, 21, 1234, 2, 61)]
        {
            let object = Object { slab, index, len, bump, tag };
            let word = Word::object(object);
            assert_eq!(word.state(), Some(State::Object(object)));
            let slot = Slot::new(word);
            for _ in 0..MAX_PINS {
                slot.pin(true).unwrap();
            }
            assert_eq!(slot.load().state(), Some(State::Object(object)));
            assert_eq!(slot.load().pins(), MAX_PINS);
            for _ in 0..20 {
                slot.grow_older();
            }
            assert_eq!((slot.load().age(), slot.load().pins()), (MAX_AGE, MAX_PINS));
            assert_eq!(slot.load().state(), Some(State::Object(object)));
            assert_eq!(slot.load().unpinned().0 & !AGE, word.0);
        }
    }

    #[test]
    fn a_member_preserves_its_group_and_position_whatever_its_age_and_pins() {
        for (group, position) in [(0, 0), ((1 << 27) - 1, 31), (0x55_5555, 21)] {
            let slot = Slot::new(Word::member(Member { group, position }));
            slot.pin(false).unwrap();
            slot.grow_older();
            let word = slot.load();
            assert_eq!(word.state(), Some(State::Member(Member { group, position })));
            assert_eq!((word.age(), word.pins()), (1, 1));
        }
    }

    #[test]
    fn a_page_on_the_backing_device_preserves_the_extremes_of_every_field() {
        for (block, whole, sum) in [(1, false, 0), (MAX_BLOCKS - 1, true, u32::MAX), (77, true, 1)]
        {
            let at = Backed { block, whole, sum };
            let word = Word::backed(at);
            assert_eq!(word.state(), Some(State::Backed(at)));
            assert_eq!((word.pins(), word.age(), word.is_object()), (0, 0, false));
            assert_eq!(word.unpinned(), word);
            assert_eq!(Slot::new(word).pin(true), Err(word));
            assert_eq!(Slot::new(word).grow_older(), None);
        }
    }
}
