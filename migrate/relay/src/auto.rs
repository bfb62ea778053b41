//! `--codec auto` in a source relay: gives each chunk its codec and level, and the controller its
//! measurements.
//!
//! ```text
//!  intake: class of the chunk ─► choice ─► codec thread, or raw past it ─► outcome ─► controller
//!  auto (a thread): every 5 ms: do bytes wait for a link? bytes delivered
//!                   every 25 ms: these, waits for credit, CPU time ─► controller
//! ```

use crate::counters::Counters;
use codec::{Codec, Settings};
use controller::{Bottleneck, Choice, Class, Config, Controller, Decision, Observation, Signals};
use rustix::time::{clock_gettime, ClockId};
use session::{Outgoing, Session};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The interval at which the links are checked.
const LOOK: Duration = Duration::from_millis(5);
/// Checks per tick of the controller.
const LOOKS: u32 = 5;
/// Checks before the first tick: until then nothing is known.
const FIRST_LOOKS: u32 = 2;
/// The time over which a link's peak rate is measured.
const LASTING: Duration = Duration::from_millis(200);

/// How many times as long the link takes for a byte as the CPU before deltas pay: storing and
/// comparing pages costs each end a copy of every page.
const ROOM_FOR_DELTAS: f64 = 1.5;

/// Options of `--codec auto`.
#[derive(Debug, Clone, Default)]
pub struct AutoConfig {
    /// Cores that the relay may use on average; `None`: all that the process may run on.
    pub max_cpu: Option<f64>,
    /// Receives each decision as it is made.
    pub explain: Option<Sender<Decision>>,
}

/// The bytes sent with one codec and level.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Codec and level.
    pub settings: Settings,
    /// Plain bytes.
    pub plain: u64,
    /// Bytes sent for them.
    pub sent: u64,
}

/// The results of `--codec auto`.
#[derive(Debug, Clone)]
pub struct AutoReport {
    /// The bytes by codec and level. Those that no codec made smaller count as none, whatever was
    /// tried.
    pub parts: Vec<Part>,
    /// The bottleneck for most of the time.
    pub bottleneck: Bottleneck,
    /// The last decision before the VM stopped.
    pub last: Decision,
    /// The highest rate of the links over 200 ms, bytes/s.
    pub link_peak: f64,
    /// Plain bytes/s, over the time in which any were sent.
    pub plain_rate: f64,
    /// The links have transmitted more than the plain rate without being the bottleneck: QEMU alone
    /// would have been at least as fast.
    pub link_too_fast: bool,
}

pub(crate) struct Auto {
    controller: Controller,
    waits: Mutex<Waits>,
    /// Plain bytes, and the bytes sent for them, for each candidate.
    made: Box<[(AtomicU64, AtomicU64)]>,
    /// Bytes sent raw without a choice.
    as_they_were: AtomicU64,
    /// When the first bytes arrived.
    started: OnceLock<Instant>,
    /// The link is the bottleneck, and CPU time is left.
    wants_deltas: AtomicBool,
    seen: Mutex<Seen>,
}

/// Readers that wait for credit.
struct Waits {
    readers: u32,
    since: Instant,
    total: Duration,
}

/// Statistics of the ticks.
struct Seen {
    /// Time in which bytes were sent, by bottleneck: codec threads, link, destination, source.
    time: [Duration; 4],
    before: Option<(Instant, u64)>,
    /// The start of the interval for `link_peak`, and the bytes sent until then.
    stretch: Option<(Instant, u64)>,
    link_peak: f64,
    plain: u64,
    last: Option<Decision>,
    told: u64,
}

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

    /// All bytes delivered. If the kernel does not report them, `written`, part of which may still
    /// wait in a queue. If it does, it has acknowledged the session's hellos before QEMU's first
    /// byte.
    fn bytes(&self, written: u64) -> u64 {
        if self.bytes > 0 {
            self.bytes
        } else {
            written
        }
    }
}

/// A reader that waits for credit, until this is dropped.
pub(crate) struct Waiting<'a>(&'a Auto);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waits = lock(&self.0.waits);
        waits.readers -= 1;
        if waits.readers == 0 {
            let waited = waits.since.elapsed();
            waits.total += waited;
        }
    }
}

