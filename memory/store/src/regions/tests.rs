use super::*;
use crate::heap::Claimed;
use crate::{Options, Store};

/// Regression: it counted as one of class 0, whose lock does not protect it.
#[test]
fn a_slab_that_is_ready_belongs_to_no_class() {
    let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
    let heap = &store.heap;
    heap.grow(1, None).unwrap();
    let (slab, _) = heap.regions.take_ready(&heap.map, 1).unwrap();
    let state = heap.map.slab(slab);
    assert_eq!(state.role(), Role::Ready);
    assert!((0..crate::class::CLASSES).all(|class| state.class() != class_word(class)));
}

/// A thread that frees an object looks at its slab's role. Before, others may have emptied the
/// slab and freed its region, which then has slabs of another length.
#[test]
fn a_late_look_at_a_slab_whose_region_has_another_length_changes_nothing() {
    let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
    let heap = &store.heap;
    let class = TABLE.iter().position(|class| class.pages == 1).unwrap();
    heap.grow(1, None).unwrap();
    let (before, _) = heap.regions.take_ready(&heap.map, 1).unwrap();
    heap.regions.put_ready(&heap.map, before, 1);
    assert!(heap.regions.shrink(&heap.map, 1));
    let longest = TABLE.iter().map(|class| class.pages).max().unwrap();
    heap.grow(longest, None).unwrap();
    let (now, _) = heap.regions.take_ready(&heap.map, longest).unwrap();
    assert_eq!(now >> SLAB_BITS, before >> SLAB_BITS, "the region is used again");
    // Bytes of objects, which look like the state of a slab that has become full.
    let last = CUTS[1].slabs - 1;
    assert!(last > CUTS[longest as usize].slabs);
    let slab = before >> SLAB_BITS << SLAB_BITS | last;
    heap.map.slab(slab).reset(Role::Full, class_word(class), TABLE[class].objects);
    heap.release(Claimed { slab, class, index: 0 });
    assert_eq!(heap.map.slab(slab).role(), Role::Full, "bytes of objects were changed");
}
