//! Decoded units that the players of one image share.
//!
//! ```text
//!  player 1 ─┬─ get: a requested page ──── decoded here, or by whoever decodes it already ─┐
//!  player 2 ─┤                                                                             ├─► log
//!  player n ─┴─ ask: units ahead of their use ──► queue ──► threads: read, check, decode ──┘
//! ```
//!
//! The log holds the units in the order in which they were decoded, up to a number of bytes. Each
//! player takes from the log the units that it lacks, and only then asks for more. Players of one
//! pace thus decode each unit once. A player that lags behind takes the units that the others
//! decode now, and later decodes again the units that the log has dropped. No player waits for
//! another one.

mod log;

use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use image::{Damage, Image, Units};

pub use self::log::Decoded;
pub(crate) use self::log::Plain;
use self::log::{drop_oldest, Place, State};
use crate::runs::Runs;
use crate::PlayError;

/// Nice value of the threads: beside a thread of nice 0 each gets a tenth of a CPU.
const NICE: i32 = 10;

/// Decoded units of an image, and the threads that decode them, for any number of players.
#[derive(Debug)]
pub struct UnitCache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    image: Arc<Image>,
    runs: Runs,
    /// Maximum number of units in the log.
    most: usize,
    /// Maximum number of units that one player asks for ahead.
    depth: usize,
    state: Mutex<State>,
    /// Signalled for each unit in the queue.
    work: Condvar,
    /// Signalled whenever a unit was decoded, or could not be.
    changed: Condvar,
}

/// How a player's wait for a unit ended.
pub(crate) enum Waited {
    /// The log has an entry that the player has not seen.
    Newer,
    /// The log has the unit.
    Here(Unit),
    /// The log has dropped the unit.
    Dropped,
    /// The unit could not be read.
    Failed,
    /// The deadline has passed.
    Late,
}

/// A unit that a player is to send.
pub(crate) struct Unit {
    pub(crate) number: u64,
    plain: Arc<Plain>,
}

impl Unit {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.plain.bytes()
    }
}

impl UnitCache {
    /// Starts `threads` threads. The log holds up to `bytes` bytes, and at least four units for
    /// each thread.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub fn new(image: &Arc<Image>, threads: usize, bytes: usize) -> Result<Arc<Self>, PlayError> {
        let depth = 2 * threads.max(1) + 2;
        let inner = Arc::new(Inner {
            image: Arc::clone(image),
            runs: Runs::new(image),
            most: (bytes / image.shape().unit_bytes()).max(2 * depth),
            depth,
            state: Mutex::default(),
            work: Condvar::new(),
            changed: Condvar::new(),
        });
        let cache = Self { inner };
        for nth in 0..threads.max(1) {
            let inner = Arc::clone(&cache.inner);
            let thread = thread::Builder::new().name(format!("restore-{nth}"));
            thread.spawn(move || inner.work()).map_err(PlayError::SetUp)?;
        }
        Ok(Arc::new(cache))
    }

    /// Counts of decoded units so far.
    pub fn decoded(&self) -> Decoded {
        self.inner.state().decoded
    }

    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.inner.image
    }

    pub(crate) fn runs(&self) -> &Runs {
        &self.inner.runs
    }

    /// Maximum number of units that one player asks for ahead.
    pub(crate) fn depth(&self) -> usize {
        self.inner.depth
    }

    /// Makes a thread decode a unit, unless the log has it or a thread is decoding it.
    pub(crate) fn queue(&self, unit: u64) {
        let mut state = self.inner.state();
        if let Entry::Vacant(place) = state.places.entry(unit) {
            place.insert(Place::Queued);
            state.queue.push_back(unit);
            self.inner.work.notify_one();
        }
    }

    /// Returns entry `seen` of the log, or the oldest after it. Sets `seen` to the number of the
    /// next entry.
    pub(crate) fn logged(&self, seen: &mut u64) -> Option<Unit> {
        let state = self.inner.state();
        *seen = state.first.max(*seen);
        let (number, plain) = state.entry(*seen)?;
        *seen += 1;
        Some(Unit { number: *number, plain: Arc::clone(plain) })
    }

    /// Waits until a queued unit is decoded, or until the log has entry `seen`.
    pub(crate) fn wait(&self, unit: u64, seen: Option<u64>, deadline: Option<Instant>) -> Waited {
        let mut state = self.inner.state();
        loop {
            if seen.is_some_and(|seen| state.entry(seen).is_some()) {
                return Waited::Newer;
            }
            if let Some(plain) = state.decoded(unit) {
                return Waited::Here(Unit { number: unit, plain: Arc::clone(plain) });
            }
            match state.places.get(&unit) {
                Some(_) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Waited::Late;
                }
                Some(_) => state = self.inner.wait(state, deadline),
                None if state.failed.contains(&unit) => return Waited::Failed,
                None => return Waited::Dropped,
            }
        }
    }

    /// Returns a unit: from the log, or decoded by this thread.
    pub(crate) fn unit(&self, number: u64, units: &mut Units) -> Result<Unit, Damage> {
        Ok(Unit { number, plain: self.get(number, units)? })
    }

    /// Returns the plain bytes of a unit: from the log, or decoded by this thread.
    pub(crate) fn get(&self, unit: u64, units: &mut Units) -> Result<Arc<Plain>, Damage> {
        let mut state = self.inner.state();
        loop {
            if let Some(plain) = state.decoded(unit) {
                return Ok(Arc::clone(plain));
            }
            if state.places.get(&unit) != Some(&Place::Busy) {
                return self.inner.decode(state, unit, units);
            }
            state = self.inner.wait(state, None);
        }
    }
}

