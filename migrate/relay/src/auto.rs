//! `--codec auto` in a source relay: assigns a codec and a level to each chunk, and reports
//! measurements to the controller.
//!
//! ```text
//!  intake: class of the chunk ─► choice ─► codec thread, or raw past it ─► outcome ─► controller
//!  auto (a thread): every 5 ms: do bytes wait for a link? bytes delivered
//!                   every 25 ms (10 at first): these, waits for credit, CPU time ─► controller
//! ```

pub(crate) mod assigned;
mod watch;

use codec::{Codec, Settings};
use controller::{Bottleneck, Config, Controller, Decision};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

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
    /// The bytes by codec and level. Bytes that no codec made smaller count as `none`, whatever
    /// codec was tried.
    pub parts: Vec<Part>,
    /// The bottleneck for most of the time.
    pub bottleneck: Bottleneck,
    /// The last decision before the VM stopped.
    pub last: Decision,
    /// The highest rate of the links over 200 ms, bytes/s.
    pub link_peak: f64,
    /// Plain bytes per second, averaged over the time in which bytes were sent.
    pub plain_rate: f64,
    /// The links have transmitted more bytes per second than the plain rate, and were not the
    /// bottleneck: QEMU alone would have been at least as fast.
    pub link_too_fast: bool,
}

pub(crate) struct Auto {
    controller: Controller,
    waits: Mutex<Waits>,
    /// Plain bytes, and the bytes sent for them, for each candidate.
    made: Box<[(AtomicU64, AtomicU64)]>,
    /// Plain bytes sent without a choice, and the bytes sent for them.
    as_they_were: (AtomicU64, AtomicU64),
    /// When the first bytes arrived.
    started: OnceLock<Instant>,
    /// The link is the bottleneck, and CPU time is left.
    wants_deltas: AtomicBool,
    /// The link is not known to be so fast that looking up pages in a seed takes longer.
    wants_seed: AtomicBool,
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
    /// The interval over which `link_peak` and the rate of plain bytes are measured: its start, the
    /// bytes sent and the plain bytes until then.
    stretch: Option<(Instant, u64, u64)>,
    link_peak: f64,
    plain: u64,
    last: Option<Decision>,
    told: u64,
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
            as_they_were: Default::default(),
            started: OnceLock::new(),
            wants_deltas: AtomicBool::new(false),
            wants_seed: AtomicBool::new(true),
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

    /// Records that the VM has stopped.
    pub(crate) fn stopped(&self) {
        self.controller.stopped();
    }

    /// Whether pages that were sent before should be sent as differences.
    pub(crate) fn wants_deltas(&self) -> bool {
        self.wants_deltas.load(Ordering::Relaxed)
    }

    /// Whether pages should be looked up in the destination's seed.
    pub(crate) fn wants_seed(&self) -> bool {
        self.wants_seed.load(Ordering::Relaxed)
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

    /// Counts bytes that no codec made smaller, and the bytes sent for them: too few to compress,
    /// or no codec thread was free.
    pub(crate) fn as_it_was(&self, plain: usize, sent: usize) {
        self.as_they_were.0.fetch_add(plain as u64, Ordering::Relaxed);
        self.as_they_were.1.fetch_add(sent as u64, Ordering::Relaxed);
    }

    pub(crate) fn report(&self) -> AutoReport {
        let seen = lock(&self.seen);
        let mut parts: Vec<Part> = Vec::new();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        if let Ok(settings) = Settings::new(Codec::Raw, None) {
            let (plain, sent) = (load(&self.as_they_were.0), load(&self.as_they_were.1));
            parts.push(Part { settings, plain, sent });
        }
        for (settings, (plain, sent)) in self.controller.candidates().iter().zip(&self.made) {
            let (plain, sent) = (load(plain), load(sent));
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is consistent after each statement, and holds only figures for reports.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
