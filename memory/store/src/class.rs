//! Size classes: the length of an object's place, and the pages of a slab of such places.
//!
//! Places grow in steps of 16 bytes up to 1 KiB and of 32 up to 4 KiB. A place has 4 bytes of
//! checksum and the object. The last class is for whole pages, whose checksums lie in the region's
//! head (with 4 bytes more, a sixteenth of each slab would be unused). A slab is long enough that
//! little is left over at its end, and short enough that a class's last, half-empty slab wastes
//! little.

/// Bytes of a checksum.
pub(crate) const SUM: usize = 4;

/// The shortest place.
const SHORTEST: usize = 64;
/// Up to this length places grow by 16 bytes, then by 32.
const FINE: usize = 1024;
const FINE_CLASSES: usize = (FINE - SHORTEST) / 16 + 1;

/// The number of classes.
pub(crate) const CLASSES: usize = FINE_CLASSES + (4096 - FINE) / 32 + 1;

/// The class of whole pages: places of 4096 bytes without a checksum.
pub(crate) const WHOLE: usize = CLASSES - 1;

/// The most pages in a slab.
pub(crate) const MAX_PAGES: u32 = 32;

/// Length of an array indexed by a slab's pages; element 0 is not used.
pub(crate) const LENGTHS: usize = MAX_PAGES as usize + 1;

/// The fewest objects in a slab.
const FEWEST: usize = 8;

/// One class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Bytes of a place.
    pub(crate) bytes: u32,
    /// Places in a slab.
    pub(crate) objects: u32,
    /// Pages of a slab.
    pub(crate) pages: u32,
}

/// All classes, by length of place.
pub(crate) static TABLE: [Class; CLASSES] = table();

/// The smallest class with room for an object of `len` bytes, which is 1 to 4096.
#[inline]
pub(crate) fn fitting(len: usize) -> usize {
    let place = len + SUM;
    if place <= FINE {
        place.saturating_sub(SHORTEST).div_ceil(16)
    } else if place <= 4096 {
        FINE_CLASSES - 1 + (place - FINE).div_ceil(32)
    } else {
        WHOLE
    }
}

/// Hash of all classes. A file with another hash has another geometry.
pub(crate) fn fingerprint() -> u64 {
    TABLE.iter().fold(0xcbf2_9ce4_8422_2325, |hash, class| {
        [class.bytes, class.objects, class.pages]
            .iter()
            .fold(hash, |hash: u64, &n| (hash ^ u64::from(n)).wrapping_mul(0x0100_0000_01b3))
    })
}

#[expect(clippy::cast_possible_truncation, reason = "sizes up to 4096, in a constant")]
const fn table() -> [Class; CLASSES] {
    let mut table = [Class { bytes: 4096, objects: 16, pages: 16 }; CLASSES];
    let mut class = 0;
    while class < WHOLE {
        let bytes = if class < FINE_CLASSES {
            SHORTEST + 16 * class
        } else {
            FINE + 32 * (class + 1 - FINE_CLASSES)
        };
        let mut best = u64::MAX;
        let mut pages = 1;
        while pages < LENGTHS {
            let fit = pages * 4096 / bytes;
            let objects = if fit > 64 { 64 } else { fit };
            // Parts in a million: the slab's unused end, and 2500 for each of its pages.
            let unused =
                (pages * 4096 - objects * bytes) as u64 * 1_000_000 / (pages as u64 * 4096);
            let cost = unused + 2500 * pages as u64;
            if objects >= FEWEST && cost < best {
                best = cost;
                table[class] =
                    Class { bytes: bytes as u32, objects: objects as u32, pages: pages as u32 };
            }
            pages += 1;
        }
        class += 1;
    }
    table
}

/// A class as a slab's state stores it.
pub(crate) fn class_word(class: usize) -> u32 {
    u32::try_from(class).expect("158 classes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_has_the_smallest_class_that_fits() {
        for len in 1..=4096 {
            let class = fitting(len);
            let room =
                |class: usize| TABLE[class].bytes as usize - if class == WHOLE { 0 } else { SUM };
            assert!(room(class) >= len, "{len} in class {class}");
            assert!(class == 0 || room(class - 1) < len, "{len} would fit class {}", class - 1);
        }
    }

    #[test]
    fn slabs_hold_their_objects_and_waste_little() {
        let mut waste = 0.0;
        for class in &TABLE {
            let len = class.pages * 4096;
            assert!(class.objects * class.bytes <= len && class.pages <= MAX_PAGES);
            assert!((8..=64).contains(&class.objects), "{class:?}");
            assert!(class.bytes % 16 == 0);
            waste += 1.0 - f64::from(class.objects * class.bytes) / f64::from(len);
        }
        let mean = waste / CLASSES as f64;
        assert!(mean < 0.008, "slabs waste {mean}");
        assert_eq!((TABLE[0].bytes, TABLE[WHOLE].bytes, CLASSES), (64, 4096, 158));
    }
}
