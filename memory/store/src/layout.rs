//! The layout of the file: superblock, table, records, dictionaries, regions.
//!
//! ```text
//!  0      superblock: magic, version, sizes, fingerprint of the classes, id, checksum; generation; blocks being written
//!  4096   slot table: 8 bytes a page, with room for the pages that the store may grow to
//!  ...    records of groups: 64 bytes each, one for every 8 pages, sparse
//!  ...    dictionaries: 4 places of 16 KiB, sparse (`dictionary.rs`)
//!  ...    (up to a multiple of 2 MiB)
//!  region 0, region 1, ...: 2 MiB each, sparse
//!
//!  region of slabs of P pages:  | head: Slab[n], and checksums of whole pages | slab 0 | ... | slab n-1 |
//! ```
//!
//! All slabs of a region have the same number of pages, which follows from the class of any object
//! in it. The head serves the running server: the next one rebuilds it from the table, except for
//! the checksums in its upper half, which belong to objects. Slabs of one length lie close
//! together, so that page tables and the page cache's tree take only 0.4 % of the data.

use crate::class::{Class, LENGTHS, MAX_PAGES, SUM, WHOLE};
use crate::entry::MAX_REGIONS;
use crate::record::{PIECES, RECORD};

/// The host's page.
pub(crate) const PAGE: usize = 4096;
/// Bytes of a region.
pub(crate) const REGION: usize = 2 << 20;
/// Bits of a slab's number that hold its index in the region.
pub(crate) const SLAB_BITS: u32 = 9;
/// Bytes of a slab's state.
pub(crate) const SLAB_STATE: usize = 24;
/// Where the checksums of whole pages begin in a region.
const SUMS: usize = 2048;
/// Where the table begins.
pub(crate) const TABLE: usize = PAGE;

const REGION_PAGES: usize = REGION / PAGE;

/// The store has one record of a group for this many pages.
const PAGES_A_RECORD: u64 = 8;

/// A store can grow to this many times the pages that it was created with. Only the file and the
/// mapping are longer for it: they take no memory there.
const ROOM: u64 = 16;

/// Records in a page.
pub(crate) const RECORDS_A_PAGE: usize = PAGE / RECORD;

/// The most dictionaries of a store.
pub const DICTIONARIES: usize = 4;

/// Pages of a dictionary's place.
pub(crate) const PLACE_PAGES: usize = 4;

/// How a region is divided, for a given slab length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Pages of the head.
    pub(crate) head: u32,
    /// Slabs.
    pub(crate) slabs: u32,
}

/// By slab length in pages.
pub(crate) static CUTS: [Cut; LENGTHS] = cuts();

#[expect(clippy::cast_possible_truncation, reason = "below 512, in a constant")]
const fn cuts() -> [Cut; LENGTHS] {
    let mut cuts = [Cut { head: 0, slabs: 0 }; LENGTHS];
    let mut pages = 1;
    while pages < LENGTHS {
        let mut head = 1;
        while (REGION_PAGES - head) / pages * SLAB_STATE > head * PAGE {
            head += 1;
        }
        cuts[pages] = Cut { head: head as u32, slabs: ((REGION_PAGES - head) / pages) as u32 };
        pages += 1;
    }
    cuts
}

/// Sizes that follow from the number of pages, and places that follow from the most pages that the
/// store can grow to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Slots in the table.
    pub(crate) pages: u64,
    /// The most slots that the table has room for.
    pub(crate) capacity: u64,
    /// Records of groups; a multiple of what a page holds.
    pub(crate) records: usize,
    /// Where the records begin.
    pub(crate) records_at: usize,
    /// Where the dictionaries begin.
    pub(crate) dictionaries_at: usize,
    /// Regions.
    pub(crate) regions: u32,
    /// Where the first region begins.
    pub(crate) regions_at: usize,
    /// Bytes of the file.
    pub(crate) len: usize,
}

impl Layout {
    /// The layout of a new store of `pages` pages; `None` if that is 0 or more than entries can
    /// address.
    pub(crate) fn new(pages: u64) -> Option<Self> {
        Self::with_room(pages, pages.checked_mul(ROOM)?.min(max_pages()).max(pages))
    }

    /// The layout of a store of `pages` pages with room for `capacity` pages; `None` if `pages` is
    /// 0 or more than `capacity`, or `capacity` more than entries can address.
    pub(crate) fn with_room(pages: u64, capacity: u64) -> Option<Self> {
        if pages == 0 || pages > capacity || capacity > max_pages() {
            return None;
        }
        let table = usize::try_from(capacity).ok()?.checked_mul(8)?;
        let records_at = (TABLE + table).next_multiple_of(PAGE);
        let dictionaries_at = records_at + records(capacity)? * RECORD;
        let regions_at =
            (dictionaries_at + DICTIONARIES * PLACE_PAGES * PAGE).next_multiple_of(REGION);
        let len = regions_at + regions(capacity)? as usize * REGION;
        let (records, regions) = (records(pages)?, regions(pages)?);
        Some(Self {
            pages,
            capacity,
            records,
            records_at,
            dictionaries_at,
            regions,
            regions_at,
            len,
        })
    }

