//! A request that several threads work on.
#![expect(
    unsafe_code,
    reason = "a flight's request is written by its queue and read by threads that were invited"
)]

use crate::request::{Buffer, Errno, Op, Request};
use crate::sync::{both, strong, AtomicU32, Ordering, Site, UnsafeCell};

/// Reads pages of a request on a thread that may wait for the backing device.
pub(crate) trait WaitForPages {
    /// Reads `count` pages of a request from its page `first` on, and gives its first failure. The
    /// caller has these pages of the buffer to itself.
    fn wait(&mut self, page: u64, buffer: &Buffer, first: u32, count: u32) -> Result<(), Errno>;
}

/// Does the pages of a request: the device's threads, and the models of [`Flight`].
pub(crate) trait DoPages: WaitForPages {
    /// Does `count` pages of a request from its page `first` on, and gives its first failure;
    /// `None` if one of them is on the backing device, and all have to be read by a thread that may
    /// wait. Nothing but a read gives `None`.
    ///
    /// For a read the caller has these pages of the buffer to itself.
    fn run(
        &mut self,
        op: Op,
        page: u64,
        buffer: &Buffer,
        first: u32,
        count: u32,
    ) -> Option<Result<(), Errno>>;
}

/// A request under way, in a place that its queue uses again and again.
///
/// Ownership rule: `what` belongs to the queue while `invited` is 0 and the flight is not under
/// way; from the first invitation on everybody may read it and nobody writes it. It is under way
/// while a page is not done. A thread that was invited takes one off `invited` when it will not look
/// at the flight again, or only for pages that it has claimed. A page belongs to the thread that
/// moved `next` past it. The thread that takes the last page off `left` finishes the flight and
/// tells the queue; that may be before the last invitation is looked at, which is why `invited` is
/// not `left`.
pub(crate) struct Flight {
    what: UnsafeCell<(u64, Request)>,
    /// The first page that nobody has claimed. Relaxed: it only shares pages out.
    next: AtomicU32,
    /// Pages that are not done.
    left: AtomicU32,
    /// Invitations that are in the ring or being worked on.
    invited: AtomicU32,
    /// The first failure, or 0. Relaxed: `left` carries the order.
    error: AtomicU32,
}

// SAFETY: by the ownership rule `what` is never written while another thread may read it; a request
// is `Send`.
unsafe impl Sync for Flight {}

impl Flight {
    pub(crate) fn new() -> Self {
        let nothing = Request { op: Op::Flush, page: 0, pages: 0, buffer: Buffer::NONE };
        Self {
            what: UnsafeCell::new((0, nothing)),
            next: AtomicU32::new(0),
            left: AtomicU32::new(0),
            invited: AtomicU32::new(0),
            error: AtomicU32::new(0),
        }
    }

    /// Whether the queue may begin another request in it: nobody looks at the last one.
    pub(crate) fn is_free(&self) -> bool {
        // Pairs with the Release in `release`: all reading of `what` is over.
        self.invited.load(strong(Site::FreeAcquire, Ordering::Acquire)) == 0
    }

