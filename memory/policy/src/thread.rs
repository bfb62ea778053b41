//! The thread: when a pass is due, and how fast it may go.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::guard::IoPath;
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::time::{clock_gettime, ClockId};
use store::{Store, MAX_WORKERS};

use crate::pressure::Gauge;
use crate::settings::{Settings, SettingsError};
use crate::stats::{add, Counters, PolicyStats};
use crate::sweep::{Step, Sweep};

/// Entries made older at a time: less than a millisecond.
const AGE: u64 = 65_536;

/// How long to wait for the keeper to have memory to spare.
const NO_ROOM: Duration = Duration::from_millis(50);

/// The longest sleep: how soon pressure is seen that has to be looked for.
const LOOK: Duration = Duration::from_secs(1);

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The settings cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// All of the store's workers are taken.
    #[error("no room for another thread: the store has {MAX_WORKERS} workers")]
    Full,
    /// The kernel refused.
    #[error("cannot make {what}")]
    Io {
        /// What was asked for.
        what: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
}

/// The policy of one store. Dropping it ends its thread; what it has done stays.
#[derive(Debug)]
pub struct Policy {
    counters: Arc<Counters>,
    pressure: &'static str,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Policy {
    /// Starts the thread. Everything that it will need is made here.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn start(store: &Arc<Store>, settings: &Settings) -> Result<Self, StartError> {
        let counters = Arc::new(Counters::default());
        let worker = store.worker().ok_or(StartError::Full)?;
        let sweep = Sweep::new(worker, settings, &counters)?;
        let gauge = Gauge::new(&settings.pressure);
        let pressure = gauge.describe();
        let io = |what| move |source| StartError::Io { what, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| io("an eventfd")(errno.into()))?;
        let stop = Arc::new(stop);
        let mut turns = Turns {
            sweep,
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
        Ok(Self { counters, pressure, stop, thread: Some(thread) })
    }

    /// The counters.
    pub fn stats(&self) -> PolicyStats {
        self.counters.stats()
    }

    /// How memory pressure is known: `trigger`, `average`, or `none`.
    pub fn pressure(&self) -> &'static str {
        self.pressure
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        // Full only after 2^64 times, and then it is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // Its panic was shown.
            let _ = thread.join();
        }
    }
}

/// Told to stop.
struct Stopped;

struct Turns {
    sweep: Sweep,
    gauge: Gauge,
    stop: Arc<OwnedFd>,
    settings: Settings,
    counters: Arc<Counters>,
}

impl Turns {
    fn run(&mut self) {
        let period = Duration::from_secs(self.settings.period);
        let mut due = Instant::now() + period;
        // Whether pressure has had its pass since pages last got older.
        let mut hurried = false;
        loop {
            let now = Instant::now();
            let done = if now >= due {
                due = now + period;
                hurried = false;
                self.grow_older().and_then(|()| self.pass())
            } else if !hurried && self.gauge.is_pressed() {
                hurried = true;
                add(&self.counters.pressed_passes, 1);
                self.pass()
            } else {
                self.sleep((due - now).min(LOOK))
            };
            if done.is_err() {
                return;
            }
        }
    }

    fn grow_older(&mut self) -> Result<(), Stopped> {
        let mut from = 0;
        while from < self.sweep.pages() {
            self.paced(|sweep, _| sweep.grow_older(from, AGE))?;
            from += AGE;
        }
        Ok(())
    }

    fn pass(&mut self) -> Result<(), Stopped> {
        loop {
            match self.paced(|sweep, idle| sweep.step(idle))? {
                Step::More => {}
                Step::NoRoom => self.sleep(NO_ROOM)?,
                Step::Done => return Ok(()),
            }
        }
    }

    /// Does a bit of work, then sleeps until it is no more than its share of the time.
    fn paced<R>(&mut self, work: impl FnOnce(&mut Sweep, u8) -> R) -> Result<R, Stopped> {
        let pressed = self.gauge.is_pressed();
        let Settings { idle, idle_pressed, cpu, cpu_pressed, .. } = self.settings;
        let (idle, cpu) = if pressed { (idle_pressed, cpu_pressed) } else { (idle, cpu) };
        let before = thread_cpu();
        let result = work(&mut self.sweep, idle);
        let used = thread_cpu().saturating_sub(before);
        add(&self.counters.cpu_us, u64::try_from(used.as_micros()).unwrap_or(0));
        let rest = used * (100 - cpu.min(100)) / cpu.max(1);
        // Too short a sleep is not worth its system call; a longer one comes of a few.
        self.sleep(rest.min(LOOK))?;
        Ok(result)
    }

    /// Waits until the time is over or there is pressure.
    fn sleep(&mut self, time: Duration) -> Result<(), Stopped> {
        let timeout = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        let stop = PollFd::new(&self.stop, PollFlags::IN);
        let (heard, stopped) = match self.gauge.fd() {
            Some((fd, flags)) => {
                let fd = fd.as_fd();
                let mut fds = [stop, PollFd::new(&fd, flags)];
                let _ = poll(&mut fds, Some(&timeout));
                (fds[1].revents(), fds[0].revents())
            }
            None => {
                let mut fds = [stop];
                let _ = poll(&mut fds, Some(&timeout));
                (PollFlags::empty(), fds[0].revents())
            }
        };
        self.gauge.heard(heard);
        if stopped.is_empty() {
            Ok(())
        } else {
            Err(Stopped)
        }
    }
}

/// CPU that this thread has used.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
