//! Loom models of a split request: every interleaving, and every value that a weakly ordered load
//! may return.
//!
//! `scripts/loom` runs them, also with each ordering or step weakened in turn, and then requires a
//! failure. Loom's cells stand for the pages of a request: they detect two threads in one page, and
//! a read of a page before its completion was seen.
#![expect(unsafe_code, reason = "the models write the pages of a request")]

use std::collections::VecDeque;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::flight::{DoPages, WaitForPages};
use crate::request::{Buffer, Errno, Op, Request};
use crate::station::Station;

/// Explores `model` with at most `preemptions` forced switches; blocking switches are free.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Does the pages of a model's request; the closure gets the request's number and the page's.
struct Pages<'a> {
    done: &'a mut dyn FnMut(u64, u32) -> Result<(), Errno>,
    /// The page that needs a wait.
    slow: Option<u32>,
}

impl DoPages for Pages<'_> {
    fn run(
        &mut self,
        _: Op,
        page: u64,
        _: &Buffer,
        first: u32,
        _: u32,
    ) -> Option<Result<(), Errno>> {
        (self.slow != Some(first)).then(|| (self.done)(page, first))
    }
}

impl WaitForPages for Pages<'_> {
    fn wait(&mut self, page: u64, _: &Buffer, first: u32, _: u32) -> Result<(), Errno> {
        (self.done)(page, first)
    }
}

/// A station with one flight, and the two pages of its request.
struct Model {
    station: Station,
    pages: [UnsafeCell<u64>; 2],
}

impl Model {
    fn new() -> Arc<Self> {
        let station = Station::new(1).expect("it needs no kernel");
        Arc::new(Self { station, pages: [UnsafeCell::new(0), UnsafeCell::new(0)] })
    }

    /// The queue's part: starts a request of two pages in the flight, with one invitation.
    fn begin(&self, tag: u64) {
        self.invite(tag, 1);
    }

    /// The same with more invitations.
    fn invite(&self, tag: u64, invitations: u32) {
        let request = Request { op: Op::Write, page: tag, pages: 2, buffer: Buffer::NONE };
        // SAFETY: the model's queue starts it when it is free and not under way; loom checks just
        // that.
        unsafe { self.station.flights[0].begin(tag, request, invitations) };
    }

    /// Writes the request's number into pages until none is left; returns whether they included the
    /// last. A page that already has the number is an error.
    fn work(&self) -> bool {
        self.work_but(None, |_, _| false)
    }

    /// The same, but `delegate` gets the page that needs a wait.
    fn work_but(&self, slow: Option<u32>, delegate: impl FnMut(u32, u32) -> bool) -> bool {
        let mut done = |tag, first| self.write(tag, first);
        let mut pages = Pages { done: &mut done, slow };
        // SAFETY: the queue, with the flight under way, or its helper.
        unsafe { self.station.flights[0].work(&mut pages, delegate) }
    }

    fn write(&self, tag: u64, first: u32) -> Result<(), Errno> {
        self.pages[first as usize].with_mut(|page| {
            // SAFETY: the page was claimed, so it is ours; loom checks just that.
            let page = unsafe { &mut *page };
            let before = std::mem::replace(page, tag);
            if before < tag {
                Ok(())
            } else {
                Err(Errno::Io)
            }
        })
    }

    /// A fetch thread's part.
    fn fetch(&self, first: u32, count: u32) {
        let mut done = |tag, first| self.write(tag, first);
        let mut pages = Pages { done: &mut done, slow: None };
        // SAFETY: these pages are ours, with an invitation.
        let last = unsafe { self.station.flights[0].fetch(&mut pages, first, count) };
        self.station.flights[0].release();
        if last {
            self.station.finish(0);
        }
    }

    /// A QAT thread's part: claims all pages, releases the flight, and does them later, the last
    /// one first. It reads the request again for each page.
    fn offload(&self) {
        let flight = &self.station.flights[0];
        // SAFETY: this thread was invited, and releases the flight below.
        let request = unsafe { flight.request() };
        let mut taken = Vec::new();
        while let Some((number, _)) = flight.claim(&request) {
            taken.push(number);
        }
        flight.release();
        let mut last = false;
        while let Some(number) = taken.pop() {
            // SAFETY: this thread has claimed the page, which is completed below.
            let Request { page: tag, .. } = unsafe { flight.request() };
            last |= flight.complete(1, self.write(tag, number));
        }
        if last {
            self.station.put(0);
            self.station.notify();
        }
    }

