//! Threads that read and decode units ahead of their use, in order.

use std::sync::Arc;

use image::{Damage, Image, Units};
use pages::{Arena, Slot};
use pipeline::{Job, Pool, PoolConfig, Popped, Reorder, Results};

use crate::PlayError;

/// One unit to decode.
struct Decode {
    image: Arc<Image>,
    unit: u64,
    seq: u64,
    slot: Slot,
}

struct Decoded {
    unit: u64,
    seq: u64,
    slot: Slot,
    result: Result<usize, Damage>,
}

impl Job for Decode {
    type Output = Decoded;
    type Context = Units;

    fn run(self, units: &mut Units) -> Decoded {
        let Self { image, unit, seq, mut slot } = self;
        let result = units.read(&image, unit, &mut slot);
        Decoded { unit, seq, slot, result }
    }
}

/// The plain bytes of a unit.
pub(crate) struct Unit {
    pub(crate) number: u64,
    slot: Slot,
    len: usize,
}

impl Unit {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.slot[..self.len]
    }
}

/// Reads units ahead, in order, each once.
pub(crate) struct UnitsInOrder {
    image: Arc<Image>,
    workers: Arc<Pool<Decode>>,
    results: Arc<Results<Decoded>>,
    order: Reorder<Decoded>,
    arena: Arc<Arena>,
    /// The next unit to submit, and the number of units.
    next: u64,
    end: u64,
    asked: u64,
    given: u64,
}

impl UnitsInOrder {
    /// Starts `threads` threads for all units of `image`.
    pub(crate) fn new(image: &Arc<Image>, threads: usize) -> Result<Self, PlayError> {
        let config = PoolConfig { threads, name: "restore", ..PoolConfig::default() };
        let workers = Pool::new(config, |_| Units::new()).map_err(PlayError::SetUp)?;
        // The caller holds one more slot.
        let slots = workers.depth() + 1;
        let arena = Arena::new(slots, image.shape().unit_bytes()).map_err(PlayError::SetUp)?;
        Ok(Self {
            image: Arc::clone(image),
            workers,
            results: Results::new(slots),
            order: Reorder::new(slots),
            arena,
            next: 0,
            end: image.index().units.len() as u64,
            asked: 0,
            given: 0,
        })
    }

    /// The next unit for which `wanted` is true; `None` if all were returned.
    pub(crate) fn next(&mut self, wanted: impl Fn(u64) -> bool) -> Result<Option<Unit>, PlayError> {
        loop {
            while self.next < self.end {
                let unit = self.next;
                if !wanted(unit) {
                    self.next += 1;
                    continue;
                }
                let Some(slot) = self.arena.take() else { break };
                let (image, seq) = (Arc::clone(&self.image), self.asked);
                if self
                    .workers
                    .try_submit(Decode { image, unit, seq, slot }, &self.results)
                    .is_err()
                {
                    break;
                }
                self.next += 1;
                self.asked += 1;
            }
            if let Some(Decoded { unit, slot, result, .. }) = self.order.pop() {
                self.given += 1;
                let len = result?;
                return Ok(Some(Unit { number: unit, slot, len }));
            }
            if self.next == self.end && self.given == self.asked {
                return Ok(None);
            }
            match self.results.pop_until(None) {
                Popped::Item(decoded) => {
                    let seq = decoded.seq;
                    self.order.insert(seq, decoded).expect("numbered here, and window for all");
                }
                // The end of the units would be that of a VM without its other pages.
                Popped::Timeout | Popped::Closed => {
                    return Err(PlayError::Ended { given: self.given, units: self.end });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{Options, RamBlock, State, Writer};

    /// Regression: results that were closed early counted as the end of the units, so that an
    /// export or a load would have ended without the other pages, and without an error.
    #[test]
    fn units_that_end_early_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let mut writer = Writer::create(&path, Options::default()).unwrap();
        let ram = RamBlock { name: "ram".into(), len: 4096, host_page: 0 };
        writer.blocks(4096, &[ram]).unwrap();
        writer.page(0, 0, &(0..=255).cycle().take(4096).collect::<Vec<u8>>()).unwrap();
        let state = State { facts: b"{}".to_vec(), ..State::default() };
        writer.finish(&state).unwrap().link().unwrap();
        let image = Arc::new(Image::open(&path).unwrap());
        let mut ahead = UnitsInOrder::new(&image, 1).unwrap();
        ahead.results.close();
        // As if a unit that was asked for were never returned.
        (ahead.next, ahead.asked) = (1, 1);
        let error = ahead.next(|_| true).err().expect("no unit was returned");
        assert!(matches!(error, PlayError::Ended { given: 0, units: 1 }), "{error}");
    }
}
