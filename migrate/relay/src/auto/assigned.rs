//! Assigns a codec and a level to each chunk, and reports the outcome to the controller.

use super::Auto;
use crate::cpu_time::thread_cpu;
use codec::Settings;
use controller::{Choice, Class, Observation};
use session::Outgoing;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Auto {
    /// Chooses codec and level for `chunk`.
    pub(crate) fn choose(self: &Arc<Self>, chunk: &[u8]) -> Assigned {
        let choice = self.controller.choose(Class::of(chunk));
        Assigned { auto: self.clone(), choice }
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

    /// Records that a codec thread begins the chunk, and returns the start time. After the VM has
    /// stopped, a chunk that has waited gets the fastest settings too.
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
    /// for a codec thread. The elapsed time is divided by `depth`: it is the time for which the
    /// chunk occupied the thread's share of the device.
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
            return self.auto.as_it_was(plain, plain);
        }
        let made = &self.auto.made[self.choice.candidate()];
        made.0.fetch_add(plain as u64, Ordering::Relaxed);
        made.1.fetch_add(encoded as u64, Ordering::Relaxed);
    }
}

/// The CPU time and the moment at which a codec thread began a chunk.
pub(crate) struct Begun {
    cpu: Duration,
    at: Instant,
}
