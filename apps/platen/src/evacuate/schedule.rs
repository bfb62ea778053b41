//! Decides when the next VM starts: a state machine over samples, without clocks and processes.
//!
//! VMs start in order. With a given number, that many migrate at once. Without one, the first VM
//! migrates alone, and a further VM starts as long as the last one to start has raised the rate of
//! all together by a tenth. A VM that has not raised it goes on too, but no other takes its place.
//!
//! A VM in doubt does not count if its migration has sent next to nothing for 10 s: it may wait for
//! a person, and the others must not wait with it.

use std::collections::VecDeque;
use std::time::Duration;

/// The most VMs that migrate at once without a given number: each relay has threads and buffers.
pub(super) const MOST: usize = 8;
/// How much the last VM to join must have raised the rate for another to join.
const GAIN: f64 = 1.1;
/// Time after a start or an end that is not measured: slow start, set-up, the codec's first choice.
const SETTLES: Duration = Duration::from_secs(3);
/// How long a rate is measured.
const WINDOW: Duration = Duration::from_secs(4);
/// How long a VM in doubt may be silent before it does not count any more.
const SILENT: Duration = Duration::from_secs(10);
/// Bytes in that time that are no more than heartbeats and attempts to connect.
const NEXT_TO_NOTHING: u64 = 1 << 20;

/// How many VMs may move at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtOnce {
    /// A fixed number.
    Fixed(usize),
    /// As many as raise the rate.
    Auto,
}

/// Progress of a running migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// Bytes on the network so far.
    pub(super) bytes: u64,
    /// Whether the destination may be starting the VM, or has it.
    pub(super) in_doubt: bool,
}

#[derive(Debug)]
struct Running {
    vm: usize,
    last: Sample,
    /// Bytes and time at the last sign of work.
    work: (u64, Duration),
}

impl Running {
    fn is_moving(&self, now: Duration) -> bool {
        !self.last.in_doubt || now.saturating_sub(self.work.1) < SILENT
    }
}

/// The VMs that wait and those that run.
#[derive(Debug)]
pub(super) struct Schedule {
    at_once: AtOnce,
    waiting: VecDeque<usize>,
    running: Vec<Running>,
    /// Bytes of all VMs, those that have ended included.
    bytes: u64,
    probe: Probe,
    most: usize,
}

/// The search for the number of VMs to migrate at once.
#[derive(Debug)]
struct Probe {
    number: usize,
    is_found: bool,
    /// The rate before the last VM joined, bytes per second.
    before: f64,
    /// Time of the last start or end.
    changed: Duration,
    /// Time and bytes at the beginning of the measurement.
    window: Option<(Duration, u64)>,
}

impl Probe {
    fn restart(&mut self, now: Duration) {
        self.changed = now;
        self.window = None;
    }

    /// Measures the rate of all VMs, while as many run as may, and adapts their number.
    fn look(&mut self, now: Duration, bytes: u64) {
        let Some((begun, first)) = self.window else {
            if now.saturating_sub(self.changed) >= SETTLES {
                self.window = Some((now, bytes));
            }
            return;
        };
        let time = now.saturating_sub(begun);
        if time < WINDOW {
            return;
        }
        let rate = bytes.saturating_sub(first) as f64 / time.as_secs_f64();
        if rate > self.before * GAIN && self.number < MOST {
            self.number += 1;
            self.before = rate;
        } else {
            self.is_found = true;
            if rate <= self.before * GAIN {
                self.number = (self.number - 1).max(1);
            }
        }
        self.restart(now);
    }
}

impl Schedule {
    /// A schedule of `count` VMs, which are numbered from 0 in their order.
    pub(super) fn new(count: usize, at_once: AtOnce) -> Self {
        Self {
            at_once,
            waiting: (0..count).collect(),
            running: Vec::new(),
            bytes: 0,
            probe: Probe {
                number: 1,
                is_found: false,
                before: 0.0,
                changed: Duration::ZERO,
                window: None,
            },
            most: 0,
        }
    }

    /// The VM to start now, if one is to start.
    pub(super) fn next(&mut self, now: Duration) -> Option<usize> {
        let moving = self.running.iter().filter(|one| one.is_moving(now)).count();
        let limit = match self.at_once {
            AtOnce::Fixed(number) => number.max(1),
            AtOnce::Auto => {
                if !self.probe.is_found && moving == self.probe.number && !self.waiting.is_empty() {
                    if self.running.iter().any(|one| one.last.bytes == 0) {
                        self.probe.restart(now);
                    }
                    self.probe.look(now, self.bytes);
                }
                self.probe.number
            }
        };
        if moving >= limit {
            return None;
        }
        let vm = self.waiting.pop_front()?;
        self.running.push(Running { vm, last: Sample::default(), work: (0, now) });
        self.most = self.most.max(moving + 1);
        self.probe.restart(now);
        Some(vm)
    }

    /// Takes note of the progress of a VM's migration.
    pub(super) fn tells(&mut self, vm: usize, sample: Sample, now: Duration) {
        let Some(one) = self.running.iter_mut().find(|one| one.vm == vm) else { return };
        self.bytes = self.bytes.saturating_add(sample.bytes.saturating_sub(one.last.bytes));
        let works = sample.bytes.saturating_sub(one.work.0) > NEXT_TO_NOTHING;
        if works || !sample.in_doubt || !one.last.in_doubt {
            one.work = (sample.bytes, now);
        }
        one.last = sample;
    }

    /// Whether the other host may have a VM whose migration sends next to nothing.
    pub(super) fn waits_in_doubt(&self, vm: usize, now: Duration) -> bool {
        self.running.iter().any(|one| one.vm == vm && !one.is_moving(now))
    }

    /// Takes note that a VM's migration has ended, whatever its outcome.
    pub(super) fn ended(&mut self, vm: usize, now: Duration) {
        self.running.retain(|one| one.vm != vm);
        self.probe.restart(now);
    }

    /// Starts no VM any more; returns those that have not started.
    pub(super) fn interrupt(&mut self) -> Vec<usize> {
        self.waiting.drain(..).collect()
    }

    /// Whether nothing runs and nothing waits.
    #[cfg(test)]
    fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The largest number of VMs that have migrated at once.
    pub(super) fn most(&self) -> usize {
        self.most
    }
}

#[cfg(test)]
mod tests;
