//! The log of decoded units, and where each unit is.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Number of free buffers for the next units.
const FREE: usize = 8;

/// The plain bytes of a unit.
#[derive(Debug)]
pub(crate) struct Plain {
    pub(super) bytes: Box<[u8]>,
    pub(super) len: usize,
}

impl Plain {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Counts of a [`UnitCache`](crate::UnitCache).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Units that were read and decoded. A unit that was decoded twice counts twice.
    pub units: u64,
    /// The plain bytes of these units.
    pub bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) places: HashMap<u64, Place>,
    /// Decoded units, the oldest first.
    pub(super) log: VecDeque<(u64, Arc<Plain>)>,
    /// Number of the first entry of `log` since the beginning.
    pub(super) first: u64,
    pub(super) queue: VecDeque<u64>,
    /// Units whose last read failed.
    pub(super) failed: HashSet<u64>,
    pub(super) free: Vec<Box<[u8]>>,
    pub(super) decoded: Decoded,
    pub(super) closed: bool,
}

/// The place of a unit. A unit without a place was not asked for, was dropped, or could not be
/// decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Queued,
    /// A thread decodes it.
    Busy,
    /// The number of its entry of the log.
    Log(u64),
}

impl State {
    /// The decoded unit, if the log has it.
    pub(super) fn decoded(&self, unit: u64) -> Option<&Arc<Plain>> {
        let Some(Place::Log(nth)) = self.places.get(&unit) else { return None };
        self.entry(*nth).map(|(_, plain)| plain)
    }

    /// Entry `nth` of the log, counted since the beginning.
    pub(super) fn entry(&self, nth: u64) -> Option<&(u64, Arc<Plain>)> {
        self.log.get(usize::try_from(nth.checked_sub(self.first)?).ok()?)
    }
}

/// Drops the oldest unit of the log. Its buffer is reused unless a player is still sending it.
pub(super) fn drop_oldest(state: &mut State) {
    let Some((unit, plain)) = state.log.pop_front() else { return };
    state.places.remove(&unit);
    state.first += 1;
    if let (Some(plain), true) = (Arc::into_inner(plain), state.free.len() < FREE) {
        state.free.push(plain.bytes);
    }
}
