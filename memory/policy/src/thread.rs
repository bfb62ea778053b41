//! The policy's thread: when a pass is due, and how fast it runs.

mod turns;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use device::guard::IoPath;
use rustix::event::{eventfd, EventfdFlags};
use store::Store;

use self::turns::Turns;
use crate::error::StartError;
use crate::pressure::Gauge;
use crate::requests::{AskError, Asked, Requests};
use crate::settings::Settings;
use crate::stats::{Counters, PolicyStats};
use crate::sweep::Sweep;
use crate::training::{Trainer, Training};
use crate::writeback::{What, WriteBack};

/// The policy of one store. Dropping it ends its thread.
#[derive(Debug)]
pub struct Policy {
    counters: Arc<Counters>,
    pressure: &'static str,
    untrained: Option<StartError>,
    pressure_lost: Arc<AtomicBool>,
    stop: Arc<OwnedFd>,
    requests: Option<Arc<Requests>>,
    thread: Option<JoinHandle<()>>,
}

impl Policy {
    /// Starts the thread. Everything that it will need is allocated here.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn start(store: &Arc<Store>, settings: &Settings) -> Result<Self, StartError> {
        Self::start_with(store, settings, None)
    }

    /// As [`start`](Self::start), with a [`Trainer`] that starts processes to train dictionaries.
    /// The device must have memory for dictionaries ([`device::DeviceOptions::dictionaries`]).
    /// Training that is not possible is no error: [`untrained`](Self::untrained) returns the cause.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn start_with(
        store: &Arc<Store>,
        settings: &Settings,
        trainer: Option<Trainer>,
    ) -> Result<Self, StartError> {
        let counters = Arc::new(Counters::default());
        let worker = store.worker().ok_or(StartError::Full)?;
        let sweep = Sweep::new(worker, settings, &counters)?;
        let mut back = WriteBack::new(store, settings, &counters)?;
        let gauge = Gauge::new(&settings.pressure);
        let (pressure, pressure_lost) = (gauge.describe(), gauge.lost());
        if let Some(back) = &mut back {
            back.begin(pressure != Gauge::NONE);
        }
        let io = |what| move |source| StartError::Io { what, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| io("an eventfd")(errno.into()))?;
        let stop = Arc::new(stop);
        let wake = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let requests = match &back {
            None => None,
            Some(_) => {
                let wake = wake().map_err(|errno| io("an eventfd")(errno.into()))?;
                Some(Arc::new(Requests::new(wake)))
            }
        };
        // Recompression and writeback run even if training cannot.
        let (training, untrained) =
            match trainer.map(|of| Training::new(store, settings, of, &counters)) {
                Some(Ok(training)) => (training, None),
                Some(Err(error)) => (None, Some(error)),
                None => (None, None),
            };
        let mut turns = Turns {
            sweep,
            training,
            back,
            requests: requests.clone(),
            gauge,
            stop: Arc::clone(&stop),
            settings: settings.clone(),
            counters: Arc::clone(&counters),
        };
        let thread = thread::Builder::new()
            .name("policy".into())
            .spawn(move || {
                let _path = IoPath::enter();
                turns.run();
            })
            .map_err(io("a thread"))?;
        Ok(Self {
            counters,
            pressure,
            pressure_lost,
            untrained,
            stop,
            requests,
            thread: Some(thread),
        })
    }

    /// The counters.
    pub fn stats(&self) -> PolicyStats {
        self.counters.stats()
    }

    /// Requests a pass that writes back these pages. It runs after earlier requests and after the
    /// policy's own running writeback; recompression pauses for it. Returns a ticket for
    /// [`asked`](Self::asked).
    ///
    /// # Errors
    ///
    /// [`AskError`].
    pub fn write_back(&self, what: What) -> Result<u64, AskError> {
        let requests = self.requests.as_ref().ok_or(AskError::NoBacking)?;
        requests.add(what)
    }

    /// The state of the pass with this ticket.
    pub fn asked(&self, ticket: u64) -> Asked {
        self.requests.as_ref().map_or(Asked::Unknown, |requests| requests.progress(ticket))
    }

    /// The source of memory pressure information: `trigger`, `average`, or `none`. With `none`
    /// memory is never short.
    pub fn pressure(&self) -> &'static str {
        if self.pressure_lost.load(Ordering::Acquire) {
            Gauge::NONE
        } else {
            self.pressure
        }
    }

    /// Why no dictionaries are trained although there is a [`Trainer`].
    pub fn untrained(&self) -> Option<&StartError> {
        self.untrained.as_ref()
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread's panic was already printed.
            let _ = thread.join();
        }
    }
}