impl Auto {
    /// `settings` are the candidates, `threads` the number of codec threads.
    pub(crate) fn new(config: &AutoConfig, candidates: Vec<Settings>, threads: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let controller = Controller::new(Config {
            max_cpu: config.max_cpu,
            cores: Some(config.max_cpu.unwrap_or(cores).min(cores)),
            candidates,
            ..Config::new(threads)
        });
        let made = controller.candidates().iter().map(|_| Default::default()).collect();
        Self {
            controller,
            waits: Mutex::new(Waits { readers: 0, since: Instant::now(), total: Duration::ZERO }),
            made,
            as_they_were: AtomicU64::new(0),
            started: OnceLock::new(),
            wants_deltas: AtomicBool::new(false),
            seen: Mutex::new(Seen {
                time: [Duration::ZERO; 4],
                before: None,
                stretch: None,
                link_peak: 0.0,
                plain: 0,
                last: None,
                told: 0,
            }),
        }
    }

    /// Chooses codec and level for `chunk`.
    pub(crate) fn choose(self: &Arc<Self>, chunk: &[u8]) -> Assigned {
        let choice = self.controller.choose(Class::of(chunk));
        Assigned { auto: self.clone(), choice }
    }

    /// Records that the VM has stopped.
    pub(crate) fn stopped(&self) {
        self.controller.stopped();
    }

    /// Whether pages that were sent before should be sent as differences.
    pub(crate) fn wants_deltas(&self) -> bool {
        self.wants_deltas.load(Ordering::Relaxed)
    }

