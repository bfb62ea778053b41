//! A simulated migration: a guest, QEMU's rule for the switchover, the relays and a link.
//!
//! The guest writes to the pages of its working set at random, so that the dirtied bytes of a time
//! t are W (1 - e^(-d t / W)). QEMU sends its bitmap's pages, reads the dirty log when less than
//! its threshold is left, throttles as auto-converge does, and stops the VM when less than the
//! threshold is left after that. A relay holds bytes that are under way. The steps last 5 ms.

use converge::{Action, Controller, Decision, Limits, Phase, Sample};
use std::time::Duration;

/// A step of the simulation, s.
const STEP: f64 = 0.005;
/// QEMU measures its bandwidth over this time, s.
const BANDWIDTH: f64 = 0.1;
/// Samples are this far apart, s.
const SAMPLE: f64 = 0.25;
/// Zero pages per second, bytes.
const ZEROS: f64 = 4e9;

/// The simulated environment. Sizes are bytes of pages, rates bytes per second.
#[derive(Clone, Copy)]
pub(crate) struct World {
    pub(crate) zeros: f64,
    /// Pages that the guest does not write to.
    pub(crate) cold: f64,
    /// Pages that it writes to.
    pub(crate) hot: f64,
    /// The rate at which it writes to pages, at a given time.
    pub(crate) writes: fn(f64) -> f64,
    /// Bytes per second on the network.
    pub(crate) link: f64,
    /// How many times smaller pages become.
    pub(crate) cold_ratio: f64,
    pub(crate) hot_ratio: f64,
    /// The most page bytes per second that QEMU and the relays manage.
    pub(crate) most: f64,
    /// Device state and the start of the VM, s.
    pub(crate) device: f64,
    /// QEMU sends nothing for so long after it has read the dirty log, s.
    pub(crate) pause: f64,
    /// QEMU has avail-switchover-bandwidth.
    pub(crate) has_bandwidth: bool,
    /// Another client sets downtime-limit at this time, to so many seconds.
    pub(crate) operator: Option<(f64, f64)>,
    /// QEMU refuses the parameters of a throttle.
    pub(crate) refuses_throttle: bool,
}

impl World {
    /// A guest of a gigabyte, half of it zeros, over a link of so many Mbit/s.
    pub(crate) fn new(mbit: f64, writes: fn(f64) -> f64) -> Self {
        Self {
            zeros: 500e6,
            cold: 400e6,
            hot: 100e6,
            writes,
            link: mbit * 125e3,
            cold_ratio: 3.0,
            hot_ratio: 3.0,
            most: 1.2e9,
            device: 0.03,
            pause: 0.0,
            has_bandwidth: true,
            operator: None,
            refuses_throttle: false,
        }
    }
}

/// How it went.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// When the VM stopped at the source, and for how long it stood still, s.
    pub(crate) ended: Option<(f64, f64)>,
    pub(crate) postcopy: Option<f64>,
    pub(crate) cancelled: Option<f64>,
    /// When the first pass was over, s.
    pub(crate) first_pass: f64,
    /// The strongest throttle in force, per cent.
    pub(crate) throttle: u8,
    pub(crate) decisions: Vec<Decision>,
}

/// QEMU's parameters.
struct Parameters {
    downtime_limit: f64,
    switchover: Option<f64>,
    /// throttle-trigger-threshold, as a part.
    trigger: f64,
    most_throttle: f64,
    increment: f64,
}

struct Run {
    world: World,
    now: f64,
    zeros: f64,
    cold: f64,
    /// Hot pages that the bitmap shows.
    dirty: f64,
    /// Hot pages written to since the dirty log was read.
    log: f64,
    sent: f64,
    data: f64,
    wire: f64,
    syncs: u64,
    period_began: f64,
    period_dirty: f64,
    period_sent: f64,
    dirty_rate: Option<f64>,
    high: u32,
    throttle: f64,
    window: (f64, f64),
    bandwidth: f64,
    /// The end of QEMU's pause.
    paused: f64,
    parameters: Parameters,
}

/// Migrates with a controller, or by QEMU alone with a downtime-limit of 300 ms, for at most
/// `limit` seconds.
pub(crate) fn migrate(world: World, limits: Option<Limits>, limit: f64) -> Outcome {
    let mut controller = limits
        .map(|limits| Controller::new(limits, Duration::from_millis(300), world.has_bandwidth));
    let mut run = Run::new(world);
    let mut outcome = Outcome::default();
    if let Some(controller) = &mut controller {
        run.parameters.downtime_limit = controller.held().downtime_limit.as_secs_f64();
    }
    let mut next = SAMPLE;
    while run.now < limit {
        if let Some(downtime) = run.step() {
            outcome.ended = Some((run.now, downtime));
            return outcome;
        }
        if outcome.first_pass == 0.0 && run.zeros + run.cold <= 0.0 {
            outcome.first_pass = run.now;
        }
        outcome.throttle = outcome.throttle.max(run.percent());
        if let Some((_, limit)) = run.world.operator.filter(|(at, _)| run.now >= *at) {
            run.parameters.downtime_limit = limit;
            run.world.operator = None;
        }
        let Some(controller) = controller.as_mut().filter(|_| run.now >= next) else { continue };
        next += SAMPLE;
        let step = controller.step(&run.sample());
        outcome.decisions.extend(step.decisions);
        for action in step.actions {
            match action {
                Action::StopAt(wanted) => {
                    run.parameters.downtime_limit = wanted.downtime_limit.as_secs_f64();
                    run.parameters.switchover = wanted.bandwidth.map(|rate| rate as f64);
                }
                Action::Throttle(_) if world.refuses_throttle => controller.not_done(action),
                Action::Throttle(percent) => {
                    run.parameters.trigger = 0.01;
                    run.parameters.most_throttle = f64::from(percent) / 100.0;
                    run.parameters.increment = 0.99;
                }
                Action::StartPostcopy => {
                    outcome.postcopy = Some(run.now);
                    return outcome;
                }
                Action::Cancel => {
                    outcome.cancelled = Some(run.now);
                    return outcome;
                }
            }
        }
    }
    outcome
}

