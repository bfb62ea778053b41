//! One page's entry in the table: 64 bits, and the only way in to its object.
//!
//! ```text
//!  63  62..60  59..58  57..51  50..45  44..27  26..18  17..12   11..0
//!  1   age     bump    pins    index   region  slab    tag      length-1   an object
//!  1   age     0       pins    position    group          62      0        a member of a group
//!  01  form (61..60), 60 bits of the word                                  a same-filled page
//!  001 kind (60..59), block (58..32), checksum (31..0)                     on the backing device
//!  00...01                                                                 lost: its entry was not sound
//!  00...00                                                                 absent
//! ```
//!
//! An object's class follows from its length and `bump` (0 to 3 classes larger than the smallest
//! that fits), so that the table alone says which objects are in use. A page that is compressed
//! with others says which group it is in, and as which of its pages; the group's own entries
//! (`record.rs`) name the objects. The protocol:
//!
//! - A reader *pins*: it adds one to `pins` by a compare-and-swap against the word it read, so the
//!   word it holds is the one that names the object. It unpins when it has copied the bytes.
//! - A writer *publishes*: it waits until nobody pins and swaps in the word of an object whose
//!   bytes are already there. The old object is then its own, and it frees it.
//! - Compaction *relocates*: it pins, copies, and swaps in the new place if its own pin is the only
//!   one. The old place is then its own.
//!
//! So a place is freed by exactly one thread, and only when no reader is in it. Pins that a killed
//! server left behind are taken off when the table is recovered.
//!
//! A page on the backing device is not pinned: its block may be written over while it is read. Who
//! reads it looks at the entry again when it has the bytes: if that says the same, and the checksum
//! in it is theirs, they are what the page was (`writeback.rs`).
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

use crate::sync::{both, relax, step, strong, AtomicU64, Ordering, Site};

/// The longest object: a page as it is.
pub const MAX_OBJECT: usize = 4096;

/// Tags are below this: two more are ours.
pub const TAGS: u8 = 62;

/// The tag of members of groups, which are no objects of their own.
const MEMBER: u8 = 62;

/// The tag of objects of 8 bytes: same-filled pages whose word fits no entry.
pub(crate) const RARE: u8 = 63;

/// The most pages in a group.
pub const MAX_MEMBERS: usize = 32;

/// Regions are below this: 512 GiB.
pub(crate) const MAX_REGIONS: u32 = 1 << 18;

/// Blocks of a backing device are below this: 512 GiB.
pub(crate) const MAX_BLOCKS: u32 = 1 << 27;

/// Threads that may pin at a time; one more would run into the next field.
pub(crate) const MAX_PINS: u64 = 127;

/// The age at which a page stops growing older.
pub const MAX_AGE: u8 = 7;

const OBJECT: u64 = 1 << 63;
const SAME: u64 = 1 << 62;
const BACKED: u64 = 1 << 61;
const LOST: u64 = 1;

const TAG_SHIFT: u32 = 12;
const SLAB_SHIFT: u32 = 18;
const INDEX_SHIFT: u32 = 45;
const PIN_SHIFT: u32 = 51;
const BUMP_SHIFT: u32 = 58;
const AGE_SHIFT: u32 = 60;
const BLOCK_SHIFT: u32 = 32;
const KIND_SHIFT: u32 = 59;

const SLAB_MASK: u64 = (1 << 27) - 1;
const PIN: u64 = 1 << PIN_SHIFT;
const PINS: u64 = MAX_PINS << PIN_SHIFT;
const AGE: u64 = 7 << AGE_SHIFT;

/// Where an object lies, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Region (18 bits) and the slab's number in it (9 bits).
    pub slab: u32,
    /// Its number in the slab, below 64.
    pub index: u32,
    /// Bytes, 1 to [`MAX_OBJECT`].
    pub len: u32,
    /// How many classes larger than need be, below 4.
    pub bump: u32,
    /// The caller's, below [`TAGS`].
    pub tag: u8,
}

/// Where a page is that is compressed with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The group's number.
    pub group: u32,
    /// Which of its pages, below [`MAX_MEMBERS`].
    pub position: u32,
}

/// Where on the backing device a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backed {
    /// The block, from 1 on, below [`MAX_BLOCKS`].
    pub block: u32,
    /// The block is the page as it is; else it has a directory.
    pub whole: bool,
    /// The checksum of the object.
    pub sum: u32,
}

/// What a word says, once taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is stored.
    Absent,
    /// This word, over and over.
    Same(u64),
    /// An object.
    Object(Object),
    /// A part of a group.
    Member(Member),
    /// On the backing device.
    Backed(Backed),
    /// Something was stored, and its entry or object was found not to be sound.
    Lost,
}

/// The 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub(crate) u64);

impl Word {
    /// Nothing stored.
    pub const ABSENT: Self = Self(0);
    pub(crate) const LOST: Self = Self(LOST);

