//! QAT threads: each compresses pages on a QAT device, with many pages in flight.
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

/// Options for the use of a QAT device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Threads, each with an instance of its own, at most 32; fewer if there are fewer instances.
    pub threads: usize,
    /// Pages that each thread has in flight, 1 to 256. With 1 it waits for each page.
    pub depth: usize,
    /// While the device is full, compress pages in software if that is faster.
    pub share: bool,
    /// Decompress and compare every n-th output of the device: 1 for all, 0 for none.
    pub verify_every: u32,
    /// The longest wait of a page for the device, 1 ms to 60 s.
    pub deadline: Duration,
}

impl Default for OffloadOptions {
    /// One thread for each eight CPUs, because one thread copies 1 GB/s and more; 128 pages in
    /// flight; a share of the load in software; one output in 64 verified; a deadline of 100 ms.
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
    /// Makes an engine of the driver. The engine does not look for another instance later, because
    /// that would allocate.
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

/// The QAT counters of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffloadStats {
    /// Threads whose instance accepts pages just now.
    pub on_device: usize,
    /// The driver's counters of each thread.
    pub engines: Vec<Snapshot>,
}

/// A QAT thread, with one instance.
pub(crate) struct QatThread {
    dispatch: Arc<Dispatch>,
    /// The thread's access to the store.
    pages: PageIo,
    qat: qat::Engine,
    /// The invitation that the thread follows.
    current: Option<Invitation>,
    /// Whether the thread is counted in `on_device`.
    ready: bool,
    /// Bit n is set: notify queue n. There are at most as many queues as the store has workers, 64.
    waiting: u64,
}

impl QatThread {
    /// Creates a thread whose engine has an instance.
    pub(crate) fn new(dispatch: &Arc<Dispatch>, pages: PageIo, qat: qat::Engine) -> Self {
        dispatch.qat.add_thread(qat.counters());
        Self { dispatch: Arc::clone(dispatch), pages, qat, current: None, ready: false, waiting: 0 }
    }

    /// Follows invitations until it is ordered to stop.
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
        // The drop of the thread frees memory, so the guard ends here.
        drop(path);
    }

    /// Publishes whether this thread accepts writes.
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

    /// Gives the device pages while it has room; returns their number.
    fn fill(&mut self) -> usize {
        let Self { dispatch, pages, qat, current, waiting, .. } = self;
        let mut taken = 0;
        // Same-filled pages need no room, so without a limit the loop might not look at the pages
        // in flight.
        while taken < MOST_AT_ONCE {
            let Some(invitation) = current.or_else(|| dispatch.qat.invitations.pop()) else {
                return taken;
            };
            *current = Some(invitation);
            let Some(lease) = qat.take(PAGE) else { return taken };
            let station = dispatch.station(invitation.queue);
            let flight = &station.flights[usize::from(invitation.flight)];
            // SAFETY: this thread was invited, and releases the invitation below.
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

    /// Stores the device's results; returns the number of pages.
    fn collect(&mut self) -> usize {
        let Self { dispatch, pages, qat, waiting, .. } = self;
        qat.poll(|tag, finished| {
            let (Invitation { queue, flight: at }, number) = untag(tag);
            let station = dispatch.station(queue);
            let flight = &station.flights[usize::from(at)];
            // SAFETY: this thread has claimed the page, which is completed below.
            let request = unsafe { flight.request() };
            let index = request.page + u64::from(number);
            let plain = request.buffer.written(number as usize);
            let stored = if flight.out_of_memory() {
                Ok(())
            } else if let Ok(finished) = finished {
                pages.write_offloaded(index, plain, finished.bytes, finished.crc32)
            } else {
                // The engine returns this only for input that is to be decompressed.
                pages.write(index, plain)
            };
            if flight.complete(1, stored) {
                station.put(at);
                *waiting |= 1 << queue;
            }
        })
    }

    /// Notifies the queues of finished flights: once for all results of a poll, because each
    /// notification may be a system call.
    fn notify(&mut self) {
        while self.waiting != 0 {
            let queue = self.waiting.trailing_zeros();
            self.waiting &= self.waiting - 1;
            self.dispatch.station(u16::try_from(queue).expect("below 64")).notify();
        }
    }

    /// Sleeps until there is work, or until the instance has to be checked; `false` if the thread
    /// has to stop.
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

/// The most pages taken between two polls of the device.
const MOST_AT_ONCE: usize = 256;

/// How often a thread checks an instance that does not work.
const PROBING: Duration = Duration::from_millis(10);