    /// The layout of the same store with `pages` pages; `None` if it has no room for them.
    pub(crate) fn resized(&self, pages: u64) -> Option<Self> {
        Self::with_room(pages, self.capacity)
    }

    /// Regions of the store once it has grown to its capacity.
    pub(crate) fn most_regions(&self) -> u64 {
        ((self.len - self.regions_at) / REGION) as u64
    }

    /// Pages of all records.
    pub(crate) fn record_pages(&self) -> u64 {
        (self.records / RECORDS_A_PAGE) as u64
    }

    /// Where a page of records begins; for the number after the last one, where the records end.
    pub(crate) fn record_page(&self, page: u64) -> usize {
        debug_assert!(page <= self.record_pages());
        self.records_at + usize::try_from(page).expect("they are mapped") * PAGE
    }

    /// Where a dictionary begins; for the number after the last one, where the dictionaries end.
    pub(crate) fn dictionary(&self, place: usize) -> usize {
        debug_assert!(place <= DICTIONARIES);
        self.dictionaries_at + place * PLACE_PAGES * PAGE
    }

    /// The page number in the checksum of an object of a group: beyond those of pages, and the same
    /// after the store has grown.
    pub(crate) fn piece_index(&self, group: u32, piece: usize) -> u64 {
        self.capacity + u64::from(group) * PIECES as u64 + piece as u64
    }

    /// Pages of superblock and table: the minimum of an empty store.
    pub(crate) fn fixed_pages(&self) -> u64 {
        1 + (self.pages * 8).div_ceil(PAGE as u64)
    }

    /// Pages of the file behind the present table that only a larger table uses.
    pub(crate) fn spare_table_pages(&self) -> usize {
        self.records_at / PAGE - usize::try_from(self.fixed_pages()).expect("they are mapped")
    }

    /// Where a region begins.
    pub(crate) fn region(&self, region: u32) -> usize {
        debug_assert!(region < self.regions);
        self.regions_at + region as usize * REGION
    }

    /// Where the state of a slab lies; `None` for a number that no slab has.
    #[inline]
    pub(crate) fn state(&self, slab: u32) -> Option<usize> {
        let region = slab >> SLAB_BITS;
        let in_region = (slab & ((1 << SLAB_BITS) - 1)) as usize * SLAB_STATE;
        (region < self.regions).then(|| self.region(region) + in_region)
    }

    /// Where the memory of a slab of `pages` pages begins.
    pub(crate) fn slab(&self, slab: u32, pages: u32) -> usize {
        let number = slab & ((1 << SLAB_BITS) - 1);
        let page = CUTS[pages as usize].head + number * pages;
        self.region(slab >> SLAB_BITS) + page as usize * PAGE
    }

    /// Where an object's checksum and its bytes lie; `None` if there is no such place.
    #[inline]
    pub(crate) fn place(&self, slab: u32, class: usize, index: u32) -> Option<(usize, usize)> {
        let Class { bytes, objects, pages } = *crate::class::TABLE.get(class)?;
        let number = slab & ((1 << SLAB_BITS) - 1);
        let region = slab >> SLAB_BITS;
        let cut = CUTS[pages as usize];
        if region >= self.regions || number >= cut.slabs || index >= objects {
            return None;
        }
        let region = self.region(region);
        let slab_page = cut.head + number * pages;
        let at = region + slab_page as usize * PAGE + (index * bytes) as usize;
        if class == WHOLE {
            Some((region + SUMS + (slab_page + index) as usize * SUM, at))
        } else {
            Some((at, at + SUM))
        }
    }
}

/// Records of groups of a store of `pages` pages.
fn records(pages: u64) -> Option<usize> {
    let records = usize::try_from(pages.div_ceil(PAGES_A_RECORD)).ok()?;
    Some(records.next_multiple_of(RECORDS_A_PAGE))
}

/// Regions of a store of `pages` pages: a quarter more than the uncompressed pages, for slabs that
/// are not full, and three regions for each slab length. `None` for more than entries can address.
fn regions(pages: u64) -> Option<u32> {
    let regions = pages.checked_mul(5)? / 4 / REGION_PAGES as u64 + 3 * u64::from(MAX_PAGES);
    u32::try_from(regions).ok().filter(|&regions| regions <= MAX_REGIONS)
}

