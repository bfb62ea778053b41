//! Loom models of the mailbox: every interleaving, and every value that a weakly ordered load may
//! return.
//!
//! `scripts/loom` runs them, also with each ordering or step weakened in turn, and then requires a
//! failure. The driver's side is one thread, as an engine is; any thread runs callbacks.

#![expect(unsafe_code, reason = "the models write what stands for a slot's memory")]

use super::{parse, Mailbox};
use crate::mailbox::{Events, State};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::Arc;
use loom::thread;
use qat_abi as abi;

const SLOT: u16 = 1;
const BIT: u64 = 1 << SLOT;

/// Explores `model` with at most three forced switches; switches at the end or in a wait are free.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

impl Mailbox {
    /// As `on_completion`, on the model's own mailbox.
    fn call_back(&self, tag: usize, status: i32) {
        let (_, slot, generation) = parse(std::ptr::without_provenance_mut(tag));
        self.deliver(slot, generation, status);
    }

    /// Announces a request in `SLOT`.
    fn announce(&self) -> usize {
        self.expect(0, SLOT).addr()
    }

    /// Waits until a callback in `SLOT` is reported; returns its status.
    fn taken(&self) -> i32 {
        while self.take_done(0) != BIT {
            thread::yield_now();
        }
        self.status(SLOT)
    }

    fn stray(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }
}

/// A minimal library: the thread that polls gets the request, writes the results and runs the
/// callback. It orders what precedes the submission before the poll (as it must, for the request's
/// own memory), and nothing else.
struct Library {
    mailbox: Mailbox,
    ring: AtomicUsize,
    results: UnsafeCell<i32>,
}

impl Library {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            mailbox: Mailbox::new(),
            ring: AtomicUsize::new(0),
            results: UnsafeCell::new(0),
        })
    }

    /// The driver prepares the slot, announces the request, submits it.
    fn submit(&self, seed: i32) {
        // SAFETY: the slot is the driver's here; loom checks just that.
        self.results.with_mut(|results| unsafe { *results = seed });
        // An exchange, like a lock: loom may order a plain store before an earlier exchange of
        // another thread.
        self.ring.swap(self.mailbox.announce(), Ordering::Release);
    }

    fn poll(&self) {
        let tag = self.ring.swap(0, Ordering::Acquire);
        if tag == 0 {
            return;
        }
        // SAFETY: the slot is the device's until its callback; loom checks just that.
        let results = self.results.with_mut(|results| unsafe {
            *results *= 10;
            *results
        });
        self.mailbox.call_back(tag, -results);
    }

    /// The driver takes the callback and reads its results.
    fn take(&self) -> (i32, i32) {
        let status = self.mailbox.taken();
        // SAFETY: the callback has been taken, so the slot is the driver's; loom checks just that.
        (status, self.results.with(|results| unsafe { *results }))
    }
}

#[test]
fn results_are_seen_and_the_slot_can_be_used_again() {
    explore(|| {
        let library = Library::new();
        library.submit(1);
        let events = {
            let library = Arc::clone(&library);
            thread::spawn(move || {
                library.poll();
                library.poll();
            })
        };
        library.poll();
        assert_eq!(library.take(), (-10, 10));
        library.submit(2);
        library.poll();
        assert_eq!(library.take(), (-20, 20));
        events.join().unwrap();
        assert_eq!((library.mailbox.take_done(0), library.mailbox.stray()), (0, 0));
    });
}

#[test]
fn two_callbacks_of_a_request_are_one_report_and_one_stray() {
    explore(|| {
        let mailbox = Arc::new(Mailbox::new());
        let tag = mailbox.announce();
        let pollers = [-1, -2].map(|status| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.call_back(tag, status))
        });
        let status = mailbox.taken();
        assert!(matches!(status, -1 | -2), "{status}");
        pollers.into_iter().for_each(|poller| poller.join().unwrap());
        assert_eq!((mailbox.take_done(0), mailbox.stray()), (0, 1));
        assert_eq!(mailbox.status(SLOT), status);
    });
}

