//! The thread: when a pass is due, and how fast it may go.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
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
use crate::writeback::{Wanted, What, WriteBack};

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
    desk: Option<Arc<Desk>>,
    thread: Option<JoinHandle<()>>,
}

/// Where it is asked to write back, and woken to see.
#[derive(Debug)]
struct Desk {
    asked: Mutex<Option<What>>,
    wake: OwnedFd,
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
        let back = WriteBack::new(store, settings, &counters)?;
        let gauge = Gauge::new(&settings.pressure);
        let pressure = gauge.describe();
        let io = |what| move |source| StartError::Io { what, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| io("an eventfd")(errno.into()))?;
        let stop = Arc::new(stop);
        let wake = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let desk = match &back {
            None => None,
            Some(_) => {
                let wake = wake().map_err(|errno| io("an eventfd")(errno.into()))?;
                Some(Arc::new(Desk { asked: Mutex::new(None), wake }))
            }
        };
        let mut turns = Turns {
            sweep,
            back,
            desk: desk.clone(),
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
        Ok(Self { counters, pressure, stop, desk, thread: Some(thread) })
    }

    /// The counters.
    pub fn stats(&self) -> PolicyStats {
        self.counters.stats()
    }

    /// Asks for a pass that writes such pages back, after what is being done just now; what is done counts in
    /// [`PolicyStats::writeback_asked`] when it is over. `false` without a backing device.
    pub fn write_back(&self, what: What) -> bool {
        let Some(desk) = &self.desk else { return false };
        *desk.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
        // Full only after 2^64 times, and then it is readable.
        let _ = rustix::io::write(&desk.wake, &1_u64.to_ne_bytes());
        true
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
    back: Option<WriteBack>,
    desk: Option<Arc<Desk>>,
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
                self.grow_older().and_then(|()| self.pass()).and_then(|()| self.write_back())
            } else if let Some(what) = self.asked() {
                let done = self.write_back_all(|_| Wanted::Asked(what));
                add(&self.counters.writeback_asked, 1);
                done
            } else if !hurried && self.gauge.is_pressed() {
                hurried = true;
                add(&self.counters.pressed_passes, 1);
                self.pass().and_then(|()| self.write_back())
            } else {
                self.sleep((due - now).min(LOOK), true)
            };
            if done.is_err() {
                return;
            }
        }
    }

    /// What somebody wants written back.
    fn asked(&mut self) -> Option<What> {
        let desk = self.desk.as_deref()?;
        let _ = rustix::io::read(&desk.wake, &mut [0; 8]);
        desk.asked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A pass of writing back, if it is time for one.
    fn write_back(&mut self) -> Result<(), Stopped> {
        if self.settings.writeback_pressed_only && !self.gauge.is_pressed() {
            return Ok(());
        }
        self.write_back_all(|pressed| Wanted::Policy { pressed })
    }

    fn write_back_all(&mut self, wanted: impl Fn(bool) -> Wanted) -> Result<(), Stopped> {
        if self.back.is_none() {
            return Ok(());
        }
        while self.paced(|turns, pressed| {
            turns.back.as_mut().is_some_and(|back| back.step(wanted(pressed)))
        })? {}
        Ok(())
    }

    fn grow_older(&mut self) -> Result<(), Stopped> {
        let mut from = 0;
        while from < self.sweep.pages() {
            self.paced(|turns, _| turns.sweep.grow_older(from, AGE))?;
            from += AGE;
        }
        Ok(())
    }

    fn pass(&mut self) -> Result<(), Stopped> {
        loop {
            let Settings { idle, idle_pressed, .. } = self.settings;
            let idle = |pressed| if pressed { idle_pressed } else { idle };
            match self.paced(|turns, pressed| turns.sweep.step(idle(pressed)))? {
                Step::More => {}
                Step::NoRoom => self.sleep(NO_ROOM, false)?,
                Step::Done => return Ok(()),
            }
        }
    }

    /// Does a bit of work, then sleeps until it is no more than its share of the time.
    fn paced<R>(&mut self, work: impl FnOnce(&mut Self, bool) -> R) -> Result<R, Stopped> {
        let pressed = self.gauge.is_pressed();
        let Settings { cpu, cpu_pressed, .. } = self.settings;
        let cpu = if pressed { cpu_pressed } else { cpu };
        let before = thread_cpu();
        let result = work(self, pressed);
        let used = thread_cpu().saturating_sub(before);
        add(&self.counters.cpu_us, u64::try_from(used.as_micros()).unwrap_or(0));
        let rest = used * (100 - cpu.min(100)) / cpu.max(1);
        // Too short a sleep is not worth its system call; a longer one comes of a few.
        self.sleep(rest.min(LOOK), false)?;
        Ok(result)
    }

    /// Waits until the time is over or there is pressure, and if `idle` until there is something asked.
    fn sleep(&mut self, time: Duration, idle: bool) -> Result<(), Stopped> {
        let timeout = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // What is not waited for is the stop once more.
        let desk = self
            .desk
            .as_deref()
            .filter(|_| idle)
            .map_or(self.stop.as_fd(), |desk| desk.wake.as_fd());
        let (gauge, flags) = self.gauge.fd().unwrap_or((self.stop.as_fd(), PollFlags::empty()));
        let mut fds = [
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(desk, PollFlags::IN),
            PollFd::from_borrowed_fd(gauge, flags),
        ];
        let _ = poll(&mut fds, Some(&timeout));
        let (stopped, heard) = (fds[0].revents(), fds[2].revents());
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
