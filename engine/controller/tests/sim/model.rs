//! A discrete-event simulation of a migration: QEMU, readers, credit, codec threads, a link, a
//! destination.
//!
//! The window is the session's: 15 ms of drain above the least latency, between 1 and 64 MiB,
//! chunks a quarter of it up to 512 KiB. Not modelled: the worse ratio of shorter chunks, and
//! wake-ups.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use codec::{Codec, Settings};
use controller::{Choice, Class, Config, Controller, Observation, Signals};

use crate::tables::{Row, LZ4, ZSTD};

/// The simulated environment. Times are in ns, rates in bytes per ns.
pub(crate) struct World {
    pub(crate) workers: usize,
    pub(crate) max_cpu: Option<f64>,
    /// The link's rate at a given time.
    pub(crate) link: Box<dyn Fn(f64) -> f64>,
    /// Rate of the source QEMU and the readers.
    pub(crate) source: f64,
    /// Rate of the destination, in plain bytes.
    pub(crate) destination: f64,
    /// The destination takes half of that time for most chunks, and eleven times as long for one in
    /// ten.
    pub(crate) jerky: bool,
    /// When the source QEMU and the destination are slower.
    pub(crate) source_slow: Slow,
    pub(crate) destination_slow: Slow,
    pub(crate) latency: f64,
    /// Bytes to migrate.
    pub(crate) bytes: f64,
    /// The chunk at a place in them.
    pub(crate) chunk: Box<dyn Fn(usize) -> &'static Row>,
    /// Observed CPU times differ from the real ones by up to this share, and now and then by a
    /// factor of 5; they are right on average.
    pub(crate) noise: f64,
    /// Classes are not probed: all chunks are `Plain`.
    pub(crate) blind: bool,
    /// All pages were sent once.
    pub(crate) again: bool,
}

/// A QEMU is slower for some time again and again, as when other programs have its cores.
#[derive(Clone, Copy)]
pub(crate) struct Slow {
    pub(crate) period: f64,
    /// The part of a period, at its end, in which it is slower.
    pub(crate) length: f64,
    /// The rate then.
    pub(crate) rate: f64,
}

impl Slow {
    const NEVER: Self = Self { period: 1.0, length: 0.0, rate: 0.0 };

    /// The time for `bytes` from `now` on at `rate`.
    fn time(self, now: f64, bytes: f64, rate: f64) -> f64 {
        let left = self.period - now % self.period;
        if left > self.length {
            return bytes / rate;
        }
        let slowly = left * self.rate;
        if slowly >= bytes {
            bytes / self.rate
        } else {
            left + (bytes - slowly) / rate
        }
    }
}

impl World {
    pub(crate) fn new(link: f64, chunk: impl Fn(usize) -> &'static Row + 'static) -> Self {
        Self {
            workers: 4,
            max_cpu: None,
            link: Box::new(move |_| link),
            source: 2.0,
            destination: f64::INFINITY,
            jerky: false,
            source_slow: Slow::NEVER,
            destination_slow: Slow::NEVER,
            latency: 0.3e6,
            bytes: 0.0,
            chunk: Box::new(chunk),
            noise: 0.15,
            blind: false,
            again: false,
        }
    }
}

/// The source of the choices.
pub(crate) enum Chooser<'a> {
    /// Always this column of the tables.
    Fixed(usize),
    Auto(&'a Controller),
}

/// The result of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Until the last chunk was delivered.
    pub(crate) time: f64,
    pub(crate) wire: f64,
    /// CPU time of the codec threads.
    pub(crate) cpu: f64,
    pub(crate) chunks: usize,
    pub(crate) explored: usize,
    /// CPU time and bytes of exploring chunks.
    pub(crate) explored_cpu: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Read,
    Encoded(usize),
    Sent,
    Delivered,
    Acknowledged,
    Tick,
}

#[derive(Clone, Copy)]
struct Chunk {
    plain: f64,
    row: &'static Row,
    choice: Option<Choice>,
    /// Column of the tables.
    column: usize,
    issued: f64,
}

impl Chunk {
    fn encoded(&self) -> f64 {
        self.plain * f64::from(self.row.1[self.column].0) / 1e4 + 64.0
    }

    fn cost(&self) -> f64 {
        self.plain * self.row.1[self.column].1 as f64 / 1e3
    }
}

const TICK: f64 = 50e6;
const FIRST_TICK: f64 = 10e6;
const FULL: f64 = 524_288.0;

struct Run<'a> {
    world: &'a World,
    chooser: Chooser<'a>,
    now: f64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    left: f64,
    read: f64,
    reading: Option<f64>,
    waiting_since: Option<f64>,
    credit_wait: f64,
    in_flight: f64,
    /// Read, while no codec thread has room.
    blocked: Option<Chunk>,
    queue: VecDeque<Chunk>,
    at_work: Vec<Option<Chunk>>,
    link_queue: VecDeque<Chunk>,
    sending: bool,
    link_since: f64,
    link_time: f64,
    arrived: VecDeque<Chunk>,
    delivering: bool,
    acks: VecDeque<Chunk>,
    sent: f64,
    // Pacing.
    samples: [f64; 16],
    sample: usize,
    sample_since: f64,
    sample_bytes: f64,
    limited: bool,
    least: f64,
    state: u64,
    ticked_at: f64,
    ticked_link: f64,
    outcome: Outcome,
}

