//! The queue of one transport thread.
#![expect(unsafe_code, reason = "works on its own flights")]

mod delegated;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::event::{poll, PollFd, PollFlags};

use crate::counters::add;
use crate::flight::{DoPages, WaitForPages};
use crate::guard::IoPath;
use crate::page_io::PageIo;
use crate::request::{Buffer, Errno, Extent, Op, Queue, Request, PAGE};
use crate::threads::Threads;

/// A queue of a [`Device`](crate::Device).
pub struct DeviceQueue {
    threads: Arc<Threads>,
    pages: PageIo,
    number: u16,
    /// Flights that are not under way, the least recently used first.
    idle: VecDeque<u16>,
    /// Finished flights that were taken from the ring and not yet reported.
    early: VecDeque<u16>,
    under_way: usize,
}

impl DeviceQueue {
    pub(crate) fn new(threads: &Arc<Threads>, pages: PageIo, number: u16, depth: u16) -> Self {
        Self {
            threads: Arc::clone(threads),
            pages,
            number,
            idle: (0..depth).collect(),
            early: VecDeque::with_capacity(usize::from(depth)),
            under_way: 0,
        }
    }

    /// Reads whole pages from `page`, on this thread alone.
    ///
    /// # Errors
    ///
    /// The errors of a request.
    pub fn read_now(&mut self, page: u64, out: &mut [u8]) -> Result<(), Errno> {
        // SAFETY: the bytes are ours until `now` returns, and the request is complete by then.
        let buffer = unsafe { Buffer::new(out.as_mut_ptr(), out.len()) };
        self.now(Op::Read, page, buffer)
    }

    /// Writes whole pages from `page`, on this thread alone.
    ///
    /// # Errors
    ///
    /// The errors of a request.
    pub fn write_now(&mut self, page: u64, bytes: &[u8]) -> Result<(), Errno> {
        // SAFETY: no thread writes the bytes until `now` returns (the device only reads them, since
        // it is a write), and the request is complete by then.
        let buffer = unsafe { Buffer::new(bytes.as_ptr().cast_mut(), bytes.len()) };
        self.now(Op::Write, page, buffer)
    }

    fn now(&mut self, op: Op, page: u64, buffer: Buffer) -> Result<(), Errno> {
        self.watched(|queue| queue.do_now(op, page, buffer))
    }

    /// Works on requests with heartbeats and with the check for allocations.
    #[inline]
    fn watched<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let _path = IoPath::enter();
        self.pages.slot().begin();
        let done = work(self);
        self.pages.slot().end();
        done
    }

    fn do_now(&mut self, op: Op, page: u64, buffer: Buffer) -> Result<(), Errno> {
        let pages = u32::try_from(buffer.len() / PAGE).unwrap_or(u32::MAX);
        let request = Request { op, page, pages, buffer };
        self.check(&request)?;
        // The caller of `do_now` waits for the backing device.
        let done = self.pages.run(op, page, &buffer, 0, pages);
        done.unwrap_or_else(|| self.pages.wait(page, &buffer, 0, pages))
    }

    fn check(&self, request: &Request) -> Result<(), Errno> {
        let counters = self.pages.counters();
        add(&counters.requests, 1);
        if self.is_sound(request) {
            Ok(())
        } else {
            add(&counters.invalid_io, 1);
            Err(Errno::Invalid)
        }
    }

    fn is_sound(&self, request: &Request) -> bool {
        let end = request.page.checked_add(u64::from(request.pages));
        let there = end.is_some_and(|end| end <= self.threads.records.pages);
        let pages = request.pages as usize;
        match request.op {
            Op::Read | Op::Write => there && pages.checked_mul(PAGE) == Some(request.buffer.len()),
            Op::Discard | Op::WriteZeroes { .. } => there,
            Op::Flush => true,
        }
    }

    /// A free flight, if there is one.
    fn flight(&mut self) -> Option<u16> {
        let station = self.threads.dispatch.station(self.number);
        // A flight with an invitation still in the ring is not free yet.
        for _ in 0..self.idle.len().min(8) {
            let number = self.idle.pop_front()?;
            if station.flights[usize::from(number)].is_free() {
                return Some(number);
            }
            self.idle.push_back(number);
        }
        None
    }

    fn next_done(&mut self) -> Option<u16> {
        self.early.pop_front().or_else(|| self.threads.dispatch.station(self.number).done())
    }

    fn begin(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        if let Err(errno) = self.check(&request) {
            return Some(Err(errno));
        }
        if request.op == Op::Write && request.pages > 0 && self.threads.dispatch.qat.is_ready() {
            if let Some(number) = self.flight() {
                if self.give_to_qat(number, tag, request) {
                    return None;
                }
            }
        }
        if request.pages >= self.threads.dispatch.split_from(request.op) {
            if let Some(number) = self.flight() {
                return self.split(number, tag, request);
            }
        }
        let Request { op, page, pages, ref buffer } = request;
        let pages = if op == Op::Flush { 0 } else { pages };
        match self.pages.run(op, page, buffer, 0, pages) {
            Some(done) => Some(done),
            None => self.read_later(tag, request),
        }
    }

    fn read_now_or_not(&mut self, request: Request) -> Option<Result<(), Errno>> {
        let Request { op: Op::Read, page, pages, ref buffer } = request else { return None };
        if !self.is_sound(&request) {
            return Some(self.check(&request));
        }
        let done = self.pages.run(Op::Read, page, buffer, 0, pages)?;
        add(&self.pages.counters().requests, 1);
        Some(done)
    }
}

impl Queue for DeviceQueue {
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        self.watched(|queue| queue.begin(tag, request))
    }

    fn read_at_once(&mut self, request: Request) -> Option<Result<(), Errno>> {
        self.watched(|queue| queue.read_now_or_not(request))
    }

    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
        let mut number = 0;
        while let Some(done) = self.next_done() {
            let flight = &self.threads.dispatch.station(self.number).flights[usize::from(done)];
            // SAFETY: the flight is ours, was under way, and no other request was started in it.
            let (tag, result) = unsafe { flight.result() };
            self.idle.push_back(done);
            self.under_way -= 1;
            number += 1;
            each(tag, result);
        }
        number
    }

    fn in_flight(&self) -> usize {
        self.under_way
    }

    fn arm(&mut self) -> bool {
        self.threads.dispatch.station(self.number).arm(&mut self.early)
    }

    fn defers_writes(&self) -> bool {
        self.threads.dispatch.qat.is_ready()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.threads.dispatch.station(self.number).wake().fd()
    }

    fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        self.watched(|queue| {
            add(&queue.pages.counters().requests, 1);
            queue.pages.patch(page, at, bytes)
        })
    }

    fn extent(&mut self, page: u64, most: u64) -> Result<Extent, Errno> {
        // There is no heartbeat: the search may look at all entries of the table, but never waits.
        self.pages.extent(page, most)
    }
}

impl Drop for DeviceQueue {
    fn drop(&mut self) {
        // The buffers belong to the transport, which frees them after this.
        while self.under_way > 0 {
            if self.arm() {
                let _ = poll(&mut [PollFd::new(&self.fd(), PollFlags::IN)], None);
            }
            self.reap(&mut |_, _| {});
        }
        self.threads.dispatch.station(self.number).disarm();
        self.threads.dispatch.close(self.number);
    }
}

impl fmt::Debug for DeviceQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceQueue")
            .field("number", &self.number)
            .field("in_flight", &self.under_way)
            .finish_non_exhaustive()
    }
}
