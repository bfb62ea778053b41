//! The device: opens a store, and makes queues.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;

use codec::{Settings, SettingsError};
use pulse::Pulse;
use qat::{Engine, Qat};
use store::{Store, MAX_WORKERS};

use crate::counters::{self, IoStats};
use crate::dictionaries::Dictionaries;
use crate::dispatch::Dispatch;
use crate::fetcher::Fetcher;
use crate::page_io::PageIo;
use crate::pages::Damage;
use crate::qat_threads::{OffloadOptions, OffloadStats, QatThread};
use crate::queue::DeviceQueue;
use crate::records::{Records, Thread, FETCHERS, MAX_QAT_THREADS};
use crate::request::Backend;
use crate::station::Station;
use crate::threads::Threads;

/// A device's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Codec and level of new writes. Pages stored with other settings stay readable.
    pub settings: Settings,
    /// Worker threads over which large requests are split, at most 32. With 0 each transport thread
    /// does its requests alone.
    pub workers: usize,
    /// The most requests of a queue in flight that are split or wait for the backing device.
    pub depth: u16,
    /// Whether to allocate memory for dictionaries that may be installed later: 0.1 to 0.3 MB each.
    /// Dictionaries that the store already has are used anyway, if the codec is zstd.
    pub dictionaries: bool,
}

