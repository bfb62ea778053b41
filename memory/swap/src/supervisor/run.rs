//! The supervisor's loop: its events, and the actions on them.

mod end;
mod helpers;
mod listen;
mod patience;
mod renew;

use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::backoff::Backoff;
use super::child::{Helper, Server};
use super::error::{with_cause, SuperviseError};
use super::notify::Notify;
use super::oom::OomKills;
use super::process::Process;
use super::service::Service;
use super::watchdog::{Watchdog, LOOK};
use super::words;
use patience::Patience;

/// The pause before a retry of a failed start or helper.
const AGAIN: Duration = Duration::from_secs(1);

/// The pause before a stand-by server that has ended is replaced: it may have found no memory.
const STAND_BY_AGAIN: Duration = Duration::from_secs(10);

/// The first and the longest pause before another attempt to take the disk down, each pause twice
/// as long as the one before: a swapoff that fails needs memory and time.
const DOWN_AGAIN: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// For how long a service manager is asked, every second, to wait for the end. The last steps may
/// take as long without a message.
const EXTENSION: Duration = Duration::from_secs(120);

/// How long the supervisor waits for a server that was killed at the end, and for a killed helper.
const GONE: Duration = Duration::from_secs(10);

pub(super) struct Supervisor<'a> {
    service: &'a mut dyn Service,
    server: Option<Server>,
    /// The stand-by server. One that has ended is replaced: when it is needed, there may be no
    /// memory to start another.
    standby: Option<Server>,
    /// A server that is to replace the present one, and is allocating its memory.
    successor: Option<Server>,
    /// Whether the present server is a successor that does not serve yet.
    renewing: bool,
    /// At most one of each task.
    helpers: Vec<Helper>,
    /// The next trainer's socket, while the last trainer still runs.
    to_train: Option<OwnedFd>,
    /// Children that were killed and have not been reaped.
    dismissed: Vec<Process>,
    backoff: Backoff,
    watchdog: Watchdog,
    /// When the watchdog looks next.
    look: Instant,
    pub(super) oom: OomKills,
    notify: Notify,
    /// When to start a server.
    restart: Option<Instant>,
    /// When to start a stand-by server.
    stand_by: Option<Instant>,
    /// When to retry the failed helper after a later server's start.
    up_again: Option<Instant>,
    /// Whether that helper is due when the helper that now has the disk has ended.
    up_later: bool,
    /// When to retry the failed helper before the end.
    down_again: Option<Instant>,
    /// How often that helper has failed.
    downs: u32,
    /// Whether the helper after the first start was begun.
    up_begun: bool,
    started: u32,
    /// Consecutive servers that were killed because they were not ready in time.
    late: u32,
    /// Whether the first start, with its helper, has succeeded.
    been_up: bool,
    /// Whether the helper after the first start may have set the disk up, and no helper has taken
    /// it down.
    set_up: bool,
    /// The helper after the first start failed with this status: everything is taken down.
    up_failed: Option<ExitStatus>,
    /// Whether the supervisor was asked to end, and the attempt has not failed.
    stopping: bool,
    /// Whether the service manager knows that the service ends. It takes nothing back.
    announced: bool,
    /// Whether the server was ordered to end.
    ending: bool,
    /// How long it may take.
    patience: Patience,
}

pub(super) struct Woken {
    stop: bool,
    server: bool,
    said: bool,
    helper: bool,
    resume: bool,
    request: bool,
    successor: bool,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(service: &'a mut dyn Service) -> Self {
        let notify = Notify::new(service.notify_socket().as_deref());
        Self {
            service,
            server: None,
            standby: None,
            successor: None,
            renewing: false,
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
            up_later: false,
            down_again: None,
            downs: 0,
            up_begun: false,
            started: 0,
            late: 0,
            been_up: false,
            set_up: false,
            up_failed: None,
            stopping: false,
            announced: false,
            ending: false,
            patience: Patience::default(),
        }
    }

    pub(super) fn run(&mut self, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
        loop {
            if self.ending && self.server.is_none() {
                // The supervisor was asked to end between two servers: nothing more will use what
                // the dead one left.
                self.service.abandon(self.set_up);
                return self.outcome();
            }
            self.begin_what_is_due()?;
            let woken = self.wait(stop)?;
            // The messages that have arrived are handled first: a server that has just reported
            // ready is shut down in the proper order.
            if woken.said {
                self.listen()?;
            }
            if woken.stop {
                // The descriptor is level-triggered, so the bytes written to it are read. A
                // signalfd returns 128 bytes for a signal.
                let _ = rustix::io::read(stop, &mut [0; 128]);
                self.stop();
            }
            if woken.resume {
                self.resume();
            }
            if woken.request {
                self.request();
            }
            if woken.successor {
                self.hear_successor();
            }
            if woken.helper {
                self.helpers_ended()?;
            }
            if woken.server && self.server_ended()? {
                return self.outcome();
            }
            self.enforce_deadlines()?;
            self.look_at_servers();
            self.oom.settle();
            // A child whose wait fails is dropped too.
            self.dismissed.retain(|child| matches!(child.try_wait(), Ok(None)));
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
        if due(&mut self.down_again) {
            self.stop();
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
            if !standby.is_stopped() && standby.channel.write_all(line.as_bytes()).is_ok() {
                self.started += 1;
                standby.deadline = Some(self.to_be_ready());
                self.server = Some(standby);
                return Ok(());
            }
            // The stand-by server has died too.
            self.dismiss(standby.child);
        }
        let command = self.service.server(replaces);
        match Server::spawn(command) {
            Ok(mut server) => {
                self.started += 1;
                // If the first server does not start, the caller gets the error, and no disk is in
                // use yet.
                server.deadline = replaces.then(|| self.to_be_ready());
                self.server = Some(server);
            }
            Err(error) if !replaces => return Err(error),
            // There may be no memory, or no process number. The disk's users wait, so retry.
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

    /// Starts a stand-by server, if there is none. Not between two servers: the one that gets ready
    /// next is followed by a stand-by server.
    fn stand_by(&mut self) {
        let ready = self.server.as_ref().is_some_and(|server| server.ready.is_some());
        if self.standby.is_some() || self.ending || !ready {
            return;
        }
        let Some(command) = self.service.standby() else { return };
        match Server::spawn(command) {
            Ok(standby) => self.standby = Some(standby),
            Err(_) => self.stand_by = Some(Instant::now() + AGAIN),
        }
    }

    /// Ends a process without waiting for it.
    fn dismiss(&mut self, child: Process) {
        child.kill();
        self.dismissed.push(child);
    }
}
