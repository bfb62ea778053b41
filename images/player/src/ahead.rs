//! One player's way through all units of an image.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use image::Units;

use crate::cache::{Unit, UnitCache, Waited};
use crate::PlayError;

/// One player's way through all units: first the units that any player decodes, then the others in
/// order.
pub(crate) struct Ahead {
    cache: Arc<UnitCache>,
    units: Units,
    /// The next entry of the log.
    seen: u64,
    /// The units to ask for before all others.
    first: VecDeque<u64>,
    /// Those of them that may not have been sent completely.
    leading: VecDeque<u64>,
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
            leading: VecDeque::new(),
            next: 0,
            end: cache.image().index().units.len() as u64,
            asked: VecDeque::new(),
            is_over: false,
        }
    }

    /// Puts `units` before all others.
    pub(crate) fn begin_with(&mut self, units: impl IntoIterator<Item = u64>) {
        self.first.extend(units);
        self.leading.clone_from(&self.first);
    }

    /// Whether a unit of [`Ahead::begin_with`] is still wanted.
    pub(crate) fn leads(&mut self, wanted: impl Fn(u64) -> bool) -> bool {
        while self.leading.front().is_some_and(|&unit| !wanted(unit)) {
            self.leading.pop_front();
        }
        !self.leading.is_empty()
    }

    /// The next unit for which `wanted` is true; `None` if none is decoded by `deadline`, or if all
    /// were returned ([`Ahead::is_over`]).
    pub(crate) fn next(
        &mut self,
        deadline: Option<Instant>,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<Option<Unit>, PlayError> {
        while !self.is_over {
            while let Some(unit) = self.cache.logged(&mut self.seen) {
                self.asked.retain(|&asked| asked != unit.number);
                if wanted(unit.number) {
                    return Ok(Some(unit));
                }
            }
            self.ask(&wanted);
            let Some(&oldest) = self.asked.front() else {
                // All units were asked for, but some may have been sent only in part: no page may
                // be left out.
                match (0..self.end).find(|&unit| wanted(unit)) {
                    Some(left) => self.next = left,
                    None => self.is_over = true,
                }
                continue;
            };
            match self.cache.wait(oldest, Some(self.seen), deadline) {
                Waited::Newer => {}
                Waited::Late => return Ok(None),
                // This thread does not decode the unit: it serves the VM's requests, and a disk may
                // hang.
                Waited::Dropped if wanted(oldest) => self.cache.queue(oldest),
                Waited::Here(unit) if wanted(oldest) => {
                    self.asked.pop_front();
                    return Ok(Some(unit));
                }
                Waited::Failed if wanted(oldest) => {
                    self.cache.unit(oldest, &mut self.units)?;
                }
                Waited::Dropped | Waited::Here(_) | Waited::Failed => {
                    self.asked.pop_front();
                }
            }
        }
        Ok(None)
    }

    /// Waits for `unit`, one of the next to ask for; `None` if it is not decoded by `deadline`.
    pub(crate) fn wait(
        &mut self,
        unit: u64,
        deadline: Instant,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<Option<Unit>, PlayError> {
        self.ask(wanted);
        let unit = loop {
            match self.cache.wait(unit, None, Some(deadline)) {
                Waited::Here(unit) => break unit,
                Waited::Late => return Ok(None),
                Waited::Failed => break self.cache.unit(unit, &mut self.units)?,
                Waited::Newer | Waited::Dropped => self.cache.queue(unit),
            }
        };
        self.asked.retain(|&asked| asked != unit.number);
        Ok(Some(unit))
    }

    /// Whether every wanted unit was returned.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Asks for the next wanted units.
    fn ask(&mut self, wanted: impl Fn(u64) -> bool) {
        while self.asked.len() < self.cache.depth() {
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
            self.cache.queue(unit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{Image, Options, RamBlock, State, Writer};
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
        let (_, most) = cache.log_len();
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
            assert!(cache.log_len().0 <= most);
        }
        assert!(players.iter().all(|(_, left)| left.borrow().is_empty()));
        let decoded = cache.decoded().units;
        assert!((UNITS..=3 * UNITS).contains(&decoded), "{decoded}");
    }

    /// Nice value of this process's thread with that name, from field 19 of its proc(5) `stat`.
    fn nice_of(thread: &str) -> Option<i32> {
        let stats = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let mut stats =
            stats.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        let stat = stats.find(|stat| stat.contains(&format!("({thread})")))?;
        stat.rsplit_once(") ")?.1.split(' ').nth(16)?.parse().ok()
    }

    #[test]
    fn threads_of_the_background_leave_the_cpus_to_the_guest() {
        let dir = tempfile::tempdir().unwrap();
        // No other test has so many.
        let _cache = UnitCache::new(&made(&dir.path().join("image"), 1), 60, 0).unwrap();
        let deadline = Instant::now() + Duration::from_secs(300);
        let own = rustix::process::getpriority_process(None).unwrap();
        while nice_of("restore-59") != Some(own.max(10)) {
            assert!(Instant::now() < deadline, "{:?}", nice_of("restore-59"));
            std::thread::sleep(Duration::from_millis(5));
        }
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
        cache.hold(0);
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
        cache.lose(0);
        let unit = ahead.next(None, wanted).unwrap().unwrap();
        assert_eq!((unit.number, first_word(&unit)), (0, 0));
    }

    /// The player's own thread serves the VM's requests.
    #[test]
    fn a_unit_that_the_log_has_dropped_is_not_decoded_by_the_player_itself() {
        let dir = tempfile::tempdir().unwrap();
        let cache = UnitCache::new(&made(&dir.path().join("image"), 4), 1, 0).unwrap();
        let mut ahead = Ahead::new(&cache);
        cache.stop();
        (0..4).for_each(|unit| cache.hold(unit));
        let soon = || Some(Instant::now() + Duration::from_millis(1));
        assert!(ahead.next(soon(), |_| true).unwrap().is_none());
        (0..4).for_each(|unit| cache.lose(unit));
        assert!(ahead.next(soon(), |_| true).unwrap().is_none());
        assert!(ahead.wait(2, soon().unwrap(), |_| true).unwrap().is_none());
        assert_eq!((cache.decoded().units, ahead.is_over()), (0, false));
    }
}