impl Drop for UnitCache {
    fn drop(&mut self) {
        self.inner.state().closed = true;
        // The threads are not waited for: one of them may be waiting for a disk.
        self.inner.work.notify_all();
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has changed, or until `deadline`.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let Some(deadline) = deadline else {
            return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout(state, left);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Decodes a unit that no other thread decodes, and appends it to the log.
    fn decode(
        &self,
        mut state: MutexGuard<'_, State>,
        unit: u64,
        units: &mut Units,
    ) -> Result<Arc<Plain>, Damage> {
        state.places.insert(unit, Place::Busy);
        let bytes = state.free.pop();
        drop(state);
        let new = || vec![0; self.image.shape().unit_bytes()].into_boxed_slice();
        let mut bytes = bytes.unwrap_or_else(new);
        let len = units.read(&self.image, unit, &mut bytes);
        let mut state = self.state();
        let result = match len {
            Ok(len) => {
                let plain = Arc::new(Plain { bytes, len });
                while state.log.len() >= self.most {
                    drop_oldest(&mut state);
                }
                let nth = state.first + state.log.len() as u64;
                state.places.insert(unit, Place::Log(nth));
                state.log.push_back((unit, Arc::clone(&plain)));
                state.failed.remove(&unit);
                state.decoded.units += 1;
                state.decoded.bytes += len as u64;
                Ok(plain)
            }
            Err(damage) => {
                state.places.remove(&unit);
                state.failed.insert(unit);
                Err(damage)
            }
        };
        drop(state);
        self.changed.notify_all();
        result
    }

    /// A thread: decodes the units in the queue.
    fn work(&self) {
        // The guest needs the CPUs more: nothing waits for most of these units. On Linux both calls
        // concern this thread alone. A thread that has a greater value keeps it.
        if rustix::process::getpriority_process(None).is_ok_and(|nice| nice < NICE) {
            let _ = rustix::process::setpriority_process(None, NICE);
        }
        let mut units = Units::new();
        let mut state = self.state();
        while !state.closed {
            match state.queue.pop_front() {
                None => state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(unit) if state.places.get(&unit) == Some(&Place::Queued) => {
                    // A player that needs a damaged unit reads it again, and reports the damage.
                    let _ = self.decode(state, unit, &mut units);
                    state = self.state();
                }
                // A player's request was faster.
                Some(_) => {}
            }
        }
    }
}

/// States that tests bring about.
#[cfg(test)]
impl UnitCache {
    /// Units in the log, and their maximum.
    pub(crate) fn log_len(&self) -> (usize, usize) {
        (self.inner.state().log.len(), self.inner.most)
    }

    /// A thread decodes `unit`, until [`Self::lose`].
    pub(crate) fn hold(&self, unit: u64) {
        self.inner.state().places.insert(unit, Place::Busy);
    }

    /// The log has dropped `unit`.
    pub(crate) fn lose(&self, unit: u64) {
        self.inner.state().places.remove(&unit);
    }

    /// The threads end, as if the disk hung.
    pub(crate) fn stop(&self) {
        self.inner.state().closed = true;
        self.inner.work.notify_all();
    }
}
