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

/// An invitation to work on a flight of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invitation {
    pub(crate) queue: u16,
    pub(crate) flight: u16,
}

/// Pages of a flight that have to be waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    pub(crate) queue: u16,
    pub(crate) flight: u16,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// Pieces of requests that may wait for the backing device's threads. A request that is split has
/// five and one for each worker that has found the first: 64 requests of four ublk queues each are
/// 2,000 pieces on four CPUs. The thread that has one more waits for the backing device itself, as
/// without these threads.
const FETCHES: usize = 16_384;

/// Work for threads of one kind, and what they sleep on.
pub(crate) struct Work<T> {
    ring: Ring<T>,
    /// The ring has something, or it is time to stop.
    event: EventCount,
}

/// What came of waiting for work.
pub(crate) enum Next<T> {
    Work(T),
    /// The time is up.
    Nothing,
    Stop,
}

impl<T> Work<T> {
    fn new(room: usize) -> Self {
        let event = EventCount::new();
        // The first wait of a process asks for the number of its CPUs, which allocates.
        let _ = event.wait_until(Some(Instant::now()), || None::<()>);
        Self { ring: Ring::new(room), event }
    }

    /// Puts `work` in; `false` if there is no room.
    fn put(&self, work: T) -> bool {
        self.ring.push(work).is_ok()
    }

    /// What is there, without waiting.
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
    /// Puts `work` in `number` times, as long as there is room, and gives how often it was.
    fn put_often(&self, work: T, number: u32) -> u32 {
        let sent = (0..number).take_while(|_| self.put(work)).count();
        // A thread that is woken wakes the next.
        self.event.notify_one();
        u32::try_from(sent).expect("no more than asked for")
    }
}

/// Writes for threads with an instance of a QAT device.
pub(crate) struct QatWork {
    pub(crate) invitations: Work<Invitation>,
    /// Threads whose instance takes pages. A hint: a thread that is given a page does it, by the
    /// device or in software.
    pub(crate) on_device: AtomicUsize,
    /// Of each thread, in the order of their numbers.
    counters: Mutex<Vec<Arc<qat::Counters>>>,
}

/// One more of these threads is worth waking for so many pages: half of what one has in flight.
const QAT_THREAD_PAGES: u32 = 64;

impl QatWork {
    fn new() -> Self {
        Self {
            invitations: Work::new(1024),
            on_device: AtomicUsize::new(0),
            counters: Mutex::default(),
        }
    }

    /// Whether a write is to go there.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        self.on_device.load(Ordering::Relaxed) > 0
    }

    /// Threads that a write of so many pages is worth waking.
    pub(crate) fn threads_for(&self, pages: u32) -> u32 {
        let threads = u32::try_from(self.on_device.load(Ordering::Relaxed)).unwrap_or(1);
        (pages / QAT_THREAD_PAGES).clamp(1, threads.max(1))
    }

    /// Sends an invitation `number` times, as long as there is room, and gives how often it was.
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

    /// Threads whose instance takes pages, and the driver's counters of each; `None` without any.
    pub(crate) fn stats(&self) -> Option<(usize, Vec<Snapshot>)> {
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let engines: Vec<Snapshot> = counters.iter().map(|one| one.snapshot()).collect();
        let on_device = self.on_device.load(Ordering::Relaxed);
        (!engines.is_empty()).then_some((on_device, engines))
    }
}

/// What queues, workers and the other threads of a device share to pass requests on.
pub(crate) struct Dispatch {
    workers: usize,
    pub(crate) invitations: Work<Invitation>,
    pub(crate) fetches: Work<Fetch>,
    /// Threads that wait for the backing device; 0 without one.
    pub(crate) fetchers: usize,
    pub(crate) qat: QatWork,
    pub(crate) stop: AtomicBool,
    /// A queue's station is made when it is first needed and stays, since an invitation may outlive
    /// the queue.
    stations: Box<[OnceLock<Station>]>,
    /// Which of them have a queue, a bit each.
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

    /// Requests of so many pages are split.
    pub(crate) fn split_from(&self, op: Op) -> u32 {
        match op {
            _ if self.workers == 0 => u32::MAX,
            // To wake a thread costs about what a page costs to compress, and two to three to read.
            Op::Write => 8,
            Op::Read => 16,
            Op::Discard | Op::WriteZeroes { .. } => 16384,
            Op::Flush => u32::MAX,
        }
    }

    /// Sends workers an invitation `number` times, as long as there is room, and gives how often it
    /// was.
    pub(crate) fn invite(&self, invitation: Invitation, number: u32) -> u32 {
        self.invitations.put_often(invitation, number)
    }

    /// Has `count` pages of a flight, from its page `first` on, read by a thread that may wait;
    /// `false` if there is none, or no room to say so. The caller has counted the invitation.
    pub(crate) fn fetch(&self, queue: u16, flight: u16, first: u32, count: u32) -> bool {
        let sent = self.fetchers > 0 && self.fetches.put(Fetch { queue, flight, first, count });
        if sent {
            self.fetches.event.notify_one();
        }
        sent
    }

    /// Tells all threads to end when they have done what is there.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.invitations.event.notify_all();
        self.fetches.event.notify_all();
        self.qat.invitations.event.notify_all();
    }

    /// Opens the first place that is free, if `make` gives what is to be there: `None` when all are
    /// taken.
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

    /// The queue of this number is gone.
    pub(crate) fn close(&self, queue: u16) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << queue);
    }
}
