//! Places for objects: each class's slabs with room, and the workers' own.
//!
//! A worker claims from its current slab of the class without a lock. When that is full, it takes
//! the class's lock and the first slab of the list. A full slab in which an object is freed goes to
//! the front of the list: nearly full slabs are filled first, and those at the back empty. An empty
//! slab becomes ready for any class with slabs of that length.
//!
//! In a class with few slabs, workers have no slabs of their own but claim from the listed slabs
//! under the lock: half a slab for each of 158 classes and each worker would be most of a small
//! store. A class without room uses that of up to three larger classes before it gets another slab:
//! a few objects in places some per cent too long waste less than another slab that is half empty
//! for long.

mod list;

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ring::EventCount;

use crate::asks::Asks;
use crate::class::{class_word, Class, CLASSES, LENGTHS, TABLE, WHOLE};
use crate::groups::Groups;
use crate::inject;
use crate::map::Map;
use crate::regions::{Full, NoMemory, Regions};
use crate::slab::{Freed, Role, NIL};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

pub(crate) use list::Claimed;
use list::List;

/// With fewer slabs a worker, a class has no slabs of workers' own. The free half of a worker's
/// current slab is then 1/32 of its class at most.
const OWN_FROM: u32 = 16;

/// The largest number of classes between an object's class and the one that it lies in.
pub(crate) const MAX_BUMP: usize = 3;

/// A list has a pair of cache lines to itself.
#[repr(align(128))]
struct Padded(Mutex<List>);

pub(crate) struct Heap {
    pub(crate) map: Map,
    pub(crate) regions: Regions,
    pub(crate) groups: Groups,
    classes: Box<[Padded]>,
    /// The number of workers.
    pub(crate) workers: AtomicU32,
    /// Slabs of each length taken since the keeper last looked.
    pub(crate) taken: [AtomicU32; LENGTHS],
    /// When this many slabs of a length or fewer are ready, the keeper is woken.
    pub(crate) low: [AtomicU32; LENGTHS],
    /// Whether some length is that low: 1 until the keeper looks.
    pub(crate) is_low: AtomicU32,
    /// Target of pages ready for writes: the whole reserve, or less while memory is short.
    pub(crate) reserve: AtomicU64,
    /// Whether the machine is short of memory, as the keeper last saw it.
    pub(crate) short: AtomicBool,
    /// Workers that wait for a slab of each length.
    pub(crate) wanted: [AtomicU32; LENGTHS],
    /// How often the keeper could not make a slab of each length.
    pub(crate) refused: [AtomicU32; LENGTHS],
    /// How many waits for a slab of each length have begun, and how many of them had begun before
    /// the last refusal: those all see it, and need no keeper.
    pub(crate) begun: [AtomicU32; LENGTHS],
    pub(crate) answered: [AtomicU32; LENGTHS],
    /// The number of keepers; with none, a thread that needs memory asks the kernel itself.
    pub(crate) keepers: AtomicU32,
    /// Where the keeper waits.
    pub(crate) work: EventCount,
    /// Where workers wait for the keeper.
    pub(crate) room: EventCount,
    /// The keeper's requests to the kernel.
    pub(crate) asks: Asks,
}

impl Heap {
    pub(crate) fn new(map: Map, limit: u64, patience: Duration) -> Self {
        let list = || Padded(Mutex::new(List::EMPTY));
        let counts = || [const { AtomicU32::new(0) }; LENGTHS];
        Self {
            regions: Regions::new(&map, limit),
            groups: Groups::new(),
            map,
            classes: (0..CLASSES).map(|_| list()).collect(),
            workers: AtomicU32::new(0),
            taken: counts(),
            low: counts(),
            is_low: AtomicU32::new(0),
            reserve: AtomicU64::new(0),
            short: AtomicBool::new(false),
            wanted: counts(),
            refused: counts(),
            begun: counts(),
            answered: counts(),
            keepers: AtomicU32::new(0),
            work: EventCount::new(),
            room: EventCount::new(),
            asks: Asks::new(patience),
        }
    }

    /// For recovery: drops all slabs, for a scan of the table from the start.
    pub(crate) fn reset(&self) {
        for class in 0..CLASSES {
            *self.lock(class) = List::EMPTY;
        }
        self.regions.reset(&self.map);
    }