#[test]
fn callbacks_of_two_slots_are_each_reported_once() {
    explore(|| {
        let shared = Arc::new((Mailbox::new(), [UnsafeCell::new(0), UnsafeCell::new(0)]));
        let pollers = [0, 1].map(|slot| {
            let tag = shared.0.expect(0, slot).addr();
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // SAFETY: the slot is the device's until its callback; loom checks just that.
                shared.1[usize::from(slot)].with_mut(|results| unsafe { *results = 7 });
                shared.0.call_back(tag, i32::from(slot));
            })
        });
        let mut seen = 0;
        while seen != 0b11 {
            let bits = shared.0.take_done(0);
            assert_eq!(seen & bits, 0, "reported twice");
            for slot in (0..2_u16).filter(|slot| bits >> slot & 1 == 1) {
                assert_eq!(shared.0.status(slot), i32::from(slot));
                // SAFETY: the callback has been taken, so the slot is the driver's; loom checks
                // just that.
                let results = shared.1[usize::from(slot)].with(|results| unsafe { *results });
                assert_eq!(results, 7);
            }
            seen |= bits;
            thread::yield_now();
        }
        pollers.into_iter().for_each(|poller| poller.join().unwrap());
        assert_eq!(shared.0.take_done(0), 0);
    });
}

/// The library refuses a request and calls back for it nevertheless, concurrently or later.
#[test]
fn a_late_callback_never_completes_the_next_request() {
    explore(|| {
        let mailbox = Arc::new(Mailbox::new());
        let old = mailbox.announce();
        let events = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.call_back(old, -1))
        };
        let forgotten = mailbox.give_up(SLOT);
        if !forgotten {
            assert_eq!(mailbox.taken(), -1);
        }
        let new = mailbox.announce();
        assert_eq!(mailbox.take_done(0), 0, "the next request's callback has not come yet");
        events.join().unwrap();
        assert_eq!(mailbox.take_done(0), 0, "the next request's callback has not come yet");
        assert_eq!(mailbox.stray(), u64::from(forgotten));
        mailbox.call_back(new, 5);
        assert_eq!(mailbox.taken(), 5);
    });
}

/// As above, while the next request's own callback comes.
#[test]
fn a_late_and_a_right_callback_bring_the_right_status() {
    explore(|| {
        let mailbox = Arc::new(Mailbox::new());
        let later = |tag, status| {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.call_back(tag, status))
        };
        let late = later(mailbox.announce(), -1);
        let forgotten = mailbox.give_up(SLOT);
        if !forgotten {
            assert_eq!(mailbox.taken(), -1);
        }
        let right = later(mailbox.announce(), 5);
        assert_eq!(mailbox.taken(), 5);
        late.join().unwrap();
        right.join().unwrap();
        assert_eq!((mailbox.take_done(0), mailbox.status(SLOT)), (0, 5));
        assert_eq!(mailbox.stray(), u64::from(forgotten));
    });
}

/// A second callback of a completed request, while the slot's next request is announced and
/// completed.
#[test]
fn a_second_callback_never_completes_the_next_request() {
    explore(|| {
        let mailbox = Arc::new(Mailbox::new());
        let old = mailbox.announce();
        let events = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.call_back(old, -1))
        };
        mailbox.call_back(old, -1);
        assert_eq!(mailbox.taken(), -1);
        let new = mailbox.announce();
        assert_eq!(mailbox.take_done(0), 0, "the next request's callback has not come yet");
        mailbox.call_back(new, 5);
        assert_eq!(mailbox.taken(), 5);
        events.join().unwrap();
        assert_eq!((mailbox.take_done(0), mailbox.stray()), (0, 1));
        assert_eq!(mailbox.status(SLOT), 5);
    });
}

#[test]
fn a_restart_is_noticed_after_its_death_and_with_its_state() {
    explore(|| {
        let mailbox = Arc::new(Mailbox::new());
        let events = {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || {
                mailbox.event(abi::CPA_INSTANCE_EVENT_FATAL_ERROR);
                mailbox.event(abi::CPA_INSTANCE_EVENT_RESTARTING);
                mailbox.event(abi::CPA_INSTANCE_EVENT_RESTARTED);
            })
        };
        let look = || {
            let Events { state, fatals, restarts } = mailbox.events();
            if restarts == 1 {
                assert_eq!((state, fatals), (State::Running, 1));
            }
            restarts
        };
        let first = look();
        assert!(first <= look());
        events.join().unwrap();
        assert_eq!(look(), 1);
    });
}
