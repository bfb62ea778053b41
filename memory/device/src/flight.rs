//! A request that several threads work on.
#![expect(
    unsafe_code,
    reason = "a flight's request is written by its queue and read by those invited"
)]

use crate::engine::{Engine, Fetcher};
use crate::request::{Buffer, Errno, Op, Request};
use crate::sync::{both, strong, AtomicU32, Ordering, Site, UnsafeCell};

/// A request under way, in a place that its queue uses again and again.
///
/// Ownership rule: `what` belongs to the queue while `invited` is 0 and the flight is not under
/// way; from the first invitation on everybody may read it and nobody writes it. It is under way
/// while a page is not done. Those invited say when they will not look at it again by taking one
/// off `invited`; whoever still has pages of it may. Pages belong to whoever moved `next` past
/// them. Who takes the last page off `left` finishes the flight, and says so to the queue; that may
/// be before the last invitation is looked at, which is why `invited` is not `left`.
pub(crate) struct Flight {
    what: UnsafeCell<(u64, Request)>,
    /// The first page that nobody has taken. Relaxed: it only shares pages out.
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
        // Pairs with the Release in `leave`: all reading of `what` is over.
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
    pub(crate) fn uninvite(&self, number: u32) {
        self.invited.fetch_sub(number, Ordering::Relaxed);
    }

    /// An invitation was followed: whoever calls this does not look at the flight again.
    pub(crate) fn leave(&self) {
        // Pairs with the Acquire in `is_free`.
        self.invited.fetch_sub(1, strong(Site::LeaveRelease, Ordering::Release));
    }

    /// Does pages until there are none to take; whether the last of all was among them. Those that
    /// have to be waited for are given to `elsewhere`, the first one and how many, which says
    /// whether somebody else does them; if so, that one has been invited.
    ///
    /// # Safety
    ///
    /// The caller is the queue, with the flight under way, or was invited and has not left.
    pub(crate) unsafe fn work(
        &self,
        engine: &mut Engine,
        mut elsewhere: impl FnMut(u32, u32) -> bool,
    ) -> bool {
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let mut far = 0;
        while let Some((first, count)) = self.take_or(request, far) {
            let done = match request.op == Op::Write && self.is_hopeless() {
                true => Some(Ok(())),
                // Who waits reads what is in memory as well.
                false if far > 0 => None,
                false => engine.run(request.op, request.page, &request.buffer, first, count),
            };
            let done = match done {
                Some(done) => done,
                None if self.hand_over(first, count, &mut elsewhere) => {
                    // Where one is, its neighbours are: they go in a few pieces, for whose notes
                    // there is room.
                    far = request.pages.div_ceil(FAR);
                    continue;
                }
                None => engine.wait(request.page, &request.buffer, first, count),
            };
            if self.did(count, done) {
                return true;
            }
        }
        false
    }

    /// The request, for those who do its pages one at a time.
    ///
    /// # Safety
    ///
    /// The caller was invited and has not left, or has taken a page that is not [done](Self::did).
    pub(crate) unsafe fn request(&self) -> Request {
        // SAFETY: by the ownership rule nobody writes it: while a page is not done the flight is
        // under way.
        self.what.with(|what| unsafe { (*what).1 })
    }

    /// Takes pages of `request`, which is this flight's: the first, and how many. `None` when all
    /// are taken.
    #[inline]
    pub(crate) fn take(&self, request: &Request) -> Option<(u32, u32)> {
        self.take_or(request, 0)
    }

    /// The same, or `far` pages if that is more.
    #[inline]
    fn take_or(&self, request: &Request, far: u32) -> Option<(u32, u32)> {
        let step = step(request.op).max(far);
        let first = self.next.fetch_add(step, Ordering::Relaxed);
        if first >= request.pages {
            // So that a late guest, of 64 at most, cannot bring it around.
            self.next.store(request.pages, Ordering::Relaxed);
            return None;
        }
        Some((first, step.min(request.pages - first)))
    }

    /// A write that found no memory has failed, and each of its pages would wait for some anew.
    #[inline]
    pub(crate) fn is_hopeless(&self) -> bool {
        self.error.load(Ordering::Relaxed) == Errno::NoSpace.raw().unsigned_abs()
    }

    /// One more is invited, for these pages; whether somebody has taken them.
    fn hand_over(
        &self,
        first: u32,
        count: u32,
        elsewhere: &mut impl FnMut(u32, u32) -> bool,
    ) -> bool {
        // Before the ring says so. The caller is the queue or invited itself, so that the flight is
        // not free.
        self.invited.fetch_add(1, Ordering::Relaxed);
        let taken = elsewhere(first, count);
        if !taken {
            self.uninvite(1);
        }
        taken
    }

    /// Takes all pages, for others to be invited to.
    pub(crate) fn take_all(&self, pages: u32) {
        self.next.store(pages, Ordering::Relaxed);
    }

    /// Has pages that were taken done elsewhere, or does them; whether the last of all was among
    /// them.
    ///
    /// # Safety
    ///
    /// The caller is the queue, with the flight under way, and nobody else does these pages.
    pub(crate) unsafe fn give(
        &self,
        engine: &mut Engine,
        first: u32,
        count: u32,
        mut elsewhere: impl FnMut(u32, u32) -> bool,
    ) -> bool {
        if self.hand_over(first, count, &mut elsewhere) {
            return false;
        }
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = engine.wait(request.page, &request.buffer, first, count);
        self.did(count, done)
    }

    /// Pages that the caller has taken are done; whether they were the last.
    #[inline]
    pub(crate) fn did(&self, count: u32, done: Result<(), Errno>) -> bool {
        if let Err(errno) = done {
            let raw = errno.raw().unsigned_abs();
            let _ = self.error.compare_exchange(0, raw, Ordering::Relaxed, Ordering::Relaxed);
        }
        // AcqRel: the last one has seen all that the others did, and tells the queue.
        let order = both(Site::LeftAcquire, Site::LeftRelease);
        self.left.fetch_sub(count, order) == count
    }

    /// Reads pages that were handed over; whether they were the last.
    ///
    /// # Safety
    ///
    /// The caller was invited for these pages, and has not left.
    pub(crate) unsafe fn fetch(&self, fetcher: &mut Fetcher, first: u32, count: u32) -> bool {
        // SAFETY: by the ownership rule nobody writes it while the caller is who it promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = fetcher.wait(request.page, &request.buffer, first, count);
        self.did(count, done)
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

/// What is left of a request is noted in about so many pieces for those who may wait: as many as
/// there are of them.
const FAR: u32 = 4;

/// Pages that are taken at a time: few, so that all threads end together, and taking one costs
/// nanoseconds where compressing one costs microseconds. A page that is discarded costs nanoseconds
/// too.
fn step(op: Op) -> u32 {
    match op {
        Op::Write => 1,
        Op::Read => 2,
        Op::Discard | Op::WriteZeroes { .. } | Op::Flush => 4096,
    }
}
