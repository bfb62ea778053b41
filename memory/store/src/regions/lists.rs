//! Lists of free regions, and of slabs with and without memory.

use crate::class::LENGTHS;
use crate::map::Map;
use crate::slab::NIL;

#[derive(Clone, Copy)]
pub(super) struct Region {
    /// Pages a slab; 0 for a free region.
    pub(super) pages: u32,
    /// Slabs that have memory, or are just getting or losing it.
    pub(super) live: u32,
    /// The next free region.
    pub(super) next: u32,
}

pub(super) struct Lists {
    pub(super) regions: Box<[Region]>,
    /// Regions from this one on were never used.
    pub(super) fresh: u32,
    /// Head of the list of regions that were used and are free again.
    pub(super) free: u32,
    /// By slab length in pages.
    pub(super) ready: [u32; LENGTHS],
    pub(super) ready_slabs: [u32; LENGTHS],
    pub(super) bare: [u32; LENGTHS],
}

impl Lists {
    pub(super) fn new(map: &Map) -> Self {
        let none = Region { pages: 0, live: 0, next: NIL };
        Self {
            regions: vec![none; map.layout().regions as usize].into_boxed_slice(),
            fresh: 0,
            free: NIL,
            ready: [NIL; LENGTHS],
            ready_slabs: [0; LENGTHS],
            bare: [NIL; LENGTHS],
        }
    }

    pub(super) fn take_region(&mut self) -> Option<u32> {
        if self.free != NIL {
            let region = self.free;
            self.free = self.regions[region as usize].next;
            return Some(region);
        }
        let region = self.fresh;
        ((region as usize) < self.regions.len()).then(|| {
            self.fresh += 1;
            region
        })
    }

    pub(super) fn put_region(&mut self, region: u32) {
        self.regions[region as usize] = Region { pages: 0, live: 0, next: self.free };
        self.free = region;
    }

    pub(super) fn link_bare(&mut self, map: &Map, slab: u32, pages: u32) {
        let head = self.bare[pages as usize];
        map.slab(slab).set_prev(NIL);
        map.slab(slab).set_next(head);
        if head != NIL {
            map.slab(head).set_prev(slab);
        }
        self.bare[pages as usize] = slab;
    }

    pub(super) fn unlink_bare(&mut self, map: &Map, slab: u32, pages: u32) {
        let (prev, next) = (map.slab(slab).prev(), map.slab(slab).next());
        if prev == NIL {
            self.bare[pages as usize] = next;
        } else {
            map.slab(prev).set_next(next);
        }
        if next != NIL {
            map.slab(next).set_prev(prev);
        }
    }
}
