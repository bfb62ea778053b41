//! A flight: one request that several threads work on.
#![expect(
    unsafe_code,
    reason = "a flight's request is written by its queue and read by threads that were invited"
)]

use crate::request::{Buffer, Errno, Op, Request};
use crate::sync::{both, strong, AtomicU32, Ordering, Site, UnsafeCell};

/// Reads pages on a thread that may wait for the backing device.
pub(crate) trait WaitForPages {
    /// Reads `count` pages of a request from its page `first`, and returns its first failure. The
    /// caller has exclusive use of these pages of the buffer.
    fn wait(&mut self, page: u64, buffer: &Buffer, first: u32, count: u32) -> Result<(), Errno>;
}

/// Does the pages of a request: implemented by the device's threads, and by the models of
/// [`Flight`].
pub(crate) trait DoPages: WaitForPages {
    /// Does `count` pages of a request from its page `first`, and returns its first failure.
    /// Returns `None` if one of them is on the backing device: then a thread that may wait has to
    /// read all of them. Only a read returns `None`.
    ///
    /// For a read the caller has exclusive use of these pages of the buffer.
    fn run(
        &mut self,
        op: Op,
        page: u64,
        buffer: &Buffer,
        first: u32,
        count: u32,
    ) -> Option<Result<(), Errno>>;
}

/// A request in flight, in a slot that its queue reuses.
///
/// Ownership rule: `what` belongs to the queue while `invited` is 0 and the flight is not under
/// way. From the first invitation on, all invited threads may read it and none may write it. A
/// flight is under way while a page of it is not done. An invited thread decrements `invited` when
/// it will no longer access the flight, except for pages that it has claimed. A page belongs to the
/// thread that moved `next` past it. The thread that decrements `left` to 0 finishes the flight and
/// notifies the queue. The last invitation may be looked at later than that, so `invited` and
/// `left` are separate.
pub(crate) struct Flight {
    what: UnsafeCell<(u64, Request)>,
    /// The first unclaimed page. Relaxed is enough: the field only distributes pages.
    next: AtomicU32,
    /// Pages that are not done.
    left: AtomicU32,
    /// Invitations in the ring or being worked on.
    invited: AtomicU32,
    /// The first failure, or 0. Relaxed is enough: `left` provides the ordering.
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

    /// Whether the queue may start another request in this flight: no thread accesses the last one
    /// any more.
    pub(crate) fn is_free(&self) -> bool {
        // Pairs with the Release in `release`: all reads of `what` are over.
        self.invited.load(strong(Site::FreeAcquire, Ordering::Acquire)) == 0
    }

