//! The supervisor's loop: what it waits for, and what it does then.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::backoff::Backoff;
use super::child::{receive, watch, Helper, Server, Task};
use super::error::{failed, with_cause, SuperviseError};
use super::notify::Notify;
use super::oom::OomKills;
use super::service::Service;
use super::watchdog::{Proc, Watchdog, LOOK};
use super::{words, CLIENT_LOST};

/// How long to wait before what could not be started, or has failed, is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// How long one that was killed at its end is waited for.
const GONE: Duration = Duration::from_secs(10);

pub(super) struct Supervisor<'a> {
    service: &'a mut dyn Service,
    server: Option<Server>,
    /// It is looked at only when it is needed.
    standby: Option<Server>,
    /// At most one of each task.
    helpers: Vec<Helper>,
    /// What the next trainer gets, when the former has ended.
    to_train: Option<OwnedFd>,
    /// Killed, and not yet seen to have ended.
    dismissed: Vec<Child>,
    backoff: Backoff,
    watchdog: Watchdog,
    /// When to look at the server again.
    look: Instant,
    oom: OomKills,
    notify: Notify,
    /// When to start a server.
    restart: Option<Instant>,
    /// When to start one that stands by.
    stand_by: Option<Instant>,
    /// When to run what has failed after the start of a later server.
    up_again: Option<Instant>,
    /// What follows the first start was begun.
    up_begun: bool,
    started: u32,
    /// Servers in a row that were killed because they were not ready in time.
    late: u32,
    /// Whether the first start has succeeded as a whole.
    been_up: bool,
    /// The first start has failed so: all is taken down again.
    up_failed: Option<ExitStatus>,
    /// Asked to end, and trying to.
    stopping: bool,
    /// The server was told to end.
    ending: bool,
}

pub(super) struct Woken {
    stop: bool,
    server: bool,
    said: bool,
    helper: bool,
    resume: bool,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(service: &'a mut dyn Service) -> Self {
        let notify = Notify::new(service.notify_socket().as_deref());
        Self {
            service,
            server: None,
            standby: None,
            helpers: Vec::with_capacity(4),
            to_train: None,
            dismissed: Vec::with_capacity(4),
            backoff: Backoff::default(),
            watchdog: Watchdog::default(),
            look: Instant::now() + LOOK,
            oom: OomKills::own(),
            notify,
            restart: Some(Instant::now()),
            stand_by: None,
            up_again: None,
            up_begun: false,
            started: 0,
            late: 0,
            been_up: false,
            up_failed: None,
            stopping: false,
            ending: false,
        }
    }

    pub(super) fn run(&mut self, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
        loop {
            if self.ending && self.server.is_none() {
                // Asked to end between two servers: what the dead one left is nobody's.
                self.service.abandon();
                return self.outcome();
            }
            self.begin_what_is_due()?;
            let woken = self.wait(stop)?;
            // First what is true already: a server that is ready is one that is taken down in
            // order.
            if woken.said {
                self.listen()?;
            }
            if woken.stop {
                // Level-triggered: take what was written.
                let _ = rustix::io::read(stop, &mut [0; 64]);
                self.stop();
            }
            if woken.resume {
                self.resume();
            }
            if woken.helper {
                self.helpers_ended()?;
            }
            if woken.server && self.server_ended()? {
                return self.outcome();
            }
            self.enforce_deadlines()?;
            self.look_at_server();
            // One that cannot be asked is not asked again.
            self.dismissed.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        }
    }

    /// How it ends when all is down.
    fn outcome(&mut self) -> Result<(), SuperviseError> {
        self.up_failed.take().map_or(Ok(()), |status| Err(SuperviseError::Up(status)))
    }

    /// Starts the next server now, if a pause is under way.
    fn resume(&mut self) {
        if let Some(resume) = self.service.resume() {
            // Level-triggered: take what was written. A signalfd gives 128 bytes for a signal.
            let _ = rustix::io::read(resume, &mut [0; 128]);
        }
        if let Some(at) = &mut self.restart {
            *at = Instant::now();
        }
    }