impl Run {
    fn new(world: World) -> Self {
        Self {
            now: 0.0,
            zeros: world.zeros,
            cold: world.cold,
            dirty: world.hot,
            log: 0.0,
            sent: 0.0,
            data: 0.0,
            wire: 0.0,
            syncs: 1,
            period_began: 0.0,
            period_dirty: 0.0,
            period_sent: 0.0,
            dirty_rate: None,
            high: 0,
            throttle: 0.0,
            window: (0.0, 0.0),
            bandwidth: 0.0,
            paused: 0.0,
            parameters: Parameters {
                downtime_limit: 0.3,
                switchover: None,
                trigger: 1.0,
                most_throttle: 0.01,
                increment: 0.01,
            },
            world,
        }
    }

    fn drain(&self, ratio: f64) -> f64 {
        (self.world.link * ratio).min(self.world.most)
    }

    fn left(&self) -> f64 {
        self.zeros + self.cold + self.dirty
    }

    /// The rate at which the path carries the pages that are sent now.
    fn carries(&self) -> f64 {
        self.drain(if self.cold > 0.0 { self.world.cold_ratio } else { self.world.hot_ratio })
    }

    /// Seconds that bytes are under way: the window of the relays (W16), at least a megabyte.
    fn delay(&self) -> f64 {
        0.017_f64.max(1e6 / self.carries())
    }

    fn percent(&self) -> u8 {
        (100.0 * self.throttle) as u8
    }

    /// One step; the downtime if the VM stops.
    fn step(&mut self) -> Option<f64> {
        self.now += STEP;
        let speed = (self.world.writes)(self.now) * (1.0 - self.throttle);
        self.log += speed * (1.0 - self.log / self.world.hot) * STEP;
        if self.now < self.paused {
            return None;
        }
        self.send();
        if self.now - self.window.0 >= BANDWIDTH {
            self.bandwidth = (self.data - self.window.1) / (self.now - self.window.0);
            self.window = (self.now, self.data);
        }
        let bandwidth = self.parameters.switchover.unwrap_or(self.bandwidth);
        let threshold = bandwidth * self.parameters.downtime_limit;
        if self.left() >= threshold {
            return None;
        }
        self.synchronise();
        self.paused = self.now + self.world.pause;
        if self.left() >= threshold {
            return None;
        }
        let last = self.left() / self.drain(self.world.hot_ratio);
        Some(self.delay() + last + self.world.device)
    }

    fn send(&mut self) {
        let mut time = STEP;
        let zeros = self.zeros.min(ZEROS * time);
        time -= zeros / ZEROS;
        self.zeros -= zeros;
        self.sent += zeros;
        for (cold, ratio) in [(true, self.world.cold_ratio), (false, self.world.hot_ratio)] {
            let drain = self.drain(ratio);
            let left = if cold { &mut self.cold } else { &mut self.dirty };
            let bytes = left.min(drain * time.max(0.0));
            *left -= bytes;
            time -= bytes / drain;
            self.sent += bytes;
            self.data += bytes;
            self.wire += bytes / ratio;
        }
    }

    fn synchronise(&mut self) {
        let new = self.log * (1.0 - self.dirty / self.world.hot);
        self.dirty += new;
        self.log = 0.0;
        self.syncs += 1;
        self.period_dirty += new;
        let span = self.now - self.period_began;
        if span < 1.0 {
            return;
        }
        self.dirty_rate = Some(self.period_dirty / span);
        if self.period_dirty > (self.data - self.period_sent) * self.parameters.trigger {
            self.high += 1;
        }
        if self.high >= 2 {
            self.high = 0;
            self.throttle = match self.throttle {
                none if none <= 0.0 => 0.01,
                now => (now + self.parameters.increment).min(self.parameters.most_throttle),
            };
        }
        (self.period_began, self.period_dirty, self.period_sent) = (self.now, 0.0, self.data);
    }

    fn sample(&self) -> Sample {
        let seconds = Duration::from_secs_f64;
        Sample {
            at: seconds(self.now),
            phase: Phase::Precopy,
            total: (self.world.zeros + self.world.cold + self.world.hot) as u64,
            remaining: self.left() as u64,
            syncs: self.syncs,
            sent: self.sent as u64,
            data: self.data as u64,
            drain: if self.data > 0.0 { self.carries() } else { 0.0 },
            wire: self.wire as u64,
            dirty_rate: self.dirty_rate,
            bandwidth: Some(self.bandwidth),
            delay: seconds(self.delay()),
            throttle: self.percent(),
            downtime_limit: Some(seconds(self.parameters.downtime_limit)),
            max_bandwidth: None,
        }
    }
}
