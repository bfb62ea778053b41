//! Places for objects: each class's slabs with room, and the workers' own.
//!
//! A worker claims from its current slab of the class without a lock. When that is full it takes
//! the class's lock for the first slab of the list. Slabs that were full and have a hole go to the
//! front of the list, so that nearly full ones are filled first and those at the back empty
//! themselves; a slab whose last object goes is ready for any class with slabs of that length.
//!
//! A class with few slabs has none that belong to a worker: half a slab for each of 158 classes and
//! each worker would be most of a small store. Workers claim from its listed slabs under the lock.
//! A class without any room uses that of up to three larger ones before it gets one more slab:
//! their places are a few per cent too long for a few of its objects, a slab more is half empty for
//! long.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ring::EventCount;

use crate::class::{Class, CLASSES, LENGTHS, TABLE, WHOLE};
use crate::groups::Groups;
use crate::inject;
use crate::map::Map;
use crate::regions::{Full, NoMemory, Regions};
use crate::slab::{Freed, Role, NIL};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A class with fewer slabs for each worker has none that belong to one: the half of a slab that a
/// worker's current one has free is then 1/32 of its class at most.
const OWN_FROM: u32 = 16;

/// How many classes larger a place may be than need be.
pub(crate) const MAX_BUMP: usize = 3;

/// A place that the caller has claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) slab: u32,
    pub(crate) class: usize,
    pub(crate) index: u32,
}

/// Slabs of a class with free objects.
#[derive(Clone, Copy)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    /// All slabs of the class, listed or not.
    pub(crate) slabs: u32,
}

/// One cache line or two each: neighbours in the table are not neighbours in use.
#[repr(align(128))]
struct Padded(Mutex<List>);

pub(crate) struct Heap {
    pub(crate) map: Map,
    pub(crate) regions: Regions,
    pub(crate) groups: Groups,
    classes: Box<[Padded]>,
    /// Workers there are.
    pub(crate) workers: AtomicU32,
    /// Slabs of each length taken since the keeper looked.
    pub(crate) taken: [AtomicU32; LENGTHS],
    /// The keeper is to look when no more slabs of each length than this are ready.
    pub(crate) low: [AtomicU32; LENGTHS],
    /// Some length is that low: 1 until the keeper looks.
    pub(crate) is_low: AtomicU32,
    /// Pages that the keeper has ready for writes, if it can: the whole reserve, or less while
    /// memory is short.
    pub(crate) reserve: AtomicU64,
    /// The machine is short of memory, as the keeper last saw it.
    pub(crate) short: AtomicBool,
    /// Workers that wait for a slab of each length.
    pub(crate) wanted: [AtomicU32; LENGTHS],
    /// How often the keeper had none to give.
    pub(crate) refused: [AtomicU32; LENGTHS],
    /// Keepers there are: with none, whoever needs memory asks the kernel itself.
    pub(crate) keepers: AtomicU32,
    /// The keeper sleeps here.
    pub(crate) work: EventCount,
    /// Workers that wait for the keeper sleep here.
    pub(crate) room: EventCount,
    patience: Duration,
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
            keepers: AtomicU32::new(0),
            work: EventCount::new(),
            room: EventCount::new(),
            patience,
        }
    }

    /// For recovery: forgets every slab, for a scan from the beginning.
    pub(crate) fn forget(&self) {
        for class in 0..CLASSES {
            *self.lock(class) = List::EMPTY;
        }
        self.regions.forget(&self.map);
    }

    pub(crate) fn lock(&self, class: usize) -> MutexGuard<'_, List> {
        // Nothing between two consistent states can panic.
        self.classes[class].0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place in `class`, or one of the few larger ones. `current` is the worker's slab of it.
    #[inline]
    pub(crate) fn claim(&self, current: &mut u32, class: usize) -> Result<Claimed, Full> {
        if *current != NIL {
            if let Some(index) = self.map.slab(*current).claim() {
                return Ok(Claimed { slab: *current, class, index });
            }
        }
        self.claim_slowly(current, class, false)
    }

    /// As [`claim`](Self::claim), for work that can wait: from what is there, and from those ready
    /// slabs that writes do not count on.
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
                    self.map.slab(slab).settle(Role::Owned);
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

    /// A place for compaction to move an object to: only where there is room already.
    pub(crate) fn claim_existing(&self, class: usize) -> Option<Claimed> {
        let last = if class == WHOLE { WHOLE } else { (class + MAX_BUMP).min(WHOLE - 1) };
        (class..=last).find_map(|class| self.lock(class).claim_shared(&self.map, class))
    }

    /// Frees a place of the caller's.
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
        // Between our freeing and our lock it may have become another class's.
        if state.class() != class_word(class) {
            return;
        }
        if state.role() == Role::Full && !state.is_full() {
            state.settle(Role::Listed);
            list.push_front(&self.map, slab);
        }
        if state.role() == Role::Listed && state.is_empty(objects) {
            list.unlink(&self.map, slab);
            list.slabs -= 1;
            // While the lock is held, so that nobody takes it for this class's any more.
            self.regions.put_ready(&self.map, slab, pages);
            drop(list);
            self.work.notify_one();
        }
    }

    /// A slab for `class`, from those that are ready; without a keeper from the kernel.
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
                self.grow(pages)?;
                continue;
            }
            if !self.regions.could_have(pages) {
                return Err(Full);
            }
            let refused = self.refused[length].load(Ordering::Relaxed);
            self.wanted[length].fetch_add(1, Ordering::Relaxed);
            self.work.notify_one();
            let deadline = Instant::now() + self.patience;
            let got = self.room.wait_until(Some(deadline), || {
                let gone = self.keepers.load(Ordering::Relaxed) == 0;
                let no = self.refused[length].load(Ordering::Relaxed) != refused;
                match take() {
                    Some((slab, _)) => Some(Ok(Some(slab))),
                    None if gone => Some(Ok(None)),
                    None => no.then_some(Err(Full)),
                }
            });
            self.wanted[length].fetch_sub(1, Ordering::Relaxed);
            match got.unwrap_or(Err(Full))? {
                Some(slab) => return Ok(slab),
                None => continue,
            }
        }
    }

    /// A slab for `class` that no write is going to miss: more of its length are ready than the
    /// keeper wants to be woken for, or other lengths have memory enough to make one of. The caller
    /// may have to wait for the kernel, and holds nothing that a write waits for.
    fn spare_slab(&self, class: usize) -> Result<u32, Full> {
        let pages = TABLE[class].pages;
        let length = pages as usize;
        if self.keepers.load(Ordering::Relaxed) == 0 {
            return self.new_slab(class);
        }
        self.taken[length].fetch_add(1, Ordering::Relaxed);
        let low = self.low[length].load(Ordering::Relaxed);
        if self.regions.ready_slabs(pages) <= low {
            // What recompression and compaction have freed is ready, and in other lengths.
            let half = self.reserve.load(Ordering::Relaxed) / 2;
            let enough = self.regions.ready() >= half.max(u64::from(pages));
            if !enough
                || self.regions.trade(&self.map, pages) < pages
                || self.regions.grow(&self.map, pages).is_err()
            {
                self.is_low.store(1, Ordering::Relaxed);
                self.work.notify_one();
                return Err(Full);
            }
        }
        self.regions.take_ready(&self.map, pages).map(|(slab, _)| slab).ok_or(Full)
    }

    /// One more ready slab of `pages` pages, at the cost of ready ones of other lengths.
    pub(crate) fn grow(&self, pages: u32) -> Result<(), Full> {
        match self.regions.grow(&self.map, pages) {
            Ok(()) => Ok(()),
            Err(NoMemory::Limit) if self.regions.make_room(&self.map, pages) => {
                self.regions.grow(&self.map, pages).map_err(|_| Full)
            }
            Err(NoMemory::Limit | NoMemory::Address | NoMemory::Kernel) => Err(Full),
        }
    }
}

