//! The length of each pass, and the results of the passes.

use forecast::Pass;
use std::time::Duration;

/// The part of the rehearsal that the first pass takes.
const FIRST: f64 = 0.4;
/// The parts that further passes take, one after the other, again and again: dirtying is known for
/// times that differ by an order of magnitude and more.
const FURTHER: [f64; 4] = [0.005, 0.02, 0.05, 0.15];

/// The longest time that QEMU waits in a write: it holds locks of its RAM meanwhile.
const LONGEST_HOLD: Duration = Duration::from_secs(3);

/// QEMU's counters at one moment. Bytes are bytes of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Time since the rehearsal's start.
    pub at: Duration,
    /// How often QEMU has synchronised the dirty log.
    pub syncs: u64,
    /// Dirty bytes that QEMU has not sent yet.
    pub remaining: u64,
    /// Bytes sent so far, zero pages included.
    pub sent: u64,
}

impl Observation {
    /// All bytes that were ever dirty. Only a synchronisation changes the number.
    fn ever_dirty(&self) -> u64 {
        self.sent.saturating_add(self.remaining)
    }
}

/// How long QEMU may take for the end of a pass. If its counters do not fit the stream, more pages
/// come than were counted.
const PATIENCE: Duration = Duration::from_secs(1);

/// How far the stream is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Nothing more: QEMU waits in a write.
    Nothing,
    /// Until this many bytes of pages have come since the start, zero pages included. Then the pass
    /// is over, and QEMU waits in a write of the next one.
    Until(u64),
    /// Everything that comes.
    All,
}

/// Decides how far the stream is read, and collects passes.
///
/// A pass takes long because QEMU waits in a write at its beginning. Its end is read at full speed,
/// and no farther: otherwise QEMU would go through pass after pass, each shorter than the last, and
/// an old QEMU would stop the VM.
#[derive(Debug)]
pub struct Schedule {
    length: Duration,
    passes: Vec<Pass>,
    last: Option<Observation>,
    /// When the present pass began, as far as the observations show.
    begun: Duration,
    /// The time until which QEMU is held.
    held_until: Duration,
    /// Whether a pass ended between the last two observations.
    passes_are_short: bool,
    next: usize,
}

impl Schedule {
    /// Creates the schedule of a rehearsal of this length.
    pub fn new(length: Duration) -> Self {
        Self {
            length,
            passes: Vec::new(),
            last: None,
            begun: Duration::ZERO,
            held_until: Duration::ZERO,
            passes_are_short: false,
            next: 0,
        }
    }

    /// How long the first pass should take.
    pub fn first_pass(&self) -> Duration {
        self.length.mul_f64(FIRST)
    }

    /// Adds an observation. Returns how far to read now. In the first pass the caller decides that.
    pub fn observe(&mut self, seen: Observation) -> Allowed {
        let Some(last) = self.last.replace(seen) else {
            self.begun = seen.at;
            return Allowed::Nothing;
        };
        let syncs = seen.syncs.saturating_sub(last.syncs);
        // QEMU counts its first synchronisation before it sends anything.
        let has_ended = syncs > 0 && last.syncs > 0;
        if has_ended {
            self.end_pass(last, seen, syncs);
        }
        self.passes_are_short = has_ended;
        match seen.at.checked_sub(self.held_until) {
            None => Allowed::Nothing,
            Some(late) if late < PATIENCE => Allowed::Until(seen.ever_dirty()),
            Some(_) => Allowed::All,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
    fn end_pass(&mut self, last: Observation, seen: Observation, syncs: u64) {
        let dirtied = seen.ever_dirty().saturating_sub(last.ever_dirty()) as f64;
        // The pass ended somewhere between the two observations.
        let now = (last.at + seen.at) / 2;
        let time = now.saturating_sub(self.begun).as_secs_f64();
        // Behind an observation without any, the first of several ended the pass that was under
        // way. The others add little to its bytes, which makes the forecast cautious.
        let among = if self.passes_are_short { syncs as f64 } else { 1.0 };
        if time > 0.0 {
            self.passes.push(Pass { seconds: time / among, bytes: dirtied / among });
        }
        self.begun = now;
        let part = FURTHER[self.next % FURTHER.len()];
        self.next += 1;
        self.held_until = now + self.length.mul_f64(part).min(LONGEST_HOLD);
    }

    /// The passes that have ended.
    pub fn passes(&self) -> &[Pass] {
        &self.passes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ms: u64, syncs: u64, sent: u64, remaining: u64) -> Observation {
        Observation { at: Duration::from_millis(ms), syncs, remaining, sent }
    }

    #[test]
    fn what_a_synchronisation_finds_does_not_depend_on_when_it_is_seen() {
        for (sent, remaining) in [(1000, 300), (1250, 50)] {
            let mut schedule = Schedule::new(Duration::from_secs(20));
            schedule.observe(seen(0, 1, 0, 1000));
            schedule.observe(seen(7990, 1, 900, 100));
            let next = schedule.observe(seen(8010, 2, sent, remaining));
            assert_eq!(next, Allowed::Nothing, "the next pass is held");
            assert_eq!(schedule.passes(), [Pass { seconds: 8.0, bytes: 300.0 }]);
        }
    }

    #[test]
    fn a_pass_is_held_as_long_as_its_part_and_then_let_end() {
        let mut schedule = Schedule::new(Duration::from_secs(20));
        schedule.observe(seen(0, 1, 0, 1000));
        schedule.observe(seen(7980, 1, 1000, 0));
        assert_eq!(schedule.observe(seen(8020, 2, 1000, 300)), Allowed::Nothing);
        assert_eq!(schedule.observe(seen(8080, 2, 1010, 290)), Allowed::Nothing);
        // A part of 0.005, from the middle of the two observations on.
        assert_eq!(schedule.observe(seen(8101, 2, 1010, 290)), Allowed::Until(1300));
        assert_eq!(
            schedule.observe(seen(9101, 2, 1310, 0)),
            Allowed::All,
            "the counters are wrong"
        );
        assert_eq!(schedule.observe(seen(9120, 3, 1310, 40)), Allowed::Nothing);
        let bytes: Vec<_> = schedule.passes().iter().map(|pass| pass.bytes).collect();
        assert_eq!(bytes, [300.0, 40.0]);
    }

    #[test]
    fn of_several_synchronisations_after_a_long_pass_the_long_one_counts() {
        let mut schedule = Schedule::new(Duration::from_secs(100));
        schedule.observe(seen(0, 1, 0, 1000));
        schedule.observe(seen(39_990, 1, 900, 100));
        schedule.observe(seen(40_010, 21, 1000, 500));
        assert_eq!(schedule.passes(), [Pass { seconds: 40.0, bytes: 500.0 }]);
    }

    #[test]
    fn short_passes_are_averaged() {
        let mut schedule = Schedule::new(Duration::from_secs(100));
        schedule.observe(seen(0, 1, 0, 1000));
        schedule.observe(seen(100, 2, 1000, 10));
        schedule.observe(seen(120, 12, 1100, 0));
        assert_eq!(schedule.passes()[1], Pass { seconds: 0.006, bytes: 9.0 });
    }

    #[test]
    fn counters_that_fall_are_no_pages() {
        let mut schedule = Schedule::new(Duration::from_secs(20));
        schedule.observe(seen(0, 1, 0, 1000));
        schedule.observe(seen(100, 2, 900, 10));
        assert_eq!(schedule.passes()[0].bytes, 0.0);
    }
}