    pub(crate) fn lock(&self, class: usize) -> MutexGuard<'_, List> {
        // No panic interrupts an update under this lock.
        self.classes[class].0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a place in `class` or one of the few larger ones. `current` is the worker's slab of
    /// the class.
    #[inline]
    pub(crate) fn claim(&self, current: &mut u32, class: usize) -> Result<Claimed, Full> {
        if *current != NIL {
            if let Some(index) = self.map.slab(*current).claim() {
                return Ok(Claimed { slab: *current, class, index });
            }
        }
        self.claim_slowly(current, class, false)
    }

    /// As [`claim`](Self::claim), for work that can wait: uses existing room and those ready slabs
    /// that are not part of the reserve for writes.
    pub(crate) fn claim_spare(&self, current: &mut u32, class: usize) -> Result<Claimed, Full> {
        if *current != NIL {
            if let Some(index) = self.map.slab(*current).claim() {
                return Ok(Claimed { slab: *current, class, index });
            }
        }
        self.claim_slowly(current, class, true)
    }

    #[cold]
    fn claim_slowly(&self, current: &mut u32, class: usize, spare: bool) -> Result<Claimed, Full> {
        let mut list = self.lock(class);
        if *current != NIL {
            list.disown(&self.map, *current);
            *current = NIL;
        }
        loop {
            if list.slabs >= OWN_FROM * self.workers.load(Ordering::Relaxed).max(1) {
                if let Some(slab) = list.pop(&self.map) {
                    self.map.slab(slab).set_role(Role::Owned);
                    let index = self.map.slab(slab).claim().expect("a listed slab has room");
                    *current = slab;
                    return Ok(Claimed { slab, class, index });
                }
            } else if let Some(claimed) = list.claim_shared(&self.map, class) {
                return Ok(claimed);
            }
            drop(list);
            for larger in class + 1..=(class + MAX_BUMP).min(WHOLE - 1) {
                if let Some(claimed) = self.lock(larger).claim_shared(&self.map, larger) {
                    return Ok(claimed);
                }
            }
            let slab = if spare { self.spare_slab(class)? } else { self.new_slab(class)? };
            inject::step();
            list = self.lock(class);
            self.map.slab(slab).reset(Role::Listed, class_word(class), TABLE[class].objects);
            list.slabs += 1;
            list.push_back(&self.map, slab);
        }
    }

    /// A destination for an object that compaction moves: only in slabs that exist.
    pub(crate) fn claim_existing(&self, class: usize) -> Option<Claimed> {
        let last = if class == WHOLE { WHOLE } else { (class + MAX_BUMP).min(WHOLE - 1) };
        (class..=last).find_map(|class| self.lock(class).claim_shared(&self.map, class))
    }

    /// Frees a place that the caller owns.
    #[inline]
    pub(crate) fn release(&self, Claimed { slab, class, index }: Claimed) {
        if self.map.slab(slab).release(index, TABLE[class].objects) == Freed::LookAgain {
            self.look_again(slab, class);
        }
    }

    /// Gives up a worker's current slab of `class`.
    pub(crate) fn disown(&self, slab: u32, class: usize) {
        self.lock(class).disown(&self.map, slab);
        self.look_again(slab, class);
    }

    #[cold]
    fn look_again(&self, slab: u32, class: usize) {
        let Class { objects, pages, .. } = TABLE[class];
        let state = self.map.slab(slab);
        let mut list = self.lock(class);
        // Between the free and the lock, the slab may have become another class's, or its region
        // one of slabs of another length: then other bytes lie where its state was.
        if !self.regions.has_of_class(&self.map, slab, class) {
            return;
        }
        if state.role() == Role::Full && !state.is_full() {
            state.set_role(Role::Listed);
            list.push_front(&self.map, slab);
        }
        if state.role() == Role::Listed && state.is_empty(objects) {
            list.unlink(&self.map, slab);
            list.slabs -= 1;
            // Under the lock, so that no thread takes the slab for this class's any more.
            self.regions.put_ready(&self.map, slab, pages);
            drop(list);
            self.work.notify_one();
        }
    }