    /// The word of an object, aged 0 and not pinned. Its numbers are in their ranges.
    pub fn object(object: Object) -> Self {
        debug_assert!((1..=MAX_OBJECT).contains(&(object.len as usize)));
        debug_assert!(u64::from(object.slab) <= SLAB_MASK && object.index < 64);
        debug_assert!(object.bump < 4 && (object.tag < TAGS || object.tag == RARE));
        Self(Self::pack(object))
    }

    /// The word of a member of a group, aged 0 and not pinned. Its numbers are in their ranges.
    pub fn member(member: Member) -> Self {
        debug_assert!(u64::from(member.group) <= SLAB_MASK);
        debug_assert!((member.position as usize) < MAX_MEMBERS);
        let Member { group: slab, position: index } = member;
        Self(Self::pack(Object { slab, index, len: 1, bump: 0, tag: MEMBER }))
    }

    /// The word of a page on the backing device. Its block is in its range.
    pub fn backed(at: Backed) -> Self {
        debug_assert!((1..MAX_BLOCKS).contains(&at.block));
        let block = u64::from(at.block) << BLOCK_SHIFT;
        Self(BACKED | u64::from(at.whole) << KIND_SHIFT | block | u64::from(at.sum))
    }

    fn pack(object: Object) -> u64 {
        OBJECT
            | u64::from(object.len - 1)
            | u64::from(object.tag) << TAG_SHIFT
            | u64::from(object.slab) << SLAB_SHIFT
            | u64::from(object.index) << INDEX_SHIFT
            | u64::from(object.bump) << BUMP_SHIFT
    }

    /// The word of a page filled with `word`, if it fits 60 bits and a form: a number whose upper
    /// five bits are equal (zero, all ones, small numbers, addresses), a repeated 32-bit pattern,
    /// or one whose lower four bits are zero (round floating-point numbers).
    pub fn same(word: u64) -> Option<Self> {
        const LOW: u64 = (1 << 60) - 1;
        let sign = word.cast_signed() >> 59;
        if sign == 0 || sign == -1 {
            Some(Self(SAME | (word & LOW)))
        } else if word >> 32 == word & 0xffff_ffff {
            Some(Self(SAME | 1 << 60 | (word & 0xffff_ffff)))
        } else if word & 15 == 0 {
            Some(Self(SAME | 2 << 60 | word >> 4))
        } else {
            None
        }
    }

    /// Takes the word apart; `None` if nothing of ours wrote it.
    pub fn state(self) -> Option<State> {
        let field = |shift: u32, mask: u64| {
            u32::try_from(self.0 >> shift & mask).expect("masks are below 32 bits")
        };
        if self.0 & OBJECT != 0 {
            let object = Object {
                slab: field(SLAB_SHIFT, SLAB_MASK),
                index: field(INDEX_SHIFT, 63),
                len: field(0, 4095) + 1,
                bump: field(BUMP_SHIFT, 3),
                tag: field(TAG_SHIFT, 63).to_le_bytes()[0],
            };
            return match object {
                Object { slab: group, index: position, len: 1, bump: 0, tag: MEMBER }
                    if (position as usize) < MAX_MEMBERS =>
                {
                    Some(State::Member(Member { group, position }))
                }
                Object { tag: MEMBER, .. } => None,
                object => Some(State::Object(object)),
            };
        }
        if self.0 & SAME != 0 {
            let value = self.0 & ((1 << 60) - 1);
            return match self.0 >> 60 & 3 {
                0 => Some(State::Same(((value << 4).cast_signed() >> 4).cast_unsigned())),
                1 if value >> 32 == 0 => Some(State::Same(value | value << 32)),
                2 => Some(State::Same(value << 4)),
                _ => None,
            };
        }
        if self.0 & BACKED != 0 {
            let block = field(BLOCK_SHIFT, u64::from(MAX_BLOCKS - 1));
            let at = |whole| Backed { block, whole, sum: field(0, u64::from(u32::MAX)) };
            return match self.0 >> KIND_SHIFT & 3 {
                _ if block == 0 => None,
                0 => Some(State::Backed(at(false))),
                1 => Some(State::Backed(at(true))),
                _ => None,
            };
        }
        match self.0 {
            0 => Some(State::Absent),
            LOST => Some(State::Lost),
            _ => None,
        }
    }

    /// Whether it is one that can be pinned: an object, or a member of a group.
    pub(crate) fn is_object(self) -> bool {
        self.0 & OBJECT != 0
    }

    fn pins(self) -> u64 {
        if self.is_object() {
            (self.0 & PINS) >> PIN_SHIFT
        } else {
            0
        }
    }

    /// Without the pins.
    pub(crate) fn unpinned(self) -> Self {
        if self.is_object() {
            Self(self.0 & !PINS)
        } else {
            self
        }
    }

    pub(crate) fn age(self) -> u8 {
        if self.is_object() {
            ((self.0 & AGE) >> AGE_SHIFT).to_le_bytes()[0]
        } else {
            0
        }
    }

    /// The same object elsewhere, as old as before.
    pub(crate) fn at(self, slab: u32, index: u32, bump: u32) -> Self {
        match self.state() {
            Some(State::Object(object)) => {
                Self(Self::object(Object { slab, index, bump, ..object }).0 | (self.0 & AGE))
            }
            _ => self,
        }
    }
}

