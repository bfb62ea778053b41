//! Every interleaving, and every value that a weakly ordered load may give, of small models.
//!
//! Run by `scripts/loom`, which also removes one ordering after the other and expects a failure.
#![cfg(loom)]
#![expect(unsafe_code, reason = "one model writes what a stack's number stands for")]

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use ring::{EventCount, Fenced, Ring, Stack};

/// Explores `model` with `preemptions` forced switches at most; blocking switches are free.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Items are boxed: loom's cells detect two owners at once, and its leak check (and Miri) would
/// report a box that is seen twice or lost.
type Item = Box<u32>;

#[test]
fn two_producers_and_a_consumer_pass_every_item_once() {
    explore(3, || {
        let ring = Arc::new(Ring::<Item>::new(2));
        let producers = [1, 2].map(|item| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.push(Box::new(item)).expect("there is room for two"))
        });
        let mut seen = Vec::new();
        seen.extend(ring.pop());
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        // Both pushes have ended, so no item is still being written.
        seen.extend(std::iter::from_fn(|| ring.pop()));
        seen.sort();
        assert_eq!(seen, [Box::new(1), Box::new(2)]);
    });
}

#[test]
fn cells_are_used_again_when_the_ring_wraps() {
    explore(3, || {
        let ring = Arc::new(Ring::<Item>::new(2));
        ring.push(Box::new(1)).unwrap();
        ring.push(Box::new(2)).unwrap();
        let producer = {
            let ring = Arc::clone(&ring);
            // The ring is full unless the consumer popped first; then this writes the cell just
            // read.
            thread::spawn(move || ring.push(Box::new(3)).is_ok())
        };
        assert_eq!(ring.pop(), Some(Box::new(1)));
        let third = producer.join().unwrap();
        assert_eq!(ring.pop(), Some(Box::new(2)));
        assert_eq!(ring.pop(), third.then(|| Box::new(3)));
        assert_eq!(ring.pop(), None);
    });
}

#[test]
fn two_consumers_share_the_items() {
    explore(3, || {
        let ring = Arc::new(Ring::<Item>::new(2));
        let consumers = [(), ()].map(|()| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.pop())
        });
        ring.push(Box::new(1)).unwrap();
        ring.push(Box::new(2)).unwrap();
        let mut seen: Vec<_> = consumers.into_iter().filter_map(|c| c.join().unwrap()).collect();
        seen.extend(std::iter::from_fn(|| ring.pop()));
        seen.sort();
        assert_eq!(seen, [Box::new(1), Box::new(2)]);
    });
}

#[test]
fn an_item_of_a_stack_is_complete_and_has_one_owner() {
    explore(3, || {
        // The memory behind the numbers: loom detects two owners at once, and an owner that is not
        // done.
        let things = Arc::new([(); 2].map(|()| loom::cell::UnsafeCell::new(0_u32)));
        let stack = Arc::new(Stack::full(2));
        let use_one = |stack: &Stack, things: &[loom::cell::UnsafeCell<u32>; 2]| {
            if let Some(number) = stack.pop() {
                // SAFETY: the thread that popped the number owns the memory behind it; loom checks
                // just that.
                things[number as usize].with_mut(|thing| unsafe { *thing += 1 });
                stack.push(number);
            }
        };
        let others = [(), ()].map(|()| {
            let (stack, things) = (Arc::clone(&stack), Arc::clone(&things));
            thread::spawn(move || use_one(&stack, &things))
        });
        use_one(&stack, &things);
        others.into_iter().for_each(|other| other.join().unwrap());
        let mut left = [stack.pop(), stack.pop()];
        left.sort();
        assert_eq!((left, stack.pop()), ([Some(0), Some(1)], None));
    });
}

/// Sleeps for an item and takes it.
fn receive(ring: &Ring<Item>, items: &EventCount) -> Item {
    items.wait_until(None, || ring.pop()).expect("there is no deadline")
}

