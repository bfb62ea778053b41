//! A limit on the bytes per second that several writers write together.
//!
//! A writer writes in slices. It may write a slice once the slices before it, of any writer, have
//! had their time at the limited rate. Time without traffic is made up for by at most [`BURST`], so
//! that a second carries at most the limit, that burst and one slice: 1.3 % more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};

use crate::map::Map;

/// Unused time that may be made up for, so that a thread that wakes up late costs no throughput.
const BURST: Duration = Duration::from_millis(8);
/// A slice is as many bytes as this time carries at the limited rate.
const SLICE: Duration = Duration::from_millis(5);
/// The bounds of a slice. In a shorter slice headers would cost too much, and a longer one gains
/// nothing.
const SLICE_BYTES: (u64, u64) = (1 << 10, 256 << 10);
/// The unsent bytes that the kernel may hold for all links, as time at the limited rate: they go
/// out as one burst once a network that was away is back.
const UNSENT: Duration = Duration::from_millis(4);
/// The bounds of a link's unsent bytes.
const UNSENT_BYTES: (u64, u64) = (4 << 10, 1 << 20);
/// The approximate bytes of TLS handshake and hello, in both directions, which nothing delays.
const HANDSHAKE: u64 = 8 << 10;
/// A shared number further ahead is an error of another process: it would stop all sessions.
const MOST_AHEAD: Duration = Duration::from_secs(10);

/// A limit on the rate of writes.
#[derive(Debug)]
pub struct Cap {
    /// Bytes a second.
    rate: u64,
    taken: Taken,
}

/// Nanoseconds of the monotonic clock up to which the slices written so far take at the limited
/// rate. Relaxed: the number alone is the state.
#[derive(Debug)]
enum Taken {
    Own(AtomicU64),
    Shared(Arc<Map>),
}

