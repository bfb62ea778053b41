//! Ready slabs: how many there are to be of each length, and those that workers wait for.

use crate::class::{LENGTHS, MAX_PAGES, TABLE};
use crate::heap::Heap;
use crate::store::Store;
use crate::sync::{AtomicU32, Ordering};

/// A reserve of this many pages or more has a ready slab of each length: one of each takes about
/// 300.
const ROOMY: u64 = 1024;

impl Store {
    /// Whether workers wait for more slabs than are ready. One that only has yet to take its slab,
    /// or to see that it gets none, is no reason to stay awake: with real-time priority the keeper
    /// would keep it from its CPU.
    pub(super) fn some_wait(&self) -> bool {
        let Heap { wanted, begun, answered, regions, .. } = &self.heap;
        (1..=MAX_PAGES).any(|pages| {
            let of = |counts: &[AtomicU32; LENGTHS]| counts[pages as usize].load(Ordering::Relaxed);
            let (wanted, answered) = (of(wanted), of(begun) == of(answered));
            wanted > 0 && !answered && wanted > regions.ready_slabs(pages)
        })
    }

    /// Twice the targets of all lengths together, in pages, and what workers wait for: more than
    /// this is surplus.
    pub(super) fn plenty(&self) -> u64 {
        const ONE_OF_EACH: u64 = (MAX_PAGES as u64) * (MAX_PAGES as u64 + 1) / 2;
        let reserve = self.heap.reserve.load(Ordering::Relaxed);
        let waited: u64 = (0..)
            .zip(&self.heap.wanted)
            .map(|(pages, wanted): (u64, _)| pages * u64::from(wanted.load(Ordering::Relaxed)))
            .sum();
        2 * (reserve + if reserve >= ROOMY { ONE_OF_EACH } else { 0 }) + waited
    }

    /// Makes slabs for workers that wait, from ready slabs of other lengths if need be.
    pub(super) fn serve_waiting(&self) {
        for pages in 1..=MAX_PAGES {
            let wanted = &self.heap.wanted[pages as usize];
            if wanted.load(Ordering::Relaxed) == 0 {
                continue;
            }
            while wanted.load(Ordering::Relaxed) > self.heap.regions.ready_slabs(pages) {
                // First frees ready slabs of other lengths: the kernel may have no other memory to
                // give, because its reclaim waits for this very slab.
                self.heap.regions.trade(&self.heap.map, pages);
                if self.heap.grow(pages, Some(&self.heap.asks)).is_err() {
                    self.refuse(pages as usize);
                    break;
                }
            }
            // Also when there are enough already: `stock` and freeing make slabs ready without
            // waking the waiters.
            self.heap.room.notify_all();
        }
    }

    /// Tells all workers that wait for a slab of this length that they get none.
    fn refuse(&self, length: usize) {
        let Heap { begun, refused, answered, .. } = &self.heap;
        // First, since a wait that begins in between may not see the refusal: it is not counted.
        let begun = begun[length].load(Ordering::Acquire);
        refused[length].fetch_add(1, Ordering::Relaxed);
        answered[length].store(begun, Ordering::Relaxed);
    }

    /// Makes slabs until each length in use has its share of the reserve ready.
    pub(super) fn stock(&self, demand: &[u32; LENGTHS]) {
        let targets = self.targets(demand);
        let regions = &self.heap.regions;
        let reserve = self.heap.reserve.load(Ordering::Relaxed);
        for pages in 1..=MAX_PAGES {
            // Waking the keeper for each slab would cost more than making the slab.
            self.heap.low[pages as usize].store(targets[pages as usize] / 2, Ordering::Relaxed);
        }
        for pages in 1..=MAX_PAGES {
            let target = targets[pages as usize];
            while regions.ready_slabs(pages) < target {
                // Waiting workers come first. With enough pages ready in other lengths, trading is
                // cheaper.
                let wanted =
                    self.heap.wanted.iter().any(|wanted| wanted.load(Ordering::Relaxed) > 0);
                let enough = regions.ready() >= reserve;
                if wanted || enough && regions.ready_slabs(pages) > 0 {
                    return;
                }
                if regions.grow(&self.heap.map, pages, Some(&self.heap.asks)).is_err() {
                    return;
                }
            }
        }
    }

    /// Frees ready slabs beyond twice the target, except those that workers wait for; returns
    /// whether the kernel took them.
    pub(super) fn release_surplus(&self, demand: &[u32; LENGTHS]) -> bool {
        for (pages, target) in (0..).zip(self.targets(demand)).skip(1) {
            let wanted = self.heap.wanted[pages as usize].load(Ordering::Relaxed);
            while self.heap.regions.ready_slabs(pages) > target.saturating_mul(2).max(wanted) {
                // Workers may have taken the slabs meanwhile.
                if !self.heap.regions.shrink(&self.heap.map, pages)
                    && self.heap.regions.ready_slabs(pages) > 0
                {
                    return false;
                }
            }
        }
        true
    }

    /// How many slabs of each length are to be ready: a share of the reserve by demand, and, with a
    /// large reserve, at least one of each length that a class uses.
    fn targets(&self, demand: &[u32; LENGTHS]) -> [u32; LENGTHS] {
        let mut targets = [0; LENGTHS];
        let reserve = self.heap.reserve.load(Ordering::Relaxed);
        if reserve == 0 {
            return targets;
        }
        let weight = |(pages, demand): (u64, &u32)| u64::from(*demand) * pages;
        let all: u64 = (0..).zip(demand).map(weight).sum();
        let one = u32::from(reserve >= ROOMY);
        for class in &TABLE {
            let share = (reserve * u64::from(demand[class.pages as usize])).checked_div(all);
            let share = u32::try_from(share.unwrap_or(0)).unwrap_or(u32::MAX);
            targets[class.pages as usize] = share.max(one);
        }
        targets
    }
}
