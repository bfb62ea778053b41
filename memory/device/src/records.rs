//! Data shared by a device's threads: settings, dictionaries, counters, damage.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use codec::Settings;
use pulse::{Pulse, Slot, SLOTS};
use store::MAX_WORKERS;

use crate::counters::Counters;
use crate::dictionaries::Dictionaries;
use crate::pages::Damage;

/// The number of fetch threads of a device with a backing device, and so of reads in flight: a disk
/// does several reads at a time faster than one after another.
pub const FETCHERS: usize = 4;

/// The most QAT threads; each takes one of the store's workers.
pub(crate) const MAX_QAT_THREADS: usize = 32;

/// The heartbeats of the QAT threads, whatever other threads a device has: a supervisor that finds
/// one of them hung knows that a call of the QAT device's driver does not return.
pub const QAT_SLOTS: Range<usize> = 0..MAX_QAT_THREADS;

/// Shared by all threads of a device, without waiting.
pub(crate) struct Records {
    pub(crate) pages: u64,
    pub(crate) settings: Settings,
    pub(crate) dictionaries: Arc<Dictionaries>,
    /// Threads that large requests are split over.
    pub(crate) workers: usize,
    counters: Box<[Counters]>,
    /// The threads' heartbeats, for a supervisor.
    pulse: Arc<Pulse>,
    damage: OnceLock<Damage>,
}

/// A thread with counters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Thread {
    /// The worker with this number.
    Worker(usize),
    /// The transport's thread that has the queue with this number.
    Queue(usize),
    /// The fetch thread with this number.
    Fetcher(usize),
    /// The QAT thread with this number.
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

    /// The place of a thread's counters and heartbeat.
    pub(crate) fn place(&self, of: Thread) -> usize {
        let workers = QAT_SLOTS.end;
        let queues = workers + self.workers;
        match of {
            Thread::Qat(number) => QAT_SLOTS.start + number,
            Thread::Worker(number) => workers + number,
            Thread::Queue(number) => queues + number,
            Thread::Fetcher(number) => queues + MAX_WORKERS + number,
        }
    }

    /// The counters at this place.
    #[inline]
    pub(crate) fn counters(&self, place: usize) -> &Counters {
        &self.counters[place]
    }

    /// The heartbeat at this place.
    #[inline]
    pub(crate) fn slot(&self, place: usize) -> &Slot {
        self.pulse.slot(place)
    }

    /// The counters of all threads.
    pub(crate) fn all_counters(&self) -> &[Counters] {
        &self.counters
    }

    /// Records the first damage, for a person to read; further damage is only counted.
    pub(crate) fn note_damage(&self, damage: Damage) {
        let _ = self.damage.set(damage);
    }

    /// The first damage that was found.
    pub(crate) fn damage(&self) -> Option<&Damage> {
        self.damage.get()
    }
}
