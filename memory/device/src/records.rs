//! What the threads of a device know of it, and what they note: settings, dictionaries, counters,
//! damage.

use std::sync::{Arc, OnceLock};

use codec::Settings;
use pulse::{Pulse, Slot, SLOTS};
use store::MAX_WORKERS;

use crate::counters::Counters;
use crate::dictionaries::Dictionaries;
use crate::pages::Damage;

/// Threads that wait for a backing device, where there is one: so many of its reads are under way,
/// since a disk does several at a time faster than one after the other.
pub const FETCHERS: usize = 4;

/// Threads with an instance of a QAT device at most; each takes one of the store's workers.
pub(crate) const MAX_QAT_THREADS: usize = 32;

/// Shared by all threads of a device; none of it is ever waited for.
pub(crate) struct Records {
    pub(crate) pages: u64,
    pub(crate) settings: Settings,
    pub(crate) dictionaries: Arc<Dictionaries>,
    /// Threads that large requests are split over.
    pub(crate) workers: usize,
    counters: Box<[Counters]>,
    /// What each of these threads does, for a supervisor to see.
    pulse: Arc<Pulse>,
    damage: OnceLock<Damage>,
}

/// Whose counters they are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Thread {
    /// The worker of this number.
    Worker(usize),
    /// The transport's thread with the queue of this number.
    Queue(usize),
    /// The thread of this number that waits for the backing device.
    Fetcher(usize),
    /// The thread of this number with an instance of a QAT device.
    Qat(usize),
}

impl Records {
    pub(crate) fn new(
        pages: u64,
        settings: Settings,
        dictionaries: Arc<Dictionaries>,
        workers: usize,
        pulse: Arc<Pulse>,
    ) -> Self {
        let threads = workers + MAX_WORKERS + FETCHERS + MAX_QAT_THREADS;
        debug_assert!(threads <= SLOTS, "{threads} threads have {SLOTS} slots");
        Self {
            pages,
            settings,
            dictionaries,
            workers,
            counters: (0..threads).map(|_| Counters::default()).collect(),
            pulse,
            damage: OnceLock::new(),
        }
    }

    /// Where counters and sign of life of a thread are.
    pub(crate) fn place(&self, of: Thread) -> usize {
        match of {
            Thread::Worker(number) => number,
            Thread::Queue(number) => self.workers + number,
            Thread::Fetcher(number) => self.workers + MAX_WORKERS + number,
            Thread::Qat(number) => self.workers + MAX_WORKERS + FETCHERS + number,
        }
    }

    /// The counters at this place.
    #[inline]
    pub(crate) fn counters(&self, place: usize) -> &Counters {
        &self.counters[place]
    }

    /// The sign of life at this place.
    #[inline]
    pub(crate) fn slot(&self, place: usize) -> &Slot {
        self.pulse.slot(place)
    }

    /// Of all threads.
    pub(crate) fn all_counters(&self) -> &[Counters] {
        &self.counters
    }

    /// Notes the first damage that is found: it is for a person to read, the others are counted.
    pub(crate) fn note_damage(&self, damage: Damage) {
        let _ = self.damage.set(damage);
    }

    /// The first damage that was found.
    pub(crate) fn damage(&self) -> Option<&Damage> {
        self.damage.get()
    }
}
