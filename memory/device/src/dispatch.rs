//! How requests get from the queues to the other threads of a device: stations, and rings of
//! invitations.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use qat::Snapshot;
use ring::{EventCount, Ring};
use store::MAX_WORKERS;

use crate::request::Op;
use crate::station::Station;

/// An invitation to work on a queue's flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invitation {
    pub(crate) queue: u16,
    pub(crate) flight: u16,
}

/// Pages of a flight that a fetch thread has to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    pub(crate) queue: u16,
    pub(crate) flight: u16,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// Entries in the ring to the fetch threads. A split request takes five, and one for each worker
/// that has found its first page on the backing device: 64 requests of four ublk queues each are
/// 2,000 entries on four CPUs. If the ring is full, the thread that finds such a page waits for the
/// backing device itself.
const FETCHES: usize = 16_384;

/// A ring of work for threads of one kind, and the event they wait on.
pub(crate) struct Work<T> {
    ring: Ring<T>,
    /// Signalled when the ring has work or the threads have to stop.
    event: EventCount,
}

/// The result of waiting for work.
pub(crate) enum Next<T> {
    Work(T),
    /// The deadline has passed.
    Nothing,
    Stop,
}

impl<T> Work<T> {
    fn new(room: usize) -> Self {
        let event = EventCount::new();
        // The first wait of a process asks for the number of its CPUs, which allocates. So it is
        // done here.
        let _ = event.wait_until(Some(Instant::now()), || None::<()>);
        Self { ring: Ring::new(room), event }
    }

    /// Adds `work`; `false` if there is no room.
    fn put(&self, work: T) -> bool {
        self.ring.push(work).is_ok()
    }

    /// Takes work without waiting.
    pub(crate) fn pop(&self) -> Option<T> {
        self.ring.pop()
    }

    /// Waits for work, until `deadline` if there is one.
    pub(crate) fn wait(&self, deadline: Option<Instant>, stop: &AtomicBool) -> Next<T> {
        let next = self.event.wait_until(deadline, || {
            let work = self.ring.pop();
            let stopped = work.is_none() && stop.load(Ordering::Acquire);
            (work.is_some() || stopped).then_some(work)
        });
        match next {
            Some(Some(work)) => Next::Work(work),
            Some(None) => Next::Stop,
            None => Next::Nothing,
        }
    }
}

impl<T: Copy> Work<T> {
    /// Adds `work` up to `number` times, as far as there is room; returns how often.
    fn put_often(&self, work: T, number: u32) -> u32 {
        let sent = (0..number).take_while(|_| self.put(work)).count();
        // Each woken thread wakes the next.
        self.event.notify_one();
        u32::try_from(sent).expect("no more than asked for")
    }
}

/// Writes for the QAT threads.
pub(crate) struct QatWork {
    pub(crate) invitations: Work<Invitation>,
    /// QAT threads whose instance accepts pages. The number is only a hint: such a thread completes
    /// every page that it gets, on the device or in software.
    pub(crate) on_device: AtomicUsize,
    /// The counters of each QAT thread, by number.
    counters: Mutex<Vec<Arc<qat::Counters>>>,
}

/// Pages of a write that justify waking one more QAT thread: half of the pages that one has in
/// flight.
const QAT_THREAD_PAGES: u32 = 64;

impl QatWork {
    fn new() -> Self {
        Self {
            invitations: Work::new(1024),
            on_device: AtomicUsize::new(0),
            counters: Mutex::default(),
        }
    }

