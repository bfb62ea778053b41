//! Objects: their places, checksums and tags.

use crate::class::{fitting, CLASSES, WHOLE};
use crate::entry::{Object, Word};
use crate::layout::DICTIONARIES;
use crate::map::Map;

/// The lower four bits of the tag of an object made with dictionary 0; dictionary n adds n.
pub const DICTIONARY_TAG: u8 = 8;

/// The lower four bits of a tag.
const KIND: u8 = 15;

/// The dictionary that an object with this tag was made with, if any.
#[inline]
pub fn dictionary_of(tag: u8) -> Option<usize> {
    let place = usize::from((tag & KIND).wrapping_sub(DICTIONARY_TAG));
    (place < DICTIONARIES).then_some(place)
}

/// Where the object that an entry names lies: its class, and the offsets of its checksum and bytes.
/// `None` if there is no such place; then the entry is damaged.
#[inline]
pub(crate) fn locate(map: &Map, object: &Object) -> Option<(usize, (usize, usize))> {
    let fits = fitting(object.len as usize);
    let class = fits + object.bump as usize;
    if object.bump > 0 && class >= WHOLE || class >= CLASSES {
        return None;
    }
    Some((class, map.layout().place(object.slab, class, object.index)?))
}

/// The seed of an object's checksum: an object is valid only for that page, with that length, tag
/// and bump. (A wrong bump may name the right bytes, but another class for the slab.)
#[inline]
pub(crate) fn seed(index: u64, object: &Object) -> u32 {
    let what = u64::from(object.len << 8 | object.bump << 6) | u64::from(object.tag);
    let mixed = (index ^ what << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let [_, _, _, _, high @ ..] = (mixed ^ mixed >> 29).to_le_bytes();
    u32::from_le_bytes(high) ^ u32::try_from(what).expect("21 bits")
}

/// The checksum of an object.
#[inline]
pub(crate) fn checksum(index: u64, object: &Object, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(seed(index, object), bytes)
}

/// Whether the entry is that of a page stored uncompressed.
#[inline]
pub(crate) fn is_huge(word: Word, object: &Object) -> bool {
    word.is_object() && fitting(object.len as usize) == WHOLE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_name_their_dictionary_whatever_their_other_bits() {
        for tag in 0..=63_u8 {
            let expected = usize::from(tag % 16).checked_sub(8).filter(|&place| place < 4);
            assert_eq!(dictionary_of(tag), expected, "{tag}");
        }
    }
}
