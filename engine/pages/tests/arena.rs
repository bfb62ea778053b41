//! Operation lists on an `Arena`, and slots passed between threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pages::{Arena, Slot, PAGE_SIZE};
use proptest::prelude::*;
use ring::{EventCount, Ring};

fn stamp(slot: &mut Slot, with: u64) {
    let bytes = with.to_le_bytes();
    slot[..8].copy_from_slice(&bytes);
    let end = slot.len() - 8;
    slot[end..].copy_from_slice(&bytes);
}

fn stamped(slot: &Slot, with: u64) -> bool {
    let bytes = with.to_le_bytes();
    slot[..8] == bytes && slot[slot.len() - 8..] == bytes
}

proptest! {
    #[test]
    fn slots_are_disjoint_and_come_back(
        slots in 1usize..9,
        slot_bytes in 1usize..9000,
        ops in prop::collection::vec(prop::option::of(any::<prop::sample::Index>()), 0..100),
    ) {
        let arena = Arena::new(slots, slot_bytes).expect("a small mapping");
        let mut held: Vec<(u64, Slot)> = Vec::new();
        for (number, op) in (1..).zip(ops) {
            match op {
                None => match arena.take() {
                    Some(mut slot) => {
                        prop_assert!(held.len() < slots);
                        prop_assert_eq!(slot.len(), slot_bytes.next_multiple_of(PAGE_SIZE));
                        stamp(&mut slot, number);
                        held.push((number, slot));
                    }
                    None => prop_assert_eq!(held.len(), slots),
                },
                Some(index) if !held.is_empty() => {
                    let (number, slot) = held.swap_remove(index.index(held.len()));
                    prop_assert!(stamped(&slot, number), "another slot was written over this one");
                }
                Some(_) => {}
            }
            prop_assert_eq!(arena.free(), slots - held.len());
        }
        prop_assert!(held.iter().all(|(number, slot)| stamped(slot, *number)));
    }
}

#[test]
fn a_new_slot_is_zero_and_sizes_that_overflow_are_refused() {
    let arena = Arena::new(2, 3 * PAGE_SIZE).expect("a small mapping");
    let slot = arena.take().expect("a free slot");
    assert!(slot.iter().all(|&byte| byte == 0));
    for (slots, slot_bytes) in [(usize::MAX, 1), (1 << 20, usize::MAX / 2), (1, usize::MAX)] {
        let error = Arena::new(slots, slot_bytes).expect_err("too large");
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
    }
}

#[test]
fn a_slot_outlives_the_last_handle_on_its_arena() {
    let arena = Arena::new(1, PAGE_SIZE).expect("a small mapping");
    let mut slot = arena.take().expect("a free slot");
    drop(arena);
    stamp(&mut slot, 5);
    assert!(stamped(&slot, 5));
}

#[test]
fn waiting_threads_get_slots_and_stop_on_request() {
    let arena = Arena::new(2, PAGE_SIZE).expect("a small mapping");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let takers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut taken = 0u32;
                    while arena.take_until(None, || stop.load(Ordering::Acquire)).is_some() {
                        taken += 1;
                        if taken == 20_000 {
                            break;
                        }
                    }
                    taken
                })
            })
            .collect();
        for taker in takers {
            assert_eq!(taker.join().expect("no panic"), 20_000);
        }
        let held = [arena.take(), arena.take()];
        assert!(held.iter().all(Option::is_some), "every slot came back");
        let past = Some(Instant::now() + Duration::from_millis(2));
        assert!(arena.take_until(past, || false).is_none(), "none is free");
        let waiter = scope.spawn(|| arena.take_until(None, || stop.load(Ordering::Acquire)));
        stop.store(true, Ordering::Release);
        arena.wake_all();
        assert!(waiter.join().expect("no panic").is_none());
    });
    assert_eq!(arena.free(), 2);
}

#[test]
fn a_slot_carries_its_bytes() {
    let arena = Arena::new(4, PAGE_SIZE).expect("a small mapping");
    let (ring, event) = (Ring::new(2), EventCount::new());
    let (sent, room) = (&ring, EventCount::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..30_000u64 {
                let mut slot = arena.take_until(None, || false).expect("never told to stop");
                stamp(&mut slot, number);
                let mut slot = Some(slot);
                room.wait_until(None, || {
                    slot = slot.take().and_then(|slot| sent.push(slot).err());
                    slot.is_none().then_some(())
                });
                event.notify_one();
            }
        });
        for number in 0..30_000u64 {
            let slot = event.wait_until(None, || ring.pop()).expect("no deadline");
            room.notify_one();
            assert!(stamped(&slot, number));
        }
    });
    assert_eq!(arena.free(), 4);
}
