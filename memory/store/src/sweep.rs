//! Compaction: moves objects out of the emptiest slabs into other slabs of their class.
//!
//! A pass chooses, in each class, as many of the emptiest listed slabs as the class's other listed
//! slabs and the last slabs of the three larger classes have room for. In a class with many slabs
//! it looks at some of them, and the next pass at others. It walks the whole table
//! once, in steps, and moves the objects in the chosen slabs. Then the empty ones become ready for
//! any class. The table is the index from a slab to its objects: no object has a pointer back to
//! its page. A slab that got an object meanwhile (a worker had claimed a place and not yet
//! published it) is listed again until the next pass.
//!
//! If a server is killed in a pass, an object is at its old place or its new one, and the other
//! place is free: the store of its entry decides, as for a write.

use crate::class::{class_word, fitting, CLASSES, TABLE, WHOLE};
use crate::entry::{State, MAX_OBJECT};
use crate::heap::{Claimed, Heap, MAX_BUMP};
use crate::inject;
use crate::object::{checksum, locate};
use crate::slab::{Role, NIL};
use crate::slot::Slot;

/// Slabs of a class that one pass looks at, from the back of its list, while it holds the class's
/// lock.
const LOOK_AT: usize = 1024;

/// The state of compaction.
pub(crate) struct Sweep {
    pub(crate) pages: u64,
    /// The next table entry to look at, during a pass.
    pub(crate) cursor: Option<u64>,
    /// Slabs being emptied, linked by `next`.
    pub(crate) leaving: u32,
}

impl Sweep {
    pub(crate) fn new(pages: u64) -> Self {
        Self { pages, cursor: None, leaving: NIL }
    }
}

/// How many slabs of each class a pass can empty.
///
/// Emptying a slab removes its free places, and needs a free place in another slab for each of its
/// objects: as many free places in total as the slab has places. The rest of a class's free places
/// is less than one slab. If that rest and the rests of the few larger classes suffice, one slab
/// more can be emptied, so that classes share their last slabs.
pub(crate) fn plan(heap: &Heap) -> [u32; CLASSES] {
    let mut free = [0_u32; CLASSES];
    let mut slabs = [0_u32; CLASSES];
    for class in 0..CLASSES {
        let objects = TABLE[class].objects;
        let list = heap.lock(class);
        for slab in list.listed_from_back(&heap.map).take(LOOK_AT) {
            free[class] += objects - heap.map.slab(slab).in_use(objects);
            slabs[class] += 1;
        }
    }
    let mut left: [u32; CLASSES] = std::array::from_fn(|class| free[class] % TABLE[class].objects);
    std::array::from_fn(|class| {
        let objects = TABLE[class].objects;
        let possible = (free[class] / objects).min(slabs[class]);
        // `left` no longer has what smaller classes will use.
        let missing = objects - left[class];
        let larger = class + 1..(class + 1 + MAX_BUMP).min(WHOLE).max(class + 1);
        if possible == slabs[class] || left[larger.clone()].iter().sum::<u32>() < missing {
            return possible;
        }
        // Only if no smaller class uses this class's rest.
        if left[class] < free[class] % objects {
            return possible;
        }
        left[class] = 0;
        let mut missing = missing;
        for larger in &mut left[larger] {
            let part = missing.min(*larger);
            *larger -= part;
            missing -= part;
        }
        possible + 1
    })
}

