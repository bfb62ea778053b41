//! Operation lists on a `Ring`, against a `VecDeque`.
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;
use ring::Ring;

#[derive(Clone, Debug)]
enum Op {
    Push,
    Pop,
}

proptest! {
    #[test]
    fn a_ring_does_what_a_bounded_queue_does(
        capacity in 0usize..20,
        ops in prop::collection::vec(prop_oneof![3 => Just(Op::Push), 2 => Just(Op::Pop)], 0..300),
    ) {
        let ring = Ring::new(capacity);
        prop_assert_eq!(ring.capacity(), capacity.max(2).next_power_of_two());
        let mut queue = VecDeque::new();
        // Each item holds a clone of one `Arc`: its count shows an item dropped twice or never.
        let witness = Arc::new(());
        for (number, op) in ops.iter().enumerate() {
            match op {
                Op::Push => {
                    let pushed = ring.push((number, Arc::clone(&witness)));
                    if queue.len() < ring.capacity() {
                        prop_assert!(pushed.is_ok());
                        queue.push_back(number);
                    } else {
                        prop_assert_eq!(pushed.map_err(|(n, _)| n), Err(number));
                    }
                }
                Op::Pop => {
                    prop_assert_eq!(ring.pop().map(|(n, _)| n), queue.pop_front());
                }
            }
            prop_assert_eq!(ring.len(), queue.len());
            prop_assert_eq!(ring.is_empty(), queue.is_empty());
            prop_assert_eq!(ring.has_room(), queue.len() < ring.capacity());
            prop_assert_eq!(Arc::strong_count(&witness), queue.len() + 1);
        }
        drop(ring);
        prop_assert_eq!(Arc::strong_count(&witness), 1);
    }
}
