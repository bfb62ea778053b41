//! A page's entry in the slot table: 64 bits that name a page's object, or hold its value.
//!
//! ```text
//!  63  62..60  59..58  57..51  50..45  44..27  26..18  17..12   11..0
//!  1   age     bump    pins    index   region  slab    tag      length-1   an object
//!  1   age     0       pins    position    group          62      0        a member of a group
//!  01  form (61..60), 60 bits of the value                                 a same-filled page
//!  001 kind (60..59), block (58..32), checksum (31..0)                     on the backing device
//!  00...01                                                                 lost: damaged
//!  00...00                                                                 absent
//! ```
//!
//! An object's class follows from its length and `bump` (0 to 3 classes above the smallest that
//! fits), so that the table alone says which objects are in use. The entry of a page in a group
//! names the group and the page's position in it; the group's own entries (`record.rs`) name the
//! objects.
#![cfg_attr(not(loom), expect(unreachable_pub, reason = "the models name them"))]

/// The longest object: an uncompressed page.
pub const MAX_OBJECT: usize = 4096;

/// Callers' tags are below this; the store has two more of its own.
pub const TAGS: u8 = 62;

/// The tag in entries of pages in groups.
const MEMBER: u8 = 62;

/// The tag of 8-byte objects: same-filled pages whose value fits no entry.
pub(crate) const RARE: u8 = 63;

/// The most pages in a group.
pub const MAX_MEMBERS: usize = 32;

/// Region numbers are below this: 512 GiB.
pub(crate) const MAX_REGIONS: u32 = 1 << 18;

/// Block numbers are below this: 512 GiB.
pub(crate) const MAX_BLOCKS: u32 = 1 << 27;

/// The most pins at a time; one more would overflow into the next field.
pub(crate) const MAX_PINS: u64 = 127;

/// The highest age.
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
pub(crate) const AGE_SHIFT: u32 = 60;
const BLOCK_SHIFT: u32 = 32;
const KIND_SHIFT: u32 = 59;

const SLAB_MASK: u64 = (1 << 27) - 1;
pub(crate) const PIN: u64 = 1 << PIN_SHIFT;
pub(crate) const PINS: u64 = MAX_PINS << PIN_SHIFT;
pub(crate) const AGE: u64 = 7 << AGE_SHIFT;

/// Where an object lies, its length and its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// Region (18 bits) and the slab's number in it (9 bits).
    pub slab: u32,
    /// The object's index in the slab, below 64.
    pub index: u32,
    /// Bytes, 1 to [`MAX_OBJECT`].
    pub len: u32,
    /// How many classes the object's class is above the smallest that fits, below 4.
    pub bump: u32,
    /// The caller's tag, below [`TAGS`].
    pub tag: u8,
}

/// A page's place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The group's number.
    pub group: u32,
    /// The page's position in it, below [`MAX_MEMBERS`].
    pub position: u32,
}

/// A page's place on the backing device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backed {
    /// The block, from 1, below [`MAX_BLOCKS`].
    pub block: u32,
    /// Whether the block is one uncompressed page; else it has a directory.
    pub whole: bool,
    /// The checksum of the object.
    pub sum: u32,
}

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is stored.
    Absent,
    /// A page filled with this 64-bit value.
    Same(u64),
    /// An object in memory.
    Object(Object),
    /// A member of a group.
    Member(Member),
    /// An object on the backing device.
    Backed(Backed),
    /// Something was stored, but its entry or object was found damaged.
    Lost,
}

/// An encoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub(crate) u64);

impl Word {
    /// Nothing is stored.
    pub const ABSENT: Self = Self(0);
    pub(crate) const LOST: Self = Self(LOST);

    /// The entry of an object, of age 0, not pinned. All fields must be in range.
    pub fn object(object: Object) -> Self {
        debug_assert!((1..=MAX_OBJECT).contains(&(object.len as usize)));
        debug_assert!(u64::from(object.slab) <= SLAB_MASK && object.index < 64);
        debug_assert!(object.bump < 4 && (object.tag < TAGS || object.tag == RARE));
        Self(Self::pack(object))
    }

    /// The entry of a page in a group, of age 0, not pinned. All fields must be in range.
    pub fn member(member: Member) -> Self {
        debug_assert!(u64::from(member.group) <= SLAB_MASK);
        debug_assert!((member.position as usize) < MAX_MEMBERS);
        let Member { group: slab, position: index } = member;
        Self(Self::pack(Object { slab, index, len: 1, bump: 0, tag: MEMBER }))
    }

    /// The entry of a page on the backing device. The block must be in range.
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

    /// The entry of a page filled with `word`, if it fits 60 bits in one of three forms: upper five
    /// bits equal (zero, all ones, small numbers, addresses); a repeated 32-bit pattern; lower four
    /// bits zero (round floating-point numbers).
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

    /// Decodes the entry; `None` if no server can have written it.
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

    /// Whether the entry can be pinned: it names an object, or a group.
    pub(crate) fn is_object(self) -> bool {
        self.0 & OBJECT != 0
    }

    pub(crate) fn pins(self) -> u64 {
        if self.is_object() {
            (self.0 & PINS) >> PIN_SHIFT
        } else {
            0
        }
    }

    /// The entry without its pins.
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

    /// The entry of the same object at another place, with its age.
    pub(crate) fn at(self, slab: u32, index: u32, bump: u32) -> Self {
        match self.state() {
            Some(State::Object(object)) => {
                Self(Self::object(Object { slab, index, bump, ..object }).0 | (self.0 & AGE))
            }
            _ => self,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn same_filled_words_round_trip_or_are_refused() {
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
    fn invalid_entries_are_recognised() {
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