impl Cap {
    /// Creates a limit of `rate` bytes a second, at least 1.
    pub fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), taken: Taken::Own(AtomicU64::new(0)) }
    }

    /// Creates a limit that other processes share.
    pub(crate) fn shared(rate: u64, map: &Arc<Map>) -> Self {
        Self { rate: rate.max(1), taken: Taken::Shared(Arc::clone(map)) }
    }

    fn taken(&self) -> &AtomicU64 {
        match &self.taken {
            Taken::Own(taken) => taken,
            Taken::Shared(map) => &map.state().taken,
        }
    }

    /// Bytes in `time` at the limited rate.
    fn bytes(&self, time: Duration) -> u64 {
        let bytes = u128::from(self.rate) * time.as_nanos() / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Nanoseconds for `bytes` at the limited rate.
    fn time(&self, bytes: u64) -> u64 {
        let time = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// The most bytes to write at once.
    pub fn slice(&self) -> usize {
        let bytes = self.bytes(SLICE).clamp(SLICE_BYTES.0, SLICE_BYTES.1);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// The unsent bytes that the kernel may hold for each of `links` links.
    pub fn unsent(&self, links: u64) -> u32 {
        let each = self.bytes(UNSENT) / links.max(1);
        u32::try_from(each.clamp(UNSENT_BYTES.0, UNSENT_BYTES.1)).unwrap_or(u32::MAX)
    }

    /// Whether the limit holds bytes back now.
    pub fn holds_back(&self) -> bool {
        self.taken().load(Ordering::Relaxed) > now()
    }

    /// Waits until `bytes` may be written.
    pub fn wait(&self, bytes: u64) {
        while let Err(until) = self.take(now(), bytes) {
            std::thread::sleep(Duration::from_nanos(until.saturating_sub(now())));
        }
    }

    /// Counts the handshake of a new link, which was not delayed.
    pub fn count_handshake(&self) {
        self.count(HANDSHAKE);
    }

    /// Counts bytes that are not delayed.
    pub fn count(&self, bytes: u64) {
        self.add(now(), bytes);
    }

    /// At time `now`, counts `bytes`, which are then written at once; or returns the time at which
    /// to try again.
    pub(crate) fn take(&self, now: u64, bytes: u64) -> Result<(), u64> {
        let taken = self.taken().load(Ordering::Relaxed);
        let until = self.sane(taken, now);
        if until > now {
            return Err(until);
        }
        let next = self.after(until, now, bytes);
        let won = self.taken().compare_exchange(taken, next, Ordering::Relaxed, Ordering::Relaxed);
        won.map(drop)
    }

    fn add(&self, now: u64, bytes: u64) {
        let add = |taken| Some(self.after(self.sane(taken, now), now, bytes));
        let _ = self.taken().fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// The number, unless it is one that no traffic explains and that another process has left
    /// behind.
    fn sane(&self, taken: u64, now: u64) -> u64 {
        let most = now.saturating_add(u64::try_from(MOST_AHEAD.as_nanos()).unwrap_or(u64::MAX));
        match self.taken {
            Taken::Shared(_) if taken > most => now,
            _ => taken,
        }
    }

    fn after(&self, taken: u64, now: u64, bytes: u64) -> u64 {
        let burst = u64::try_from(BURST.as_nanos()).unwrap_or(u64::MAX);
        taken.max(now.saturating_sub(burst)).saturating_add(self.time(bytes))
    }
}

/// Nanoseconds of the monotonic clock, which all processes of a host share.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    const SECOND: u64 = 1_000_000_000;
    const RATES: [u64; 5] = [128 << 10, 1 << 20, 12_500_000, 125_000_000, 3_000_000_000];

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound.max(1)
        }
    }

    /// How the links of a simulated session behave.
    #[derive(Clone, Copy)]
    struct Links {
        count: u64,
        /// A thread wakes up this much too late at most, ns.
        late: u64,
        /// The pauses between two frames, ns at most; 0 for links that always have bytes.
        pause: u64,
        /// All links stand still now and then, ns.
        away: u64,
    }

    /// The slices that the links write: when, and how many bytes.
    fn simulate(cap: &Cap, links: Links, until: u64) -> Vec<(u64, u64)> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ links.count ^ cap.rate);
        let mut wakes: BinaryHeap<_> = (0..links.count).map(|link| Reverse((0, link))).collect();
        let mut left = vec![0; usize::try_from(links.count).unwrap()];
        let (mut written, mut next_away) = (Vec::new(), SECOND);
        while let Some(Reverse((now, link))) = wakes.pop() {
            if now > until {
                break;
            }
            if links.away > 0 && now >= next_away {
                next_away = now + 3 * SECOND;
                let all: Vec<_> = wakes.drain().collect();
                wakes.extend(all.iter().map(|Reverse((at, of))| Reverse((at + links.away, *of))));
                wakes.push(Reverse((now + links.away, link)));
                continue;
            }
            let frame = &mut left[usize::try_from(link).unwrap()];
            if *frame == 0 {
                *frame = 100 + random.below(557_000);
            }
            let bytes = (cap.slice() as u64).min(*frame);
            let wake = match cap.take(now, bytes) {
                Ok(()) => {
                    *frame -= bytes;
                    written.push((now, bytes));
                    let pause = if *frame == 0 { random.below(links.pause) } else { 0 };
                    now + pause + random.below(20_000)
                }
                Err(at) => at.max(now) + random.below(links.late + 1),
            };
            wakes.push(Reverse((wake, link)));
        }
        written
    }

    /// The most bytes of any window of a second.
    fn most_in_a_second(written: &[(u64, u64)]) -> u64 {
        let (mut from, mut sum, mut most) = (0, 0, 0);
        for &(at, bytes) in written {
            sum += bytes;
            while written[from].0 + SECOND <= at {
                sum -= written[from].1;
                from += 1;
            }
            most = most.max(sum);
        }
        most
    }

    #[test]
    fn no_second_exceeds_the_limit_by_3_percent_whatever_the_links_do() {
        for rate in RATES {
            for count in [1, 2, 4, 64] {
                for (late, pause, away) in [
                    (0, 0, 0),
                    (1_000_000, 0, 0),
                    (50_000_000, 0, 0),
                    (1_000_000, 30_000_000, 0),
                    (1_000_000, 2 * SECOND, 0),
                    (1_000_000, 0, SECOND / 2),
                ] {
                    let cap = Cap::new(rate);
                    let links = Links { count, late, pause, away };
                    let written = simulate(&cap, links, 10 * SECOND);
                    let most = most_in_a_second(&written);
                    let name = format!("{rate} B/s, {count} links, {late} {pause} {away}");
                    // And what the kernel holds back in an outage.
                    let unsent = cap.bytes(UNSENT);
                    assert!(most + unsent <= rate + rate * 3 / 100, "{name}: {most} in a second");
                    if pause == 0 && away == 0 && late <= 1_000_000 {
                        let all: u64 = written.iter().map(|(_, bytes)| bytes).sum();
                        assert!(all >= 10 * rate / 100 * 97, "{name}: {all} in ten seconds");
                    }
                }
            }
        }
    }

    #[test]
    fn links_join_after_their_handshakes() {
        let cap = Cap::new(1 << 20);
        // Each takes 7.8 ms of this rate, and up to 8 ms may be made up for.
        (0..4).for_each(|_| cap.add(SECOND, HANDSHAKE));
        let until = cap.take(SECOND, 1);
        assert!(until.is_err_and(|until| until == SECOND + 23_250_000), "{until:?}");
        assert!(cap.take(SECOND + 23_250_000, 1).is_ok());
    }
}