/// Migrates.
pub(crate) fn run(world: &World, chooser: Chooser<'_>) -> Outcome {
    run_until(world, chooser, 1e13).expect("the simulated migration got stuck")
}

/// Migrates, or gives up at `limit` ns.
pub(crate) fn run_until(world: &World, chooser: Chooser<'_>, limit: f64) -> Option<Outcome> {
    let mut run = Run {
        world,
        chooser,
        now: 0.0,
        events: BinaryHeap::new(),
        number: 0,
        left: world.bytes,
        read: 0.0,
        reading: None,
        waiting_since: None,
        credit_wait: 0.0,
        in_flight: 0.0,
        blocked: None,
        queue: VecDeque::new(),
        at_work: vec![None; world.workers],
        link_queue: VecDeque::new(),
        sending: false,
        link_since: 0.0,
        link_time: 0.0,
        arrived: VecDeque::new(),
        delivering: false,
        acks: VecDeque::new(),
        sent: 0.0,
        samples: [0.0; 16],
        sample: 0,
        sample_since: 0.0,
        sample_bytes: 0.0,
        limited: false,
        least: f64::MAX,
        state: 1,
        ticked_at: 0.0,
        ticked_link: 0.0,
        outcome: Outcome::default(),
    };
    run.at(0.0, Event::Tick);
    run.start_reading();
    while let Some(Reverse((time, _, event))) = run.events.pop() {
        run.now = f64::from_bits(time);
        if run.now >= limit {
            return None;
        }
        run.happens(event);
        if run.left <= 0.0 && run.in_flight < 0.5 && run.reading.is_none() {
            break;
        }
    }
    run.outcome.time = run.now;
    run.outcome.wire = run.sent;
    Some(run.outcome)
}

