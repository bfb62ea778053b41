//! Decoded units that the players of one image share.
//!
//! ```text
//!  player 1 ─┬─ get: a requested page ──── decoded here, or by whoever decodes it already ─┐
//!  player 2 ─┤                                                                             ├─► log
//!  player n ─┴─ ask: units ahead of their use ──► queue ──► threads: read, check, decode ──┘
//! ```
//!
//! The log holds the units in the order in which they were decoded, up to a number of bytes. Each
//! player takes from the log what it lacks, and only then asks for more. Players of one pace thus
//! decode each unit once. One that lags behind takes what the others decode now, and decodes again
//! what the log has dropped meanwhile. No player waits for another one.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use image::{Damage, Image, Units};

use crate::runs::Runs;
use crate::PlayError;

/// Buffers that are kept for the next units.
const FREE: usize = 8;

/// The plain bytes of a unit.
#[derive(Debug)]
pub(crate) struct Plain {
    bytes: Box<[u8]>,
    len: usize,
}

impl Plain {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Decoded units of an image, and the threads that decode them, for any number of players.
#[derive(Debug)]
pub struct UnitCache {
    inner: Arc<Inner>,
}

/// Counts of a [`UnitCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Units that were read and decoded; one that was decoded twice counts twice.
    pub units: u64,
    /// Their plain bytes.
    pub bytes: u64,
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

#[derive(Debug, Default)]
struct State {
    places: HashMap<u64, Place>,
    /// Decoded units, the oldest first.
    log: VecDeque<(u64, Arc<Plain>)>,
    /// Number of the first entry of `log` since the beginning.
    first: u64,
    queue: VecDeque<u64>,
    free: Vec<Box<[u8]>>,
    decoded: Decoded,
    closed: bool,
}

/// Where a unit is. A unit without a place is not asked for, was dropped, or could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Queued,
    /// A thread decodes it.
    Busy,
    /// The number of its entry of the log.
    Log(u64),
}

impl State {
    /// The decoded unit, if the log has it.
    fn decoded(&self, unit: u64) -> Option<&Arc<Plain>> {
        let Some(Place::Log(nth)) = self.places.get(&unit) else { return None };
        self.entry(*nth).map(|(_, plain)| plain)
    }

    /// Entry `nth` of the log, counted since the beginning.
    fn entry(&self, nth: u64) -> Option<&(u64, Arc<Plain>)> {
        self.log.get(usize::try_from(nth.checked_sub(self.first)?).ok()?)
    }
}

impl UnitCache {
    /// Starts `threads` threads. The log holds up to `bytes`, and at least four units for each
    /// thread.
    ///
    /// # Errors
    ///
    /// A thread that cannot be started.
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

    /// The plain bytes of a unit: from the log, or decoded by this thread.
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
        // Nobody waits for the threads: one of them may wait for a disk.
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

    /// Decodes a unit that nobody decodes, and appends it to the log.
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
                state.decoded.units += 1;
                state.decoded.bytes += len as u64;
                Ok(plain)
            }
            Err(damage) => {
                state.places.remove(&unit);
                Err(damage)
            }
        };
        drop(state);
        self.changed.notify_all();
        result
    }

    /// A thread: decodes what is in the queue.
    fn work(&self) {
        let mut units = Units::new();
        let mut state = self.state();
        while !state.closed {
            match state.queue.pop_front() {
                None => state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(unit) if state.places.get(&unit) == Some(&Place::Queued) => {
                    // Whoever needs a damaged unit reads it again, and reports the damage.
                    let _ = self.decode(state, unit, &mut units);
                    state = self.state();
                }
                // A request was faster.
                Some(_) => {}
            }
        }
    }
}

