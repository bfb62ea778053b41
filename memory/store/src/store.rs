//! The store: creation, takeover, counters.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, OnceLock};

use crate::ahead::Ahead;
use crate::backing_device::Backing;
use crate::editing::Editing;
use crate::entry::MAX_PINS;
use crate::error::StoreError;
use crate::grow;
use crate::heap::Heap;
use crate::inject;
use crate::layout::{Layout, PAGE};
use crate::map::{self, Map, Taken};
use crate::options::{in_pages, limit_pages, Options};
use crate::recover;
use crate::refusals::Refusals;
use crate::stats::{self, sum, Counters, Stats};
use crate::superblock;
use crate::sweep::Sweep;
use crate::sync::{AtomicU64, Ordering};

/// The most workers at a time. Compaction pins too, so it is below the most pins of a slot.
pub const MAX_WORKERS: usize = 64;

const _: () = assert!((MAX_WORKERS as u64) < MAX_PINS);

impl StoreError {
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

impl From<Taken> for StoreError {
    fn from(taken: Taken) -> Self {
        match taken {
            Taken::InUse => Self::InUse,
            Taken::Io(source) => Self::Io { action: "open", source },
        }
    }
}

/// Compressed pages in a memfd. Each thread uses it through a [`Worker`](crate::Worker) of its own.
pub struct Store {
    pub(crate) heap: Heap,
    pub(crate) counters: Box<[Counters]>,
    /// Bit n is set: worker n exists.
    pub(crate) working: AtomicU64,
    pub(crate) editing: Editing,
    pub(crate) sweep: Mutex<Sweep>,
    pub(crate) compacted: AtomicU64,
    pub(crate) options: Options,
    /// Set before there are workers, or never.
    pub(crate) backing: OnceLock<Backing>,
    pub(crate) lost: AtomicU64,
    pub(crate) refusals: Refusals,
    /// Held while a dictionary is installed.
    pub(crate) installing: Mutex<()>,
    pub(crate) beside: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl Store {
    /// Creates an empty store of `pages` pages of 4096 bytes in a new memfd, and allocates its
    /// table.
    ///
    /// # Errors
    ///
    /// [`StoreError::Pages`], [`StoreError::Limit`], and the kernel's.
    pub fn create(pages: u64, options: Options) -> Result<Arc<Self>, StoreError> {
        let layout = Layout::new(pages).ok_or(StoreError::Pages { pages })?;
        let limit = limit_pages(&layout, &options)?;
        let fd = map::create(&layout).map_err(StoreError::io("create"))?;
        let file = map::take(fd.as_fd())?;
        let map = Map::new(file, fd, layout).map_err(StoreError::io("map"))?;
        populate_table(&map)?;
        superblock::write(map.superblock(), &layout);
        Ok(Self::with(Heap::new(map, limit, options.patience), options, 0))
    }

    /// Takes over the store in `fd`, whose server has exited: verifies the superblock, rebuilds the
    /// free lists from the table, and frees memory in which nothing is stored. Objects' checksums
    /// are verified when they are read, or by [`Worker::check`](crate::Worker::check).
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] while another server has the store (a killed server has it until its
    /// parent has waited for it); [`StoreError::Foreign`] for a file that is not a store of a
    /// version that this program serves, with that version's sizes; errors of the limit and of the
    /// kernel as for [`create`](Self::create). After an error the file is unchanged.
    pub fn attach(fd: BorrowedFd<'_>, options: Options) -> Result<Arc<Self>, StoreError> {
        Self::attach_ahead(Ahead::map(fd)?, options)
    }

    /// As [`attach`](Self::attach), for a store that was mapped while its server still ran.
    ///
    /// # Errors
    ///
    /// The errors of [`attach`](Self::attach).
    pub fn attach_ahead(ahead: Ahead, options: Options) -> Result<Arc<Self>, StoreError> {
        let Ahead { mut map, .. } = ahead;
        map.take()?;
        grow::look_again(&mut map)?;
        let limit = limit_pages(map.layout(), &options)?;
        populate_table(&map)?;
        grow::grow(&mut map, &options)?;
        superblock::next_generation(map.superblock());
        inject::step();
        let heap = Heap::new(map, limit, options.patience);
        let found = recover::recover(&heap).map_err(StoreError::io("recover"))?;
        let store = Self::with(heap, options, found.lost);
        // Counters of the recovered pages; each worker adds to its own.
        let first = &store.counters[MAX_WORKERS];
        first.pages.store(found.pages, Ordering::Relaxed);
        first.same.store(found.same, Ordering::Relaxed);
        first.huge.store(found.huge, Ordering::Relaxed);
        first.bytes.store(found.bytes, Ordering::Relaxed);
        first.grouped.store(found.grouped, Ordering::Relaxed);
        first.groups.store(found.groups, Ordering::Relaxed);
        first.backed.store(found.backed, Ordering::Relaxed);
        stats::set_dictionaries(first, found.dictionary);
        Ok(store)
    }

    fn with(heap: Heap, options: Options, lost: u64) -> Arc<Self> {
        let pages = heap.map.layout().pages;
        Arc::new(Self {
            heap,
            counters: (0..=MAX_WORKERS).map(|_| Counters::default()).collect(),
            working: AtomicU64::new(0),
            editing: Editing::default(),
            sweep: Mutex::new(Sweep::new(pages)),
            compacted: AtomicU64::new(0),
            options,
            backing: OnceLock::new(),
            lost: AtomicU64::new(lost),
            refusals: Refusals::default(),
            installing: Mutex::new(()),
            beside: OnceLock::new(),
        })
    }

    /// The file, for the supervisor. The descriptor is valid as long as the store; duplicate it to
    /// use it longer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.heap.map.fd()
    }

