//! The announcements of sessions whose VM has stopped.

use std::sync::atomic::{AtomicU64, Ordering};

/// The longest time for which a session goes first.
pub(crate) const HURRY: u64 = 2_000_000_000;
/// The most announcements at a time: the shared state is one cache line.
const MOST: usize = 6;

/// The announcements in force. Each is the time at which it ends by itself, in nanoseconds of the
/// monotonic clock.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Stopped([AtomicU64; MOST]);

impl Stopped {
    /// Announces at time `now` that a VM has stopped. The announcement ends [`HURRY`] later. One
    /// beyond [`MOST`] replaces the one that ends first.
    pub(crate) fn announce(&self, now: u64) {
        let read = |place| (place, AtomicU64::load(place, Ordering::Relaxed));
        let rest = |end: u64| if is_in_force(end, now) { end } else { 0 };
        while let Some((place, end)) = self.0.iter().map(read).min_by_key(|(_, end)| rest(*end)) {
            // Another session may have taken this place meanwhile.
            if replace(place, end, now + HURRY) {
                break;
            }
        }
    }

    /// Withdraws the announcement that ends at `until`. Of two with the same end, either may go.
    pub(crate) fn withdraw(&self, until: u64) {
        self.0.iter().any(|place| replace(place, until, 0));
    }

    /// Whether an announcement is in force at time `now`.
    pub(crate) fn is_any(&self, now: u64) -> bool {
        self.0.iter().any(|place| is_in_force(place.load(Ordering::Relaxed), now))
    }

    #[cfg(test)]
    pub(crate) fn set_all(&self, until: u64) {
        self.0.iter().for_each(|place| place.store(until, Ordering::Relaxed));
    }
}

/// Whether an announcement that ends at `until` is in force at time `now`. One that begins later is
/// an error of another process.
fn is_in_force(until: u64, now: u64) -> bool {
    until > now && until - now <= HURRY
}

fn replace(place: &AtomicU64, old: u64, new: u64) -> bool {
    place.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Stopped {
        Stopped([const { AtomicU64::new(0) }; MOST])
    }

    #[test]
    fn each_announcement_counts_until_it_is_withdrawn_or_ends() {
        let stopped = none();
        let times = [50, 50, 60];
        times.iter().for_each(|now| stopped.announce(*now));
        for now in times {
            assert!(stopped.is_any(60));
            stopped.withdraw(now + HURRY);
        }
        assert!(!stopped.is_any(60));
        stopped.announce(70);
        assert!(stopped.is_any(70 + HURRY - 1) && !stopped.is_any(70 + HURRY));
    }

    #[test]
    fn the_announcements_that_end_last_are_kept() {
        let stopped = none();
        let times: Vec<u64> = (1..=20).collect();
        times.iter().for_each(|now| stopped.announce(*now));
        let (replaced, kept) = times.split_at(times.len() - MOST);
        replaced.iter().for_each(|now| stopped.withdraw(now + HURRY));
        for now in kept {
            assert!(stopped.is_any(20));
            stopped.withdraw(now + HURRY);
        }
        assert!(!stopped.is_any(20));
    }
}
