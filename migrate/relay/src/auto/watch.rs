//! The thread that measures the flow for the controller.

use super::{lock, Auto};
use crate::counters::Counters;
use crate::cpu_time::process_cpu;
use controller::{Bottleneck, Decision, Signals};
use session::Session;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// The interval at which the links are checked.
const LOOK: Duration = Duration::from_millis(5);
/// Checks per tick of the controller.
const LOOKS: u32 = 5;
/// Checks per tick until the controller knows the link's rate. Until then it plans without the
/// rate.
const FIRST_LOOKS: u32 = 2;
/// The time over which a link's peak rate, and the rate of plain bytes, are measured.
const LASTING: Duration = Duration::from_millis(200);

/// Deltas pay once the link takes this many times as long for a byte as the CPU: storing and
/// comparing pages costs each end a copy of every page.
const ROOM_FOR_DELTAS: f64 = 1.5;

/// Looking pages up in a seed pays up to this rate of the link, bytes/s. On two cores for both
/// ends, a guest that returned took 1.86 s with its seed, and without one 2.20 s at 2.5 Gbit/s,
/// 1.67 s at 5 Gbit/s and 1.31 s at 10 Gbit/s (`docs/figures.md`).
const SEED_PAYS: f64 = 500e6;
/// A link that was never the bottleneck may have any rate, since pages that are found do not cross.
/// Once QEMU sends so many bytes/s, pages go whole. That shows a slow link: it becomes the
/// bottleneck. If it does not, look-ups would gain no time.
const SEED_TRIAL: f64 = 250e6;
/// The rate at which look-ups stop is so many times the one at which they begin again.
const ROOM_FOR_SEED: f64 = 1.5;

/// The bytes that the links have delivered, as acknowledged by the peer's kernel on the links that
/// are up.
#[derive(Debug, Default)]
struct Delivered {
    before: u64,
    bytes: u64,
}

impl Delivered {
    fn look(&mut self, acked: u64) {
        // A smaller count means that a link was lost, and its count with it.
        self.bytes += acked.saturating_sub(self.before);
        self.before = acked;
    }

    /// All bytes delivered. If the kernel does not report acknowledgements, this is `written`, of
    /// which a part may still wait in a queue. If the kernel reports them, it has acknowledged the
    /// session's hellos before QEMU's first byte.
    fn bytes(&self, written: u64) -> u64 {
        if self.bytes > 0 {
            self.bytes
        } else {
            written
        }
    }
}

impl Auto {
    /// Measures the flow until `is_over`; `worker_cpu` returns the CPU time of the codec threads.
    pub(crate) fn watch(
        &self,
        session: &Session,
        counters: &Counters,
        worker_cpu: impl Fn() -> Duration,
        page_size: u32,
        explain: Option<&Sender<Decision>>,
        is_over: impl Fn() -> bool,
    ) {
        let (mut looks, mut waited, mut wanted) = (0_u32, 0_u32, FIRST_LOOKS);
        let mut delivered = Delivered::default();
        while !is_over() {
            let plain = counters.plain.load(Ordering::Relaxed);
            if plain == 0 {
                // QEMU has not started its migration, and may not do so for hours.
                std::thread::sleep(2 * LOOK);
                continue;
            }
            let (waits, acked) = session.link_progress();
            waited += u32::from(waits);
            delivered.look(acked);
            // The controller counts time from the first bytes.
            if looks == wanted || self.started.get().is_none() {
                let wire = delivered.bytes(session.bytes_out.load(Ordering::Relaxed));
                self.controller.tick(
                    self.started.get_or_init(Instant::now).elapsed(),
                    &Signals {
                        plain_bytes: plain,
                        wire_bytes: wire,
                        credit_wait: self.credit_wait(),
                        link_busy: f64::from(waited) / f64::from(looks.max(1)),
                        other_cpu: Some(process_cpu().saturating_sub(worker_cpu())),
                        sends_again: counters.sends_again(page_size),
                    },
                );
                wanted = if self.controller.knows_link() { LOOKS } else { FIRST_LOOKS };
                self.see(plain, wire, explain);
                (looks, waited) = (0, 0);
            }
            std::thread::sleep(LOOK);
            looks += 1;
        }
        self.send_decisions(explain);
    }

