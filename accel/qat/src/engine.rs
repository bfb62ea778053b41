//! The engine of one worker: slots to fill, submission, delivery. It has a device if one is
//! available.

mod claim;

use crate::calls::{register, Calls};
use crate::counters::{add, set, Counters, Reason};
use crate::delivery::{Delivery, Place, Work};
use crate::device::Device;
use crate::options::{Direction, EngineOptions};
use crate::piece::{BadData, Finished, Op};
use crate::process::Qat;
use crate::software::Software;
use std::cell::Cell;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// A slot to fill and submit on the engine that returned it. Dropping a lease loses the slot.
#[derive(Debug)]
#[must_use = "a lease that is dropped loses its slot: submit it or give it back"]
pub struct Lease {
    engine: u32,
    place: Place,
}

/// One worker with one instance and one session. Used by one thread at a time.
#[derive(Debug)]
pub struct Engine {
    id: u32,
    options: EngineOptions,
    qat: Option<Arc<Qat>>,
    device: Option<Device>,
    delivery: Delivery,
    plain: Vec<PlainSlot>,
    plain_free: Vec<u16>,
    /// The last piece's operation, for estimates.
    last_op: Op,
    /// Whether the clock has been read since the last poll.
    ticked: bool,
    /// When to look for an instance again, and the pause after that.
    claim_at: u64,
    claim_pause: u64,
    /// Consecutive waits without a result.
    waits: u32,
    /// The library's calls, for the watchdog.
    calls: Arc<Calls>,
}

#[derive(Debug)]
struct PlainSlot {
    source: Box<[u8]>,
    work: Work,
    number: u64,
}

/// Slots in ordinary memory, for pieces that wait for software, in addition to the device's slots.
const PLAIN_SLOTS: u16 = 16;
/// Software work of one `poll`, after which it returns.
const POLL_BUDGET_NS: u64 = 1_000_000;
const CLAIM_PAUSE_NS: (u64, u64) = (100_000_000, 5_000_000_000);
/// The longest sleep between two polls of the device, and so the longest delay of a new piece
/// beside a device that has work for four times as long.
const LONGEST_PAUSE_NS: u64 = 1_000_000;

