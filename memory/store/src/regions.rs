//! Memory of slabs: which addresses have memory, which of it is free, and the limit.
//!
//! ```text
//!             type_region                 populate                   take_ready
//!  no region ───────────────► bare (no memory) ─────────► ready ───────────────► a class's slab
//!            ◄───────────────                  ◄─────────       ◄───────────────
//!             its last slab is bare   punch a hole              put_ready, when it is empty
//! ```
//!
//! Taking a slab or putting it back moves a number between lists, under the lock. Memory is
//! allocated from the kernel and freed to it outside of the lock, because that may take long.

mod adopt;
mod charge;
mod lists;

use std::sync::{Mutex, MutexGuard, PoisonError};

use self::lists::{Lists, Region};
use crate::asks::Asks;
use crate::class::{class_word, MAX_PAGES, TABLE};
use crate::inject;
use crate::layout::{CUTS, SLAB_BITS};
use crate::map::Map;
use crate::slab::{Role, NIL, NO_CLASS};
use crate::sync::{AtomicU64, Ordering};

/// Why there is no more memory.
#[derive(Debug)]
pub(crate) enum NoMemory {
    /// The limit is reached.
    Limit,
    /// No address range is left.
    Address,
    /// The kernel has none.
    Kernel,
}

/// No place could be claimed: the limit is reached, or the kernel has no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

pub(crate) struct Regions {
    lists: Mutex<Lists>,
    /// Pages of memory that the file has. It is increased before memory is allocated and decreased
    /// after memory is freed, so that it is never too small.
    used: AtomicU64,
    used_max: AtomicU64,
    /// The limit in pages; `u64::MAX` for none.
    limit: AtomicU64,
    /// Pages in ready slabs.
    ready: AtomicU64,
    /// Held while memory is freed, and while existing memory is mapped.
    mapping: Mutex<()>,
}