    fn see(&self, plain: u64, wire: u64, explain: Option<&Sender<Decision>>) {
        let now = Instant::now();
        let decision = self.controller.current();
        self.judge_deltas(decision.bottleneck, decision.link_ns, decision.cpu_ns);
        let mut seen = lock(&self.seen);
        if let Some((then, before)) =
            seen.before.replace((now, plain)).filter(|_| !decision.stopped)
        {
            if plain > before {
                seen.plain = plain;
                let row = match decision.bottleneck {
                    Bottleneck::Workers => Some(0),
                    Bottleneck::Link => Some(1),
                    Bottleneck::Destination => Some(2),
                    Bottleneck::Source => Some(3),
                    Bottleneck::Unknown => None,
                };
                if let Some(row) = row {
                    seen.time[row] += now - then;
                }
            }
        }
        let mut read = 0.0;
        match seen.stretch {
            Some((then, before, plain_before)) if now - then >= LASTING => {
                let span = (now - then).as_secs_f64();
                let rate = wire.saturating_sub(before) as f64 / span;
                read = plain.saturating_sub(plain_before) as f64 / span;
                seen.link_peak = seen.link_peak.max(rate);
                seen.stretch = Some((now, wire, plain));
            }
            Some(_) => {}
            None => seen.stretch = Some((now, wire, plain)),
        }
        self.judge_seed(decision.drain_bytes_per_s, read);
        if !decision.stopped {
            seen.last = Some(decision);
        }
        drop(seen);
        self.send_decisions(explain);
    }

    /// Deltas start only when the link clearly takes longer for a byte than the CPU, and stop only
    /// when it clearly takes less: the mix tends towards equality, and pages sent while deltas are
    /// off do not enter the cache.
    pub(crate) fn judge_deltas(&self, bottleneck: Bottleneck, link: f64, cpu: f64) {
        match bottleneck {
            Bottleneck::Link if link > ROOM_FOR_DELTAS * cpu => {
                self.wants_deltas.store(true, Ordering::Relaxed);
            }
            Bottleneck::Workers => self.wants_deltas.store(false, Ordering::Relaxed),
            _ if cpu > ROOM_FOR_DELTAS * link => self.wants_deltas.store(false, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Pages are looked up in the seed unless the link is clearly too fast for that. `link`: its
    /// rate, if it was the bottleneck once; `read`: plain bytes/s of QEMU.
    pub(crate) fn judge_seed(&self, link: Option<f64>, read: f64) {
        match link {
            Some(rate) if rate < SEED_PAYS => self.wants_seed.store(true, Ordering::Relaxed),
            Some(rate) if rate > ROOM_FOR_SEED * SEED_PAYS => {
                self.wants_seed.store(false, Ordering::Relaxed);
            }
            None if read > SEED_TRIAL => self.wants_seed.store(false, Ordering::Relaxed),
            _ => {}
        }
    }

    fn send_decisions(&self, explain: Option<&Sender<Decision>>) {
        let Some(explain) = explain else { return };
        let mut seen = lock(&self.seen);
        let (told, decisions) = self.controller.explain_after(seen.told);
        seen.told = told;
        for decision in decisions {
            // The receiver is gone, which is no error.
            let _ = explain.send(decision);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delivered_amount_never_decreases() {
        let mut delivered = Delivered::default();
        assert_eq!(delivered.bytes(77), 77, "the kernel does not say");
        let mut before = 0;
        // The handshake, data, one of two links lost, data, all lost, a new one.
        for (acked, all) in [(3, 3), (1000, 1000), (400, 1000), (500, 1100), (0, 1100), (9, 1109)] {
            delivered.look(acked);
            assert_eq!(delivered.bytes(1 << 20), all);
            assert!(all >= before);
            before = all;
        }
    }
}
