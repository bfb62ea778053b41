//! The device: what all its threads share, and the workers.
#![expect(unsafe_code, reason = "workers follow invitations to flights")]

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use codec::{Settings, SettingsError};
use qat::Qat;
use ring::{EventCount, Ring};
use store::{Store, MAX_WORKERS};

use crate::dictionaries::Dictionaries;
use crate::engine::{Engine, Fetcher};
use crate::guard::IoPath;
use crate::offload::{Offload, OffloadOptions, OffloadStats, Offloader, MAX_OFFLOADERS};
use crate::pages::Damage;
use crate::queue::DeviceQueue;
use crate::request::{Backend, Op};
use crate::station::Station;
use crate::stats::{self, Counters, IoStats};

/// What a device is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Codec and level of what is written from now on. What is stored already is read whatever it
    /// is.
    pub settings: Settings,
    /// Threads beside the transports' own that large requests are split over, at most 32; 0: each
    /// transport thread does its requests alone.
    pub workers: usize,
    /// Requests that are split, or wait for the backing device, that a queue may have under way.
    pub depth: u16,
    /// Whether there is memory for dictionaries that may be installed: 0.1 to 0.3 MB each. Those
    /// that the store has are used anyway, if the codec is zstd.
    pub dictionaries: bool,
}

impl Default for DeviceOptions {
    /// zstd level 1, as many workers as there are CPUs but one (that one is the transport's), and
    /// 256 requests.
    fn default() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        Self {
            settings: Settings::default(),
            workers: (cpus - 1).min(32),
            depth: 256,
            dictionaries: false,
        }
    }
}

/// Threads that wait for a backing device: so many of its reads are under way, since a disk likes
/// more than one.
const FETCHERS: usize = 4;

/// Pieces of requests that may wait for them. A request that is split has five and one for each
/// worker that has found the first: 64 requests of four ublk queues each are 2,000 pieces on four
/// CPUs. Whoever has one more waits for the backing device itself, as without these threads.
const FETCHES: usize = 16_384;

/// Why a device or a queue could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// More workers than a device may have.
    #[error("{0} workers, at most 32 are allowed")]
    Workers(usize),
    /// Workers and queues have used up the store's workers.
    #[error("no room for another thread: the store has {MAX_WORKERS} workers")]
    Full,
    /// A device whose pages are compressed by another codec than QAT's.
    #[error("a QAT device compresses for codec qatzip, not for {0}")]
    Offload(codec::Codec),
    /// No instance could be opened, or the device has some already.
    #[error("no instance of the QAT device is to be had (`platen qat status` says more)")]
    NoInstance,
    /// The codec cannot be set up.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The kernel refused.
    #[error("cannot make {what}")]
    Io {
        /// What was asked for.
        what: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
}

impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Io { source, .. } => source,
            other => io::Error::other(other),
        }
    }
}

/// An invitation to work on a flight of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Invitation {
    pub(crate) queue: u16,
    pub(crate) flight: u16,
}

/// Pages of a flight that have to be waited for.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    queue: u16,
    flight: u16,
    first: u32,
    count: u32,
}

/// What all threads of a device share.
pub(crate) struct Shared {
    pub(crate) pages: u64,
    pub(crate) settings: Settings,
    pub(crate) dictionaries: Arc<Dictionaries>,
    pub(crate) workers: usize,
    pub(crate) counters: Box<[Counters]>,
    pub(crate) damage: OnceLock<Damage>,
    /// Writes for QAT devices.
    pub(crate) offload: Offload,
    invitations: Ring<Invitation>,
    /// Invitations wait.
    work: EventCount,
    /// What waits for the threads that may wait, and that it does; none of them without a backing
    /// device.
    fetches: Ring<Fetch>,
    fetching: EventCount,
    pub(crate) fetchers: usize,
    pub(crate) stop: AtomicBool,
    /// A queue's place is made when first needed and stays, since an invitation may outlive the
    /// queue.
    stations: Box<[OnceLock<Station>]>,
    /// Which of them have a queue.
    open: Mutex<u64>,
}

impl Shared {
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

    /// Sends an invitation `number` times, as long as there is room, and gives how often it was.
    pub(crate) fn invite(&self, invitation: Invitation, number: u32) -> u32 {
        let sent = (0..number).take_while(|_| self.invitations.push(invitation).is_ok()).count();
        // Who is woken wakes the next.
        self.work.notify_one();
        u32::try_from(sent).expect("no more than asked for")
    }