/// One entry of the table. See the module for who may do what.
#[derive(Debug)]
#[repr(transparent)]
pub struct Slot(AtomicU64);

impl Slot {
    /// An entry outside of a table.
    #[cfg(any(loom, test))]
    pub fn new(word: Word) -> Self {
        Self(AtomicU64::new(word.0))
    }

    /// What is there now; it may be something else at once.
    #[inline]
    pub fn load(&self) -> Word {
        Word(self.0.load(Ordering::Relaxed))
    }

    /// What is there now; if it is on the backing device, so are its bytes.
    #[inline]
    pub fn load_backed(&self) -> Word {
        // Pairs with the Release of `supersede`.
        Word(self.0.load(strong(Site::BackedAcquire, Ordering::Acquire)))
    }

    /// Writes without asking: for recovery, before anybody else is there.
    pub(crate) fn store(&self, word: Word) {
        self.0.store(word.0, Ordering::Relaxed);
    }

    /// Keeps the object where it is until [`unpin`](Self::unpin); `Err` with the word if it is not
    /// an object. With `touch` the page is young again.
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

    /// Takes the pin off again. Only for who pinned.
    #[inline]
    pub fn unpin(&self) {
        // Pairs with the Acquire of `publish` or `relocate`: our reading is over.
        self.0.fetch_sub(PIN, strong(Site::UnpinRelease, Ordering::Release));
    }

    /// Swaps in `new`, when nobody pins what is there. The object of the word given back is the
    /// caller's to free.
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

    /// Swaps in `new`, the same page elsewhere or in another form, for the object that the caller
    /// has pinned, which ends the pin; `false`, and the pin still there, if somebody else reads it.
    /// `pinned` is what `pin` gave. The page stays as old as it is.
    #[inline]
    pub fn relocate(&self, pinned: Word, new: Word) -> bool {
        self.exchange(pinned, |word| Word(new.0 & !AGE | word.0 & AGE))
    }

    /// Swaps in `new`, another content, for the object that the caller has pinned: as
    /// [`relocate`](Self::relocate), but the page is young, and `new` need not be an object.
    #[inline]
    pub fn supersede(&self, pinned: Word, new: Word) -> bool {
        self.exchange(pinned, |_| new)
    }

    /// Swaps in `new` if `seen`, which is no object, is there still.
    #[inline]
    pub fn fill_in(&self, seen: Word, new: Word) -> bool {
        debug_assert!(!seen.is_object());
        let order = both(Site::PublishAcquire, Site::PublishRelease);
        self.0.compare_exchange(seen.0, new.0, order, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn exchange(&self, pinned: Word, new: impl Fn(Word) -> Word) -> bool {
        let order = both(Site::MoveAcquire, Site::MoveRelease);
        // A reader that came and went changes the age at most, and its unpin must be seen.
        let word = self.load();
        let alone = word.pins() == 1 || !step(Site::MoveAlone);
        let unmoved = (word.0 | AGE | PINS) == (pinned.0 | AGE | PINS);
        let new = new(word).0;
        alone && unmoved && self.0.compare_exchange(word.0, new, order, Ordering::Relaxed).is_ok()
    }

    /// Makes the object one period older, up to [`MAX_AGE`], and gives its new age.
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

    #[test]
    fn an_object_keeps_every_field_at_its_ends() {
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
    fn a_member_keeps_its_group_and_position_whatever_its_age_and_pins() {
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
    fn a_page_on_the_backing_device_keeps_every_field_at_its_ends() {
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

    #[test]
    fn same_words_come_back_or_are_refused() {
        let words = [
            0,
            u64::MAX,
            1,
            0x0000_7f12_3456_789a,
            0xffff_8880_0000_1234,
            0x5a5a_5a5a_5a5a_5a5a,
            0x6b6b_6b6b_6b6b_6b6b,
            0xdead_beef_dead_beef,
            1.0_f64.to_bits(),
            (-2.5_f64).to_bits(),
            i64::MIN.cast_unsigned(),
            1 << 59,
            (1 << 59) - 1,
        ];
        for word in words {
            let stored = Word::same(word).unwrap_or_else(|| panic!("{word:016x} does not fit"));
            assert_eq!(stored.state(), Some(State::Same(word)), "{word:016x}");
            assert_eq!((stored.pins(), stored.age(), stored.is_object()), (0, 0, false));
        }
        assert_eq!(Word::same(u64::from_le_bytes(*b"abcdefgh")), None);
    }

    #[test]
    fn words_that_nothing_of_ours_wrote_are_told() {
        let member = Word::member(Member { group: 1, position: 1 }).0;
        let members = [member | 1, member | 32 << INDEX_SHIFT, member | 1 << BUMP_SHIFT];
        for word in
            [2, SAME | 3 << 60, SAME | 1 << 60 | 1 << 33, BACKED, BACKED | 3 << 59 | 1 << 32]
                .into_iter()
                .chain(members)
        {
            assert_eq!(Word(word).state(), None, "{word:016x}");
        }
    }
}