    /// Counts a reader that is about to wait for credit.
    pub(crate) fn waiting(&self) -> Waiting<'_> {
        let mut waits = lock(&self.waits);
        if waits.readers == 0 {
            waits.since = Instant::now();
        }
        waits.readers += 1;
        Waiting(self)
    }

    fn credit_wait(&self) -> Duration {
        let waits = lock(&self.waits);
        waits.total + if waits.readers > 0 { waits.since.elapsed() } else { Duration::ZERO }
    }

    /// Counts bytes sent raw without a choice: too few to compress, or no codec thread was free.
    pub(crate) fn as_it_was(&self, len: usize) {
        self.as_they_were.fetch_add(len as u64, Ordering::Relaxed);
    }

    /// Measures the flow until `is_over`; `worker_cpu` returns the CPU time of the codec threads.
    pub(crate) fn watch(
        &self,
        session: &Session,
        counters: &Counters,
        worker_cpu: impl Fn() -> Duration,
        explain: Option<&Sender<Decision>>,
        is_over: impl Fn() -> bool,
    ) {
        let (mut looks, mut waited, mut wanted) = (0_u32, 0_u32, FIRST_LOOKS);
        let mut delivered = Delivered::default();
        while !is_over() {
            let plain = counters.plain.load(Ordering::Relaxed);
            if plain == 0 {
                // QEMU has not started; that may take hours.
                std::thread::sleep(2 * LOOK);
                continue;
            }
            let (waits, acked) = session.link_progress();
            waited += u32::from(waits);
            delivered.look(acked);
            // The controller counts time from the first bytes.
            if looks == wanted || self.started.get().is_none() {
                wanted = if looks == 0 { FIRST_LOOKS } else { LOOKS };
                let wire = delivered.bytes(session.bytes_out.load(Ordering::Relaxed));
                self.controller.tick(
                    self.started.get_or_init(Instant::now).elapsed(),
                    &Signals {
                        plain_bytes: plain,
                        wire_bytes: wire,
                        credit_wait: self.credit_wait(),
                        link_busy: f64::from(waited) / f64::from(looks.max(1)),
                        other_cpu: Some(process_cpu().saturating_sub(worker_cpu())),
                    },
                );
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
        match seen.stretch {
            Some((then, before)) if now - then >= LASTING => {
                let rate = wire.saturating_sub(before) as f64 / (now - then).as_secs_f64();
                seen.link_peak = seen.link_peak.max(rate);
                seen.stretch = Some((now, wire));
            }
            Some(_) => {}
            None => seen.stretch = Some((now, wire)),
        }
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

    pub(crate) fn report(&self) -> AutoReport {
        let seen = lock(&self.seen);
        let mut parts: Vec<Part> = Vec::new();
        let as_they_were = self.as_they_were.load(Ordering::Relaxed);
        if let Ok(settings) = Settings::new(Codec::Raw, None) {
            parts.push(Part { settings, plain: as_they_were, sent: as_they_were });
        }
        for (settings, (plain, sent)) in self.controller.candidates().iter().zip(&self.made) {
            let (plain, sent) = (plain.load(Ordering::Relaxed), sent.load(Ordering::Relaxed));
            match parts.iter_mut().find(|part| part.settings == *settings) {
                Some(part) => {
                    part.plain += plain;
                    part.sent += sent;
                }
                None => parts.push(Part { settings: *settings, plain, sent }),
            }
        }
        parts.retain(|part| part.plain > 0);
        let bottlenecks =
            [Bottleneck::Workers, Bottleneck::Link, Bottleneck::Destination, Bottleneck::Source];
        let longest = bottlenecks.into_iter().zip(seen.time).max_by_key(|(_, time)| *time);
        let bottleneck = longest
            .filter(|(_, time)| !time.is_zero())
            .map_or(Bottleneck::Unknown, |(bottleneck, _)| bottleneck);
        let time: Duration = seen.time.iter().sum();
        let plain_rate = if time.is_zero() { 0.0 } else { seen.plain as f64 / time.as_secs_f64() };
        AutoReport {
            parts,
            bottleneck,
            last: seen.last.clone().unwrap_or_else(|| self.controller.current()),
            link_peak: seen.link_peak,
            plain_rate,
            link_too_fast: plain_rate > 0.0
                && seen.link_peak >= plain_rate
                && 2 * seen.time[1] < time,
        }
    }
}

/// The codec and level for one chunk.
pub(crate) struct Assigned {
    auto: Arc<Auto>,
    choice: Choice,
}

impl Assigned {
    pub(crate) fn settings(&self) -> Settings {
        self.auto.controller.settings(&self.choice)
    }

    /// A codec thread begins. After the VM has stopped, chunks that waited also get the fastest
    /// choice.
    pub(crate) fn begin(&mut self) -> Begun {
        if self.auto.controller.is_stopped() {
            self.choice = self.auto.controller.choose(self.choice.class());
        }
        Begun { cpu: thread_cpu(), at: Instant::now() }
    }

    /// Records that a codec thread has made `outgoing` from `plain` bytes.
    pub(crate) fn done(&self, plain: usize, outgoing: &Outgoing, begun: &Begun) {
        let cpu = thread_cpu().saturating_sub(begun.cpu);
        self.observe(plain, outgoing, cpu, begun.at.elapsed());
    }

    /// Records that a device has made `outgoing` from `plain` bytes, with `depth` chunks in flight
    /// for a codec thread. The time that counts is for how long the chunk occupied one of the
    /// thread's places on the device.
    pub(crate) fn done_by_device(
        &self,
        plain: usize,
        outgoing: &Outgoing,
        begun: &Begun,
        depth: u32,
    ) {
        let taken = begun.at.elapsed() / depth;
        self.observe(plain, outgoing, taken, taken);
    }

    /// Records that the chunk bypassed the codec threads.
    pub(crate) fn past(&self, plain: usize, outgoing: &Outgoing) {
        self.observe(plain, outgoing, Duration::ZERO, Duration::ZERO);
    }

    fn observe(&self, plain: usize, outgoing: &Outgoing, cpu: Duration, wall: Duration) {
        let Outgoing::Unit { unit, .. } = outgoing else { return };
        let encoded = unit.payload_len as usize;
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.auto.controller.observe(&Observation {
            choice: self.choice,
            plain,
            encoded,
            cpu_ns: nanos(cpu),
            wall_ns: nanos(wall),
        });
        if encoded >= plain {
            return self.auto.as_it_was(plain);
        }
        let made = &self.auto.made[self.choice.candidate()];
        made.0.fetch_add(plain as u64, Ordering::Relaxed);
        made.1.fetch_add(encoded as u64, Ordering::Relaxed);
    }
}

/// The times at which a codec thread began a chunk.
pub(crate) struct Begun {
    cpu: Duration,
    at: Instant,
}

pub(crate) fn thread_cpu() -> Duration {
    cpu_time(ClockId::ThreadCPUTime)
}

pub(crate) fn process_cpu() -> Duration {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Consistent after each statement: these are figures for reports.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