    /// Kills a server that hangs, each second if it is time. Its end is then seen as any other's.
    fn look_at_server(&mut self) {
        let now = Instant::now();
        if now < self.look {
            return;
        }
        self.look = now + LOOK;
        if self.service.manager_watches() {
            self.notify.say("WATCHDOG=1");
        }
        let watched = |server: &&mut Server| server.ready.is_some() && !server.killed;
        let Some(server) = self.server.as_mut().filter(watched) else { return };
        // One that is to end has a limit for that.
        let Some(pulse) = self.service.pulse().filter(|_| !self.ending) else { return };
        let process = (server.child.id(), server.state());
        if let Some(why) = self.watchdog.look(now, pulse.slots(), process, &mut Proc) {
            let _ = server.child.kill();
            server.killed = true;
            self.service.say(&format!("the server hangs: {why}: killed"));
        }
    }

    fn begin_what_is_due(&mut self) -> Result<(), SuperviseError> {
        let due = |at: &mut Option<Instant>| at.take_if(|at| *at <= Instant::now()).is_some();
        if due(&mut self.restart) {
            self.start()?;
        }
        if due(&mut self.up_again) {
            self.up()?;
        }
        if due(&mut self.stand_by) {
            self.stand_by();
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), SuperviseError> {
        let replaces = self.started > 0;
        if let Some(mut standby) = self.standby.take() {
            let line = format!("{}{}\n", words::GO, self.service.go());
            // One that is stopped would take the line, and do nothing.
            let stopped = standby.state() == Some(b'T');
            if !stopped && standby.channel.write_all(line.as_bytes()).is_ok() {
                self.started += 1;
                standby.deadline = Some(self.to_be_ready());
                self.server = Some(standby);
                return Ok(());
            }
            // It has died as well.
            self.dismiss(standby.child);
        }
        let command = self.service.server(replaces);
        match Server::spawn(command) {
            Ok(mut server) => {
                self.started += 1;
                // Whoever has started the first one sees that it does not come up, and nobody has
                // its disk.
                server.deadline = replaces.then(|| self.to_be_ready());
                self.server = Some(server);
            }
            Err(error) if !replaces => return Err(error),
            // No memory, perhaps, or no process number: whoever has the disk waits.
            Err(error) => {
                self.service.say(&format!("{}: trying again", with_cause(&error)));
                self.restart = Some(Instant::now() + AGAIN);
            }
        }
        Ok(())
    }

    fn to_be_ready(&self) -> Instant {
        Instant::now() + self.service.ready_limit() * 2_u32.pow(self.late.min(4))
    }

    /// Starts the next one that stands by, if there is none.
    fn stand_by(&mut self) {
        if self.standby.is_some() || self.ending {
            return;
        }
        let Some(command) = self.service.standby() else { return };
        match Server::spawn(command) {
            Ok(standby) => self.standby = Some(standby),
            Err(_) => self.stand_by = Some(Instant::now() + AGAIN),
        }
    }

    /// Ends a process without waiting for it.
    fn dismiss(&mut self, mut child: Child) {
        let _ = child.kill();
        self.dismissed.push(child);
    }

    fn wait(&self, stop: BorrowedFd<'_>) -> Result<Woken, SuperviseError> {
        let deadlines = self.helpers.iter().map(|helper| helper.deadline);
        let due = self.server.as_ref().and_then(|server| server.deadline);
        let deadlines =
            deadlines.chain([self.restart, self.stand_by, self.up_again, due, Some(self.look)]);
        let timeout = deadlines.flatten().min().map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        // What is not there is watched as `stop` once more.
        let server = self.server.as_ref();
        let pidfd = server.map_or(stop, |server| server.pidfd.as_fd());
        let channel = server.map_or(stop, |server| server.channel.as_fd());
        let resume = self.service.resume().unwrap_or(stop);
        let helpers = self.helpers.iter().map(|helper| helper.pidfd.as_fd());
        let mut fds: Vec<_> = [stop, pidfd, channel, resume]
            .into_iter()
            .chain(helpers)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // No memory: that passes.
            Err(rustix::io::Errno::NOMEM | rustix::io::Errno::AGAIN) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(failed("wait")(error.into())),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok(Woken {
            stop: ready[0],
            server: server.is_some() && ready[1],
            said: server.is_some() && ready[2],
            resume: self.service.resume().is_some() && ready[3],
            helper: ready[4..].contains(&true),
        })
    }

    /// Takes what the server has said, line by line.
    fn listen(&mut self) -> Result<(), SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(()) };
        let mut bytes = [0; 256];
        let got = match receive(&server.channel, &mut bytes) {
            // Its end is seen by the pidfd; a closed channel alone must not keep us awake.
            Ok((0, _)) => {
                std::thread::sleep(Duration::from_millis(1));
                return Ok(());
            }
            Ok((got, sent)) => {
                // It comes with the first byte of the line that it belongs to.
                server.sent = sent.or_else(|| server.sent.take());
                got
            }
            Err(_) => return Ok(()),
        };
        let mut lines = Vec::new();
        for &byte in &bytes[..got] {
            if byte == b'\n' {
                lines.push(String::from_utf8_lossy(&server.line).into_owned());
                server.line.clear();
            } else if server.line.len() < 128 {
                // A line that is longer than any we know is none.
                server.line.push(byte);
            }
        }
        // One that was killed for being late may have said so just before.
        let dead = !self.ending && self.server.as_ref().is_some_and(|server| server.killed);
        for line in lines {
            match line.as_str() {
                words::READY if dead => {}
                words::READY => {
                    if let Some(server) = &mut self.server {
                        server.ready = Some(Instant::now());
                        if !self.ending {
                            server.deadline = None;
                        }
                        self.late = 0;
                    }
                    self.up()?;
                    self.stand_by();
                }
                words::TRAIN => {
                    self.to_train = self.server.as_mut().and_then(|server| server.sent.take());
                    self.train();
                }
                words::ENOUGH => self.end_training(),
                _ => self.service.said(&line),
            }
        }
        Ok(())
    }

    /// Runs what follows the start of the server that there is, if it is ready.
    fn up(&mut self) -> Result<(), SuperviseError> {
        self.up_again = None;
        let ready = self.server.as_ref().filter(|server| server.ready.is_some());
        let Some(pid) = ready.map(|server| server.child.id()) else { return Ok(()) };
        let first = !self.up_begun;
        self.up_begun = true;
        let Some(command) = self.service.up(!first, pid) else {
            self.up_ended(first);
            return Ok(());
        };
        let limit = self.service.ready_limit();
        match self.help(command, Task::Up { first }, Some(limit)) {
            Ok(()) => Ok(()),
            Err(error) if first => {
                self.end_server();
                Err(error)
            }
            Err(error) => {
                self.service.say(&format!("{}: trying again", with_cause(&error)));
                self.up_again = Some(Instant::now() + AGAIN);
                Ok(())
            }
        }
    }

    /// What follows the start of a server has succeeded.
    fn up_ended(&mut self, first: bool) {
        if first && !self.been_up {
            self.notify.say("READY=1");
        }
        self.been_up |= first;
        self.notify.say("STATUS=serving");
    }

    /// Starts what the server wants to have trained, if there is no other one. What cannot be
    /// started is dropped with its socket, which tells the server.
    fn train(&mut self) {
        if self.ending || self.stopping {
            self.to_train = None;
        }
        if self.to_train.is_none() {
            return;
        }
        if let Some(former) = self.trainer() {
            // Nobody waits for it any more. Its end is seen, and then it is the next one's turn.
            former.dismiss();
            return;
        }
        let channel = self.to_train.take();
        if let Some((command, limit)) = channel.and_then(|channel| self.service.train(channel)) {
            if let Err(error) = self.help(command, Task::Train, Some(limit)) {
                self.service.say(&with_cause(&error));
            }
        }
    }

    fn trainer(&mut self) -> Option<&mut Helper> {
        self.helpers.iter_mut().find(|helper| helper.task == Task::Train)
    }

    /// Nobody waits for a trainer any more.
    fn end_training(&mut self) {
        self.to_train = None;
        if let Some(trainer) = self.trainer() {
            trainer.dismiss();
        }
    }

    fn help(
        &mut self,
        mut command: Command,
        task: Task,
        limit: Option<Duration>,
    ) -> Result<(), SuperviseError> {
        if let Some(nth) = self.helpers.iter().position(|helper| helper.task == task) {
            // What it was to bring about is out of date.
            let other = self.helpers.swap_remove(nth);
            self.dismiss(other.child);
        }
        let child = command.stdin(Stdio::null()).spawn().map_err(failed("start a helper"))?;
        let pidfd = watch(&child)?;
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.helpers.push(Helper { child, pidfd, task, deadline });
        Ok(())
    }

    fn helpers_ended(&mut self) -> Result<(), SuperviseError> {
        let mut nth = 0;
        while let Some(helper) = self.helpers.get_mut(nth) {
            match helper.child.try_wait().map_err(failed("wait for a helper"))? {
                Some(status) => {
                    let helper = self.helpers.swap_remove(nth);
                    if helper.task == Task::Train && !status.success() && helper.deadline.is_some()
                    {
                        self.service.say(&format!("a trainer has ended with {status}"));
                    }
                    self.helper_ended(helper.task, status)?;
                }
                None => nth += 1,
            }
        }
        Ok(())
    }

    fn helper_ended(&mut self, task: Task, status: ExitStatus) -> Result<(), SuperviseError> {
        match (task, status.success()) {
            (Task::Train, _) => self.train(),
            (Task::Up { first }, true) => self.up_ended(first),
            (Task::Up { first: true }, false) => {
                // One that was killed may have begun to swap all the same: that ends before the
                // server does.
                self.service.say(&format!("what follows the start has failed ({status})"));
                self.up_failed = Some(status);
                self.been_up = true;
                self.stopping = true;
            }
            (Task::Up { first: false }, false) => {
                self.service.say(&format!(
                    "what follows the start of a server has failed ({status}): trying again"
                ));
                self.up_again = Some(Instant::now() + AGAIN);
            }
            (Task::Down, true) => self.tell_to_end(),
            (Task::Down, false) => {
                self.stopping = false;
                self.up_failed = None;
                self.service.say(&format!(
                    "cannot end, the disk is still in use ({status}): serving goes on. Ask again later"
                ));
            }
        }
        if matches!(task, Task::Up { .. }) && self.stopping {
            self.go_down();
        }
        Ok(())
    }

    fn enforce_deadlines(&mut self) -> Result<(), SuperviseError> {
        for helper in &mut self.helpers {
            if helper.deadline.is_some_and(|at| at <= Instant::now()) {
                // Its end is then seen as that of one that has failed.
                helper.dismiss();
                if let Task::Up { .. } = helper.task {
                    let limit = self.service.ready_limit();
                    self.service.say(&format!(
                        "what follows the start of a server has not ended in {limit:?}: killed"
                    ));
                }
            }
        }
        let late = |server: &&mut Server| server.deadline.is_some_and(|at| at <= Instant::now());
        let Some(server) = self.server.as_mut().filter(late) else { return Ok(()) };
        if server.killed {
            // Not swapped to any more: what it waits for is nobody's.
            self.service.abandon();
            let limit = self.service.end_limit();
            return Err(SuperviseError::Stuck { limit, gone: false });
        }
        // Its end is then seen as any other's; one that is to end for good is not waited for
        // without end.
        let _ = server.child.kill();
        server.killed = true;
        server.deadline = self.ending.then(|| Instant::now() + GONE);
        let what = if self.ending {
            format!("has not ended in {:?}", self.service.end_limit())
        } else {
            self.late += 1;
            "does not get ready".to_owned()
        };
        self.service.say(&format!("the server {what}: killed"));
        Ok(())
    }

    fn stop(&mut self) {
        if self.stopping || self.ending {
            return;
        }
        self.stopping = true;
        self.notify.say("STOPPING=1");
        // What comes back into memory needs some, and a server that gives it.
        self.end_training();
        self.resume();
        self.go_down();
    }

    /// Begins the end, unless something is coming up: that is waited for, or swapping would begin
    /// on a disk that goes.
    fn go_down(&mut self) {
        if self.helpers.iter().any(|helper| matches!(helper.task, Task::Up { .. } | Task::Down)) {
            return;
        }
        let down = if self.been_up { self.service.down() } else { None };
        let Some(command) = down else { return self.tell_to_end() };
        let limit = self.service.down_limit();
        if let Err(error) = self.help(command, Task::Down, Some(limit)) {
            self.stopping = false;
            self.service.say(&format!("cannot end: {}. Ask again later", with_cause(&error)));
        }
    }

    fn tell_to_end(&mut self) {
        self.ending = true;
        (self.restart, self.stand_by, self.up_again) = (None, None, None);
        if let Some(standby) = self.standby.take() {
            self.dismiss(standby.child);
        }
        self.end_training();
        if let Some(server) = &mut self.server {
            // One that is dying just now needs no telling.
            let _ = server.channel.write_all(format!("{}\n", words::END).as_bytes());
            server.deadline = Some(Instant::now() + self.service.end_limit());
            server.killed = false;
        }
    }

    /// Ends the server for good, with force if it does not follow.
    fn end_server(&mut self) {
        self.tell_to_end();
        let Some(mut server) = self.server.take() else { return };
        let mut fds = [PollFd::new(&server.pidfd, PollFlags::IN)];
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        // Whatever it says, the server is not waited for longer.
        let _ = poll(&mut fds, Some(&patience));
        let _ = server.child.kill();
        let _ = poll(&mut fds, Some(&patience));
        let _ = server.child.try_wait();
    }

    /// Whether that was all.
    fn server_ended(&mut self) -> Result<bool, SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(false) };
        let Some(status) = server.child.try_wait().map_err(failed("wait for the server"))? else {
            return Ok(false);
        };
        let (ready, killed) = (server.ready.map(|since| since.elapsed()), server.killed);
        self.server = None;
        self.watchdog.reset();
        if let Some(pulse) = self.service.pulse() {
            pulse.clear();
        }
        let oom = self.oom.since();
        // It was for that one alone.
        self.end_training();
        self.up_again = None;
        if self.ending {
            if killed {
                self.service.abandon();
                let limit = self.service.end_limit();
                return Err(SuperviseError::Stuck { limit, gone: true });
            }
            if !status.success() {
                self.service.say(&format!("the server ended with {status}"));
                self.service.abandon();
            }
            return Ok(true);
        }
        if !self.been_up && self.started == 1 && ready.is_none() {
            if let Some(why) = oom {
                self.service.say(&why);
            }
            return Err(SuperviseError::Start(status));
        }
        let pause = match status.code() {
            Some(code) if code == i32::from(CLIENT_LOST) && ready.is_some() => Duration::ZERO,
            _ => self.backoff.died(ready.unwrap_or_default()),
        };
        let pause = if self.stopping { Duration::ZERO } else { pause };
        // First the server, then what there is to say of it.
        self.restart = Some(Instant::now() + pause);
        self.begin_what_is_due()?;
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
