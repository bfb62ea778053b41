//! Real threads, bounded by count: every item arrives once, and no thread sleeps for ever.
#![cfg(not(loom))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ring::{EventCount, Ring};

/// A ring with both waits.
struct Channel {
    ring: Ring<u64>,
    items: EventCount,
    room: EventCount,
}

impl Channel {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            ring: Ring::new(capacity),
            items: EventCount::new(),
            room: EventCount::new(),
        })
    }

    fn send(&self, item: u64) {
        within("room", || self.room.wait_until(soon(), || self.ring.push(item).ok()));
        self.items.notify_one();
    }

    fn receive(&self) -> u64 {
        let item = within("an item", || self.items.wait_until(soon(), || self.ring.pop()));
        self.room.notify_one();
        item
    }
}

/// A deadline long after any expected event: a wait that reaches it has lost its wake-up.
fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(200))
}

fn within<R>(what: &str, wait: impl FnOnce() -> Option<R>) -> R {
    let began = Instant::now();
    let found = wait().unwrap_or_else(|| panic!("{what} never came: a wake-up was lost"));
    // `wait_until` checks once more at the deadline, so it may find an item after a lost wake-up.
    assert!(began.elapsed() < Duration::from_secs(150), "{what} came only by the deadline");
    found
}

fn many_to_many(producers: u64, consumers: u64, capacity: usize, each: u64) {
    let channel = Channel::new(capacity);
    let sum = AtomicU64::new(0);
    let total = producers * each;
    assert_eq!(total % consumers, 0, "every consumer takes the same number");
    thread::scope(|scope| {
        for producer in 0..producers {
            let channel = &channel;
            scope.spawn(move || (0..each).for_each(|n| channel.send(producer * each + n + 1)));
        }
        for _ in 0..consumers {
            scope.spawn(|| {
                for _ in 0..total / consumers {
                    sum.fetch_add(channel.receive(), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), total * (total + 1) / 2);
    assert!(channel.ring.is_empty());
}

#[test]
fn one_to_one_through_the_smallest_ring() {
    many_to_many(1, 1, 2, 100_000);
}

#[test]
fn many_to_one_arrives_complete() {
    many_to_many(6, 1, 4, 15_000);
}

#[test]
fn many_to_many_through_the_smallest_ring() {
    many_to_many(4, 4, 2, 20_000);
}

#[test]
fn one_to_many_wakes_every_sleeper() {
    many_to_many(1, 6, 64, 90_000);
}

/// Two threads that are never both awake for long: each step is one sleep and one wake-up.
#[test]
fn ping_pong_never_stops() {
    let (there, back) = (Channel::new(2), Channel::new(2));
    thread::scope(|scope| {
        scope.spawn(|| (0..30_000).for_each(|_| back.send(there.receive() + 1)));
        for n in 0..30_000 {
            there.send(n);
            assert_eq!(back.receive(), n + 1);
        }
    });
}

#[test]
fn notify_all_ends_every_wait() {
    for _ in 0..300 {
        let (event, stop) = (EventCount::new(), AtomicBool::new(false));
        thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| {
                    within("the end", || {
                        event.wait_until(soon(), || stop.load(Ordering::Relaxed).then_some(()))
                    });
                });
            }
            stop.store(true, Ordering::Relaxed);
            event.notify_all();
        });
    }
}

#[test]
fn a_deadline_ends_a_wait_and_later_ones_still_work() {
    let channel = Channel::new(2);
    let deadline = Instant::now() + Duration::from_millis(5);
    assert_eq!(channel.items.wait_until(Some(deadline), || channel.ring.pop()), None);
    assert!(Instant::now() >= deadline);
    // A deadline in the past still checks once.
    channel.send(7);
    assert_eq!(channel.items.wait_until(Some(deadline), || channel.ring.pop()), Some(7));
    thread::scope(|scope| {
        scope.spawn(|| channel.send(8));
        assert_eq!(channel.receive(), 8);
    });
}

/// Time-outs and wake-ups that race: a waiter that gives up must not consume a wake-up.
#[test]
fn waiters_that_give_up_lose_no_wake_up_of_another() {
    let channel = Channel::new(4);
    let taken = AtomicU64::new(0);
    const ITEMS: u64 = 40_000;
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while taken.load(Ordering::Relaxed) < ITEMS {
                    let deadline = Some(Instant::now() + Duration::from_micros(30));
                    if channel.items.wait_until(deadline, || channel.ring.pop()).is_some() {
                        taken.fetch_add(1, Ordering::Relaxed);
                        channel.room.notify_one();
                    }
                }
            });
        }
        (0..ITEMS).for_each(|n| channel.send(n));
    });
    assert_eq!(taken.into_inner(), ITEMS);
}

/// While both sides are busy no thread makes a system call.
#[test]
fn a_notification_without_sleepers_makes_no_system_call() {
    let channel = Channel::new(4);
    for n in 0..10_000 {
        channel.send(n);
        assert_eq!(channel.receive(), n);
    }
    assert_eq!(channel.items.futex_calls() + channel.room.futex_calls(), 0);
}