    /// Pages of 4096 bytes.
    pub fn pages(&self) -> u64 {
        self.heap.map.layout().pages
    }

    /// The most pages that the store can grow to.
    pub fn capacity(&self) -> u64 {
        self.heap.map.layout().capacity
    }

    /// How many servers the file has had, this one included.
    pub fn generation(&self) -> u64 {
        superblock::identity(self.heap.map.superblock()).0
    }

    /// The file's random id, the same for all its servers.
    pub fn id(&self) -> u64 {
        superblock::identity(self.heap.map.superblock()).1
    }

    /// Pages whose entries were found damaged at takeover. Reading such a page fails until it is
    /// written or discarded. A killed server never leaves one.
    pub fn lost_pages(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Changes the limit; 0 for none. If the limit is below the memory in use, the store gets no
    /// further memory until less is in use.
    pub fn set_mem_limit(&self, bytes: u64) {
        self.heap.regions.set_limit(in_pages(bytes));
    }

    /// Notes whether pages that are stored as they are leave memory for the backing device: then
    /// none of them fails for [`Options::whole_part`]. At first they do not.
    pub fn expect_writeback(&self, expected: bool) {
        self.refusals.expect(expected);
    }

    /// As last noted by [`expect_writeback`](Self::expect_writeback).
    pub fn expects_writeback(&self) -> bool {
        self.refusals.is_off()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let regions = &self.heap.regions;
        let bytes = |pages: u64| pages.saturating_mul(PAGE as u64);
        let of = |counter: fn(&Counters) -> &AtomicU64| sum(&self.counters, counter);
        Stats {
            orig_data_size: bytes(of(|c| &c.pages)),
            compr_data_size: of(|c| &c.bytes),
            mem_used_total: bytes(regions.used()),
            mem_limit: if regions.limit() == u64::MAX { 0 } else { bytes(regions.limit()) },
            mem_used_max: bytes(regions.used_max()),
            same_pages: of(|c| &c.same),
            pages_compacted: self.compacted.load(Ordering::Relaxed),
            huge_pages: of(|c| &c.huge),
            huge_pages_since: of(|c| &c.huge_since),
            mem_ready: bytes(regions.ready()),
            grouped_pages: of(|c| &c.grouped),
            groups: of(|c| &c.groups),
            bd_count: of(|c| &c.backed),
        }
    }

    /// Bytes of memory that the file has according to the kernel: for tests of `mem_used_total`.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn resident(&self) -> io::Result<u64> {
        Ok(self.heap.map.resident()? * PAGE as u64)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("pages", &self.pages())
            .field("generation", &self.generation())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

fn populate_table(map: &Map) -> Result<(), StoreError> {
    let fixed = map.layout().fixed_pages();
    let pages = u32::try_from(fixed).expect("tables are below 2^32 pages");
    map.populate(0, pages).map_err(StoreError::io("find memory for"))
}
