//! A class's list has its slabs with free objects, those to be filled first at the front.

use crate::map::Map;
use crate::slab::{Role, NIL};

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

impl List {
    pub(super) const EMPTY: Self = Self { head: NIL, tail: NIL, slabs: 0 };

    /// Claims from the first listed slab, and unlists it if that filled it.
    pub(super) fn claim_shared(&mut self, map: &Map, class: usize) -> Option<Claimed> {
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

    /// Marks a slab without room as full, or lists it if an object in it was just freed.
    fn set_full(&mut self, map: &Map, slab: u32) {
        if map.slab(slab).set_role(Role::Full) != u64::MAX {
            map.slab(slab).set_role(Role::Listed);
            self.push_front(map, slab);
        }
    }

    /// Takes a worker's slab back. If it is empty, the caller has to look at it again.
    pub(super) fn disown(&mut self, map: &Map, slab: u32) {
        self.set_full(map, slab);
    }

    /// Puts back a slab that compaction did not empty; returns whether it is empty after all.
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

    pub(super) fn pop(&mut self, map: &Map) -> Option<u32> {
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