    /// A worker's part, with an invitation.
    fn follow(&self) {
        let last = self.work();
        self.station.flights[0].release();
        if last {
            self.station.finish(0);
        }
    }

    /// The transport thread's part until its request is complete.
    fn wait(&self) {
        let mut early = VecDeque::new();
        while early.is_empty() {
            if self.station.arm(&mut early) {
                self.station.wake().sleep();
                early.extend(self.station.done());
            }
        }
        assert_eq!(early, [0]);
    }

    /// The queue's part when a request is complete.
    fn check(&self, tag: u64) {
        // SAFETY: the flight is finished, and we are its queue.
        assert_eq!(unsafe { self.station.flights[0].result() }, (tag, Ok(())));
        for page in &self.pages {
            // SAFETY: the request is complete, so no thread writes its pages; loom checks just
            // that.
            page.with(|page| assert_eq!(unsafe { *page }, tag));
        }
    }
}

/// Starts a thread for a part of the request.
fn spawn(model: &Arc<Model>, part: fn(&Model)) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || part(&model))
}

#[test]
fn a_request_is_over_when_all_of_its_pages_are_and_its_queue_is_woken() {
    explore(3, || {
        let model = Model::new();
        model.begin(1);
        let helper = spawn(&model, Model::follow);
        if !model.work() {
            model.wait();
        }
        model.check(1);
        helper.join().unwrap();
    });
}

#[test]
fn a_flight_is_used_again_when_its_helper_has_released_it() {
    explore(3, || {
        let model = Model::new();
        model.begin(1);
        let helper = spawn(&model, Model::follow);
        if !model.work() {
            model.wait();
        }
        if model.station.flights[0].is_free() {
            model.begin(2);
            assert!(model.work(), "the helper of the first request has taken a page of the second");
            model.check(2);
        }
        helper.join().unwrap();
    });
}

#[test]
fn two_helpers_finish_a_request_that_its_queue_sleeps_for() {
    explore(2, || {
        let model = Model::new();
        model.invite(1, 2);
        let helpers = [(); 2].map(|()| spawn(&model, Model::follow));
        model.wait();
        model.check(1);
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}

#[test]
fn a_page_that_is_delegated_is_waited_for_like_any_other() {
    explore(3, || {
        let model = Model::new();
        model.begin(1);
        let helper = spawn(&model, Model::follow);
        let mut fetcher = None;
        let last = model.work_but(Some(1), |first, count| {
            let model = Arc::clone(&model);
            fetcher = Some(thread::spawn(move || model.fetch(first, count)));
            true
        });
        if !last {
            model.wait();
        }
        model.check(1);
        helper.join().unwrap();
        if let Some(fetcher) = fetcher {
            fetcher.join().unwrap();
        }
    });
}

#[test]
fn a_device_finishes_pages_after_its_thread_released_the_flight_and_wakes_the_queue() {
    explore(3, || {
        let model = Model::new();
        model.begin(1);
        let helper = spawn(&model, Model::offload);
        model.wait();
        model.check(1);
        if model.station.flights[0].is_free() {
            model.begin(2);
            assert!(
                model.work(),
                "pages of the second request have gone to the first one's helper"
            );
            model.check(2);
        }
        helper.join().unwrap();
    });
}

#[test]
fn two_devices_finish_a_request_once_and_do_not_access_it_later() {
    explore(2, || {
        let model = Model::new();
        model.invite(1, 2);
        let helpers = [(); 2].map(|()| spawn(&model, Model::offload));
        model.wait();
        model.check(1);
        if model.station.flights[0].is_free() {
            model.begin(2);
            assert!(model.work(), "pages of the second request have gone to helpers of the first");
            model.check(2);
        }
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}

/// Otherwise a queue's eventfd would stay readable, and the queue never sleep.
#[test]
fn a_queue_clears_its_wake_up_and_its_eventfd_is_not_readable() {
    explore(3, || {
        let model = Model::new();
        model.begin(1);
        let helper = spawn(&model, Model::follow);
        if !model.work() {
            model.wait();
        }
        model.check(1);
        helper.join().unwrap();
        let mut early = VecDeque::new();
        assert!(model.station.arm(&mut early), "a flight is reported twice");
        assert!(!model.station.wake().is_set(), "it stays readable");
    });
}
