//! Which regions and slabs the next server finds in the file of one that was killed.

use std::io;

use super::lists::Region;
use super::Regions;
use crate::layout::{CUTS, DICTIONARIES, PLACE_PAGES, SLAB_BITS};
use crate::map::Map;
use crate::slab::{Role, NIL, NO_CLASS};

impl Regions {
    /// For recovery: makes an unknown region one of slabs of `pages` pages, all bare.
    pub(crate) fn adopt_region(&self, map: &Map, region: u32, pages: u32) -> io::Result<()> {
        let cut = CUTS[pages as usize];
        map.populate(map.layout().region(region), cut.head)?;
        for number in 0..cut.slabs {
            map.slab(region << SLAB_BITS | number).reset(Role::Bare, NO_CLASS, 0);
        }
        self.lock().regions[region as usize] = Region { pages, live: 0, next: NIL };
        self.force_charge(u64::from(cut.head));
        Ok(())
    }

    /// For recovery: the adopted regions, and the pages of their slabs.
    pub(crate) fn known(&self) -> Vec<(u32, u32)> {
        let lists = self.lock();
        let all = (0_u32..).zip(&lists.regions);
        all.filter(|(_, region)| region.pages > 0).map(|(n, region)| (n, region.pages)).collect()
    }

    /// For recovery: counts a slab with objects.
    pub(crate) fn adopt_slab(&self, slab: u32, pages: u32) {
        self.lock().regions[(slab >> SLAB_BITS) as usize].live += 1;
        self.force_charge(u64::from(pages));
    }

    /// For recovery, after all slabs with objects are known: links the bare slabs and the free
    /// regions. With `surplus` frees all memory in which nothing is stored.
    pub(crate) fn adopt_rest(&self, map: &Map, surplus: bool) -> io::Result<()> {
        let mut lists = self.lock();
        let regions = u32::try_from(lists.regions.len()).expect("as many as the layout says");
        lists.fresh = regions;
        let page = crate::layout::PAGE;
        let mut hole: Option<(usize, usize)> = None;
        let mut punch = |from: usize, to: usize| -> io::Result<()> {
            match &mut hole {
                // The last slab may end where its region does.
                _ if from == to => {}
                Some((_, end)) if *end == from => *end = to,
                _ => {
                    if let Some((from, to)) = hole.replace((from, to)) {
                        map.punch(from, (to - from) / page)?;
                    }
                }
            }
            Ok(())
        };
        for region in (0..regions).rev() {
            if lists.regions[region as usize].pages == 0 {
                lists.regions[region as usize].next = lists.free;
                lists.free = region;
            }
        }
        for region in 0..regions {
            let Region { pages, .. } = lists.regions[region as usize];
            let from = map.layout().region(region);
            if pages == 0 {
                if surplus {
                    punch(from, from + crate::layout::REGION)?;
                }
                continue;
            }
            let cut = CUTS[pages as usize];
            for number in 0..cut.slabs {
                let slab = region << SLAB_BITS | number;
                if map.slab(slab).role() == Role::Bare {
                    lists.link_bare(map, slab, pages);
                    if surplus {
                        let from = map.layout().slab(slab, pages);
                        punch(from, from + pages as usize * page)?;
                    }
                }
            }
            if surplus {
                let end = map.layout().slab(region << SLAB_BITS | cut.slabs, pages);
                punch(end, from + crate::layout::REGION)?;
            }
        }
        if let Some((from, to)) = hole {
            map.punch(from, (to - from) / page)?;
        }
        Ok(())
    }

    /// For recovery: gives the first `pages` pages of records memory, and frees the others.
    pub(crate) fn adopt_records(&self, map: &Map, pages: u64) -> io::Result<()> {
        let layout = map.layout();
        let count = u32::try_from(pages).map_err(|_| io::ErrorKind::InvalidData)?;
        map.populate(layout.record_page(0), count)?;
        let rest = usize::try_from(layout.record_pages() - pages).expect("they are mapped");
        map.punch(layout.record_page(pages), rest)?;
        self.force_charge(pages);
        Ok(())
    }

    /// For recovery: gives the first `places` dictionaries memory, and frees the others.
    pub(crate) fn adopt_dictionaries(&self, map: &Map, places: usize) -> io::Result<()> {
        let layout = map.layout();
        let pages = u32::try_from(places * PLACE_PAGES).expect("a few");
        map.populate(layout.dictionary(0), pages)?;
        map.punch(layout.dictionary(places), (DICTIONARIES - places) * PLACE_PAGES)?;
        self.force_charge(u64::from(pages));
        Ok(())
    }
}
