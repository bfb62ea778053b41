//! Threads that have pages compressed by a QAT device, many in flight each.
#![expect(unsafe_code, reason = "works on flights of queues")]

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::same_filled;
use qat::{Direction, EngineOptions, Op, Qat, Snapshot};

use crate::dispatch::{Dispatch, Invitation, Next};
use crate::guard::IoPath;
use crate::page_io::PageIo;
use crate::records::MAX_QAT_THREADS;
use crate::request::PAGE;

/// How pages are given to a QAT device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Threads, each with an instance of its own, at most 32; fewer where there are fewer
    /// instances.
    pub threads: usize,
    /// Pages that each keeps in flight, 1 to 256. With 1 it waits for each page: direct offload.
    pub depth: usize,
    /// While the device is full, do pages in software that are done sooner that way.
    pub share: bool,
    /// Of the device's outputs, decompress each n-th and compare: 1 for all, 0 for none.
    pub verify_every: u32,
    /// No page waits longer for the device, 1 ms to 60 s.
    pub deadline: Duration,
}

impl Default for OffloadOptions {
    /// One thread for each eight CPUs, since one copies 1 GB/s and more; 128 pages in flight,
    /// shared load, one output in 64 verified, 100 ms.
    fn default() -> Self {
        let driver = EngineOptions::default();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            threads: (cpus / 8).clamp(1, MAX_QAT_THREADS),
            depth: driver.depth,
            share: driver.share,
            verify_every: driver.verify_every,
            deadline: driver.deadline,
        }
    }
}

impl OffloadOptions {
    /// An engine of the driver, which does not look for another instance later: that would
    /// allocate.
    pub(crate) fn engine(&self, qat: &Arc<Qat>, level: i32) -> qat::Engine {
        let options = EngineOptions {
            level: u32::try_from(level).unwrap_or(1),
            depth: self.depth,
            max_plain: PAGE,
            deadline: self.deadline,
            direction: Direction::Compress,
            share: self.share,
            verify_every: self.verify_every,
            roam: false,
        };
        qat::Engine::new(Some(qat), options)
    }
}

/// What QAT devices have done for a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffloadStats {
    /// Threads whose instance takes pages just now.
    pub on_device: usize,
    /// The driver's counters of each thread.
    pub engines: Vec<Snapshot>,
}

/// One thread with an instance.
pub(crate) struct QatThread {
    dispatch: Arc<Dispatch>,
    /// Its access to the store.
    pages: PageIo,
    qat: qat::Engine,
    /// The invitation that it is following.
    current: Option<Invitation>,
    /// It is counted in `on_device`.
    ready: bool,
    /// Queues to be notified, a bit each: there are at most as many as the store has workers, 64.
    waiting: u64,
}

impl QatThread {
    /// One whose engine has an instance.
    pub(crate) fn new(dispatch: &Arc<Dispatch>, pages: PageIo, qat: qat::Engine) -> Self {
        dispatch.qat.add_thread(qat.counters());
        Self { dispatch: Arc::clone(dispatch), pages, qat, current: None, ready: false, waiting: 0 }
    }

    /// Follows invitations until it is told to stop.
    pub(crate) fn run(mut self) {
        let path = IoPath::enter();
        self.pages.slot().begin();
        loop {
            self.report();
            let taken = self.fill();
            let done = self.collect();
            self.notify();
            if taken + done > 0 {
                self.pages.slot().advance();
                continue;
            }
            if self.qat.in_flight() > 0 || self.current.is_some() {
                self.qat.wait();
            } else {
                self.pages.slot().end();
                if !self.rest() {
                    break;
                }
                self.pages.slot().begin();
            }
        }
        // What follows gives memory back.
        drop(path);
    }