impl List {
    const EMPTY: Self = Self { head: NIL, tail: NIL, slabs: 0 };

    /// Claims from the first listed slab, which stays listed unless it is full then.
    fn claim_shared(&mut self, map: &Map, class: usize) -> Option<Claimed> {
        let slab = self.head;
        if slab == NIL {
            return None;
        }
        let index = map.slab(slab).claim().expect("a listed slab has room");
        if map.slab(slab).is_full() {
            self.unlink(map, slab);
            self.set_full(map, slab);
        }
        Some(Claimed { slab, class, index })
    }

    /// Takes a slab that has no room out of circulation, or lists it if it just got some.
    fn set_full(&mut self, map: &Map, slab: u32) {
        if map.slab(slab).settle(Role::Full) != u64::MAX {
            map.slab(slab).settle(Role::Listed);
            self.push_front(map, slab);
        }
    }

    /// Takes a worker's slab back. If it is empty the caller has to look at it again.
    fn disown(&mut self, map: &Map, slab: u32) {
        self.set_full(map, slab);
    }

    /// Puts a slab that compaction did not empty back; whether it is empty after all.
    pub(crate) fn give_back(&mut self, map: &Map, slab: u32, objects: u32) -> bool {
        self.set_full(map, slab);
        let empty = map.slab(slab).role() == Role::Listed && map.slab(slab).is_empty(objects);
        if empty {
            self.unlink(map, slab);
            self.slabs -= 1;
        }
        empty
    }

    /// The listed slabs, from the back.
    pub(crate) fn listed_from_back<'a>(&self, map: &'a Map) -> impl Iterator<Item = u32> + 'a {
        let listed = |slab: u32| (slab != NIL).then_some(slab);
        std::iter::successors(listed(self.tail), move |&slab| listed(map.slab(slab).prev()))
    }

    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }

    fn pop(&mut self, map: &Map) -> Option<u32> {
        let slab = self.head;
        (slab != NIL).then(|| {
            self.unlink(map, slab);
            slab
        })
    }

    pub(crate) fn push_front(&mut self, map: &Map, slab: u32) {
        map.slab(slab).set_prev(NIL);
        map.slab(slab).set_next(self.head);
        if self.head == NIL {
            self.tail = slab;
        } else {
            map.slab(self.head).set_prev(slab);
        }
        self.head = slab;
    }

    pub(crate) fn push_back(&mut self, map: &Map, slab: u32) {
        map.slab(slab).set_next(NIL);
        map.slab(slab).set_prev(self.tail);
        if self.tail == NIL {
            self.head = slab;
        } else {
            map.slab(self.tail).set_next(slab);
        }
        self.tail = slab;
    }

    pub(crate) fn unlink(&mut self, map: &Map, slab: u32) {
        let (prev, next) = (map.slab(slab).prev(), map.slab(slab).next());
        if prev == NIL {
            self.head = next;
        } else {
            map.slab(prev).set_next(next);
        }
        if next == NIL {
            self.tail = prev;
        } else {
            map.slab(next).set_prev(prev);
        }
    }
}

/// A class as a slab's state has it.
pub(crate) fn class_word(class: usize) -> u32 {
    u32::try_from(class).expect("158 classes")
}