    /// A slab for `class` from the ready ones; without a keeper, from the kernel.
    fn new_slab(&self, class: usize) -> Result<u32, Full> {
        let pages = TABLE[class].pages;
        let length = pages as usize;
        let take = || self.regions.take_ready(&self.map, pages);
        self.taken[length].fetch_add(1, Ordering::Relaxed);
        loop {
            if let Some((slab, left)) = take() {
                let low = left <= self.low[length].load(Ordering::Relaxed);
                if low && self.keepers.load(Ordering::Relaxed) > 0 {
                    self.is_low.store(1, Ordering::Relaxed);
                    self.work.notify_one();
                }
                return Ok(slab);
            }
            if self.keepers.load(Ordering::Relaxed) == 0 {
                self.grow(pages, None)?;
                continue;
            }
            if !self.regions.could_have(pages) {
                return Err(Full);
            }
            if let Some(slab) = self.wait_for_keeper(pages)? {
                return Ok(slab);
            }
        }
    }

    /// Waits until the keeper has made a slab or cannot; `None` when the keeper is gone. A keeper
    /// that gets no CPU does not fail the wait. The kernel's silence does, and a keeper that does
    /// something else (`asks.rs`).
    fn wait_for_keeper(&self, pages: u32) -> Result<Option<u32>, Full> {
        let length = pages as usize;
        let refused = self.refused[length].load(Ordering::Relaxed);
        self.wanted[length].fetch_add(1, Ordering::Relaxed);
        // Released after `refused` was read: a refusal is new to each wait that the keeper counts
        // before it.
        self.begun[length].fetch_add(1, Ordering::Release);
        self.work.notify_one();
        let mut looks = self.asks.looks();
        let got = loop {
            let next = Instant::now() + self.asks.interval();
            let got = self.room.wait_until(Some(next), || {
                let gone = self.keepers.load(Ordering::Relaxed) == 0;
                let no = self.refused[length].load(Ordering::Relaxed) != refused;
                match self.regions.take_ready(&self.map, pages) {
                    Some((slab, _)) => Some(Ok(Some(slab))),
                    None if gone => Some(Ok(None)),
                    None => no.then_some(Err(Full)),
                }
            });
            match got {
                Some(got) => break got,
                None if self.asks.are_unanswered(&mut looks) => break Err(Full),
                // Another thread may have taken the slab: the keeper sleeps once it has made one.
                None => self.work.notify_one(),
            }
        };
        self.wanted[length].fetch_sub(1, Ordering::Relaxed);
        if matches!(got, Ok(Some(_))) {
            // The keeper fills the reserve when nothing waits any more. And this one may have taken
            // the slab of another that waits.
            self.is_low.store(1, Ordering::Relaxed);
            self.work.notify_one();
        }
        got
    }

    /// A slab for `class` that writes do not need: more of its length are ready than wake the
    /// keeper, or other lengths have enough memory to trade. The caller may wait for the kernel, so
    /// it must hold nothing that a write waits for.
    fn spare_slab(&self, class: usize) -> Result<u32, Full> {
        let pages = TABLE[class].pages;
        let length = pages as usize;
        if self.keepers.load(Ordering::Relaxed) == 0 {
            return self.new_slab(class);
        }
        self.taken[length].fetch_add(1, Ordering::Relaxed);
        let low = self.low[length].load(Ordering::Relaxed);
        if self.regions.ready_slabs(pages) <= low {
            // Recompression and compaction have freed memory, but as slabs of other lengths.
            let half = self.reserve.load(Ordering::Relaxed) / 2;
            let enough = self.regions.ready() >= half.max(u64::from(pages));
            if !enough
                || self.regions.trade(&self.map, pages) < pages
                || self.regions.grow(&self.map, pages, None).is_err()
            {
                self.is_low.store(1, Ordering::Relaxed);
                self.work.notify_one();
                return Err(Full);
            }
        }
        self.regions.take_ready(&self.map, pages).map(|(slab, _)| slab).ok_or(Full)
    }

    /// Makes one more ready slab of `pages` pages, at the limit by freeing ready slabs of other
    /// lengths. The keeper passes its requests.
    pub(crate) fn grow(&self, pages: u32, asks: Option<&Asks>) -> Result<(), Full> {
        match self.regions.grow(&self.map, pages, asks) {
            Ok(()) => Ok(()),
            Err(NoMemory::Limit) if self.regions.make_room(&self.map, pages) => {
                self.regions.grow(&self.map, pages, asks).map_err(|_| Full)
            }
            Err(NoMemory::Limit | NoMemory::Address | NoMemory::Kernel) => Err(Full),
        }
    }
}
