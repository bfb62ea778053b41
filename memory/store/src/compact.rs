//! Compaction, in steps or in a whole pass; `sweep.rs` has the work.

use std::sync::PoisonError;

use crate::class::TABLE;
use crate::entry::MAX_OBJECT;
use crate::inject;
use crate::layout::{CUTS, PAGE};
use crate::slab::NIL;
use crate::store::Store;
use crate::sweep::{choose, finish, plan, relocate};
use crate::sync::Ordering;

/// How a step of compaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compacted {
    /// The pass is not over.
    More,
    /// The pass is over, and freed this many pages of memory.
    Pages(u64),
    /// There was nothing to gain.
    Nothing,
}

impl Store {
    /// One step of compaction, over at most `pages` entries of the table; starts a pass if there is
    /// none. Runs beside any number of workers; concurrent calls wait for each other.
    pub fn compact_step(&self, pages: u64) -> Compacted {
        let mut sweep = self.sweep.lock().unwrap_or_else(PoisonError::into_inner);
        let from = match sweep.cursor {
            Some(cursor) => cursor,
            None => {
                sweep.leaving = choose(&self.heap);
                if sweep.leaving == NIL {
                    return Compacted::Nothing;
                }
                inject::step();
                0
            }
        };
        let heap = &self.heap;
        let records = heap.groups.records(&heap.map);
        let end = sweep.pages + records.len() as u64;
        let to = from.saturating_add(pages.max(1)).min(end).max(from);
        let mut bytes = [0; MAX_OBJECT];
        for index in from..to {
            let at = |index: u64| usize::try_from(index).expect("below the table's length");
            if let Some(slot) = heap.map.table().get(at(index)) {
                relocate(heap, index, slot, &mut bytes);
                continue;
            }
            let group = u32::try_from(index - sweep.pages).expect("groups have such numbers");
            let Some(record) = records.get(group as usize).filter(|one| one.is_taken()) else {
                continue;
            };
            for (number, slot) in record.pieces().iter().enumerate() {
                let index = heap.map.layout().piece_index(group, number);
                relocate(heap, index, slot, &mut bytes);
            }
        }
        if to < end {
            sweep.cursor = Some(to);
            return Compacted::More;
        }
        sweep.cursor = None;
        let freed = finish(&self.heap, std::mem::replace(&mut sweep.leaving, NIL));
        self.compacted.fetch_add(freed, Ordering::Relaxed);
        self.heap.work.notify_one();
        Compacted::Pages(freed)
    }

    /// A whole pass, which also frees the memory to the kernel if there is no keeper. Returns the
    /// number of pages freed.
    pub fn compact(&self) -> u64 {
        let freed = loop {
            match self.compact_step(u64::MAX) {
                Compacted::More => {}
                Compacted::Pages(pages) => break pages,
                Compacted::Nothing => break 0,
            }
        };
        if self.heap.keepers.load(Ordering::Relaxed) == 0 {
            self.trim();
        }
        freed
    }

    /// Frees the memory of all ready slabs, and of records behind the last group, to the kernel.
    /// Returns the number of bytes.
    pub fn trim(&self) -> u64 {
        let mut pages = 0;
        for length in (1..).zip(&CUTS[1..]).map(|(length, _)| length) {
            while self.heap.regions.shrink(&self.heap.map, length) {
                pages += u64::from(length);
            }
        }
        pages += self.trim_records();
        pages * PAGE as u64
    }

    /// Frees the memory of records behind the last group to the kernel. Returns the number of
    /// pages. A thread that uses a record keeps its group by a reference.
    pub(crate) fn trim_records(&self) -> u64 {
        // Compaction reads records without checking that they have memory.
        let _sweep = self.sweep.lock().unwrap_or_else(PoisonError::into_inner);
        self.heap.groups.shrink(&self.heap.map, &self.heap.regions)
    }

    /// Estimates how many pages of memory a pass of compaction would free. Looks at every slab.
    pub(crate) fn compactable(&self) -> u64 {
        let slabs = plan(&self.heap).into_iter().zip(&TABLE);
        slabs.map(|(slabs, class)| u64::from(slabs) * u64::from(class.pages)).sum()
    }
}