    /// Puts a request in.
    ///
    /// # Safety
    ///
    /// The flight is free and not under way, and the caller is its queue.
    pub(crate) unsafe fn begin(&self, tag: u64, request: Request, invitations: u32) {
        // SAFETY: by the ownership rule it is the queue's, which the caller is.
        self.what.with_mut(|what| unsafe { *what = (tag, request) });
        self.next.store(0, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.left.store(request.pages, Ordering::Relaxed);
        // The ring that carries the invitations publishes all of these.
        self.invited.store(invitations, Ordering::Relaxed);
    }

    /// Takes back `number` invitations that were not sent.
    pub(crate) fn cancel(&self, number: u32) {
        self.invited.fetch_sub(number, Ordering::Relaxed);
    }

    /// Gives an invitation back that was followed: the caller does not look at the flight again.
    pub(crate) fn release(&self) {
        // Pairs with the Acquire in `is_free`.
        self.invited.fetch_sub(1, strong(Site::InvitationRelease, Ordering::Release));
    }

    /// Does pages until there are none to claim; whether the last of all was among them. Pages that
    /// have to be waited for go to `delegate`, the first one and how many, which says whether
    /// another thread does them; that thread counts as invited then.
    ///
    /// # Safety
    ///
    /// The caller is the queue, with the flight under way, or was invited and has not released the
    /// flight.
    pub(crate) unsafe fn work(
        &self,
        pages: &mut impl DoPages,
        mut delegate: impl FnMut(u32, u32) -> bool,
    ) -> bool {
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let mut least = 0;
        while let Some((first, count)) = self.claim_at_least(request, least) {
            let done = match request.op == Op::Write && self.out_of_memory() {
                true => Some(Ok(())),
                // A thread that waits reads what is in memory as well.
                false if least > 0 => None,
                false => pages.run(request.op, request.page, &request.buffer, first, count),
            };
            let done = match done {
                Some(done) => done,
                None if self.invite_for(first, count, &mut delegate) => {
                    // The neighbours of such a page are on the backing device as well: they go in a
                    // few pieces, for which the ring has room.
                    least = request.pages.div_ceil(DELEGATED_PIECES);
                    continue;
                }
                None => pages.wait(request.page, &request.buffer, first, count),
            };
            if self.complete(count, done) {
                return true;
            }
        }
        false
    }

    /// The request, for threads that do its pages one at a time.
    ///
    /// # Safety
    ///
    /// The caller was invited and has not released the flight, or has claimed a page that is not
    /// [complete](Self::complete).
    pub(crate) unsafe fn request(&self) -> Request {
        // SAFETY: by the ownership rule nobody writes it: while a page is not done the flight is
        // under way.
        self.what.with(|what| unsafe { (*what).1 })
    }

    /// Claims pages of `request`, which is this flight's: the first, and how many. `None` when all
    /// are claimed.
    #[inline]
    pub(crate) fn claim(&self, request: &Request) -> Option<(u32, u32)> {
        self.claim_at_least(request, 0)
    }

    /// The same, but at least so many pages while there are.
    #[inline]
    fn claim_at_least(&self, request: &Request, least: u32) -> Option<(u32, u32)> {
        let step = step(request.op).max(least);
        let first = self.next.fetch_add(step, Ordering::Relaxed);
        if first >= request.pages {
            // So that it cannot wrap: 64 threads at most come late.
            self.next.store(request.pages, Ordering::Relaxed);
            return None;
        }
        Some((first, step.min(request.pages - first)))
    }

    /// A write that found no memory has failed, and each of its pages would wait for some anew.
    #[inline]
    pub(crate) fn out_of_memory(&self) -> bool {
        self.error.load(Ordering::Relaxed) == Errno::NoSpace.raw().unsigned_abs()
    }

    /// Invites one more thread, for these pages; whether there is one.
    fn invite_for(
        &self,
        first: u32,
        count: u32,
        delegate: &mut impl FnMut(u32, u32) -> bool,
    ) -> bool {
        // Before the ring says so. The caller is the queue or invited itself, so that the flight is
        // not free.
        self.invited.fetch_add(1, Ordering::Relaxed);
        let taken = delegate(first, count);
        if !taken {
            self.cancel(1);
        }
        taken
    }

    /// Claims all pages, for other threads to be invited to.
    pub(crate) fn claim_all(&self, pages: u32) {
        self.next.store(pages, Ordering::Relaxed);
    }

    /// Has pages that were claimed done by another thread, or does them; whether the last of all was
    /// among them.
    ///
    /// # Safety
    ///
    /// The caller is the queue, with the flight under way, and nobody else does these pages.
    pub(crate) unsafe fn delegate_or_wait(
        &self,
        pages: &mut impl DoPages,
        first: u32,
        count: u32,
        mut delegate: impl FnMut(u32, u32) -> bool,
    ) -> bool {
        if self.invite_for(first, count, &mut delegate) {
            return false;
        }
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = pages.wait(request.page, &request.buffer, first, count);
        self.complete(count, done)
    }

    /// Pages that the caller has claimed are done; whether they were the last.
    #[inline]
    pub(crate) fn complete(&self, count: u32, done: Result<(), Errno>) -> bool {
        if let Err(errno) = done {
            let raw = errno.raw().unsigned_abs();
            let _ = self.error.compare_exchange(0, raw, Ordering::Relaxed, Ordering::Relaxed);
        }
        // AcqRel: the last one has seen all that the others did, and tells the queue.
        let order = both(Site::LeftAcquire, Site::LeftRelease);
        self.left.fetch_sub(count, order) == count
    }

    /// Reads pages that were delegated; whether they were the last.
    ///
    /// # Safety
    ///
    /// The caller was invited for these pages, and has not released the flight.
    pub(crate) unsafe fn fetch(
        &self,
        fetcher: &mut impl WaitForPages,
        first: u32,
        count: u32,
    ) -> bool {
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = fetcher.wait(request.page, &request.buffer, first, count);
        self.complete(count, done)
    }

    /// Tag and result of a flight that is finished. Only for its queue.
    ///
    /// # Safety
    ///
    /// The caller is the queue, and has not begun another request since.
    pub(crate) unsafe fn result(&self) -> (u64, Result<(), Errno>) {
        // SAFETY: nobody writes it: only the queue would, which the caller is.
        let (tag, _) = self.what.with(|what| unsafe { *what });
        (tag, Errno::from_raw(self.error.load(Ordering::Relaxed)).map_or(Ok(()), Err))
    }
}

/// The rest of a request is delegated in about so many pieces: as many as there are threads that
/// may wait.
const DELEGATED_PIECES: u32 = 4;

/// Pages that are claimed at a time: few, so that all threads end together, and claiming one costs
/// nanoseconds where compressing one costs microseconds. A page that is discarded costs nanoseconds
/// too.
fn step(op: Op) -> u32 {
    match op {
        Op::Write => 1,
        Op::Read => 2,
        Op::Discard | Op::WriteZeroes { .. } | Op::Flush => 4096,
    }
}
