//! Finds the bottleneck (link, codec threads or a QEMU) and estimates its capacity.
//!
//! Each look covers the time since the last one. Only a bottleneck shows its capacity; the others
//! are only known to have sufficed. So an estimate follows the measurement while its resource is
//! the bottleneck. Otherwise it rises, slowly first and then faster, until the plan demands too
//! much of the resource and it is measured again. A link that was busy for a part of a look shows
//! its capacity too, though less exactly: above that its estimate does not rise.
//!
//! | codec threads busy | readers wait for credit | bytes wait for the link | bottleneck |
//! |---|---|---|---|
//! | all the time | - | - | codec threads |
//! | not | - | all the time | link |
//! | not | often | half of the time | link |
//! | not | often | less | destination |
//! | not | seldom | - | source QEMU |

use std::time::Duration;

/// The input of each tick. Counters are totals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Signals {
    /// Plain bytes read from QEMU.
    pub plain_bytes: u64,
    /// Bytes that the links have delivered.
    pub wire_bytes: u64,
    /// Time during which at least one reader waited for credit.
    pub credit_wait: Duration,
    /// Share of the time since the last tick, 0 to 1, in which bytes waited for the link: sent
    /// earlier, they would have been transmitted.
    pub link_busy: f64,
    /// CPU time of the process besides the codec threads; `None` if unknown.
    pub other_cpu: Option<Duration>,
    /// Whether all pages were sent once. Pages that the guest writes meanwhile are sent again, so
    /// each second lost costs more than a second.
    pub sends_again: bool,
}

/// The slowest part of the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bottleneck {
    /// Not known yet.
    #[default]
    Unknown,
    /// The codec threads.
    Workers,
    /// The link.
    Link,
    /// The peer's side: decoding, or QEMU's loading.
    Destination,
    /// The source QEMU.
    Source,
}

/// Work of the codec threads since the last tick, from the observations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Worked {
    pub(crate) cpu_ns: f64,
    pub(crate) wall_ns: f64,
}

