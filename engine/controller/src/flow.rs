//! What holds the migration up, and how much of it there is: the link, the codec threads, or a
//! QEMU.
//!
//! Each tick looks at what happened since the last one. Only what was the bottleneck shows its
//! capacity; of the rest it is only known that there was enough. So an estimate follows the
//! measurement while the thing is the bottleneck, and otherwise rises, slowly first and then
//! faster, until it is asked too much of and is measured again.
//!
//! | codec threads busy | readers wait for credit | bytes wait for the link | bottleneck |
//! |---|---|---|---|
//! | all the time | - | - | codec threads |
//! | not | - | all the time | link |
//! | not | often | half of the time | link |
//! | not | often | less | destination |
//! | not | seldom | - | source QEMU |

use std::time::Duration;

/// What a controller is told at each tick. Counters are totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Signals {
    /// Plain bytes read from QEMU.
    pub plain_bytes: u64,
    /// Bytes that the links have delivered.
    pub wire_bytes: u64,
    /// Time during which at least one reader waited for credit.
    pub credit_wait: Duration,
    /// Share of the time since the last tick, 0 to 1, in which bytes waited for the link: had they
    /// been sent before, it would have taken them.
    pub link_busy: f64,
    /// CPU time of the process besides the codec threads; `None` when nobody looked.
    pub other_cpu: Option<Duration>,
}

/// What holds the migration up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bottleneck {
    /// Not looked yet.
    #[default]
    Unknown,
    /// The codec threads.
    Workers,
    /// The link.
    Link,
    /// What the peer does with it: decoding, or QEMU's loading.
    Destination,
    /// The source QEMU.
    Source,
}

/// What the codec threads did since the last tick, from the observations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Worked {
    pub(crate) cpu_ns: f64,
    pub(crate) wall_ns: f64,
}

/// Ticks are put together until they show this much, or last this long.
const ENOUGH: Duration = Duration::from_millis(8);
const ENOUGH_BYTES: u64 = 2 << 20;
const LONG: Duration = Duration::from_millis(400);
/// The codec threads are the bottleneck from here on: some of their time goes with waking up.
const ALL_BUSY: f64 = 0.92;
/// A link that is busy this much has nothing to rise to.
const NEARLY: f64 = 0.85;
/// Readers wait for credit often from here on.
const OFTEN: f64 = 0.05;
/// Share of the codec threads' time that may save bytes nobody waits for. The rest is for when the
/// data turns dear: until that is noticed QEMU would wait.
const IDLE_USE: f64 = 0.4;
/// Looks in a row at which a QEMU has to be the bottleneck before it is believed to be.
const SURE: u32 = 3;
/// Before the link was the bottleneck once it is taken to be this much faster than what was sent
/// over it.
const UNSEEN: f64 = 64.0;
/// The factor once the link is seen to take clearly more than was believed.
const FASTER: f64 = 1.3;
/// The least and the largest factor by which an estimate rises in a look.
const RISE: (f64, f64) = (1.005, 2.0);

/// The estimates.
#[derive(Clone, Debug)]
pub(crate) struct Flow {
    threads: f64,
    /// `--max-cpu`.
    allowed: f64,
    last: Option<(Duration, Signals)>,
    worked: Worked,
    link_busy: f64,
    link_looks: f64,
    rise: f64,
    /// The link was the bottleneck once.
    pub(crate) measured: bool,
    pub(crate) bottleneck: Bottleneck,
    /// Bytes a ns that the link takes; `None` until it was seen to deliver anything.
    pub(crate) link: Option<f64>,
    /// Cores that the codec threads get when they could use all.
    pub(crate) supply: f64,
    /// ns a plain byte that a QEMU takes; 0 while it is not the bottleneck.
    pub(crate) floor: f64,
    /// CPU ns a plain byte besides encoding.
    pub(crate) other: f64,
    /// Share of their time that the codec threads were busy.
    pub(crate) busy: f64,
    /// Cores that they used.
    pub(crate) used: f64,
    /// CPU time for a busy codec thread's time: less than 1 when cores are short.
    pub(crate) granted: f64,
    /// Looks that went into that.
    grants: u32,
    /// Looks in a row at which a QEMU was the bottleneck.
    slow: u32,
    /// Share of the last looks at which one was.
    pub(crate) held: f64,
}

impl Flow {
    pub(crate) fn new(threads: usize, allowed: Option<f64>, other: f64) -> Self {
        let threads = threads.clamp(1, 4096) as f64;
        let allowed = allowed.filter(|cores| cores.is_finite()).unwrap_or(threads);
        Self {
            threads,
            allowed: allowed.clamp(0.01, threads),
            last: None,
            worked: Worked::default(),
            link_busy: 0.0,
            link_looks: 0.0,
            rise: RISE.0,
            measured: false,
            bottleneck: Bottleneck::Unknown,
            link: None,
            supply: threads,
            floor: 0.0,
            other: if other.is_finite() { other.clamp(0.0, 100.0) } else { 0.0 },
            busy: 0.0,
            used: 0.0,
            granted: 1.0,
            grants: 0,
            slow: 0,
            held: 0.0,
        }
    }

    /// Cores that may be planned with.
    pub(crate) fn cores(&self) -> f64 {
        self.supply.min(self.allowed)
    }

    pub(crate) fn worked(&mut self, worked: Worked) {
        self.worked.cpu_ns += worked.cpu_ns;
        self.worked.wall_ns += worked.wall_ns;
    }

