//! Requests that a queue shares with other threads: workers, fetch threads and QAT threads.
#![expect(unsafe_code, reason = "works on its own flights")]

use std::time::{Duration, Instant};

use super::DeviceQueue;
use crate::counters::add;
use crate::dispatch::Invitation;
use crate::flight::WaitForPages;
use crate::request::{Errno, Request};

impl DeviceQueue {
    /// Splits a request; `None` if it is under way afterwards.
    pub(super) fn split(
        &mut self,
        number: u16,
        tag: u64,
        request: Request,
    ) -> Option<Result<(), Errno>> {
        add(&self.pages.counters().split_requests, 1);
        let dispatch = &self.threads.dispatch;
        let flight = &dispatch.station(self.number).flights[usize::from(number)];
        let most = u32::try_from(self.threads.records.workers).unwrap_or(u32::MAX);
        let helpers = most.min(request.pages / HELPER_PAGES).max(1);
        // SAFETY: the flight was free and idle, and is ours.
        unsafe { flight.begin(tag, request, helpers) };
        let sent = dispatch.invite(Invitation { queue: self.number, flight: number }, helpers);
        flight.cancel(helpers - sent);
        let delegate = |first, count| dispatch.fetch(self.number, number, first, count);
        // SAFETY: the flight is ours and under way.
        if unsafe { flight.work(&mut self.pages, delegate) } {
            self.idle.push_back(number);
            // SAFETY: the flight is ours, and no other request was started in it.
            return Some(unsafe { flight.result() }.1);
        }
        self.under_way += 1;
        // The rest is being worked on just now: a page or two for each worker.
        if !self.spin_for(number) {
            return None;
        }
        self.idle.push_back(number);
        self.under_way -= 1;
        // SAFETY: the flight is ours, and no other request was started in it.
        Some(
            unsafe {
                self.threads.dispatch.station(self.number).flights[usize::from(number)].result()
            }
            .1,
        )
    }

    /// Delegates a small read to the fetch threads; `None` if it is under way afterwards.
    pub(super) fn read_later(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        let Request { page, pages, ref buffer, .. } = request;
        // A flight is taken only if it will be used, since it leaves the idle list.
        let there = self.threads.dispatch.fetchers > 0;
        let Some(number) = there.then(|| self.flight()).flatten() else {
            // All flights are in use, so other requests wait for the device anyway.
            return Some(self.pages.wait(page, buffer, 0, pages));
        };
        let dispatch = &self.threads.dispatch;
        let flight = &dispatch.station(self.number).flights[usize::from(number)];
        let fetchers = u32::try_from(dispatch.fetchers).unwrap_or(u32::MAX);
        let part = pages.div_ceil(fetchers).max(1);
        // SAFETY: the flight was free and idle, and is ours.
        unsafe { flight.begin(tag, request, 1) };
        flight.claim_all(pages);
        let mut last = false;
        for first in (0..pages).step_by(part as usize) {
            let count = part.min(pages - first);
            let delegate = |first, count| dispatch.fetch(self.number, number, first, count);
            // SAFETY: the flight is ours and under way, and no other thread does these pages.
            last |= unsafe { flight.delegate_or_wait(&mut self.pages, first, count, delegate) };
        }
        flight.release();
        if last {
            self.idle.push_back(number);
            // SAFETY: the flight is ours, and no other request was started in it.
            return Some(unsafe { flight.result() }.1);
        }
        self.under_way += 1;
        None
    }

    /// Passes a write to the QAT threads; returns whether they have room for it.
    pub(super) fn give_to_qat(&mut self, number: u16, tag: u64, request: Request) -> bool {
        let dispatch = &self.threads.dispatch;
        let flight = &dispatch.station(self.number).flights[usize::from(number)];
        let helpers = dispatch.qat.threads_for(request.pages);
        // SAFETY: the flight was free and idle, and is ours.
        unsafe { flight.begin(tag, request, helpers) };
        let sent = dispatch.qat.invite(Invitation { queue: self.number, flight: number }, helpers);
        flight.cancel(helpers - sent);
        if sent == 0 {
            self.idle.push_back(number);
            return false;
        }
        self.under_way += 1;
        true
    }

    /// Spins briefly for a flight to finish; returns whether it has.
    fn spin_for(&mut self, number: u16) -> bool {
        let station = self.threads.dispatch.station(self.number);
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                match station.done() {
                    Some(done) if done == number => return true,
                    Some(other) => self.early.push_back(other),
                    None => std::hint::spin_loop(),
                }
            }
            if start.elapsed() > LONGEST_SPIN {
                return false;
            }
        }
    }
}

/// Pages that justify waking one more worker.
const HELPER_PAGES: u32 = 8;

/// How long a thread that has done its own share spins for the others: about the cost of a sleep
/// and a wake-up, and longer than a page takes if the thread is not interrupted.
const LONGEST_SPIN: Duration = Duration::from_micros(30);