impl Engine {
    /// Creates an engine on a free instance of `qat`. Without one it works in software, and looks
    /// for one now and then.
    pub fn new(qat: Option<&Arc<Qat>>, options: EngineOptions) -> Self {
        static IDS: AtomicU32 = AtomicU32::new(0);
        let options = options.in_range();
        let room = options.room();
        let plain = (0..PLAIN_SLOTS)
            .map(|_| PlainSlot { source: vec![0; room].into(), work: Work::NONE, number: 0 })
            .collect();
        let software = Software::new(options.level, options.max_plain);
        let pieces = options.depth + usize::from(PLAIN_SLOTS);
        let mut engine = Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            qat: qat.map(Arc::clone),
            device: None,
            delivery: Delivery::new(software, pieces),
            plain,
            plain_free: (0..PLAIN_SLOTS).rev().collect(),
            last_op: match options.direction {
                Direction::Decompress => Op::Decompress { plain_len: 0 },
                _ => Op::Compress,
            },
            ticked: false,
            claim_at: 0,
            claim_pause: CLAIM_PAUSE_NS.0,
            waits: 0,
            options,
            calls: Arc::default(),
        };
        if engine.qat.is_some() {
            register(&engine.calls);
        }
        engine.look_for_instance();
        if !engine.options.roam {
            engine.claim_at = u64::MAX;
        }
        engine
    }

    /// Whether the next piece would go to a device.
    pub fn on_device(&self) -> bool {
        self.device.as_ref().is_some_and(Device::usable)
    }

    /// Takes a slot for a piece of `plain_len` plain bytes. Returns `None` if the caller has to
    /// poll (and wait) first.
    pub fn take(&mut self, plain_len: usize) -> Option<Lease> {
        let place = match self.device.as_mut().filter(|device| device.usable()) {
            None => self.plain_free.pop().map(Place::Plain),
            Some(device) => {
                let wait = device.wait_ns();
                // With work for more than half the deadline the device is full, even with free
                // slots.
                let slot = if wait <= device.patience() { device.lease() } else { None };
                match slot {
                    Some(slot) => Some(Place::Pinned(slot)),
                    // Full. The CPU takes this piece if it finishes before the device would: then
                    // the device still has work while the CPU is busy, and neither is idle.
                    None if device.is_idle()
                        || self.options.share
                            && self.delivery.software_ns(self.last_op, plain_len) < wait =>
                    {
                        self.plain_free.pop().map(Place::Plain)
                    }
                    None => None,
                }
            }
        };
        place.map(|place| Lease { engine: self.id, place })
    }

    /// The size of `source` in bytes: enough for any piece, compressed or plain.
    pub fn capacity(&self) -> usize {
        self.options.room()
    }

    /// The slot's source memory, with undefined contents.
    ///
    /// # Panics
    ///
    /// If the lease is another engine's.
    pub fn source(&mut self, lease: &Lease) -> &mut [u8] {
        assert_eq!(lease.engine, self.id, "a lease of another engine");
        match lease.place {
            Place::Pinned(slot) => {
                self.device.as_mut().expect("a leased slot keeps its device").source(slot)
            }
            Place::Plain(slot) => &mut self.plain[usize::from(slot)].source,
        }
    }

    /// Returns an unused slot.
    ///
    /// # Panics
    ///
    /// If the lease is another engine's.
    pub fn give_back(&mut self, lease: Lease) {
        assert_eq!(lease.engine, self.id, "a lease of another engine");
        match lease.place {
            Place::Pinned(slot) => {
                self.device.as_mut().expect("a leased slot keeps its device").unlease(slot)
            }
            Place::Plain(slot) => self.plain_free.push(slot),
        }
    }

    /// Submits the first `len` bytes of the slot's source as a piece. A later `poll` delivers it
    /// once, with `tag`.
    ///
    /// # Panics
    ///
    /// If the lease is another engine's, or `len` is above `capacity` (compressing: above
    /// `max_plain`). A `plain_len` above `max_plain` may come from a peer: it is delivered as bad
    /// data.
    pub fn submit(&mut self, lease: Lease, len: usize, op: Op, tag: u64) {
        assert_eq!(lease.engine, self.id, "a lease of another engine");
        let limit = if op == Op::Compress { self.options.max_plain } else { self.capacity() };
        assert!(len <= limit, "a piece of {len} bytes, {limit} at most");
        if !self.ticked {
            // Pieces submitted between two polls share one clock reading.
            self.delivery.tick();
            self.ticked = true;
        }
        self.last_op = op;
        let mut work = Work { op, len, tag, crc32: 0, at: self.delivery.now };
        if op == Op::Compress {
            work.crc32 = libdeflater::crc32(&self.source(&lease)[..len]);
        }
        add(&self.delivery.counters.submitted, 1);
        add(&self.delivery.counters.bytes_in, len as u64);
        self.delivery.outstanding += 1;
        let plain_len = work.plain_len();
        let fit = len > 0 && plain_len > 0 && plain_len <= self.options.max_plain;
        let reason = match &self.device {
            _ if !fit => Some(Reason::Unfit),
            None => Some(Reason::NoInstance),
            Some(device) => device.unusable(),
        };
        match lease.place {
            Place::Pinned(slot) => {
                let device = self.device.as_mut().expect("a leased slot keeps its device");
                device.submit(slot, work, reason, &mut self.delivery);
            }
            Place::Plain(slot) => {
                let reason = reason.unwrap_or(Reason::Busy);
                let number = self.delivery.queue(lease.place, plain_len, reason);
                let slot = &mut self.plain[usize::from(slot)];
                (slot.work, slot.number) = (work, number);
            }
        }
    }

    /// Collects the device's results, supervises the device, and does some of the queued pieces in
    /// software. `done` gets each piece's tag and result; the bytes are valid during the call.
    /// Returns the number of pieces delivered.
    pub fn poll(&mut self, mut done: impl FnMut(u64, Result<Finished<'_>, BadData>)) -> usize {
        self.delivery.tick();
        let before = self.delivery.outstanding;
        if let Some(device) = &mut self.device {
            device.collect(&mut self.delivery, &mut done);
            device.tend(&mut self.delivery);
            set(&self.delivery.counters.in_flight, device.in_flight() as u64);
        }
        if self.delivery.now >= self.claim_at {
            self.look_for_instance();
        }
        self.run_software(&mut done);
        if let Some(device) = self.device.as_mut().filter(|_| self.delivery.outstanding == 0) {
            device.rest();
        }
        self.ticked = false;
        let delivered = before - self.delivery.outstanding;
        if delivered > 0 {
            self.waits = 0;
        }
        delivered
    }

    /// Sleeps 20 µs to 1 ms, by the device's remaining work, if the engine can only wait for the
    /// device; call it when `poll` returned 0.
    ///
    /// Sets the calling thread's timer slack to 1 µs, once: with the default of 50 µs the sleep
    /// would be three times as long.
    pub fn wait(&mut self) {
        thread_local! {
            static SLACK_SET: Cell<bool> = const { Cell::new(false) };
        }
        if self.delivery.outstanding == 0 || self.delivery.has_queued() {
            return;
        }
        if !SLACK_SET.replace(true) {
            // Only a kernel without this call refuses; then the sleeps are just longer.
            let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        }
        // A busy device answers soon; after some sleeps without an answer they get longer. A
        // wake-up costs as much as a page, so a device with much work is polled about four times
        // until it is done.
        let pause = if self.waits < 4 { 20_000 } else { 50_000 };
        self.waits += 1;
        let work = self.device.as_ref().filter(|device| device.usable()).map_or(0, Device::wait_ns);
        let pause = (work / 4).clamp(pause, LONGEST_PAUSE_NS);
        std::thread::sleep(Duration::from_nanos(pause));
    }

    /// Pieces submitted and not delivered.
    pub fn in_flight(&self) -> usize {
        self.delivery.outstanding
    }

    /// The engine's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.delivery.counters
    }

    fn run_software(&mut self, done: &mut impl FnMut(u64, Result<Finished<'_>, BadData>)) {
        let end = self.delivery.now + POLL_BUDGET_NS;
        while let Some(queued) = self.delivery.next() {
            match queued.place {
                Place::Plain(slot) => {
                    let at = &self.plain[usize::from(slot)];
                    debug_assert_eq!(
                        at.number, queued.number,
                        "a plain slot has one piece at a time"
                    );
                    self.delivery.redo(&at.work, &at.source[..at.work.len], queued.reason, done);
                    self.plain_free.push(slot);
                }
                Place::Pinned(slot) => {
                    let device = self.device.as_mut().expect("a queued slot keeps its device");
                    device.redo(slot, &queued, &mut self.delivery, done);
                }
            }
            // Load sharing: return to the device after each piece, so that it does not run out of
            // work.
            if queued.reason == Reason::Busy || self.delivery.now >= end {
                break;
            }
        }
    }
}

impl Drop for Engine {
    /// Pieces that were not delivered are dropped. Waits for a working device, up to the deadline.
    fn drop(&mut self) {
        if let (Some(device), Some(qat)) = (self.device.take(), &self.qat) {
            device.retire(qat, &mut self.delivery);
        }
    }
}