impl Run<'_> {
    fn at(&mut self, time: f64, event: Event) {
        // Positive floats sort as their bits do.
        self.number += 1;
        self.events.push(Reverse((time.to_bits(), self.number, event)));
    }

    /// A random number, 0 to 1.
    fn random(&mut self) -> f64 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn window(&self) -> f64 {
        let rate = self.samples.iter().copied().fold(0.0, f64::max);
        if rate == 0.0 {
            return 4_194_304.0;
        }
        (rate * (self.least + 15e6)).clamp(1_048_576.0, 67_108_864.0)
    }

    fn start_reading(&mut self) {
        if self.left <= 0.0 || self.reading.is_some() || self.blocked.is_some() {
            return;
        }
        let window = self.window();
        let chunk = (window / 4.0).clamp(65_536.0, FULL).floor().min(self.left);
        if window - self.in_flight < chunk && self.in_flight > 0.5 {
            self.waiting_since.get_or_insert(self.now);
            self.limited = true;
            return;
        }
        if let Some(since) = self.waiting_since.take() {
            self.credit_wait += self.now - since;
        }
        self.left -= chunk;
        self.in_flight += chunk;
        self.reading = Some(chunk);
        let time = self.world.source_slow.time(self.now, chunk, self.world.source);
        self.at(self.now + time, Event::Read);
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Read => {
                let plain = self.reading.take().expect("it was being read");
                let place = (self.read / FULL) as usize;
                self.read += plain;
                let row = (self.world.chunk)(place);
                let (column, choice) = match &self.chooser {
                    Chooser::Fixed(column) => (*column, None),
                    Chooser::Auto(controller) => {
                        let choice =
                            controller.choose(if self.world.blind { Class::Plain } else { row.0 });
                        (column(controller.settings(&choice)), Some(choice))
                    }
                };
                self.outcome.chunks += 1;
                let chunk = Chunk { plain, row, choice, column, issued: self.now };
                if column == 0 {
                    self.observe(&chunk, 0.0);
                    self.send(chunk);
                } else {
                    self.blocked = Some(chunk);
                    self.feed();
                }
                self.start_reading();
            }
            Event::Encoded(worker) => {
                let chunk = self.at_work[worker].take().expect("it was at work");
                self.outcome.cpu += chunk.cost();
                let noise = 1.0 + self.world.noise * (2.0 * self.random() - 1.0);
                let noise =
                    if self.random() < 0.1 * self.world.noise { 5.0 * noise } else { noise };
                self.observe(&chunk, chunk.cost() * noise);
                self.send(chunk);
                self.feed();
                self.start_reading();
            }
            Event::Sent => {
                let chunk = self.link_queue.pop_front().expect("it was sent");
                self.sending = false;
                self.link_time += self.now - self.link_since;
                self.sent += chunk.encoded();
                self.arrived.push_back(chunk);
                self.transmit();
                self.deliver();
            }
            Event::Delivered => {
                let chunk = self.arrived.pop_front().expect("it was delivered");
                self.delivering = false;
                self.acks.push_back(chunk);
                self.at(self.now + self.world.latency, Event::Acknowledged);
                self.deliver();
            }
            Event::Acknowledged => {
                let chunk = self.acks.pop_front().expect("it was acknowledged");
                self.in_flight -= chunk.plain;
                self.paced(&chunk);
                self.start_reading();
            }
            Event::Tick => {
                self.tick();
                let knows = match &self.chooser {
                    Chooser::Auto(controller) => controller.knows_link(),
                    Chooser::Fixed(_) => true,
                };
                self.at(self.now + if knows { TICK } else { FIRST_TICK }, Event::Tick);
            }
        }
    }

    /// Passes chunks to the codec threads, each of which has room for 4 besides the one it encodes.
    fn feed(&mut self) {
        loop {
            if self.queue.len() < 4 * self.world.workers {
                self.queue.extend(self.blocked.take());
            }
            let Some(idle) = self.at_work.iter().position(Option::is_none) else { return };
            let Some(chunk) = self.queue.pop_front() else { return };
            self.at_work[idle] = Some(chunk);
            self.at(self.now + chunk.cost(), Event::Encoded(idle));
        }
    }

    fn send(&mut self, chunk: Chunk) {
        self.link_queue.push_back(chunk);
        self.transmit();
    }

    fn transmit(&mut self) {
        if let (false, Some(chunk)) = (self.sending, self.link_queue.front()) {
            self.sending = true;
            self.link_since = self.now;
            self.at(self.now + chunk.encoded() / (self.world.link)(self.now), Event::Sent);
        }
    }

    fn deliver(&mut self) {
        if let (false, Some(chunk)) = (self.delivering, self.arrived.front()) {
            self.delivering = true;
            let slow = self.world.destination_slow;
            let mut time = slow.time(self.now, chunk.plain, self.world.destination);
            if self.world.jerky {
                time *= if self.random() < 0.1 { 5.5 } else { 0.5 };
            }
            self.at(self.now + time, Event::Delivered);
        }
    }

    fn paced(&mut self, chunk: &Chunk) {
        self.sample_bytes += chunk.plain;
        self.least = self.least.min(self.now - chunk.issued);
        let span = self.now - self.sample_since;
        if span < 100e6 {
            return;
        }
        let rate = self.sample_bytes / span;
        if self.limited || rate > self.samples.iter().copied().fold(0.0, f64::max) {
            self.sample = (self.sample + 1) % self.samples.len();
            self.samples[self.sample] = rate;
        }
        self.sample_since = self.now;
        self.sample_bytes = 0.0;
        self.limited = false;
    }

    fn observe(&mut self, chunk: &Chunk, cpu: f64) {
        let (Chooser::Auto(controller), Some(choice)) = (&self.chooser, chunk.choice) else {
            return;
        };
        if choice.explore() {
            self.outcome.explored += 1;
            self.outcome.explored_cpu += chunk.cost();
        }
        let wall = if cpu > 0.0 { chunk.cost() } else { 0.0 };
        controller.observe(&Observation {
            choice,
            plain: chunk.plain as usize,
            encoded: chunk.encoded() as usize,
            cpu_ns: cpu as u64,
            wall_ns: wall as u64,
        });
    }

    fn tick(&mut self) {
        let Chooser::Auto(controller) = &self.chooser else { return };
        let link_time =
            self.link_time + if self.sending { self.now - self.link_since } else { 0.0 };
        let span = (self.now - self.ticked_at).max(1.0);
        let busy = ((link_time - self.ticked_link) / span).min(1.0);
        (self.ticked_at, self.ticked_link) = (self.now, link_time);
        let waiting = self.waiting_since.map_or(0.0, |since| self.now - since);
        let signals = Signals {
            plain_bytes: self.read as u64,
            // The bytes that the sockets have accepted, a part of what is being sent.
            wire_bytes: self.sent as u64,
            credit_wait: Duration::from_nanos((self.credit_wait + waiting) as u64),
            link_busy: busy,
            other_cpu: None,
            sends_again: self.world.again,
        };
        controller.tick(Duration::from_nanos(self.now as u64), &signals);
    }
}

/// The tables' column for these settings.
pub(crate) fn column(settings: Settings) -> usize {
    match settings.codec() {
        Codec::Raw => 0,
        codec => {
            let is_lz4 = codec == Codec::Lz4;
            let levels = if is_lz4 { &LZ4[..] } else { &ZSTD };
            let level = levels.iter().position(|level| *level == settings.level());
            let first = if is_lz4 { 1 } else { 1 + LZ4.len() };
            first + level.expect("the tables have every candidate")
        }
    }
}

/// A controller for `world`, with the usual candidates.
pub(crate) fn controller(world: &World) -> Controller {
    Controller::new(Config { max_cpu: world.max_cpu, ..Config::new(world.workers) })
}