/// The most pages that a store can have, somewhat more than 409 GiB: an entry of the slot table can
/// name no more regions.
pub fn max_pages() -> u64 {
    let regions = u64::from(MAX_REGIONS - 3 * MAX_PAGES);
    // The largest number whose quotient is still that one.
    ((regions + 1) * 4 * REGION_PAGES as u64 - 1) / 5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class;

    #[test]
    fn slabs_lie_in_their_region_and_not_in_its_head() {
        for (pages, cut) in CUTS.iter().enumerate().skip(1) {
            let head = cut.head as usize * PAGE;
            assert!(cut.slabs as usize * SLAB_STATE <= head, "{pages}");
            assert!(head + cut.slabs as usize * pages * PAGE <= REGION, "{pages}");
            assert!(cut.slabs < 1 << SLAB_BITS && cut.slabs > 0);
        }
        let whole = CUTS[class::TABLE[WHOLE].pages as usize];
        assert!(whole.slabs as usize * SLAB_STATE <= SUMS, "states run into checksums");
        assert!(SUMS + REGION_PAGES * SUM <= whole.head as usize * PAGE);
    }

    #[test]
    fn no_two_places_overlap() {
        let layout = Layout::new(1000).unwrap();
        for (class, of) in class::TABLE.iter().enumerate() {
            let mut end = 0;
            for number in 0..CUTS[of.pages as usize].slabs {
                let slab = 1 << SLAB_BITS | number;
                for index in 0..of.objects {
                    let (sum, at) = layout.place(slab, class, index).unwrap();
                    let from = sum.min(at);
                    assert!(class == WHOLE || sum + SUM == at);
                    assert!(class == WHOLE || from >= end, "class {class} slab {number} {index}");
                    assert!(at >= end);
                    end = at + of.bytes as usize - (at - from).min(SUM);
                    assert!(end <= layout.region(2));
                }
                assert_eq!(layout.place(slab, class, of.objects), None);
            }
            assert_eq!(layout.place(1 << SLAB_BITS | 511, class, 0), None);
            assert_eq!(layout.place(layout.regions << SLAB_BITS, class, 0), None);
        }
    }

    #[test]
    fn sizes_have_bounds() {
        assert_eq!(Layout::new(0), None);
        assert_eq!(Layout::new(u64::MAX), None);
        assert_eq!(Layout::new(1 << 40), None);
        let largest = Layout::new(max_pages()).unwrap();
        assert_eq!((largest.regions, largest.capacity), (MAX_REGIONS, max_pages()));
        assert_eq!(Layout::new(max_pages() + 1), None);
        assert_eq!(Layout::with_room(10, 9), None);
        assert_eq!(Layout::with_room(10, max_pages() + 1), None);
        // As in a forged superblock: 8 bytes of the table for each page are nearly 2^64.
        assert_eq!(Layout::with_room(10, (1 << 61) - 1), None);
        assert_eq!(Layout::new(512).unwrap().fixed_pages(), 2);
        assert_eq!(Layout::new(513).unwrap().fixed_pages(), 3);
        for pages in [1, 511, 512, 513, 100_000, 100_000_000] {
            let layout = Layout::new(pages).unwrap();
            let table = TABLE + usize::try_from(pages).unwrap() * 8;
            let records_end = layout.records_at + layout.records * RECORD;
            assert!(layout.records_at >= table && records_end <= layout.dictionary(0), "{pages}");
            assert!(layout.dictionary(DICTIONARIES) <= layout.regions_at, "{pages}");
            assert_eq!(layout.dictionary(0) % PAGE, 0);
            assert!(layout.records as u64 * PAGES_A_RECORD >= pages, "{pages}");
            assert_eq!(layout.records_at % PAGE, 0);
        }
    }

    #[test]
    fn a_store_that_grows_does_not_move_its_objects() {
        let small = Layout::new(600).unwrap();
        assert_eq!(small.capacity, 9600);
        assert_eq!(small.resized(9601), None);
        assert_eq!(Layout::with_room(9600, 9600).unwrap().spare_table_pages(), 0);
        for pages in [600, 601, 1024, 9600] {
            let larger = small.resized(pages).unwrap();
            let places = |of: &Layout| (of.records_at, of.dictionaries_at, of.regions_at, of.len);
            assert_eq!(places(&larger), places(&small));
            assert_eq!(larger.piece_index(3, 1), small.piece_index(3, 1));
            assert!(larger.piece_index(0, 0) >= larger.pages);
            assert!(larger.regions >= small.regions && larger.records >= small.records);
            assert!(u64::from(larger.regions) <= larger.most_regions());
            let fixed = usize::try_from(larger.fixed_pages()).unwrap();
            assert_eq!((fixed + larger.spare_table_pages()) * PAGE, larger.records_at);
        }
    }
}