    /// True if it came to a look, and the estimates may have changed.
    pub(crate) fn tick(&mut self, now: Duration, signals: &Signals) -> bool {
        let Some((since, before)) = self.last else {
            self.last = Some((now, *signals));
            self.worked = Worked::default();
            return false;
        };
        if signals.link_busy.is_finite() {
            self.link_busy += signals.link_busy.clamp(0.0, 1.0);
        }
        self.link_looks += 1.0;
        let span = now.saturating_sub(since);
        let plain = signals.plain_bytes.saturating_sub(before.plain_bytes);
        if span < ENOUGH || (plain < ENOUGH_BYTES && span < LONG) {
            return false;
        }
        self.last = Some((now, *signals));
        let worked = std::mem::take(&mut self.worked);
        let link_busy = self.link_busy / self.link_looks;
        (self.link_busy, self.link_looks) = (0.0, 0.0);
        let span_ns = span.as_nanos() as f64;
        self.used = worked.cpu_ns / span_ns;
        self.busy = (worked.wall_ns / span_ns / self.threads).min(1.0);
        if worked.wall_ns > 0.0 {
            let granted = (worked.cpu_ns / worked.wall_ns).clamp(0.0, 1.0);
            self.granted += if self.grants == 0 { 1.0 } else { 0.3 } * (granted - self.granted);
            self.grants += 1;
        }
        if plain == 0 {
            // QEMU has nothing for us: that says nothing.
            return true;
        }
        let plain = plain as f64;
        if let (Some(then), Some(now)) = (before.other_cpu, signals.other_cpu) {
            let other = now.saturating_sub(then).as_nanos() as f64 / plain;
            self.other += 0.3 * (other.clamp(0.0, 100.0) - self.other);
        }
        let waited = signals.credit_wait.saturating_sub(before.credit_wait).as_secs_f64();
        let wire = signals.wire_bytes.saturating_sub(before.wire_bytes) as f64 / span_ns;
        self.bottleneck = if self.busy >= ALL_BUSY {
            Bottleneck::Workers
        } else if link_busy >= ALL_BUSY {
            Bottleneck::Link
        } else if waited < OFTEN * span.as_secs_f64() {
            Bottleneck::Source
        } else if link_busy < 0.5 {
            Bottleneck::Destination
        } else {
            Bottleneck::Link
        };
        self.learn(wire, span_ns / plain, link_busy);
        true
    }

    /// What the link takes, by `wire` bytes a ns that it took.
    fn learn_link(&mut self, wire: f64, link_busy: f64) {
        // Until it was the bottleneck once it may be anything; what is too high is soon put right.
        let believed = if self.measured { self.link } else { None };
        let link = believed.unwrap_or(UNSEEN * wire).max(self.link.unwrap_or(0.0));
        if wire > 1.2 * link {
            // Not the link that was measured any more.
            self.rise = self.rise.max(FASTER);
        }
        let link = link.max(wire);
        // Nothing at all went out: a stall, of which the next look will tell more.
        let wire_seen = wire.max(1e-6);
        match self.bottleneck {
            // It was not all the time, and what it did meanwhile is not all it can.
            Bottleneck::Link if self.measured && link_busy < NEARLY => self.link = Some(link),
            // The first bytes are on their way.
            Bottleneck::Link if !self.measured && wire <= 0.0 => {}
            Bottleneck::Link => {
                self.rise = RISE.0;
                let gain = if self.measured { 0.5 } else { 1.0 };
                self.link = Some(link + gain * (wire_seen - link));
                self.measured = true;
            }
            // Both are busy: that is where we want to be.
            Bottleneck::Workers if link_busy > NEARLY => {
                self.link = Some(link);
                self.rise = RISE.0;
            }
            Bottleneck::Workers => {
                // Far above what it was seen to take there is nothing more to learn.
                self.link =
                    Some((link * self.rise).clamp(wire_seen, 100.0 * wire_seen.max(link / 100.0)));
                self.rise = (1.0 + 1.5 * (self.rise - 1.0)).min(RISE.1);
            }
            _ => self.link = Some(link),
        }
    }

    /// `wire` bytes a ns went out, and a plain byte took `interval` ns.
    fn learn(&mut self, wire: f64, interval: f64, link_busy: f64) {
        // Where the round trip is long nothing was delivered at first, which says nothing of the
        // link.
        if self.link.is_some() || wire > 0.0 {
            self.learn_link(wire, link_busy);
        }
        if self.bottleneck == Bottleneck::Workers {
            self.supply +=
                0.15 * (self.used.clamp(0.02 * self.threads, self.threads) - self.supply);
        } else {
            // What they get of the time in which they have work, they would get of all time.
            self.supply += 0.1 * (self.threads * self.granted.max(0.05) - self.supply);
        }
        let held = matches!(self.bottleneck, Bottleneck::Source | Bottleneck::Destination);
        self.slow = if held { self.slow.saturating_add(1) } else { 0 };
        self.held += 0.1 * (f64::from(u8::from(held)) - self.held);
        self.floor = if self.slow < SURE {
            0.0
        } else if self.floor == 0.0 || interval < self.floor {
            // QEMU's pauses are no sign that it became slower: believe the fast looks at once.
            interval
        } else {
            self.floor + 0.1 * (interval.min(4.0 * self.floor) - self.floor)
        };
    }

    /// Share of the floor's time that the codec threads may be busy to save bytes nobody waits for.
    pub(crate) fn idle_use(&self) -> f64 {
        // Where codec threads wait for a core, QEMU does too.
        IDLE_USE * ((self.granted - 0.8) / 0.15).clamp(0.0, 1.0)
    }
}