/// Drops the oldest unit of the log; its buffer is used again unless a player still sends it.
fn drop_oldest(state: &mut State) {
    let Some((unit, plain)) = state.log.pop_front() else { return };
    state.places.remove(&unit);
    state.first += 1;
    if let (Some(plain), true) = (Arc::into_inner(plain), state.free.len() < FREE) {
        state.free.push(plain.bytes);
    }
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

/// One player's way through all units: those that anybody decodes, then the others in order.
pub(crate) struct Ahead {
    cache: Arc<UnitCache>,
    units: Units,
    /// The next entry of the log.
    seen: u64,
    /// The units to ask for before all others.
    first: VecDeque<u64>,
    /// The next unit to ask for, and the number of units.
    next: u64,
    end: u64,
    /// Units that were asked for and not yet returned.
    asked: VecDeque<u64>,
    is_over: bool,
}

impl Ahead {
    pub(crate) fn new(cache: &Arc<UnitCache>) -> Self {
        Self {
            cache: Arc::clone(cache),
            units: Units::new(),
            seen: 0,
            first: VecDeque::new(),
            next: 0,
            end: cache.image().index().units.len() as u64,
            asked: VecDeque::new(),
            is_over: false,
        }
    }

    /// Puts `units` before all others.
    pub(crate) fn begin_with(&mut self, units: impl IntoIterator<Item = u64>) {
        self.first.extend(units);
    }

    /// The next unit for which `wanted` is true; `None` if none is decoded by `deadline`, or if all
    /// were returned ([`Ahead::is_over`]).
    pub(crate) fn next(
        &mut self,
        deadline: Option<Instant>,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<Option<Unit>, PlayError> {
        while !self.is_over {
            while let Some(unit) = self.logged() {
                self.asked.retain(|&asked| asked != unit.number);
                if wanted(unit.number) {
                    return Ok(Some(unit));
                }
            }
            self.ask(&wanted);
            let Some(&oldest) = self.asked.front() else {
                // Whatever was asked for, and sent in part: no page may be left out.
                match (0..self.end).find(|&unit| wanted(unit)) {
                    Some(left) => self.next = left,
                    None => self.is_over = true,
                }
                continue;
            };
            let inner = &self.cache.inner;
            let state = inner.state();
            if state.entry(self.seen).is_some() {
                continue;
            }
            if matches!(state.places.get(&oldest), Some(Place::Queued | Place::Busy)) {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(None);
                }
                drop(inner.wait(state, deadline));
                continue;
            }
            // The log has dropped it before this player came to it, or it could not be decoded.
            drop(state);
            self.asked.pop_front();
            if wanted(oldest) {
                let plain = self.cache.get(oldest, &mut self.units)?;
                return Ok(Some(Unit { number: oldest, plain }));
            }
        }
        Ok(None)
    }

    /// The unit `unit`, one of the next to ask for; `None` if it is not decoded by `deadline`.
    pub(crate) fn wait(
        &mut self,
        unit: u64,
        deadline: Instant,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<Option<Unit>, PlayError> {
        self.ask(wanted);
        let inner = &self.cache.inner;
        let mut state = inner.state();
        while matches!(state.places.get(&unit), Some(Place::Queued | Place::Busy)) {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            state = inner.wait(state, Some(deadline));
        }
        drop(state);
        self.asked.retain(|&asked| asked != unit);
        let plain = self.cache.get(unit, &mut self.units)?;
        Ok(Some(Unit { number: unit, plain }))
    }

    /// Whether every wanted unit was returned.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The next entry of the log. It may have dropped some before.
    fn logged(&mut self) -> Option<Unit> {
        let state = self.cache.inner.state();
        self.seen = self.seen.max(state.first);
        let (number, plain) = state.entry(self.seen)?;
        let unit = Unit { number: *number, plain: Arc::clone(plain) };
        self.seen += 1;
        Some(unit)
    }

    /// Asks for the next wanted units.
    fn ask(&mut self, wanted: impl Fn(u64) -> bool) {
        let inner = &self.cache.inner;
        while self.asked.len() < inner.depth {
            let unit = match self.first.pop_front() {
                Some(unit) => unit,
                None if self.next < self.end => {
                    self.next += 1;
                    self.next - 1
                }
                None => return,
            };
            if !wanted(unit) || self.asked.contains(&unit) {
                continue;
            }
            self.asked.push_back(unit);
            let mut state = inner.state();
            if let Entry::Vacant(place) = state.places.entry(unit) {
                place.insert(Place::Queued);
                state.queue.push_back(unit);
                inner.work.notify_one();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{Options, RamBlock, State, Writer};
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::path::Path;
    use std::time::Duration;

    /// An image of `units` units of 16 pages.
    fn made(path: &Path, units: u64) -> Arc<Image> {
        let options = Options { unit_bytes: 64 << 10, ..Options::default() };
        let mut writer = Writer::create(path, options).unwrap();
        let len = units * (64 << 10);
        writer.blocks(4096, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
        for page in 0..units * 16 {
            let bytes: Vec<u8> =
                (0..512_u64).flat_map(|at| (at * at + page).to_le_bytes()).collect();
            writer.page(0, page, &bytes).unwrap();
        }
        let state = State { facts: b"{}".to_vec(), ..State::default() };
        writer.finish(&state).unwrap().link().unwrap();
        Arc::new(Image::open(path).unwrap())
    }

    fn first_word(unit: &Unit) -> u64 {
        u64::from_le_bytes(unit.bytes()[..8].try_into().unwrap())
    }

    #[test]
    fn players_of_any_pace_get_every_unit_once_from_a_bounded_log() {
        const UNITS: u64 = 60;
        let dir = tempfile::tempdir().unwrap();
        let cache = UnitCache::new(&made(&dir.path().join("image"), UNITS), 1, 0).unwrap();
        let most = cache.inner.most;
        assert!(most < 20, "{most}");
        let left = || RefCell::new((0..UNITS).collect::<HashSet<u64>>());
        let mut players: Vec<_> = (0..3).map(|_| (Ahead::new(&cache), left())).collect();
        // The second player takes one unit of three, the third one begins when the first has all.
        let mut turns = 0_u64;
        while players.iter().any(|(ahead, _)| !ahead.is_over()) {
            turns += 1;
            let first_is_over = players[0].0.is_over();
            for (nth, (ahead, left)) in players.iter_mut().enumerate() {
                if (nth == 1 && !turns.is_multiple_of(3)) || (nth == 2 && !first_is_over) {
                    continue;
                }
                let deadline = Instant::now() + Duration::from_secs(300);
                let wanted = |unit: u64| left.borrow().contains(&unit);
                match ahead.next(Some(deadline), wanted).unwrap() {
                    Some(unit) => {
                        assert!(left.borrow_mut().remove(&unit.number), "unit {}", unit.number);
                        assert_eq!(first_word(&unit), unit.number * 16);
                    }
                    None => assert!(ahead.is_over()),
                }
            }
            assert!(cache.inner.state().log.len() <= most);
        }
        assert!(players.iter().all(|(_, left)| left.borrow().is_empty()));
        let decoded = cache.decoded().units;
        assert!((UNITS..=3 * UNITS).contains(&decoded), "{decoded}");
    }

    /// As after hot pages were sent: a unit that was returned is wanted still, and the log has
    /// dropped it.
    #[test]
    fn a_unit_that_was_sent_in_part_is_returned_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = UnitCache::new(&made(&dir.path().join("image"), 40), 1, 0).unwrap();
        let (mut one, mut other) = (Ahead::new(&cache), Ahead::new(&cache));
        let deadline = Instant::now() + Duration::from_secs(300);
        one.begin_with([3]);
        let unit = one.wait(3, deadline, |_| true).unwrap().unwrap();
        assert_eq!(first_word(&unit), 3 * 16);
        let seen = RefCell::new(HashSet::new());
        let wanted = |unit: u64| !seen.borrow().contains(&unit);
        while let Some(unit) = other.next(None, wanted).unwrap() {
            seen.borrow_mut().insert(unit.number);
        }
        assert_eq!(seen.borrow().len(), 40);
        seen.borrow_mut().clear();
        while let Some(unit) = one.next(None, wanted).unwrap() {
            assert!(seen.borrow_mut().insert(unit.number));
        }
        assert_eq!(seen.borrow().len(), 40);
    }

    /// A time that is over ends the wait for a unit that another thread decodes.
    #[test]
    fn a_unit_that_is_decoded_elsewhere_is_waited_for_until_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let cache = UnitCache::new(&made(&dir.path().join("image"), 40), 1, 0).unwrap();
        cache.inner.state().places.insert(0, Place::Busy);
        let mut ahead = Ahead::new(&cache);
        ahead.begin_with([0]);
        assert!(ahead.wait(0, Instant::now(), |_| true).unwrap().is_none());
        let left = RefCell::new((0..40).collect::<HashSet<u64>>());
        let wanted = |unit: u64| left.borrow().contains(&unit);
        // All others come meanwhile.
        while left.borrow().len() > 1 {
            let deadline = Some(Instant::now() + Duration::from_secs(300));
            let unit = ahead.next(deadline, wanted).unwrap().unwrap();
            left.borrow_mut().remove(&unit.number);
        }
        assert!(ahead.next(Some(Instant::now()), wanted).unwrap().is_none() && !ahead.is_over());
        // Whoever decodes it has failed.
        cache.inner.state().places.remove(&0);
        let unit = ahead.next(None, wanted).unwrap().unwrap();
        assert_eq!((unit.number, first_word(&unit)), (0, 0));
    }
}
