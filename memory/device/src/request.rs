//! The interface of transports: requests, two traits, three errors.
#![expect(
    unsafe_code,
    reason = "a buffer is the transport's, used by other threads until completion"
)]

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// The size of a block in bytes.
pub const PAGE: usize = 4096;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Copies the pages to the buffer.
    Read,
    /// Copies the buffer to the pages.
    Write,
    /// Frees the pages; they read as zeros.
    Discard,
    /// Zeros the pages.
    WriteZeroes {
        /// Whether the pages count as stored: [`Queue::extent`] then reports zeros and no hole.
        /// This takes no memory.
        keep: bool,
    },
    /// Does nothing, because completed writes are stored. Its page range is ignored.
    Flush,
}

/// The transport's memory: a read's destination, a write's source.
#[derive(Clone, Copy)]
pub struct Buffer {
    start: *mut u8,
    len: usize,
}

// SAFETY: a buffer is only an address; its maker promises what `Buffer::new` asks, for all threads.
unsafe impl Send for Buffer {}

impl Buffer {
    /// For requests without a buffer.
    pub const NONE: Self = Self { start: std::ptr::null_mut(), len: 0 };

    /// The `len` initialised bytes at `start`, with any alignment.
    ///
    /// # Safety
    ///
    /// From [`Queue::submit`] of a request with this buffer until the request is complete, the
    /// bytes are valid and belong to the device: no one else writes them, and for [`Op::Read`] no
    /// one else reads them. A request is complete when `submit` returns `Some`, when
    /// [`Queue::reap`] reports its tag, or when the queue has been dropped (which waits for it).
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of page `number` of a write's buffer.
    ///
    /// # Panics
    ///
    /// If the buffer is too short.
    #[inline]
    pub(crate) fn written(&self, number: usize) -> &[u8; PAGE] {
        let start = self.page(number);
        // SAFETY: the page is within the buffer, and by the promise of `new` valid, initialised and
        // not written while the request is under way, which it is during this call.
        unsafe { &*start }
    }

    /// The bytes of page `number` of a read's buffer. Only for the thread that has claimed this
    /// page of the request.
    ///
    /// # Safety
    ///
    /// No other reference to this page of the buffer exists.
    ///
    /// # Panics
    ///
    /// If the buffer is too short.
    #[inline]
    #[expect(
        clippy::mut_from_ref,
        reason = "the buffer is an address, and the caller has the page"
    )]
    pub(crate) unsafe fn read(&self, number: usize) -> &mut [u8; PAGE] {
        let start = self.page(number);
        // SAFETY: the page is within the buffer, and by the promise of `new` valid, initialised and
        // the device's; by the caller's promise no other thread of the device uses it.
        unsafe { &mut *start }
    }

    #[inline]
    fn page(&self, number: usize) -> *mut [u8; PAGE] {
        assert!(number < self.len / PAGE, "page {number} of a buffer of {} bytes", self.len);
        // SAFETY: the result is within the buffer, as was just asserted.
        unsafe { self.start.add(number * PAGE) }.cast()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// The first page.
    pub page: u64,
    /// The number of pages; a request of 0 completes at once.
    pub pages: u32,
    /// For [`Op::Read`] and [`Op::Write`] a buffer of exactly that many pages. Other operations
    /// ignore it.
    pub buffer: Buffer,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(i32)]
pub enum Errno {
    /// EIO: a page cannot be read.
    #[error("a page cannot be read")]
    Io = 5,
    /// EINVAL: the request lies beyond the end, or its buffer has another length. The fault is the
    /// transport's or its client's.
    #[error("the request is not valid")]
    Invalid = 22,
    /// ENOSPC: there is no memory for a written page.
    #[error("no memory left for the page")]
    NoSpace = 28,
}

impl Errno {
    /// The kernel's errno, positive.
    pub fn raw(self) -> i32 {
        self as i32
    }

    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            5 => Some(Self::Io),
            22 => Some(Self::Invalid),
            28 => Some(Self::NoSpace),
            _ => None,
        }
    }
}

/// The stored form of a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Pages in the run, at least 1.
    pub pages: u64,
    /// Whether nothing is stored.
    pub hole: bool,
    /// Whether the pages read as zeros.
    pub zero: bool,
}

/// The interface of a block device to a transport.
pub trait Backend: Send + Sync + 'static {
    /// The queue of one thread.
    type Queue: Queue;

    /// The number of blocks.
    fn pages(&self) -> u64;

    /// Opens a queue for one thread, and allocates all that it will need.
    ///
    /// # Errors
    ///
    /// There is no room for another queue; the kernel's error.
    fn open(&self) -> io::Result<Self::Queue>;
}

/// The requests of one transport thread, which owns the queue. Methods neither allocate nor block,
/// unless their documentation says so.
pub trait Queue: Send + 'static {
    /// Starts a request. Returns `Some` if it is complete already; then `tag` is not reported
    /// again. Otherwise [`reap`](Self::reap) reports `tag`, which the caller chooses.
    ///
    /// Dropping the queue waits for all requests in flight.
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>>;

    /// Does a read at once if it needs no wait. `None` if the read waits, or may wait: then nothing
    /// has happened, the buffer is the caller's, and the request can be [submitted](Self::submit).
    fn read_at_once(&mut self, request: Request) -> Option<Result<(), Errno>> {
        let _ = request;
        None
    }

    /// Reports the requests completed since the last call, and returns their number.
    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize;

    /// The number of requests in flight.
    fn in_flight(&self) -> usize;

    /// Arms the queue. Call it before each sleep of the thread on [`fd`](Self::fd). Returns `false`
    /// if there is something to reap already; then nothing will wake the thread.
    fn arm(&mut self) -> bool;

    /// Whether the caller should start further writes before waiting for one, however small: the
    /// device has many in flight, each with a long latency. May change at any time.
    fn defers_writes(&self) -> bool {
        false
    }

    /// An eventfd that becomes readable when there is something to reap and the queue is
    /// [armed](Self::arm). Only for waiting: the caller need not read it. Spurious wake-ups are
    /// possible.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Writes `bytes` into page `page` at offset `at`, without changing the rest. Other writes of
    /// the page come entirely before or after. Waits for a concurrent patch of the same page.
    ///
    /// # Errors
    ///
    /// As for a request; also [`Errno::Io`] when the page cannot be read.
    fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno>;

    /// The length and kind of the first run of pages of one kind, in at most `most` pages from
    /// `page`.
    ///
    /// # Errors
    ///
    /// [`Errno::Invalid`] beyond the end, or for `most` of 0.
    fn extent(&mut self, page: u64, most: u64) -> Result<Extent, Errno>;
}