/// Unlists the emptiest slabs, which are to be emptied, and links them.
pub(crate) fn choose(heap: &Heap) -> u32 {
    let mut leaving = NIL;
    for (class, slabs) in plan(heap).into_iter().enumerate().filter(|(_, slabs)| *slabs > 0) {
        let objects = TABLE[class].objects;
        let mut list = heap.lock(class);
        // The number of slabs by objects in use at this moment; more objects may be freed
        // meanwhile.
        let mut by_use = [0_u32; 65];
        let mut looked = 0;
        for slab in list.listed_from_back(&heap.map).take(LOOK_AT) {
            by_use[heap.map.slab(slab).in_use(objects) as usize] += 1;
            looked += 1;
        }
        let mut below = 0;
        let mut fewer = 0;
        while below < objects && fewer + by_use[below as usize] <= slabs {
            fewer += by_use[below as usize];
            below += 1;
        }
        // All slabs with fewer objects than `below`, and `as_many` of those with just as many.
        let mut as_many = slabs - fewer;
        let mut slab = list.tail();
        for _ in 0..looked {
            let prev = heap.map.slab(slab).prev();
            let used = heap.map.slab(slab).in_use(objects);
            if used < below || used == below && as_many > 0 {
                as_many -= u32::from(used == below);
                list.unlink(&heap.map, slab);
                heap.map.slab(slab).set_role(Role::Leaving);
                heap.map.slab(slab).set_next(leaving);
                leaving = slab;
            } else if looked == LOOK_AT {
                // At the back it would keep the next passes from the slabs before it. It is one of
                // the fuller ones, which are to be filled.
                list.unlink(&heap.map, slab);
                list.push_front(&heap.map, slab);
            }
            slab = prev;
        }
    }
    leaving
}

/// Moves an entry's object out of a slab that is being emptied, if it is in one and is not in use.
pub(crate) fn relocate(heap: &Heap, index: u64, slot: &Slot, bytes: &mut [u8; MAX_OBJECT]) {
    let leaves = |word: crate::entry::Word| match word.state() {
        Some(State::Object(object)) => {
            let (class, place) = locate(&heap.map, &object)?;
            let slab = heap.map.slab(object.slab);
            let leaves = slab.role() == Role::Leaving && slab.class() == class_word(class);
            leaves.then_some((object, class, place))
        }
        _ => None,
    };
    if leaves(slot.load()).is_none() {
        return;
    }
    let Ok(pinned) = slot.pin(false) else { return };
    inject::step();
    // The pinned object may differ from the one seen before.
    let Some((object, class, from)) = leaves(pinned) else { return slot.unpin() };
    let fits = fitting(object.len as usize);
    let Some(to) = heap.claim_existing(fits) else { return slot.unpin() };
    inject::step();
    let bump = u32::try_from(to.class - fits).expect("three at most");
    let new = pinned.at(to.slab, to.index, bump);
    let moved = crate::entry::Object { slab: to.slab, index: to.index, bump, ..object };
    let (_, place) = locate(&heap.map, &moved).expect("the heap claims places that exist");
    let bytes = &mut bytes[..object.len as usize];
    let mut sum = heap.map.read(from, bytes);
    if moved.bump != object.bump {
        // The exchange of seeds by XOR preserves an error in the checksum, so a read still detects
        // it.
        sum ^= checksum(index, &object, bytes) ^ checksum(index, &moved, bytes);
    }
    heap.map.write(place, sum, bytes);
    inject::step();
    if slot.relocate(pinned, new) {
        inject::step();
        heap.release(Claimed { slab: object.slab, class, index: object.index });
    } else {
        // Another thread reads it: try in the next pass.
        slot.unpin();
        heap.release(to);
    }
    inject::step();
}

/// Makes the emptied slabs ready and lists the others again. Returns the pages of the former.
pub(crate) fn finish(heap: &Heap, mut leaving: u32) -> u64 {
    let mut freed = 0;
    while leaving != NIL {
        let slab = leaving;
        leaving = heap.map.slab(slab).next();
        let class = heap.map.slab(slab).class() as usize;
        let of = TABLE[class];
        let mut list = heap.lock(class);
        if list.give_back(&heap.map, slab, of.objects) {
            heap.regions.put_ready(&heap.map, slab, of.pages);
            freed += u64::from(of.pages);
        }
        drop(list);
        inject::step();
    }
    freed
}
