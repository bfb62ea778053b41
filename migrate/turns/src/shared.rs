//! The turns of all sessions of a host.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crate::cap::{now, Cap};
use crate::map::{self, Map};
use crate::stopped::HURRY;

/// The longest pause before a slice: the peer counts a link as lost after 3 s of silence.
const PAUSE: Duration = Duration::from_millis(500);
/// The interval between two looks during a pause.
const LOOK: Duration = Duration::from_millis(1);
/// The most bytes to write at once without a limit.
const SLICE: usize = 256 << 10;

/// The share of a session among those that wait for their turns, 1 to 8: one of 8 writes twice the
/// bytes of one of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priority(u8);

impl Default for Priority {
    fn default() -> Self {
        Self(4)
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number @ 1..=8) => Ok(Self(number)),
            _ => Err(format!("'{text}' is not a priority from 1 to 8")),
        }
    }
}

/// A session's part in the turns of all sessions.
#[derive(Debug)]
pub struct Turns {
    map: Arc<Map>,
    /// The limit of all sessions together; `None` if they have none.
    cap: Option<Cap>,
    priority: Priority,
    /// The end of this session's announcement; 0 while its VM runs.
    hurries_until: AtomicU64,
}

impl Turns {
    /// Creates memory for the turns of sessions that send at most `rate` bytes per second together,
    /// and returns it as a descriptor to pass on. `None`: no limit.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn file(rate: Option<u64>) -> io::Result<OwnedFd> {
        let file = map::file()?;
        Self::limit(&file, rate)?;
        Ok(file)
    }

    /// As [`Turns::file`], in a file at `path` that a later process finds again: sessions that
    /// began before it share the limit with its own. The folder must be this user's alone.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn file_at(path: &Path, rate: Option<u64>) -> io::Result<OwnedFd> {
        let file = map::file_at(path)?;
        Self::limit(&file, rate)?;
        Ok(file)
    }

    /// Changes the limit for sessions that map the memory from now on.
    ///
    /// # Errors
    ///
    /// The errors of [`Turns::open`].
    pub fn limit(file: &OwnedFd, rate: Option<u64>) -> io::Result<()> {
        Map::new(file)?.state().rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        Ok(())
    }

    /// Maps memory that [`Turns::file`] has made.
    ///
    /// # Errors
    ///
    /// The file is another one; the kernel's error.
    pub fn open(file: &OwnedFd, priority: Priority) -> io::Result<Self> {
        let map = Arc::new(Map::new(file)?);
        let rate = map.state().rate.load(Ordering::Relaxed);
        let cap = (rate > 0).then(|| Cap::shared(rate, &map));
        Ok(Self { map, cap, priority, hurries_until: AtomicU64::new(0) })
    }

    /// The limit of all sessions together.
    pub fn cap(&self) -> Option<&Cap> {
        self.cap.as_ref()
    }

    /// The most bytes to write at once.
    pub fn slice(&self) -> usize {
        let Some(cap) = &self.cap else { return SLICE };
        // In a shorter slice headers would cost too much.
        (cap.slice() * usize::from(self.priority.0) / 8).max(1 << 10)
    }

    /// Waits until `bytes` may be written.
    pub fn wait(&self, bytes: u64) {
        let begin = now();
        while self.must_pause(begin, now()) {
            std::thread::sleep(LOOK);
        }
        if let Some(cap) = &self.cap {
            cap.wait(bytes);
        }
    }

    /// Counts bytes that are not delayed.
    pub fn count(&self, bytes: u64) {
        if let Some(cap) = &self.cap {
            cap.count(bytes);
        }
    }

    /// Announces that this session's VM has stopped: the others pause. Only the first call counts.
    pub fn hurry(&self) {
        self.hurry_at(now());
    }

    fn hurry_at(&self, now: u64) {
        let (own, until) = (&self.hurries_until, now + HURRY);
        if own.compare_exchange(0, until, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.map.state().stopped.announce(now);
        }
    }

    /// Whether another session goes first at time `now`, for a slice that waits since `begin`.
    fn must_pause(&self, begin: u64, now: u64) -> bool {
        let pause = u64::try_from(PAUSE.as_nanos()).unwrap_or(u64::MAX);
        now - begin < pause
            && self.map.state().stopped.is_any(now)
            && self.hurries_until.load(Ordering::Relaxed) == 0
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        match *self.hurries_until.get_mut() {
            0 => {}
            until => self.map.state().stopped.withdraw(until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    const LEN: usize = 64;

    const SECOND: u64 = 1_000_000_000;

    fn turns(file: &OwnedFd, priority: u8) -> Turns {
        Turns::open(file, Priority(priority)).unwrap()
    }

    /// The bytes that each session writes in 10 s. All always have bytes, and wake up too late by
    /// up to a millisecond.
    fn simulate(sessions: &[Turns]) -> Vec<u64> {
        let mut word = 0x9e37_79b9_u64;
        let mut late = || {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word % 1_000_000
        };
        let mut wakes: BinaryHeap<_> =
            (0..sessions.len()).map(|of| Reverse((SECOND, of))).collect();
        let mut written = vec![0; sessions.len()];
        while let Some(Reverse((now, of))) = wakes.pop() {
            if now > 11 * SECOND {
                break;
            }
            let bytes = sessions[of].slice() as u64;
            let wake = match sessions[of].cap().unwrap().take(now, bytes) {
                Ok(()) => {
                    written[of] += bytes;
                    now + late() / 100
                }
                Err(at) => at + late(),
            };
            wakes.push(Reverse((wake, of)));
        }
        written
    }

    #[test]
    fn sessions_keep_a_common_limit_and_share_it_by_priority() {
        for rate in [12_500_000, 125_000_000] {
            for priorities in [&[4, 4][..], &[8, 4], &[8, 2, 2], &[4; 8], &[1]] {
                let file = Turns::file(Some(rate)).unwrap();
                let sessions: Vec<_> = priorities.iter().map(|of| turns(&file, *of)).collect();
                let written = simulate(&sessions);
                let all: u64 = written.iter().sum();
                let name = format!("{rate} B/s, {priorities:?}: {written:?}");
                assert!(all <= 10 * rate * 103 / 100 && all >= 10 * rate * 90 / 100, "{name}");
                let sum: u64 = priorities.iter().map(|of| u64::from(*of)).sum();
                for (bytes, priority) in written.iter().zip(priorities) {
                    let fair = all * u64::from(*priority) / sum;
                    assert!(bytes.abs_diff(fair) * 100 <= fair * 15, "{name}");
                }
            }
        }
    }

    #[test]
    fn others_pause_while_a_vm_is_stopped_and_not_for_long() {
        let file = Turns::file(None).unwrap();
        let (one, other) = (turns(&file, 4), turns(&file, 4));
        let at = now();
        assert!(!other.must_pause(at, at));
        one.hurry_at(at);
        assert!(other.must_pause(at, at) && !one.must_pause(at, at));
        // Half a second at a slice, and 2 s in all. Only the first announcement counts.
        one.hurry_at(at + SECOND);
        assert!(!other.must_pause(at, at + SECOND / 2));
        assert!(!other.must_pause(at + HURRY, at + HURRY));
        // Its own VM has stopped, too.
        other.hurry_at(at);
        assert!(!other.must_pause(at, at));
    }

    /// Regression: the memory had one announcement. That of a second session took its place, and
    /// the end of the second session ended the pause while the first VM was still stopped.
    #[test]
    fn others_pause_until_the_last_of_several_stopped_vms_goes_on() {
        for ends_first in [0, 1] {
            let file = Turns::file(None).unwrap();
            let mut stopped = vec![turns(&file, 4), turns(&file, 4)];
            let (other, at) = (turns(&file, 4), now());
            stopped[0].hurry_at(at);
            let at = at + 1;
            stopped[1].hurry_at(at);
            drop(stopped.remove(ends_first));
            assert!(other.must_pause(at, at), "the end of session {ends_first} ended the pause");
            drop(stopped);
            assert!(!other.must_pause(at, at));
        }
    }

    #[test]
    fn no_number_that_a_process_leaves_behind_stops_the_others() {
        let file = Turns::file(Some(1 << 20)).unwrap();
        let session = turns(&file, 4);
        for number in [u64::MAX, now() + 11 * SECOND] {
            session.map.state().taken.store(number, Ordering::Relaxed);
            session.map.state().stopped.set_all(number);
            assert!(!session.must_pause(now(), now()));
            session.wait(1);
            assert!(session.map.state().taken.load(Ordering::Relaxed) < now() + SECOND);
            // Nor does it keep a session from its announcement.
            let (stopped, at) = (turns(&file, 4), now());
            stopped.hurry_at(at);
            assert!(session.must_pause(at, at));
        }
    }

    /// A service that is restarted, and sessions of the one before it.
    #[test]
    fn a_file_that_is_opened_again_has_the_same_turns() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("turns");
        let first = turns(&Turns::file_at(&path, Some(1 << 20)).unwrap(), 4);
        let second = turns(&Turns::file_at(&path, Some(1 << 20)).unwrap(), 4);
        first.count(5 << 20);
        assert!(second.cap().unwrap().holds_back());
        // A file that is not ours is neither mapped nor kept.
        for (len, mode) in [(LEN - 1, 0o600), (LEN + 1, 0o600), (LEN, 0o660)] {
            let other = folder.path().join(format!("{len}-{mode}"));
            std::fs::write(&other, vec![0; len]).unwrap();
            std::fs::set_permissions(&other, Permissions::from_mode(mode)).unwrap();
            let given = std::fs::File::options().read(true).write(true).open(&other).unwrap();
            assert!(Turns::open(&given.into(), Priority::default()).is_err(), "{len} {mode:o}");
            turns(&Turns::file_at(&other, None).unwrap(), 4);
            let found = std::fs::metadata(&other).unwrap();
            assert_eq!((found.len(), found.mode() & 0o777), (LEN as u64, 0o600));
        }
        assert!(Turns::file_at(&folder.path().join("none/turns"), None).is_err());
    }

    #[test]
    fn only_memory_for_turns_is_mapped() {
        let other = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(Turns::open(&other, Priority::default()).is_err());
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(Turns::open(&null.into(), Priority::default()).is_err());
        assert!(Turns::file(Some(5)).is_ok());
    }

    #[test]
    fn a_priority_is_a_number_from_1_to_8() {
        assert_eq!("8".parse(), Ok(Priority(8)));
        for no in ["0", "9", "-1", "high", ""] {
            assert!(no.parse::<Priority>().is_err(), "{no}");
        }
    }
}
