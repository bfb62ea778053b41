//! The turns of the policy's thread: which work is due, and how fast it is done.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::pressure::Gauge;
use crate::requests::{Outcome, Requests};
use crate::settings::Settings;
use crate::stats::{add, thread_cpu, Counters};
use crate::sweep::{Step, Sweep};
use crate::training::Training;
use crate::writeback::{Wanted, What, WriteBack};

/// Entries whose age is incremented at a time: less than a millisecond.
const AGE: u64 = 65_536;

/// The pause while no memory can be spared.
const NO_ROOM: Duration = Duration::from_millis(50);

/// The longest sleep, and so the delay until polled pressure is noticed.
const LOOK: Duration = Duration::from_secs(1);

/// The error of a thread that was ordered to stop.
struct Stopped;

pub(super) struct Turns {
    pub(super) sweep: Sweep,
    pub(super) training: Option<Training>,
    pub(super) back: Option<WriteBack>,
    pub(super) requests: Option<Arc<Requests>>,
    pub(super) gauge: Gauge,
    pub(super) stop: Arc<OwnedFd>,
    pub(super) settings: Settings,
    pub(super) counters: Arc<Counters>,
}

impl Turns {
    pub(super) fn run(&mut self) {
        let mut aged = Instant::now();
        // Whether memory pressure has had its pass since the ages were last incremented.
        let mut hurried = false;
        loop {
            let now = Instant::now();
            let pressed = self.gauge.is_pressed();
            let due = aged + self.period(pressed);
            let done = if now >= due {
                aged = now;
                hurried = pressed;
                add(&self.counters.pressed_passes, pressed.into());
                self.grow_older().and_then(|()| self.pass()).and_then(|()| self.write_back())
            } else if let Some((ticket, what)) = self.asked() {
                self.write_back_asked(ticket, what)
            } else if !hurried && pressed {
                hurried = true;
                add(&self.counters.pressed_passes, 1);
                self.pass().and_then(|()| self.write_back())
            } else {
                self.train().and_then(|wait| self.sleep((due - now).min(wait), true))
            };
            if done.is_err() {
                return;
            }
        }
    }

    fn period(&self, pressed: bool) -> Duration {
        let Settings { period, period_pressed, .. } = self.settings;
        Duration::from_secs(if pressed { period.min(period_pressed) } else { period })
    }

    /// Does some training. Returns for how long training has nothing to do.
    fn train(&mut self) -> Result<Duration, Stopped> {
        if self.training.is_some() {
            self.paced(|_, _| ())?;
        }
        Ok(self.training.as_ref().map_or(LOOK, Training::wait))
    }

    /// The next requested pass.
    fn asked(&self) -> Option<(u64, What)> {
        self.requests.as_deref()?.next()
    }

    /// Runs the policy's own writeback pass, while the settings want one.
    fn write_back(&mut self) -> Result<(), Stopped> {
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

    /// Runs a requested writeback pass, and records its outcome.
    fn write_back_asked(&mut self, ticket: u64, what: What) -> Result<(), Stopped> {
        let before = self.counters.stats();
        let done = self.write_back_all(|_| Wanted::Asked(what));
        add(&self.counters.writeback_asked, 1);
        if let Some(requests) = self.requests.as_deref() {
            requests.finish(ticket, Outcome::between(&before, &self.counters.stats()));
        }
        done
    }

    fn grow_older(&mut self) -> Result<(), Stopped> {
        let mut from = 0;
        while from < self.sweep.pages() {
            self.paced(|turns, _| turns.sweep.grow_older(from, AGE))?;
            from += AGE;
        }
        Ok(())
    }

    /// Recompresses idle pages until all are done, at most for a period: a pass may last hours in a
    /// large store, or in one without room. Pages grow older meanwhile, and writing back makes
    /// room. The next call goes on with the same pass.
    fn pass(&mut self) -> Result<(), Stopped> {
        let begin = Instant::now();
        loop {
            // A pass may last hours, and the requests wait.
            while let Some((ticket, what)) = self.asked() {
                self.write_back_asked(ticket, what)?;
            }
            let Settings { idle, idle_pressed, .. } = self.settings;
            let idle = |pressed| if pressed { idle_pressed } else { idle };
            match self.paced(|turns, pressed| turns.sweep.step(idle(pressed)))? {
                Step::More => {}
                Step::NoRoom => self.sleep(NO_ROOM, false)?,
                Step::Done => return Ok(()),
            }
            let pressed = self.gauge.is_pressed();
            if begin.elapsed() >= self.period(pressed) {
                return Ok(());
            }
        }
    }

    /// Does some work, and some training, then sleeps until its CPU time is within its share.
    fn paced<R>(&mut self, work: impl FnOnce(&mut Self, bool) -> R) -> Result<R, Stopped> {
        let pressed = self.gauge.is_pressed();
        let before = thread_cpu();
        if let Some(training) = &mut self.training {
            training.step(pressed);
        }
        let result = work(self, pressed);
        let used = thread_cpu().saturating_sub(before);
        add(&self.counters.cpu_us, u64::try_from(used.as_micros()).unwrap_or(0));
        self.rest(used)?;
        Ok(result)
    }

    /// Sleeps until so much CPU time is within its share, which pressure changes meanwhile.
    fn rest(&mut self, used: Duration) -> Result<(), Stopped> {
        let begin = Instant::now();
        loop {
            let Settings { cpu, cpu_pressed, .. } = self.settings;
            let cpu = if self.gauge.is_pressed() { cpu_pressed } else { cpu };
            let rest = used * (100 - cpu.min(100)) / cpu.max(1);
            let left = rest.saturating_sub(begin.elapsed());
            self.sleep(left.min(LOOK), false)?;
            if left <= LOOK {
                return Ok(());
            }
        }
    }

    /// Sleeps until the time is over, there is pressure, or, if `idle`, there is a request.
    fn sleep(&mut self, time: Duration, idle: bool) -> Result<(), Stopped> {
        // The stop event stands in for descriptors that are not polled.
        let requests = self.requests.as_deref().filter(|_| idle);
        let asked = requests.map_or(self.stop.as_fd(), Requests::wake);
        let (gauge, flags) = self.gauge.fd().unwrap_or((self.stop.as_fd(), PollFlags::empty()));
        let mut fds = [
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(asked, PollFlags::IN),
            PollFd::from_borrowed_fd(gauge, flags),
        ];
        let _ = poll(&mut fds, Timespec::try_from(time).ok().as_ref());
        let (stopped, pressed) = (fds[0].revents(), fds[2].revents());
        self.gauge.handle_events(pressed);
        if stopped.is_empty() {
            Ok(())
        } else {
            Err(Stopped)
        }
    }
}

#[cfg(test)]
mod tests;
