//! What a transport sees: requests, the two traits, and the three ways to fail.
#![expect(
    unsafe_code,
    reason = "a buffer is the transport's, used by other threads until completion"
)]

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes of a block.
pub const PAGE: usize = 4096;

/// What is to be done with some pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Their contents into the buffer.
    Read,
    /// The buffer's contents into them.
    Write,
    /// They are forgotten, and read as zeros.
    Discard,
    /// They read as zeros.
    WriteZeroes {
        /// They count as stored: [`Queue::extent`] shows zeros and no hole. Costs no memory.
        keep: bool,
    },
    /// Nothing: what is completed is stored. Whatever pages it names are not looked at.
    Flush,
}

/// Memory of the transport: what a read fills and a write takes.
#[derive(Clone, Copy)]
pub struct Buffer {
    start: *mut u8,
    len: usize,
}

// SAFETY: a buffer is only an address; who makes one promises what `Buffer::new` asks, for all
// threads.
unsafe impl Send for Buffer {}

impl Buffer {
    /// For requests that have none.
    pub const NONE: Self = Self { start: std::ptr::null_mut(), len: 0 };

    /// The `len` initialised bytes at `start`, in no particular alignment.
    ///
    /// # Safety
    ///
    /// From [`Queue::submit`] of a request with this buffer until that request is over, the bytes
    /// are valid, and they are the device's: nobody else writes them, and for [`Op::Read`] nobody
    /// else reads them. A request is over when `submit` gives `Some`, when [`Queue::reap`] reports
    /// its tag, or when the queue has been dropped (which waits for it).
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of page `number` of a write's buffer.
    ///
    /// # Panics
    ///
    /// If the buffer does not have them.
    #[inline]
    pub(crate) fn written(&self, number: usize) -> &[u8; PAGE] {
        let start = self.page(number);
        // SAFETY: the page is within the buffer, and by the promise of `new` valid, initialised and
        // written by nobody while the request is under way, which is while we are called.
        unsafe { &*start }
    }

    /// The bytes of page `number` of a read's buffer. Only for the thread that has taken this page
    /// of the request.
    ///
    /// # Safety
    ///
    /// No other reference to this page of the buffer is there.
    ///
    /// # Panics
    ///
    /// If the buffer does not have them.
    #[inline]
    #[expect(
        clippy::mut_from_ref,
        reason = "the buffer is an address, and the caller has the page"
    )]
    pub(crate) unsafe fn read(&self, number: usize) -> &mut [u8; PAGE] {
        let start = self.page(number);
        // SAFETY: the page is within the buffer, and by the promise of `new` valid, initialised and
        // the device's; by the caller's promise nobody else in the device has it.
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
    /// What to do.
    pub op: Op,
    /// The first page.
    pub page: u64,
    /// How many; 0 is done at once.
    pub pages: u32,
    /// For [`Op::Read`] and [`Op::Write`]: exactly as many pages. Not looked at for the others.
    pub buffer: Buffer,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(i32)]
pub enum Errno {
    /// EIO: a page cannot be read.
    #[error("a page cannot be read")]
    Io = 5,
    /// EINVAL: beyond the end, or a buffer of another length. The transport's fault or its
    /// client's.
    #[error("the request is not valid")]
    Invalid = 22,
    /// ENOSPC: no memory for what was to be written.
    #[error("no memory left for the page")]
    NoSpace = 28,
}

impl Errno {
    /// The kernel's number, positive.
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

/// What is stored for a run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Pages in the run, at least 1.
    pub pages: u64,
    /// Nothing is stored for them.
    pub hole: bool,
    /// They read as zeros.
    pub zero: bool,
}

/// A block device, as a transport sees it.
pub trait Backend: Send + Sync + 'static {
    /// One thread's way in.
    type Queue: Queue;

    /// Blocks that there are.
    fn pages(&self) -> u64;

    /// Opens a queue for one thread. Allocates all that it will need.
    ///
    /// # Errors
    ///
    /// No room for another queue, and the kernel's.
    fn open(&self) -> io::Result<Self::Queue>;
}

/// One transport thread's requests. Owned by that thread; nothing here allocates or blocks, except
/// as said.
pub trait Queue: Send + 'static {
    /// Begins a request. `Some` when it is over already, and then `tag` is not reported again;
    /// else [`reap`](Self::reap) reports it. `tag` is the caller's, and means nothing here.
    ///
    /// Dropping the queue waits for all that is under way.
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>>;

    /// Does a read at once, if nothing of it has to be waited for; `None` if it has, or if that
    /// cannot be known: then nothing has happened, the buffer is the caller's, and the request can
    /// be [submitted](Self::submit).
    fn read_at_once(&mut self, request: Request) -> Option<Result<(), Errno>> {
        let _ = request;
        None
    }

    /// Reports what is over since the last time, and gives their number.
    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize;

    /// Requests that are under way.
    fn in_flight(&self) -> usize;

    /// To be called before the thread sleeps on [`fd`](Self::fd): `false` if there is something to
    /// reap already, and then nothing will wake it. Needed again before the next sleep.
    fn arm(&mut self) -> bool;

    /// Whether a write, however small, is better not waited for before the next one is begun:
    /// somebody has many under way who takes long over each. It may change at any time.
    fn defers_writes(&self) -> bool {
        false
    }

    /// An eventfd that becomes readable when there is something to reap and the queue was
    /// [armed](Self::arm). It is for waiting on; nobody needs to read it, and it may be readable
    /// once for nothing.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Writes `bytes` into page `page`, beginning at its byte `at`, and leaves the rest as it is. A
    /// write of the same page by anybody else comes before or after, not in between. Waits for
    /// another patch of the same page.
    ///
    /// # Errors
    ///
    /// As for a request; also [`Errno::Io`] when the page cannot be read.
    fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno>;

    /// What is stored from `page` on, for at most `most` pages: the length of the first run of one
    /// kind.
    ///
    /// # Errors
    ///
    /// [`Errno::Invalid`] beyond the end, or for `most` of 0.
    fn extent(&mut self, page: u64, most: u64) -> Result<Extent, Errno>;
}
