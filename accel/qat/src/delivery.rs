//! State that the device's and the software's side of an engine share: clock, counters, the queue
//! of pieces for software, and delivery.

use crate::counters::{add, set, Counters, Reason};
use crate::piece::{BadData, By, Finished, Op};
use crate::software::Software;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

/// A piece in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) op: Op,
    /// Bytes of the source.
    pub(crate) len: usize,
    pub(crate) tag: u64,
    /// CRC-32 of the plain bytes: when compressing, of the source; when decompressing, known only
    /// at the end.
    pub(crate) crc32: u32,
    /// Time of its submission, in nanoseconds of the delivery's clock.
    pub(crate) at: u64,
}

impl Work {
    pub(crate) const NONE: Self = Self { op: Op::Compress, len: 0, tag: 0, crc32: 0, at: 0 };

    /// Plain bytes, to which the rates of both sides refer.
    pub(crate) fn plain_len(&self) -> usize {
        match self.op {
            Op::Compress => self.len,
            Op::Decompress { plain_len } => plain_len,
        }
    }
}

/// The place of a piece's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A slot of the device, in pinned memory.
    Pinned(u16),
    /// A slot of ordinary memory.
    Plain(u16),
}

/// A piece in the queue for software.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queued {
    pub(crate) place: Place,
    /// The number that the slot must still have. Otherwise the piece has been delivered meanwhile.
    pub(crate) number: u64,
    pub(crate) reason: Reason,
    plain_len: usize,
}

#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) counters: Arc<Counters>,
    pub(crate) software: Software,
    /// Time of the last `tick`, in nanoseconds since the engine was made.
    pub(crate) now: u64,
    /// Pieces submitted and not delivered.
    pub(crate) outstanding: usize,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    numbers: u64,
    /// Software's nanoseconds for 1 KiB of plain bytes, compressing and decompressing.
    rates: [u64; 2],
    base: Instant,
}

/// The rates before the first measurement: libdeflate level 1 on a current server, nanoseconds for
/// 1 KiB.
const FIRST_RATES: [u64; 2] = [3500, 1000];

impl Delivery {
    /// `pieces`: the capacity of the queue, which never grows.
    pub(crate) fn new(software: Software, pieces: usize) -> Self {
        Self {
            counters: Arc::default(),
            software,
            now: 0,
            outstanding: 0,
            queue: VecDeque::with_capacity(pieces),
            queued_bytes: 0,
            numbers: 0,
            rates: FIRST_RATES,
            base: Instant::now(),
        }
    }

    /// Reads the clock.
    pub(crate) fn tick(&mut self) {
        // 584 years until this wraps.
        self.now = u64::try_from(self.base.elapsed().as_nanos()).unwrap_or(u64::MAX);
    }

    /// Queues a piece for software; returns the number that its slot has to record.
    pub(crate) fn queue(&mut self, place: Place, plain_len: usize, reason: Reason) -> u64 {
        self.numbers += 1;
        self.queue.push_back(Queued { place, number: self.numbers, reason, plain_len });
        self.queued_bytes += plain_len;
        self.numbers
    }

    pub(crate) fn next(&mut self) -> Option<Queued> {
        let queued = self.queue.pop_front()?;
        self.queued_bytes -= queued.plain_len;
        Some(queued)
    }

    /// Removes a piece that has been delivered. So no piece is queued twice, and the queue never
    /// grows.
    pub(crate) fn withdraw(&mut self, number: u64) {
        if let Some(at) = self.queue.iter().position(|queued| queued.number == number) {
            let queued = self.queue.remove(at);
            self.queued_bytes -= queued.map_or(0, |queued| queued.plain_len);
        }
    }