/// Ticks are merged until they cover this much, or last this long. Codec threads that are busy all
/// the time show that sooner than a link does, whose queue is checked only every 5 ms: two checks
/// at a peer that was about to start were taken for a link of a third of its rate.
const ENOUGH: Duration = Duration::from_millis(18);
const ENOUGH_BUSY: Duration = Duration::from_millis(8);
const ENOUGH_BYTES: u64 = 2 << 20;
const LONG: Duration = Duration::from_millis(400);
/// The codec threads are the bottleneck from this busy share on: waking up takes some of their
/// time.
const ALL_BUSY: f64 = 0.92;
/// From this busy share on, the estimate of a link does not rise.
const NEARLY: f64 = 0.85;
/// From this share on, readers wait for credit often.
const OFTEN: f64 = 0.05;
/// Share of the codec threads' time that may save bytes while QEMU is the bottleneck. The rest is a
/// reserve for data that is costlier to encode: until that is noticed, QEMU would wait.
const IDLE_USE: f64 = 0.4;
/// For how long a QEMU must be the bottleneck at each look before it counts as one.
const SURE: Duration = Duration::from_millis(70);
/// How long the fastest measurement counts as a QEMU's capacity: its pauses do not make it slower.
const RECENT: Duration = Duration::from_secs(1);
/// Until the link was the bottleneck once, it is assumed to be this much faster than the bytes sent
/// over it.
const UNSEEN: f64 = 64.0;
/// A link that was busy for at least this share of the last looks shows its capacity: what it
/// delivered in that share. The estimate rises to this multiple of that at most.
const PARTLY: f64 = 0.3;
const CEILING: f64 = 1.05;
/// The weight of a look in these means.
const LOOK: f64 = 0.15;
/// The factor when the link clearly transmits more than estimated.
const FASTER: f64 = 1.3;
/// The least and the largest factor by which an estimate rises at a look.
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
    /// Means over the last looks: bytes a ns that the link delivered, and the share of the time in
    /// which bytes waited for it.
    delivered: f64,
    waited: f64,
    /// The link was the bottleneck once.
    pub(crate) measured: bool,
    /// The codec threads were the bottleneck once, or a QEMU for [`SURE`].
    outrun: bool,
    pub(crate) bottleneck: Bottleneck,
    /// Capacity of the link, bytes a ns; `None` until it was seen to deliver anything.
    pub(crate) link: Option<f64>,
    /// Cores that the codec threads would get if they used all they can.
    pub(crate) supply: f64,
    /// Time of a QEMU for a plain byte, ns; 0 while no QEMU is the bottleneck.
    pub(crate) floor: f64,
    /// CPU ns a plain byte besides encoding.
    pub(crate) other: f64,
    /// Cores that the process used over the last looks, codec threads and all else; 0: not known.
    pub(crate) own: f64,
    /// Share of their time that the codec threads were busy.
    pub(crate) busy: f64,
    /// Cores that the codec threads used.
    pub(crate) used: f64,
    /// CPU time of the codec threads per busy time: less than 1 when cores are short.
    pub(crate) granted: f64,
    /// Looks that contributed to `granted`.
    grants: u32,
    /// For how long a QEMU has been the bottleneck at each look.
    slow: Duration,
    /// The least time for a plain byte in this stretch of [`RECENT`], when it began, and the least
    /// in the stretch before.
    least: f64,
    least_since: Duration,
    least_before: f64,
    /// Share of the last looks at which a QEMU held up link and codec threads: it was the
    /// bottleneck, or neither of them was busy throughout.
    pub(crate) held: f64,
    /// [`Signals::sends_again`].
    pub(crate) again: bool,
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
            delivered: 0.0,
            waited: 0.0,
            measured: false,
            outrun: false,
            bottleneck: Bottleneck::Unknown,
            link: None,
            supply: threads,
            floor: 0.0,
            other: if other.is_finite() { other.clamp(0.0, 100.0) } else { 0.0 },
            own: 0.0,
            busy: 0.0,
            used: 0.0,
            granted: 1.0,
            grants: 0,
            slow: Duration::ZERO,
            least: f64::INFINITY,
            least_since: Duration::ZERO,
            least_before: f64::INFINITY,
            held: 0.0,
            again: false,
        }
    }

    /// Cores that the plan may use.
    pub(crate) fn cores(&self) -> f64 {
        self.supply.min(self.allowed)
    }

    /// Whether to plan with the estimate of the link. In the first looks buffers fill, and a QEMU
    /// that seems to be the bottleneck is no evidence about the link: as if the link were fast,
    /// chunks would go raw until it is full.
    pub(crate) fn is_known(&self) -> bool {
        self.link.is_some() && (self.measured || self.outrun)
    }

    pub(crate) fn worked(&mut self, worked: Worked) {
        self.worked.cpu_ns += worked.cpu_ns;
        self.worked.wall_ns += worked.wall_ns;
    }

    /// Returns whether this tick completed a look, so that the estimates may have changed.
    pub(crate) fn tick(&mut self, now: Duration, signals: &Signals) -> bool {
        let Some((since, before)) = self.last else {
            self.last = Some((now, *signals));
            self.worked = Worked::default();
            return false;
        };
        self.again = signals.sends_again;
        if signals.link_busy.is_finite() {
            self.link_busy += signals.link_busy.clamp(0.0, 1.0);
        }
        self.link_looks += 1.0;
        let span = now.saturating_sub(since);
        let plain = signals.plain_bytes.saturating_sub(before.plain_bytes);
        let busy = self.worked.wall_ns / (span.as_nanos() as f64).max(1.0) / self.threads;
        let enough = if busy >= ALL_BUSY { ENOUGH_BUSY } else { ENOUGH };
        if span < enough || (plain < ENOUGH_BYTES && span < LONG) {
            return false;
        }
        self.last = Some((now, *signals));
        let worked = std::mem::take(&mut self.worked);
        let link_busy = self.link_busy / self.link_looks;
        (self.link_busy, self.link_looks) = (0.0, 0.0);
        let span_ns = span.as_nanos() as f64;
        self.used = worked.cpu_ns / span_ns;
        self.busy = busy.min(1.0);
        if worked.wall_ns > 0.0 {
            let granted = (worked.cpu_ns / worked.wall_ns).clamp(0.0, 1.0);
            self.granted += if self.grants == 0 { 1.0 } else { 0.3 } * (granted - self.granted);
            self.grants += 1;
        }
        if plain == 0 {
            // QEMU sent nothing, so there is nothing to learn.
            return true;
        }
        let plain = plain as f64;
        if let (Some(then), Some(now)) = (before.other_cpu, signals.other_cpu) {
            let other = now.saturating_sub(then).as_nanos() as f64;
            self.own += LOOK * (self.used + other / span_ns - self.own);
            let other = other / plain;
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
        let interval = span_ns / plain;
        if now.saturating_sub(self.least_since) >= RECENT {
            (self.least_before, self.least, self.least_since) = (self.least, interval, now);
        }
        self.least = self.least.min(interval);
        self.learn(wire, interval, link_busy, span);
        true
    }

    /// The most that the link can be believed to transmit, bytes a ns: without this the estimate
    /// rose by a third while the codec threads were busy and the link was, too, for most of the
    /// time. Chunks then got cheap codecs until the link was full, and costly ones after that.
    fn ceiling(&self) -> f64 {
        if self.measured && self.waited >= PARTLY {
            CEILING * self.delivered / self.waited
        } else {
            f64::INFINITY
        }
    }

    /// Updates the estimate of the link, which transmitted `wire` bytes a ns.
    fn learn_link(&mut self, wire: f64, link_busy: f64) {
        // Until the link was the bottleneck once, any capacity is possible; too high an estimate is
        // soon corrected.
        let believed = if self.measured { self.link } else { None };
        let link = believed.unwrap_or(UNSEEN * wire).max(self.link.unwrap_or(0.0));
        if wire > 1.2 * link {
            // The link is faster than when it was measured.
            self.rise = self.rise.max(FASTER);
        }
        let link = link.max(wire);
        // Nothing was transmitted: a stall. The next look will show more.
        let wire_seen = wire.max(1e-6);
        match self.bottleneck {
            // The link was not busy all the time, so the measured rate is less than its capacity.
            Bottleneck::Link if self.measured && link_busy < NEARLY => self.link = Some(link),
            // The first bytes are under way.
            Bottleneck::Link if !self.measured && wire <= 0.0 => {}
            Bottleneck::Link => {
                self.rise = RISE.0;
                let gain = if self.measured { 0.5 } else { 1.0 };
                self.link = Some(link + gain * (wire_seen - link));
                self.measured = true;
            }
            // Both are busy: the desired state.
            Bottleneck::Workers if link_busy > NEARLY => {
                self.link = Some(link);
                self.rise = RISE.0;
            }
            Bottleneck::Workers => {
                // Far above the measured rate there is nothing more to learn.
                let risen = (link * self.rise).min(100.0 * wire_seen.max(link / 100.0));
                self.link = Some(risen.min(link.max(self.ceiling())).max(wire_seen));
                self.rise = (1.0 + 1.5 * (self.rise - 1.0)).min(RISE.1);
            }
            _ => self.link = Some(link),
        }
    }

    /// `wire` bytes a ns went out, and a plain byte took `interval` ns, in a look of `span`.
    fn learn(&mut self, wire: f64, interval: f64, link_busy: f64, span: Duration) {
        self.delivered += LOOK * (wire - self.delivered);
        self.waited += LOOK * (link_busy - self.waited);
        // On a path with a long round trip nothing is delivered at first, which is no evidence
        // about the link.
        if self.link.is_some() || wire > 0.0 {
            self.learn_link(wire, link_busy);
        }
        if self.bottleneck == Bottleneck::Workers {
            self.supply +=
                0.15 * (self.used.clamp(0.02 * self.threads, self.threads) - self.supply);
        } else {
            // The CPU share that they get while they have work is the share that they would always
            // get.
            self.supply += 0.1 * (self.threads * self.granted.max(0.05) - self.supply);
        }
        let held = matches!(self.bottleneck, Bottleneck::Source | Bottleneck::Destination);
        self.slow = if held { self.slow.saturating_add(span) } else { Duration::ZERO };
        // With short pauses the link still seems to be the bottleneck.
        let waits = held || self.bottleneck == Bottleneck::Link && link_busy < NEARLY;
        self.held += 0.2 * (f64::from(u8::from(waits)) - self.held);
        self.outrun |= self.bottleneck == Bottleneck::Workers || self.slow >= SURE;
        self.floor = if self.slow < SURE {
            0.0
        } else {
            // A pause of QEMU does not mean that it became slower.
            self.least.min(self.least_before).min(interval)
        };
    }

    /// Share of the floor's time that the codec threads may spend on saving bytes.
    pub(crate) fn idle_use(&self) -> f64 {
        // Where codec threads wait for a core, QEMU does too.
        IDLE_USE * ((self.granted - 0.8) / 0.15).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK_TIME: Duration = Duration::from_millis(25);

    /// Looks at a link that delivers 0.12 bytes a ns while it is busy: `busy` of the time.
    fn look(flow: &mut Flow, signals: &mut Signals, at: u32, busy: f64, encoding: f64) {
        let span = LOOK_TIME.as_nanos() as f64;
        flow.worked(Worked { cpu_ns: encoding * span, wall_ns: encoding * span });
        signals.plain_bytes += 8 << 20;
        signals.wire_bytes += 3_000_000 / 10 * if busy < 1.0 { 8 } else { 10 };
        signals.link_busy = busy;
        assert!(flow.tick(at * LOOK_TIME, signals));
    }

    #[test]
    fn the_estimate_of_a_link_that_is_busy_most_of_the_time_does_not_run_away() {
        let mut flow = Flow::new(2, None, 0.3);
        let mut signals = Signals::default();
        flow.tick(Duration::ZERO, &signals);
        for at in 1..30 {
            look(&mut flow, &mut signals, at, 1.0, 1.0);
        }
        assert_eq!(flow.bottleneck, Bottleneck::Link);
        let measured = flow.link.unwrap();
        assert!((0.115..0.125).contains(&measured), "{measured}");
        // Now the codec threads are busy, and the link for 80 % of the time.
        for at in 30..130 {
            look(&mut flow, &mut signals, at, 0.8, 2.0);
            assert_eq!(flow.bottleneck, Bottleneck::Workers);
            let link = flow.link.unwrap();
            assert!(link < 1.1 * measured, "{link} after {measured}, look {at}");
        }
    }

    /// A flow after 10 ms in which 4 MiB were read, bytes waited for the link, and the only codec
    /// thread was `busy`; and what the tick said.
    fn first_look(busy: f64) -> (Flow, bool) {
        let mut flow = Flow::new(1, None, 0.3);
        let mut signals = Signals::default();
        flow.tick(Duration::ZERO, &signals);
        flow.worked(Worked { cpu_ns: busy * 10e6, wall_ns: busy * 10e6 });
        (signals.plain_bytes, signals.wire_bytes, signals.link_busy) = (4 << 20, 2 << 20, 1.0);
        let looked = flow.tick(Duration::from_millis(10), &signals);
        (flow, looked)
    }

    #[test]
    fn at_the_start_busy_codec_threads_show_sooner_than_a_link() {
        let (flow, looked) = first_look(0.95);
        assert!(looked && flow.is_known() && !flow.measured);
        assert_eq!(flow.bottleneck, Bottleneck::Workers);
        let (mut flow, looked) = first_look(0.5);
        assert!(!looked && !flow.is_known());
        // The second tick covers both.
        let signals = Signals {
            plain_bytes: 8 << 20,
            wire_bytes: 4 << 20,
            link_busy: 1.0,
            ..Signals::default()
        };
        flow.worked(Worked { cpu_ns: 5e6, wall_ns: 5e6 });
        assert!(flow.tick(Duration::from_millis(20), &signals) && flow.measured);
        let link = flow.link.unwrap();
        assert!((link - (4 << 20) as f64 / 20e6).abs() < 1e-6, "{link}");
    }
}