impl Regions {
    pub(crate) fn new(map: &Map, limit: u64) -> Self {
        let fixed = map.layout().fixed_pages();
        Self {
            lists: Mutex::new(Lists::new(map)),
            used: AtomicU64::new(fixed),
            used_max: AtomicU64::new(fixed),
            limit: AtomicU64::new(limit),
            ready: AtomicU64::new(0),
            mapping: Mutex::new(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        // No panic interrupts an update under this lock.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn used_max(&self) -> u64 {
        self.used_max.load(Ordering::Relaxed)
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Pages in ready slabs.
    pub(crate) fn ready(&self) -> u64 {
        self.ready.load(Ordering::Relaxed)
    }

    /// The number of ready slabs of this many pages.
    pub(crate) fn ready_slabs(&self, pages: u32) -> u32 {
        self.lock().ready_slabs[pages as usize]
    }

    /// Whether `slab` is one of this class, whose lock the caller holds: it then stays one.
    pub(crate) fn has_of_class(&self, map: &Map, slab: u32, class: usize) -> bool {
        // Under this lock, the state is a slab's of this length.
        let lists = self.lock();
        lists.regions[(slab >> SLAB_BITS) as usize].pages == TABLE[class].pages
            && map.slab(slab).class() == class_word(class)
    }

    /// Takes a ready slab of `pages` pages, and returns it with the number of those left.
    pub(crate) fn take_ready(&self, map: &Map, pages: u32) -> Option<(u32, u32)> {
        let mut lists = self.lock();
        let slab = lists.ready[pages as usize];
        if slab == NIL {
            return None;
        }
        lists.ready[pages as usize] = map.slab(slab).next();
        lists.ready_slabs[pages as usize] -= 1;
        self.ready.fetch_sub(u64::from(pages), Ordering::Relaxed);
        Some((slab, lists.ready_slabs[pages as usize]))
    }

    /// Adds a slab without objects to the ready ones.
    pub(crate) fn put_ready(&self, map: &Map, slab: u32, pages: u32) {
        map.slab(slab).reset(Role::Ready, NO_CLASS, 0);
        let mut lists = self.lock();
        map.slab(slab).set_next(lists.ready[pages as usize]);
        lists.ready[pages as usize] = slab;
        lists.ready_slabs[pages as usize] += 1;
        self.ready.fetch_add(u64::from(pages), Ordering::Relaxed);
    }

    /// Makes one more ready slab of `pages` pages. The keeper passes its requests.
    pub(crate) fn grow(&self, map: &Map, pages: u32, asks: Option<&Asks>) -> Result<(), NoMemory> {
        let slab = loop {
            let mut lists = self.lock();
            let slab = lists.bare[pages as usize];
            if slab != NIL {
                lists.unlink_bare(map, slab, pages);
                lists.regions[(slab >> SLAB_BITS) as usize].live += 1;
                break slab;
            }
            let region = lists.take_region().ok_or(NoMemory::Address)?;
            drop(lists);
            self.type_region(map, region, pages, asks)?;
        };
        inject::step();
        let populated = self
            .charge(u64::from(pages))
            .and_then(|()| self.populate(map, map.layout().slab(slab, pages), pages, asks));
        inject::step();
        if let Err(error) = populated {
            self.put_bare(map, slab, pages);
            return Err(error);
        }
        self.put_ready(map, slab, pages);
        Ok(())
    }

    /// Frees the memory of one ready slab of `pages` pages; `false` if there is none.
    pub(crate) fn shrink(&self, map: &Map, pages: u32) -> bool {
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((slab, _)) = self.take_ready(map, pages) else { return false };
        inject::step();
        if map.punch(map.layout().slab(slab, pages), pages as usize).is_err() {
            // It still has its memory, so it stays ready.
            self.put_ready(map, slab, pages);
            return false;
        }
        inject::step();
        self.discharge(u64::from(pages));
        self.put_bare(map, slab, pages);
        true
    }

    /// Frees ready slabs of other lengths until the limit leaves room for `pages` pages.
    pub(crate) fn make_room(&self, map: &Map, pages: u32) -> bool {
        // The slab may need a new region, and so a head.
        let need = u64::from(pages) + u64::from(CUTS[pages as usize].head);
        let room = || self.used().saturating_add(need) <= self.limit();
        for other in (1..=MAX_PAGES).rev() {
            while !room() && other != pages && self.shrink(map, other) {}
        }
        room()
    }

    /// Frees at least `pages` pages of ready slabs of other lengths, the longest first, but leaves
    /// one slab of each length. Returns the number of pages freed.
    pub(crate) fn trade(&self, map: &Map, pages: u32) -> u32 {
        let mut freed = 0;
        for other in (1..=MAX_PAGES).rev() {
            while freed < pages
                && other != pages
                && self.ready_slabs(other) > 1
                && self.shrink(map, other)
            {
                freed += other;
            }
        }
        freed
    }

    /// Whether the limit allows a slab of `pages` pages once all ready slabs are freed.
    pub(crate) fn could_have(&self, pages: u32) -> bool {
        self.used().saturating_sub(self.ready()) + u64::from(pages) <= self.limit()
    }

    /// Maps the memory of a region's slabs in a process that has taken the store over; otherwise
    /// the first use of each page would allocate page tables. `false` if there is no such region.
    pub(crate) fn warm(&self, map: &Map, region: u32, asks: &Asks) -> bool {
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(&Region { pages, .. }) = self.lock().regions.get(region as usize) else {
            return false;
        };
        if pages == 0 {
            return true;
        }
        let slabs = region << SLAB_BITS..region << SLAB_BITS | CUTS[pages as usize].slabs;
        // A bare slab is mapped when it gets memory.
        for slab in slabs.filter(|&slab| map.slab(slab).role() != Role::Bare) {
            // Without memory for page tables, the first use takes a minor fault.
            let _ = asks.ask(|| map.populate(map.layout().slab(slab, pages), pages));
        }
        true
    }

    /// For recovery: drops all state, for a scan from the start.
    pub(crate) fn reset(&self, map: &Map) {
        *self.lock() = Lists::new(map);
        let fixed = map.layout().fixed_pages();
        self.used.store(fixed, Ordering::Relaxed);
        self.used_max.store(fixed, Ordering::Relaxed);
    }

    fn type_region(
        &self,
        map: &Map,
        region: u32,
        pages: u32,
        asks: Option<&Asks>,
    ) -> Result<(), NoMemory> {
        let cut = CUTS[pages as usize];
        let populated = self
            .charge(u64::from(cut.head))
            .and_then(|()| self.populate(map, map.layout().region(region), cut.head, asks));
        let mut lists = self.lock();
        if let Err(error) = populated {
            lists.put_region(region);
            return Err(error);
        }
        lists.regions[region as usize] = Region { pages, live: 0, next: NIL };
        for number in (0..cut.slabs).rev() {
            let slab = region << SLAB_BITS | number;
            map.slab(slab).reset(Role::Bare, NO_CLASS, 0);
            lists.link_bare(map, slab, pages);
        }
        Ok(())
    }

    /// Makes a slab whose memory is freed bare, and frees its region if all its slabs are.
    fn put_bare(&self, map: &Map, slab: u32, pages: u32) {
        map.slab(slab).reset(Role::Bare, NO_CLASS, 0);
        let region = slab >> SLAB_BITS;
        let mut lists = self.lock();
        lists.link_bare(map, slab, pages);
        lists.regions[region as usize].live -= 1;
        if lists.regions[region as usize].live > 0 {
            return;
        }
        let cut = CUTS[pages as usize];
        for number in 0..cut.slabs {
            lists.unlink_bare(map, region << SLAB_BITS | number, pages);
        }
        lists.regions[region as usize].pages = 0;
        drop(lists);
        let punched = map.punch(map.layout().region(region), cut.head as usize);
        if punched.is_ok() {
            self.discharge(u64::from(cut.head));
            self.lock().put_region(region);
        }
        // Otherwise the region's head stays allocated and the region unused: it wastes memory but
        // no data.
    }
}

#[cfg(test)]
mod tests;