    /// Says whether writes are welcome.
    fn report(&mut self) {
        let ready = self.qat.on_device();
        if ready != self.ready {
            self.ready = ready;
            let on_device = &self.dispatch.qat.on_device;
            if ready {
                on_device.fetch_add(1, Ordering::Relaxed);
            } else {
                on_device.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Gives the device pages while it has room, and gives their number.
    fn fill(&mut self) -> usize {
        let Self { dispatch, pages, qat, current, waiting, .. } = self;
        let mut taken = 0;
        // Pages of one word need no room, and what is in flight is to be looked at.
        while taken < MOST_AT_ONCE {
            let Some(invitation) = current.or_else(|| dispatch.qat.invitations.pop()) else {
                return taken;
            };
            *current = Some(invitation);
            let Some(lease) = qat.take(PAGE) else { return taken };
            let station = dispatch.station(invitation.queue);
            let flight = &station.flights[usize::from(invitation.flight)];
            // SAFETY: we were invited, and release the invitation below.
            let request = unsafe { flight.request() };
            let Some((number, _)) = flight.claim(&request) else {
                qat.give_back(lease);
                flight.release();
                *current = None;
                continue;
            };
            taken += 1;
            let plain = request.buffer.written(number as usize);
            let stored = if flight.out_of_memory() {
                Ok(())
            } else if let Some(word) = same_filled(plain) {
                pages.write_same(request.page + u64::from(number), u64::from_le_bytes(word))
            } else {
                qat.source(&lease)[..PAGE].copy_from_slice(plain);
                qat.submit(lease, PAGE, Op::Compress, tag(invitation, number));
                continue;
            };
            qat.give_back(lease);
            if flight.complete(1, stored) {
                station.put(invitation.flight);
                *waiting |= 1 << invitation.queue;
            }
        }
        taken
    }

    /// Stores what the device has done, and gives the number of pages.
    fn collect(&mut self) -> usize {
        let Self { dispatch, pages, qat, waiting, .. } = self;
        qat.poll(|tag, finished| {
            let (Invitation { queue, flight: at }, number) = untag(tag);
            let station = dispatch.station(queue);
            let flight = &station.flights[usize::from(at)];
            // SAFETY: we have claimed this page, which is complete below.
            let request = unsafe { flight.request() };
            let index = request.page + u64::from(number);
            let plain = request.buffer.written(number as usize);
            let stored = if flight.out_of_memory() {
                Ok(())
            } else if let Ok(finished) = finished {
                pages.write_offloaded(index, plain, finished.bytes, finished.crc32)
            } else {
                // Said only of what is to be decompressed.
                pages.write(index, plain)
            };
            if flight.complete(1, stored) {
                station.put(at);
                *waiting |= 1 << queue;
            }
        })
    }

    /// Tells the queues what is finished: once for all that a look has brought, since each may cost
    /// a system call.
    fn notify(&mut self) {
        while self.waiting != 0 {
            let queue = self.waiting.trailing_zeros();
            self.waiting &= self.waiting - 1;
            self.dispatch.station(u16::try_from(queue).expect("below 64")).notify();
        }
    }

    /// Sleeps until there is work, or it is time to look after the instance; `false` when it is
    /// time to stop.
    fn rest(&mut self) -> bool {
        let Dispatch { qat, stop, .. } = &*self.dispatch;
        let look = (!self.ready).then(|| Instant::now() + PROBING);
        match qat.invitations.wait(look, stop) {
            Next::Work(invitation) => self.current = Some(invitation),
            Next::Nothing => {}
            Next::Stop => return false,
        }
        true
    }
}

fn tag(Invitation { queue, flight }: Invitation, number: u32) -> u64 {
    u64::from(queue) << 48 | u64::from(flight) << 32 | u64::from(number)
}

fn untag(tag: u64) -> (Invitation, u32) {
    let [q0, q1, f0, f1, n @ ..] = tag.to_be_bytes();
    let (queue, flight) = (u16::from_be_bytes([q0, q1]), u16::from_be_bytes([f0, f1]));
    (Invitation { queue, flight }, u32::from_be_bytes(n))
}

/// Pages taken between two looks at the device.
const MOST_AT_ONCE: usize = 256;

/// How often a thread looks after an instance that is not well.
const PROBING: Duration = Duration::from_millis(10);