    /// Has `count` pages of a flight, from its page `first` on, read by a thread that may wait;
    /// `false` if there is none, or no room to say so. Whoever asks has invited it.
    pub(crate) fn fetch(&self, queue: u16, flight: u16, first: u32, count: u32) -> bool {
        let sent =
            self.fetchers > 0 && self.fetches.push(Fetch { queue, flight, first, count }).is_ok();
        if sent {
            self.fetching.notify_one();
        }
        sent
    }

    pub(crate) fn close(&self, queue: u16) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << queue);
    }
}

/// Ends the workers when the device and all its queues are gone.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    store: Arc<Store>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    depth: u16,
}

impl Inner {
    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.work.notify_all();
        self.shared.fetching.notify_all();
        self.shared.offload.work.notify_all();
        for thread in std::mem::take(&mut *self.threads()) {
            // One that panicked has shown its panic.
            let _ = thread.join();
        }
    }
}

/// A block device over a [`Store`].
pub struct Device {
    inner: Arc<Inner>,
}

impl Device {
    /// A device of all pages of `store`, with its workers running.
    ///
    /// # Errors
    ///
    /// Too many workers, a codec that cannot be set up, no thread.
    pub fn new(store: &Arc<Store>, options: &DeviceOptions) -> Result<Self, OpenError> {
        if options.workers > 32 {
            return Err(OpenError::Workers(options.workers));
        }
        let dictionaries = Dictionaries::of(store, Some(options.settings), options.dictionaries);
        let fetchers = if store.has_backing() { FETCHERS } else { 0 };
        let shared = Arc::new(Shared {
            pages: store.pages(),
            settings: options.settings,
            dictionaries,
            workers: options.workers,
            counters: (0..options.workers + MAX_WORKERS + FETCHERS + MAX_OFFLOADERS)
                .map(|_| Counters::default())
                .collect(),
            damage: OnceLock::new(),
            offload: Offload::new(),
            invitations: Ring::new(1024),
            work: EventCount::new(),
            fetches: Ring::new(if fetchers > 0 { FETCHES } else { 2 }),
            fetching: EventCount::new(),
            fetchers,
            stop: AtomicBool::new(false),
            stations: (0..MAX_WORKERS).map(|_| OnceLock::new()).collect(),
            open: Mutex::new(0),
        });
        // The first wait of a process asks for the number of its CPUs, which allocates.
        let _ = shared.work.wait_until(Some(Instant::now()), || None::<()>);
        let _ = shared.fetching.wait_until(Some(Instant::now()), || None::<()>);
        let inner = Inner {
            shared: Arc::clone(&shared),
            store: Arc::clone(store),
            threads: Mutex::new(Vec::with_capacity(options.workers + fetchers)),
            depth: options.depth.max(1),
        };
        for number in 0..options.workers {
            let worker = store.worker().ok_or(OpenError::Full)?;
            let mut engine = Engine::new(&shared, worker, number)?;
            let thread = thread::Builder::new().name(format!("device-{number}"));
            let shared = Arc::clone(&shared);
            let thread = thread.spawn(move || follow(&shared, &mut engine));
            let thread = thread.map_err(|source| OpenError::Io { what: "a thread", source })?;
            inner.threads().push(thread);
        }
        for number in 0..fetchers {
            let worker = store.worker().ok_or(OpenError::Full)?;
            let mut fetcher = Fetcher::new(&shared, worker, options.workers + MAX_WORKERS + number);
            let thread = thread::Builder::new().name(format!("fetch-{number}"));
            let shared = Arc::clone(&shared);
            let thread = thread.spawn(move || fetch(&shared, &mut fetcher));
            let thread = thread.map_err(|source| OpenError::Io { what: "a thread", source })?;
            inner.threads().push(thread);
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Has pages that are written compressed by a QAT device, by threads with an instance each.
    /// Gives the number of these threads. All memory is taken here.
    ///
    /// # Errors
    ///
    /// Another codec than qatzip, no free instance, no thread.
    pub fn offload(&self, qat: &Arc<Qat>, options: &OffloadOptions) -> Result<usize, OpenError> {
        let Inner { shared, store, .. } = &*self.inner;
        if shared.settings.codec() != codec::Codec::DeflateQz {
            return Err(OpenError::Offload(shared.settings.codec()));
        }
        // Held to the end: nobody else begins meanwhile.
        let mut threads = self.inner.threads();
        let mut ready = Vec::new();
        let wanted = if shared.offload.is_set_up() { 0 } else { options.threads };
        for number in 0..wanted.min(MAX_OFFLOADERS) {
            let engine = options.engine(qat, shared.settings.level());
            if !engine.on_device() {
                break;
            }
            let worker = store.worker().ok_or(OpenError::Full)?;
            let counters = shared.workers + MAX_WORKERS + FETCHERS + number;
            let pages = Engine::new(shared, worker, counters)?;
            ready.push(Offloader::new(shared, pages, engine));
        }
        let number = ready.len();
        if number == 0 {
            return Err(OpenError::NoInstance);
        }
        for (number, offloader) in ready.into_iter().enumerate() {
            let thread = thread::Builder::new().name(format!("device-qat-{number}"));
            let thread = thread.spawn(move || offloader.run());
            threads.push(thread.map_err(|source| OpenError::Io { what: "a thread", source })?);
        }
        Ok(number)
    }

    /// What QAT devices have done; `None` before [`offload`](Self::offload).
    pub fn offload_stats(&self) -> Option<OffloadStats> {
        self.inner.shared.offload.stats()
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.inner.store
    }

    /// Codec and level of what is written.
    pub fn settings(&self) -> Settings {
        self.inner.shared.settings
    }

    /// The dictionaries.
    pub fn dictionaries(&self) -> &Dictionaries {
        &self.inner.shared.dictionaries
    }

    /// Threads beside the transports' own.
    pub fn workers(&self) -> usize {
        self.inner.shared.workers
    }

    /// The counters.
    pub fn stats(&self) -> IoStats {
        stats::sum(&self.inner.shared.counters)
    }

    /// The first page that was found damaged, if any.
    pub fn damage(&self) -> Option<&Damage> {
        self.inner.shared.damage.get()
    }

    /// Opens a queue for one thread.
    ///
    /// # Errors
    ///
    /// No room for another one, and the kernel's.
    pub fn queue(&self) -> Result<DeviceQueue, OpenError> {
        let Inner { shared, store, depth, .. } = &*self.inner;
        let worker = store.worker().ok_or(OpenError::Full)?;
        let mut open = shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        let at = open.trailing_ones() as usize;
        let station = shared.stations.get(at).ok_or(OpenError::Full)?;
        let engine = Engine::new(shared, worker, shared.workers + at)?;
        if station.get().is_none() {
            let made = Station::new(*depth)
                .map_err(|source| OpenError::Io { what: "an eventfd", source })?;
            let _ = station.set(made);
        }
        *open |= 1 << at;
        let number = u16::try_from(at).expect("64 at most");
        Ok(DeviceQueue::new(&self.inner, engine, number, *depth))
    }
}

impl Backend for Device {
    type Queue = DeviceQueue;

    fn pages(&self) -> u64 {
        self.inner.shared.pages
    }

    fn open(&self) -> io::Result<DeviceQueue> {
        Ok(self.queue()?)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("pages", &self.inner.shared.pages)
            .field("settings", &self.settings())
            .field("workers", &self.workers())
            .finish_non_exhaustive()
    }
}

/// A worker: follows invitations until it is told to stop.
fn follow(shared: &Shared, engine: &mut Engine) {
    let _path = IoPath::enter();
    loop {
        let invitation = shared.work.wait_until(None, || {
            let invitation = shared.invitations.pop();
            let stopped = invitation.is_none() && shared.stop.load(Ordering::Acquire);
            (invitation.is_some() || stopped).then_some(invitation)
        });
        let Some(Invitation { queue, flight: number }) = invitation.flatten() else { return };
        let station = shared.station(queue);
        let flight = &station.flights[usize::from(number)];
        // SAFETY: we were invited, and leave below.
        let last = unsafe {
            flight.work(engine, |first, count| shared.fetch(queue, number, first, count))
        };
        flight.leave();
        if last {
            station.finish(number);
        }
    }
}

/// One that may wait: reads what others have met on the backing device until it is told to stop.
fn fetch(shared: &Shared, fetcher: &mut Fetcher) {
    let _path = IoPath::enter();
    loop {
        let fetch = shared.fetching.wait_until(None, || {
            let fetch = shared.fetches.pop();
            let stopped = fetch.is_none() && shared.stop.load(Ordering::Acquire);
            (fetch.is_some() || stopped).then_some(fetch)
        });
        let Some(Fetch { queue, flight: number, first, count }) = fetch.flatten() else { return };
        let station = shared.station(queue);
        let flight = &station.flights[usize::from(number)];
        // SAFETY: we were invited for these pages, and leave below.
        let last = unsafe { flight.fetch(fetcher, first, count) };
        flight.leave();
        if last {
            station.finish(number);
        }
    }
}