    /// Removes the pieces of a device that is dropped. All of them are void: no slot of the device
    /// has a piece.
    pub(crate) fn withdraw_pinned(&mut self) {
        self.queue.retain(|queued| matches!(queued.place, Place::Plain(_)));
        self.queued_bytes = self.queue.iter().map(|queued| queued.plain_len).sum();
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Nanoseconds that software needs for the queue and `len` more plain bytes.
    pub(crate) fn software_ns(&self, op: Op, len: usize) -> u64 {
        (self.queued_bytes + len) as u64 * self.rates[kind(op)] / 1024
    }

    /// Does a piece in software and delivers it; returns whether the data was good.
    pub(crate) fn redo(
        &mut self,
        work: &Work,
        source: &[u8],
        reason: Reason,
        done: &mut impl Done,
    ) -> bool {
        self.tick();
        let start = self.now;
        let result = match work.op {
            Op::Compress => Ok((self.software.compress(source), work.crc32)),
            Op::Decompress { plain_len } => self
                .software
                .decompress(source, plain_len)
                .map(|plain| (plain, libdeflater::crc32(plain))),
        };
        let end = u64::try_from(self.base.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let good = result.is_ok();
        let counters = &*self.counters;
        add(&counters.software[reason as usize], 1);
        self.outstanding -= 1;
        deliver(counters, work, end, By::Software(reason), result, done);
        let rate = &mut self.rates[kind(work.op)];
        *rate = smooth(*rate, start, end, work.plain_len());
        set(&counters.software_ns_per_kib, *rate);
        self.now = end;
        good
    }

    /// Delivers a piece that the device has done.
    pub(crate) fn deliver(&mut self, work: &Work, bytes: &[u8], done: &mut impl Done) {
        add(&self.counters.by_device, 1);
        self.outstanding -= 1;
        deliver(&self.counters, work, self.now, By::Device, Ok((bytes, work.crc32)), done);
    }
}

/// Receives delivered pieces: their tag and result.
pub(crate) trait Done: FnMut(u64, Result<Finished<'_>, BadData>) {}
impl<F: FnMut(u64, Result<Finished<'_>, BadData>)> Done for F {}

fn deliver(
    counters: &Counters,
    work: &Work,
    now: u64,
    by: By,
    result: Result<(&[u8], u32), BadData>,
    done: &mut impl Done,
) {
    let waited = now.saturating_sub(work.at) / 1000;
    if waited > counters.longest_wait_us.load(Ordering::Relaxed) {
        set(&counters.longest_wait_us, waited);
    }
    add(&counters.delivered, 1);
    match result {
        Ok((bytes, crc32)) => {
            add(&counters.bytes_out, bytes.len() as u64);
            done(work.tag, Ok(Finished { bytes, crc32, by }));
        }
        Err(bad) => {
            add(&counters.bad_data, 1);
            done(work.tag, Err(bad));
        }
    }
}

/// The new estimate of nanoseconds for 1 KiB after `len` bytes took from `start` to `end`.
///
/// The weight of a sample is 1/8. A sample is capped at four times the estimate, because the thread
/// may have been descheduled meanwhile.
pub(crate) fn smooth(rate: u64, start: u64, end: u64, len: usize) -> u64 {
    let sample = end.saturating_sub(start).saturating_mul(1024) / (len as u64).max(64);
    if rate == 0 {
        return sample;
    }
    let sample = sample.min(rate.saturating_mul(4).max(64));
    (rate * 7 + sample) / 8
}

fn kind(op: Op) -> usize {
    match op {
        Op::Compress => 0,
        Op::Decompress { .. } => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of the queue: the pieces in order, with their places.
    #[test]
    fn withdrawn_jobs_do_not_wait_and_the_queue_never_grows() {
        const PIECES: usize = 40;
        let mut delivery = Delivery::new(Software::new(1, 4096), PIECES);
        let room = delivery.queue.capacity();
        let mut model: Vec<(u64, usize, Place)> = Vec::new();
        let mut random = 7_u64;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 40).unwrap() % below
        };
        for _ in 0..20_000 {
            match next(8) {
                0..4 if model.len() < PIECES => {
                    let slot = u16::try_from(next(1000)).unwrap();
                    let place = [Place::Pinned(slot), Place::Plain(slot)][next(2)];
                    let len = 1 + next(4096);
                    let number = delivery.queue(place, len, Reason::Late);
                    assert!(model.iter().all(|&(other, ..)| other < number));
                    model.push((number, len, place));
                }
                4 | 5 if !model.is_empty() => {
                    let (number, ..) = model.remove(next(model.len()));
                    delivery.withdraw(number);
                    // It has been removed.
                    delivery.withdraw(number);
                }
                6 if next(40) == 0 => {
                    delivery.withdraw_pinned();
                    model.retain(|(.., place)| matches!(place, Place::Plain(_)));
                }
                _ => {
                    let queued = delivery.next().map(|queued| (queued.number, queued.place));
                    let expected = (!model.is_empty()).then(|| model.remove(0));
                    assert_eq!(queued, expected.map(|(number, _, place)| (number, place)));
                }
            }
            assert_eq!(delivery.has_queued(), !model.is_empty());
            let bytes: usize = model.iter().map(|&(_, len, _)| len).sum();
            assert_eq!(delivery.software_ns(Op::Compress, 0), bytes as u64 * FIRST_RATES[0] / 1024);
            assert_eq!((delivery.queue.len(), delivery.queue.capacity()), (model.len(), room));
        }
    }
}