    /// Starts a request.
    ///
    /// # Safety
    ///
    /// The flight is free and not under way, and the caller is its queue.
    pub(crate) unsafe fn begin(&self, tag: u64, request: Request, invitations: u32) {
        // SAFETY: by the ownership rule `what` belongs to the queue, which the caller is.
        self.what.with_mut(|what| unsafe { *what = (tag, request) });
        self.next.store(0, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.left.store(request.pages, Ordering::Relaxed);
        // The ring that carries the invitations publishes all these stores.
        self.invited.store(invitations, Ordering::Relaxed);
    }

    /// Subtracts `number` invitations that were not sent.
    pub(crate) fn cancel(&self, number: u32) {
        self.invited.fetch_sub(number, Ordering::Relaxed);
    }

    /// Returns an invitation: the caller no longer accesses the flight.
    pub(crate) fn release(&self) {
        // Pairs with the Acquire in `is_free`.
        self.invited.fetch_sub(1, strong(Site::InvitationRelease, Ordering::Release));
    }

    /// Does pages until none is left to claim; returns whether they included the last page of the
    /// flight to be done. Pages that need a wait go to `delegate` (first page, count), which
    /// returns whether another thread will do them; that thread counts as invited then.
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
        // SAFETY: by the ownership rule no thread writes `what` while the caller is what it
        // promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let mut least = 0;
        while let Some((first, count)) = self.claim_at_least(request, least) {
            let done = match request.op == Op::Write && self.out_of_memory() {
                true => Some(Ok(())),
                // A fetch thread reads the pages in memory too.
                false if least > 0 => None,
                false => pages.run(request.op, request.page, &request.buffer, first, count),
            };
            let done = match done {
                Some(done) => done,
                None if self.invite_for(first, count, &mut delegate) => {
                    // The neighbours of a page on the backing device are probably there too:
                    // delegate the rest in a few pieces, for which the ring has room.
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
        // SAFETY: by the ownership rule no thread writes `what`: the flight is under way while a
        // page is not done.
        self.what.with(|what| unsafe { (*what).1 })
    }

    /// Claims pages of `request`, which is this flight's: the first, and how many. `None` when all
    /// are claimed.
    #[inline]
    pub(crate) fn claim(&self, request: &Request) -> Option<(u32, u32)> {
        self.claim_at_least(request, 0)
    }

    /// As [`claim`](Self::claim), but at least `least` pages if there are as many.
    #[inline]
    fn claim_at_least(&self, request: &Request, least: u32) -> Option<(u32, u32)> {
        let step = step(request.op).max(least);
        let first = self.next.fetch_add(step, Ordering::Relaxed);
        if first >= request.pages {
            // Stored so that the counter cannot overflow: at most 64 threads come late.
            self.next.store(request.pages, Ordering::Relaxed);
            return None;
        }
        Some((first, step.min(request.pages - first)))
    }

    /// Whether a page of this write found no memory. Then the request has failed, and each further
    /// page would wait for memory in vain.
    #[inline]
    pub(crate) fn out_of_memory(&self) -> bool {
        self.error.load(Ordering::Relaxed) == Errno::NoSpace.raw().unsigned_abs()
    }

    /// Invites one more thread, for these pages; returns whether one was found.
    fn invite_for(
        &self,
        first: u32,
        count: u32,
        delegate: &mut impl FnMut(u32, u32) -> bool,
    ) -> bool {
        // Increment before the ring publishes the invitation. The flight is not free meanwhile,
        // because the caller is the queue or invited itself.
        self.invited.fetch_add(1, Ordering::Relaxed);
        let taken = delegate(first, count);
        if !taken {
            self.cancel(1);
        }
        taken
    }

    /// Claims all pages, before they are delegated.
    pub(crate) fn claim_all(&self, pages: u32) {
        self.next.store(pages, Ordering::Relaxed);
    }

    /// Delegates claimed pages to another thread, or does them; returns whether they included the
    /// last page of the flight to be done.
    ///
    /// # Safety
    ///
    /// The caller is the queue, with the flight under way, and no other thread does these pages.
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
        // SAFETY: by the ownership rule no thread writes `what` while the caller is what it
        // promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = pages.wait(request.page, &request.buffer, first, count);
        self.complete(count, done)
    }

    /// Completes pages that the caller has claimed; returns whether they were the last.
    #[inline]
    pub(crate) fn complete(&self, count: u32, done: Result<(), Errno>) -> bool {
        if let Err(errno) = done {
            let raw = errno.raw().unsigned_abs();
            let _ = self.error.compare_exchange(0, raw, Ordering::Relaxed, Ordering::Relaxed);
        }
        // AcqRel: the last thread has seen the results of all others, and notifies the queue.
        let order = both(Site::LeftAcquire, Site::LeftRelease);
        self.left.fetch_sub(count, order) == count
    }

    /// Reads delegated pages; returns whether they were the last.
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
        // SAFETY: by the ownership rule no thread writes `what` while the caller is what it
        // promises to be.
        let (_, ref request) = self.what.with(|what| unsafe { *what });
        let done = fetcher.wait(request.page, &request.buffer, first, count);
        self.complete(count, done)
    }

    /// Tag and result of a finished flight. Only for its queue.
    ///
    /// # Safety
    ///
    /// The caller is the queue, and has not started another request since.
    pub(crate) unsafe fn result(&self) -> (u64, Result<(), Errno>) {
        // SAFETY: only the queue writes `what`, and the caller is the queue.
        let (tag, _) = self.what.with(|what| unsafe { *what });
        (tag, Errno::from_raw(self.error.load(Ordering::Relaxed)).map_or(Ok(()), Err))
    }
}

/// The rest of a request is delegated in about this many pieces: the number of fetch threads.
const DELEGATED_PIECES: u32 = 4;

/// Pages claimed at a time. Few, so that all threads end together: a claim costs nanoseconds,
/// compressing a page microseconds. A discarded page costs only nanoseconds too, so many are
/// claimed at once.
fn step(op: Op) -> u32 {
    match op {
        Op::Write => 1,
        Op::Read => 2,
        Op::Discard | Op::WriteZeroes { .. } | Op::Flush => 4096,
    }
}
