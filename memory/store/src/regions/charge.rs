//! Memory that the kernel gives, charged to the limit.

use super::{NoMemory, Regions};
use crate::asks::Asks;
use crate::layout::PLACE_PAGES;
use crate::map::Map;
use crate::sync::Ordering;

impl Regions {
    /// Allocates memory for page `page` of the records of groups.
    pub(crate) fn grow_records(&self, map: &Map, page: u64) -> Result<(), NoMemory> {
        self.charge(1).and_then(|()| self.populate(map, map.layout().record_page(page), 1, None))
    }

    /// Frees the memory of these pages of records; returns whether the kernel took it.
    pub(crate) fn shrink_records(&self, map: &Map, from: u64, to: u64) -> bool {
        let pages = usize::try_from(to - from).expect("they are mapped");
        let punched = map.punch(map.layout().record_page(from), pages).is_ok();
        if punched {
            self.discharge(to - from);
        }
        punched
    }

    /// Allocates memory for a dictionary.
    pub(crate) fn grow_dictionary(&self, map: &Map, place: usize) -> Result<(), NoMemory> {
        let at = map.layout().dictionary(place);
        self.charge(PLACE_PAGES as u64).and_then(|()| {
            let pages = u32::try_from(PLACE_PAGES).expect("a few");
            self.populate(map, at, pages, None)
        })
    }

    /// Charges `pages` pages to the limit.
    pub(super) fn charge(&self, pages: u64) -> Result<(), NoMemory> {
        let limit = self.limit();
        let add = |used: u64| used.checked_add(pages).filter(|&sum| sum <= limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(before) => {
                self.used_max.fetch_max(before + pages, Ordering::Relaxed);
                Ok(())
            }
            Err(_) => Err(NoMemory::Limit),
        }
    }

    pub(super) fn force_charge(&self, pages: u64) {
        let before = self.used.fetch_add(pages, Ordering::Relaxed);
        self.used_max.fetch_max(before + pages, Ordering::Relaxed);
    }

    pub(super) fn discharge(&self, pages: u64) {
        self.used.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Allocates memory that is charged; drops the charge if the kernel has none.
    pub(super) fn populate(
        &self,
        map: &Map,
        at: usize,
        pages: u32,
        asks: Option<&Asks>,
    ) -> Result<(), NoMemory> {
        let populate = || map.populate(at, pages);
        let populated = match asks {
            Some(asks) => asks.ask(populate),
            None => populate(),
        };
        populated.map_err(|_| {
            // A part of it may be there. Free it, or the file would have more than is charged.
            let _ = map.punch(at, pages as usize);
            self.discharge(u64::from(pages));
            NoMemory::Kernel
        })
    }
}