    /// Whether writes should go to the QAT threads.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        self.on_device.load(Ordering::Relaxed) > 0
    }

    /// How many QAT threads to wake for a write of `pages` pages.
    pub(crate) fn threads_for(&self, pages: u32) -> u32 {
        let threads = u32::try_from(self.on_device.load(Ordering::Relaxed)).unwrap_or(1);
        (pages / QAT_THREAD_PAGES).clamp(1, threads.max(1))
    }

    /// Sends an invitation up to `number` times, as far as there is room; returns how often.
    pub(crate) fn invite(&self, invitation: Invitation, number: u32) -> u32 {
        self.invitations.put_often(invitation, number)
    }

    pub(crate) fn add_thread(&self, counters: &Arc<qat::Counters>) {
        let mut all = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::clone(counters));
    }

    pub(crate) fn is_set_up(&self) -> bool {
        !self.counters.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// The number of QAT threads whose instance accepts pages, and the driver's counters of each;
    /// `None` without QAT threads.
    pub(crate) fn stats(&self) -> Option<(usize, Vec<Snapshot>)> {
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let engines: Vec<Snapshot> = counters.iter().map(|one| one.snapshot()).collect();
        let on_device = self.on_device.load(Ordering::Relaxed);
        (!engines.is_empty()).then_some((on_device, engines))
    }
}

/// Shared by all threads of a device, to pass requests on.
pub(crate) struct Dispatch {
    workers: usize,
    pub(crate) invitations: Work<Invitation>,
    pub(crate) fetches: Work<Fetch>,
    /// The number of fetch threads; 0 without a backing device.
    pub(crate) fetchers: usize,
    pub(crate) qat: QatWork,
    pub(crate) stop: AtomicBool,
    /// A queue's station is made at first use and never freed, because an invitation may outlive
    /// the queue.
    stations: Box<[OnceLock<Station>]>,
    /// Bit n is set: station n has a queue.
    open: Mutex<u64>,
}

impl Dispatch {
    pub(crate) fn new(workers: usize, fetchers: usize) -> Self {
        Self {
            workers,
            invitations: Work::new(1024),
            fetches: Work::new(if fetchers > 0 { FETCHES } else { 2 }),
            fetchers,
            qat: QatWork::new(),
            stop: AtomicBool::new(false),
            stations: (0..MAX_WORKERS).map(|_| OnceLock::new()).collect(),
            open: Mutex::new(0),
        }
    }

    pub(crate) fn station(&self, queue: u16) -> &Station {
        self.stations[usize::from(queue)].get().expect("it was made with its queue")
    }

    /// Requests of this many pages or more are split.
    pub(crate) fn split_from(&self, op: Op) -> u32 {
        match op {
            _ if self.workers == 0 => u32::MAX,
            // Waking a thread costs about as much as compressing a page, or reading two to three.
            Op::Write => 8,
            Op::Read => 16,
            Op::Discard | Op::WriteZeroes { .. } => 16384,
            Op::Flush => u32::MAX,
        }
    }

    /// Sends workers an invitation up to `number` times, as far as there is room; returns how
    /// often.
    pub(crate) fn invite(&self, invitation: Invitation, number: u32) -> u32 {
        self.invitations.put_often(invitation, number)
    }

    /// Passes `count` pages of a flight, from its page `first`, to a fetch thread; `false` if there
    /// is no such thread, or no room in the ring. The caller has counted the invitation.
    pub(crate) fn fetch(&self, queue: u16, flight: u16, first: u32, count: u32) -> bool {
        let sent = self.fetchers > 0 && self.fetches.put(Fetch { queue, flight, first, count });
        if sent {
            self.fetches.event.notify_one();
        }
        sent
    }

    /// Orders all threads to finish the queued work and end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.invitations.event.notify_all();
        self.fetches.event.notify_all();
        self.qat.invitations.event.notify_all();
    }

    /// Opens the first free station number with `make`; `None` if all are taken.
    pub(crate) fn open<T, E>(
        &self,
        make: impl FnOnce(usize, &OnceLock<Station>) -> Result<T, E>,
    ) -> Result<Option<T>, E> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let at = open.trailing_ones() as usize;
        let Some(station) = self.stations.get(at) else { return Ok(None) };
        let made = make(at, station)?;
        *open |= 1 << at;
        Ok(Some(made))
    }

    /// Frees a queue's station number.
    pub(crate) fn close(&self, queue: u16) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << queue);
    }
}
