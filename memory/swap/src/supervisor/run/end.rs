//! The end of servers: on request, by deadline, by the watchdog, or by their own death.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use thread_stat::Proc;

use super::helpers::KILLED;
use super::patience::Patience;
use super::{Supervisor, DOWN_AGAIN, EXTENSION, GONE, STAND_BY_AGAIN};
use crate::supervisor::child::{Server, Task};
use crate::supervisor::error::{failed, with_cause, SuperviseError};
use crate::supervisor::watchdog::{Hang, LOOK};
use crate::supervisor::{words, CLIENT_LOST};

impl Supervisor<'_> {
    /// The supervisor's result when everything is down.
    pub(super) fn outcome(&mut self) -> Result<(), SuperviseError> {
        self.up_failed.take().map_or(Ok(()), |status| Err(SuperviseError::Up(status)))
    }

    /// Ends the pause before the next server, if there is one.
    pub(super) fn resume(&mut self) {
        if let Some(resume) = self.service.resume() {
            // The descriptor is level-triggered, so the bytes written to it are read. A signalfd
            // returns 128 bytes for a signal.
            let _ = rustix::io::read(resume, &mut [0; 128]);
        }
        if let Some(at) = &mut self.restart {
            *at = Instant::now();
        }
    }

    /// Kills a server that hangs, and replaces a stand-by server that has ended; looks once a
    /// second. The server's exit is then handled like any other.
    pub(super) fn look_at_servers(&mut self) {
        let now = Instant::now();
        if now < self.look {
            return;
        }
        self.look = now + LOOK;
        self.notify.beat(self.service.manager_watches());
        if self.announced {
            self.notify.extend(EXTENSION);
        }
        if let Some(standby) = &self.standby {
            let ended = standby.child.try_wait();
            if !matches!(ended, Ok(None)) {
                self.note_kill(ended.ok().flatten());
                self.standby = None;
                self.stand_by = Some(now + STAND_BY_AGAIN);
            }
        }
        let watched = |server: &&mut Server| server.ready.is_some() && !server.killed;
        let Some(server) = self.server.as_mut().filter(watched) else { return };
        // A server that was told to end has a deadline of its own.
        let Some(pulse) = self.service.pulse().filter(|_| !self.ending) else { return };
        let mut kernel = Proc::of(server.child.id());
        let found = self.watchdog.look(now, pulse.slots(), server.state(), &mut kernel);
        if let Some(Hang { why, slot }) = found {
            server.child.kill();
            server.killed = true;
            self.service.say(&format!("the server hangs: {why}: killed"));
            if let Some(slot) = slot {
                self.service.has_hung(slot);
            }
        }
    }

    /// Gives a server that was told to end another limit, if it has worked on its end in the last
    /// one. Returns whether it has one.
    fn more_patience(&mut self) -> bool {
        let Some(server) = self.server.as_mut().filter(|_| self.ending) else { return false };
        let limit = self.service.end_limit();
        let waited = self.patience.waited(limit);
        if server.killed {
            return false;
        }
        let Some(deadline) = self.patience.more(server, self.service.pulse(), limit) else {
            return false;
        };
        server.deadline = Some(deadline);
        self.service.say(&format!(
            "the server has not ended in {waited:?}, but works on it: {limit:?} more"
        ));
        true
    }

    pub(super) fn enforce_deadlines(&mut self) -> Result<(), SuperviseError> {
        self.enforce_helpers()?;
        self.enforce_renewal();
        let late = |server: &Server| server.deadline.is_some_and(|at| at <= Instant::now());
        if !self.server.as_ref().is_some_and(late) || self.more_patience() {
            return Ok(());
        }
        let Some(server) = self.server.as_mut() else { return Ok(()) };
        if server.killed {
            // The disk is no longer swapped to, so nothing for which the server waits is needed.
            self.service.abandon(self.set_up);
            let limit = self.patience.waited(self.service.end_limit());
            return Err(SuperviseError::Stuck { limit, gone: false });
        }
        // The server's exit is then handled like any other. At the final stop the wait for it is
        // bounded.
        server.child.kill();
        server.killed = true;
        server.deadline = self.ending.then(|| Instant::now() + GONE);
        let what = if self.ending {
            format!("has not ended in {:?}", self.patience.waited(self.service.end_limit()))
        } else {
            self.late += 1;
            "does not get ready".to_owned()
        };
        self.service.say(&format!("the server {what}: killed"));
        Ok(())
    }

    pub(super) fn stop(&mut self) {
        if self.ending {
            return;
        }
        // A device whose first start has failed is being taken down already; if that fails too, the
        // manager's request still holds.
        if !std::mem::replace(&mut self.announced, true) {
            self.notify.say("STOPPING=1");
        }
        if self.stopping {
            return;
        }
        self.stopping = true;
        self.down_again = None;
        // swapoff needs memory and a server, so the trainer ends.
        self.end_training();
        self.refuse_renewal("the device ends");
        self.resume();
        self.go_down();
    }

    /// Starts to take the device down, unless the helper after a start still runs: then swapping
    /// could begin on a disk that is about to go.
    pub(super) fn go_down(&mut self) {
        if self.helpers.iter().any(|helper| matches!(helper.task, Task::Up { .. } | Task::Down)) {
            return;
        }
        let down = if self.been_up { self.service.down() } else { None };
        let Some(command) = down else { return self.tell_to_end() };
        let limit = self.service.down_limit();
        if let Err(error) = self.help(command, Task::Down, Some(limit)) {
            self.cannot_end(&format!("cannot end: {}", with_cause(&error)));
        }
    }

    /// Continues to serve after a failed attempt to take the disk down. A service manager that
    /// waits for the end kills the service in the end, and the swapped-out pages would be lost: so
    /// the supervisor tries again by itself.
    pub(super) fn cannot_end(&mut self, why: &str) {
        self.stopping = false;
        self.up_now();
        if !(self.announced && self.notify.has_manager()) {
            return self.service.say(&format!("{why}. Ask again later"));
        }
        let (first, longest) = DOWN_AGAIN;
        let pause = (first * 2_u32.pow(self.downs.min(8))).min(longest);
        self.downs += 1;
        self.down_again = Some(Instant::now() + pause);
        let line = format!("{why}; another attempt in {pause:?}");
        self.notify.say(&format!("STATUS={line}"));
        self.service.say(&line);
    }

    pub(super) fn tell_to_end(&mut self) {
        self.ending = true;
        (self.restart, self.stand_by) = (None, None);
        (self.up_again, self.down_again) = (None, None);
        if let Some(standby) = self.standby.take() {
            self.dismiss(standby.child);
        }
        self.refuse_renewal("the device ends");
        self.end_training();
        if let Some(server) = &mut self.server {
            // A server that is dying just now has closed the channel.
            let _ = server.channel.write_all(format!("{}\n", words::END).as_bytes());
            let limit = self.service.end_limit();
            let (patience, deadline) = Patience::begin(server, self.service.pulse(), limit);
            self.patience = patience;
            server.deadline = Some(deadline);
            server.killed = false;
        }
    }

    /// Ends the server without a replacement. Kills it if it does not obey.
    pub(super) fn end_server(&mut self) {
        self.tell_to_end();
        let Some(server) = self.server.take() else { return };
        let mut fds = [PollFd::from_borrowed_fd(server.child.pidfd(), PollFlags::IN)];
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        // The wait is over, whatever poll returns.
        let _ = poll(&mut fds, Some(&patience));
        server.child.kill();
        let _ = poll(&mut fds, Some(&patience));
        let ended = server.child.try_wait();
        if !ended.is_ok_and(|status| status.is_some_and(|status| status.success())) {
            self.service.abandon(self.set_up);
        }
    }

    /// Handles the server's exit; returns whether the supervisor is done.
    pub(super) fn server_ended(&mut self) -> Result<bool, SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(false) };
        let Some(status) = server.child.try_wait().map_err(failed("wait for the server"))? else {
            return Ok(false);
        };
        let (ready, killed) = (server.ready.map(|since| since.elapsed()), server.killed);
        // The supervisor's own SIGKILL has another reason, which it has reported.
        let may_be_oom = status.signal() == Some(KILLED) && !killed;
        self.server = None;
        self.watchdog.reset();
        if let Some(pulse) = self.service.pulse() {
            pulse.clear();
        }
        // The trainer and the helper were for that server only.
        self.end_training();
        (self.up_again, self.up_later) = (None, false);
        self.renewal_failed(status);
        if self.ending {
            if killed {
                self.service.abandon(self.set_up);
                let limit = self.patience.waited(self.service.end_limit());
                return Err(SuperviseError::Stuck { limit, gone: true });
            }
            if !status.success() {
                self.service.say(&format!("the server ended with {status}"));
                self.service.abandon(self.set_up);
            }
            return Ok(true);
        }
        if !self.been_up && self.started == 1 && ready.is_none() {
            if let Some(why) = self.oom.since().filter(|_| may_be_oom) {
                self.service.say(&why);
            }
            // It may have made its disk.
            self.service.abandon(self.set_up);
            return Err(SuperviseError::Start(status));
        }
        let pause = match status.code() {
            Some(code) if code == i32::from(CLIENT_LOST) && ready.is_some() => Duration::ZERO,
            _ => self.backoff.died(ready.unwrap_or_default()),
        };
        let pause = if self.stopping { Duration::ZERO } else { pause };
        // First start the next server, then report: to read the cgroup's files takes memory.
        self.restart = Some(Instant::now() + pause);
        self.begin_what_is_due()?;
        let oom = self.oom.since().filter(|_| may_be_oom);
        let after = match pause {
            Duration::ZERO => String::new(),
            pause => format!(" in {pause:?}"),
        };
        let why = oom.map(|why| format!("; {why}")).unwrap_or_default();
        let line = format!("the server has died ({status}{why}): starting another{after}");
        self.notify.say(&format!("STATUS={line}"));
        self.service.say(&line);
        Ok(false)
    }
}