impl Default for DeviceOptions {
    /// zstd level 1; a worker for each CPU but one, which is for the transport; 256 requests.
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

/// Why a device or a queue could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// More than 32 workers.
    #[error("{0} workers, at most 32 are allowed")]
    Workers(usize),
    /// Workers and queues have used up the store's workers.
    #[error("no room for another thread: the store has {MAX_WORKERS} workers")]
    Full,
    /// The device's codec is not QAT's.
    #[error("a QAT device compresses for codec qatzip, not for {0}")]
    Offload(codec::Codec),
    /// No instance could be opened, or the device uses QAT already.
    #[error("no instance of the QAT device is available (`platen qat status` says more)")]
    NoInstance,
    /// The codec cannot be set up.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The kernel refused.
    #[error("cannot make {what}")]
    Io {
        /// The object that could not be made.
        what: &'static str,
        /// The kernel's error.
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

/// A block device over a [`Store`].
pub struct Device {
    threads: Arc<Threads>,
    store: Arc<Store>,
    depth: u16,
}

fn no_thread(source: io::Error) -> OpenError {
    OpenError::Io { what: "a thread", source }
}

impl Device {
    /// Creates a device of all pages of `store`, with its workers running.
    ///
    /// # Errors
    ///
    /// [`OpenError::Workers`], [`OpenError::Full`], [`OpenError::Settings`], [`OpenError::Io`].
    pub fn new(store: &Arc<Store>, options: &DeviceOptions) -> Result<Self, OpenError> {
        Self::with_pulse(store, options, Arc::new(Pulse::private()))
    }

    /// As [`new`](Self::new), with heartbeats for a supervisor.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn with_pulse(
        store: &Arc<Store>,
        options: &DeviceOptions,
        pulse: Arc<Pulse>,
    ) -> Result<Self, OpenError> {
        if options.workers > 32 {
            return Err(OpenError::Workers(options.workers));
        }
        let dictionaries = Dictionaries::of(store, Some(options.settings), options.dictionaries);
        let fetchers = if store.has_backing() { FETCHERS } else { 0 };
        let records =
            Records::new(store.pages(), options.settings, dictionaries, options.workers, pulse);
        let threads = Threads::new(records, Dispatch::new(options.workers, fetchers));
        for number in 0..options.workers {
            let worker = store.worker().ok_or(OpenError::Full)?;
            let pages = PageIo::new(&threads.records, worker, Thread::Worker(number))?;
            threads.start_worker(number, pages).map_err(no_thread)?;
        }
        for number in 0..fetchers {
            let worker = store.worker().ok_or(OpenError::Full)?;
            let fetcher = Fetcher::new(&threads.records, worker, Thread::Fetcher(number));
            threads.start_fetcher(number, fetcher).map_err(no_thread)?;
        }
        let (threads, store) = (Arc::new(threads), Arc::clone(store));
        Ok(Self { threads, store, depth: options.depth.max(1) })
    }

    /// Starts threads that compress written pages with a QAT device. Each thread has an instance of
    /// its own. Returns the number of these threads. All memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`OpenError::Offload`], [`OpenError::NoInstance`], [`OpenError::Io`].
    pub fn offload(&self, qat: &Arc<Qat>, options: &OffloadOptions) -> Result<usize, OpenError> {
        let Threads { records, dispatch, .. } = &*self.threads;
        if records.settings.codec() != codec::Codec::DeflateQz {
            return Err(OpenError::Offload(records.settings.codec()));
        }
        let wanted = if dispatch.qat.is_set_up() { 0 } else { options.threads };
        // Before the lock, without which no device ends: the library may never return.
        let engines: Vec<_> = (0..wanted.min(MAX_QAT_THREADS))
            .map(|_| options.engine(qat, records.settings.level()))
            .take_while(Engine::on_device)
            .collect();
        // The guard is held to the end, so that a concurrent call waits.
        let mut handles = self.threads.handles();
        let mut ready = Vec::new();
        let engines = if dispatch.qat.is_set_up() { Vec::new() } else { engines };
        for (number, engine) in engines.into_iter().enumerate() {
            let worker = self.store.worker().ok_or(OpenError::Full)?;
            let pages = PageIo::new(records, worker, Thread::Qat(number))?;
            ready.push(QatThread::new(dispatch, pages, engine));
        }
        let number = ready.len();
        if number == 0 {
            return Err(OpenError::NoInstance);
        }
        for (number, qat_thread) in ready.into_iter().enumerate() {
            let thread = thread::Builder::new().name(format!("device-qat-{number}"));
            handles.push(thread.spawn(move || qat_thread.run()).map_err(no_thread)?);
        }
        Ok(number)
    }

    /// The QAT counters; `None` before [`offload`](Self::offload).
    pub fn offload_stats(&self) -> Option<OffloadStats> {
        let (on_device, engines) = self.threads.dispatch.qat.stats()?;
        Some(OffloadStats { on_device, engines })
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Codec and level of new writes.
    pub fn settings(&self) -> Settings {
        self.threads.records.settings
    }

    /// The dictionaries.
    pub fn dictionaries(&self) -> &Dictionaries {
        &self.threads.records.dictionaries
    }

    /// Worker threads, without the transports' own.
    pub fn workers(&self) -> usize {
        self.threads.records.workers
    }

    /// The counters.
    pub fn stats(&self) -> IoStats {
        counters::sum(self.threads.records.all_counters())
    }

    /// The first page that was found damaged, if any.
    pub fn damage(&self) -> Option<&Damage> {
        self.threads.records.damage()
    }

    /// Opens a queue for one thread.
    ///
    /// # Errors
    ///
    /// [`OpenError::Full`] if no worker of the store or no queue number is free;
    /// [`OpenError::Settings`] and [`OpenError::Io`].
    pub fn queue(&self) -> Result<DeviceQueue, OpenError> {
        let Threads { records, dispatch, .. } = &*self.threads;
        let worker = self.store.worker().ok_or(OpenError::Full)?;
        let opened = dispatch.open(|at, station| {
            let pages = PageIo::new(records, worker, Thread::Queue(at))?;
            if station.get().is_none() {
                let made = Station::new(self.depth)
                    .map_err(|source| OpenError::Io { what: "an eventfd", source })?;
                let _ = station.set(made);
            }
            let number = u16::try_from(at).expect("64 at most");
            Ok::<_, OpenError>(DeviceQueue::new(&self.threads, pages, number, self.depth))
        });
        opened?.ok_or(OpenError::Full)
    }
}

impl Backend for Device {
    type Queue = DeviceQueue;

    fn pages(&self) -> u64 {
        self.threads.records.pages
    }

    fn open(&self) -> io::Result<DeviceQueue> {
        Ok(self.queue()?)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("pages", &self.threads.records.pages)
            .field("settings", &self.settings())
            .field("workers", &self.workers())
            .finish_non_exhaustive()
    }
}