#[test]
fn a_sleeping_consumer_is_woken() {
    explore(3, || {
        let shared = Arc::new((Ring::<Item>::new(2), EventCount::new()));
        let consumer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let first = receive(&shared.0, &shared.1);
                let second = receive(&shared.0, &shared.1);
                assert_eq!((*first, *second), (1, 2));
            })
        };
        for item in [1, 2] {
            shared.0.push(Box::new(item)).unwrap();
            shared.1.notify_one();
        }
        consumer.join().unwrap();
    });
}

/// Both sides sleep: the consumer for items, the producer for room.
#[test]
fn both_sides_of_a_full_ring_are_woken() {
    explore(3, || {
        let shared = Arc::new((Ring::<Item>::new(2), EventCount::new(), EventCount::new()));
        let producer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (ring, items, room) = &*shared;
                for item in 1..=3 {
                    let mut item = Some(Box::new(item));
                    room.wait_until(None, || {
                        item = ring.push(item.take().unwrap()).err();
                        item.is_none().then_some(())
                    });
                    items.notify_one();
                }
            })
        };
        let (ring, items, room) = &*shared;
        for item in 1..=3 {
            assert_eq!(*receive(ring, items), item);
            room.notify_one();
        }
        producer.join().unwrap();
    });
}

/// Two sleepers, two items: the wake-ups may merge into one, whose receiver takes only one item.
#[test]
fn two_sleepers_are_both_woken() {
    explore(3, || {
        let shared = Arc::new((Ring::<Item>::new(2), EventCount::new()));
        let consumers = [(), ()].map(|()| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || receive(&shared.0, &shared.1))
        });
        for item in [1, 2] {
            shared.0.push(Box::new(item)).unwrap();
            shared.1.notify_one();
        }
        let mut seen = consumers.map(|consumer| consumer.join().unwrap());
        seen.sort();
        assert_eq!(seen, [Box::new(1), Box::new(2)]);
    });
}

/// The second item may be complete while the first is still being written. Its consumer then finds
/// nothing, and the first producer's notification has to serve both consumers.
#[test]
fn two_producers_wake_two_sleepers() {
    explore(2, || {
        let shared = Arc::new((Ring::<Item>::new(2), EventCount::new()));
        let send = |shared: &(Ring<Item>, EventCount), item| {
            shared.0.push(Box::new(item)).unwrap();
            shared.1.notify_one();
        };
        let producer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || send(&shared, 1))
        };
        let consumers = [(), ()].map(|()| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || receive(&shared.0, &shared.1))
        });
        send(&shared, 2);
        producer.join().unwrap();
        let mut seen = consumers.map(|consumer| consumer.join().unwrap());
        seen.sort();
        assert_eq!(seen, [Box::new(1), Box::new(2)]);
    });
}

/// A flag instead of a ring, with two waiters.
#[test]
fn notify_all_wakes_every_sleeper() {
    explore(3, || {
        let shared = Arc::new((AtomicBool::new(false), EventCount::new()));
        let waiters = [(), ()].map(|()| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let ready = || shared.0.load(Ordering::Relaxed).then_some(());
                shared.1.wait_until(None, ready).unwrap();
            })
        });
        shared.0.store(true, Ordering::Relaxed);
        shared.1.notify_all();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// One fence for two event counts, one of which is checked first, as the pipeline's workers do.
#[test]
fn one_fence_serves_several_event_counts() {
    explore(3, || {
        let ring = Ring::<Item>::new(2);
        let shared = Arc::new((ring, EventCount::new(), AtomicBool::new(false), EventCount::new()));
        let consumer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || receive(&shared.0, &shared.1))
        };
        let watcher = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let ready = || shared.2.load(Ordering::Relaxed).then_some(());
                shared.3.wait_until(None, ready).unwrap();
            })
        };
        shared.0.push(Box::new(1)).unwrap();
        shared.2.store(true, Ordering::Relaxed);
        let fence = Fenced::new();
        if shared.1.has_sleepers_after(&fence) {
            shared.1.notify_one();
        }
        shared.3.notify_all_after(&fence);
        assert_eq!(consumer.join().unwrap(), Box::new(1));
        watcher.join().unwrap();
    });
}
