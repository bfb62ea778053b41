//! Supervises the service of a VM that runs under libvirt while its RAM is loaded.

use super::daemon::Daemon;
use super::folder::Folder;
use super::outcome::{after_death, after_load, cancelled, Without, LATER, NOTICES, RESTARTED};
use crate::restore_player::{connect, Serve};
use crate::restore_players::{Players, Service};
use crate::restore_service::{complete, Copies, End, AGAIN, ATTEMPTS};
use crate::say::say;
use anyhow::{bail, Context};
use libvirt::{Connection, Domain, Handover, LibvirtError, State, Why};
use player::Recovery;
use serde_json::{json, Value};
use std::path::Path;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of questions about the VM's state until it runs: they take 10 s and the time of their
/// answers.
const QUESTIONS: u32 = 5000;
/// Time limit for libvirt to notice that the VM goes on.
const RESUMES: Duration = Duration::from_secs(5);
/// The only VM of its players.
const VM: usize = 0;

/// A VM that runs while its RAM is loaded; has another player serve it if one dies.
pub(super) struct Supervisor<'a> {
    daemon: &'a Daemon,
    domain: &'a Domain,
    copies: Copies<'a>,
    folder: &'a Folder,
    socket: String,
    /// Number of players that have died.
    deaths: u32,
    begin: Instant,
    /// The connection on which libvirt has prepared the VM. If it ends before libvirt is asked to
    /// finish, libvirt destroys the VM.
    connection: Option<Connection>,
    /// The channel on which libvirt's answer arrives, once it was asked to finish.
    finishing: Option<Receiver<Result<(), LibvirtError>>>,
    /// The connection for questions about the VM's state until it runs, and the number of questions
    /// left.
    watch: Option<(Connection, u32)>,
    /// Time until libvirt had started the CPUs, milliseconds.
    started_ms: Option<f64>,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        daemon: &'a Daemon,
        domain: &'a Domain,
        players: &'a Players<'a>,
        folder: &'a Folder,
    ) -> Self {
        Self {
            daemon,
            domain,
            copies: Copies::new(players),
            folder,
            socket: String::new(),
            deaths: 0,
            begin: Instant::now(),
            connection: None,
            finishing: None,
            watch: None,
            started_ms: None,
        }
    }

    /// Restores a VM that libvirt has prepared at `socket`; returns the report.
    pub(super) fn begin(mut self, connection: Connection, socket: String) -> anyhow::Result<Value> {
        (self.connection, self.socket) = (Some(connection), socket);
        self.supervise(false)
    }

    /// Continues a restore whose player has died, and whose VM waits; returns the report.
    pub(super) fn go_on(mut self) -> anyhow::Result<Value> {
        self.deaths = 1;
        self.recover()?;
        self.supervise(true)
    }

    /// Has players serve the VM until one of them has sent QEMU everything.
    fn supervise(&mut self, mut resume: bool) -> anyhow::Result<Value> {
        let mut attempts = 0;
        let mut recovery = None;
        loop {
            if resume && recovery.is_none() {
                recovery = Some(Recovery::new(connect(Path::new(&self.socket))?));
            }
            let serve = Serve { vm: VM, socket: self.socket.clone().into(), resume };
            let service = self.copies.serve(&serve, recovery.as_ref())?;
            let (why, failed) = match self.follow(&service, resume, &mut recovery)? {
                End::Done(report) => return self.done(report),
                End::Failed(event) => {
                    (event["error"].as_str().unwrap_or_default().to_owned(), Some(event))
                }
                End::Died { connecting } => {
                    attempts += 1;
                    // The player has sent QEMU nothing.
                    if !connecting && attempts < ATTEMPTS {
                        continue;
                    }
                    (service.player.why_it_ended(), None)
                }
            };
            if !resume && self.finishing.is_none() {
                let is_untouched = failed.as_ref().is_some_and(|event| event["untouched"] == true);
                if is_untouched && self.copies.next() {
                    say(&format!("{why}; another begins from {}", self.copies.path()));
                    continue;
                }
                return self.give_up(&why);
            }
            self.deaths += 1;
            recovery = None;
            if self.without(&why)? == Without::Completed {
                return self.done(json!({}));
            }
            self.replace(&why, failed.as_ref())?;
            resume = true;
        }
    }

    /// Follows the events of one player.
    fn follow(
        &mut self,
        service: &Service,
        resume: bool,
        recovery: &mut Option<Recovery>,
    ) -> anyhow::Result<End> {
        let mut connecting = false;
        loop {
            let event = match self.watch {
                Some(_) => service.events.recv_timeout(AGAIN),
                None => service.events.recv().map_err(RecvTimeoutError::from),
            };
            let event = match event {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    self.ask_state();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(End::Died { connecting }),
            };
            match event["event"].as_str() {
                Some("connecting") => connecting = true,
                Some("resuming") => {
                    if let Some(recovery) = recovery.take() {
                        recovery.is_resumed();
                    }
                }
                Some("running") => {
                    let how = if resume { Handover::Resumed } else { Handover::AtOnce };
                    self.finish(how)?;
                    if resume {
                        say("the VM goes on");
                    }
                }
                Some("loaded") => {
                    say("everything is loaded: the image is not needed any more");
                }
                Some("done") => return Ok(End::Done(event)),
                Some("failed") => return Ok(End::Failed(event)),
                _ => {}
            }
        }
    }

    /// Makes libvirt start the CPUs and take the VM over. Its answer comes at the end of the load.
    fn finish(&mut self, how: Handover) -> anyhow::Result<()> {
        let mut connection = self.connection.take().context("no connection to libvirt")?;
        if how == Handover::Resumed {
            self.await_resumed();
        }
        let (answer, finishing) = channel();
        let domain = self.domain.clone();
        let finish = move || {
            // Nobody waits for it if the restore has failed meanwhile.
            let _ = answer.send(connection.finish(&domain, how));
        };
        thread::Builder::new()
            .name("finish".into())
            .spawn(finish)
            .context("cannot start a thread")?;
        self.finishing = Some(finishing);
        if how == Handover::AtOnce {
            // Without a second connection the VM runs, but nothing shows when it has begun to.
            self.watch = self.daemon.open().ok().map(|connection| (connection, QUESTIONS));
        }
        Ok(())
    }

    /// Waits until libvirt has noticed that QEMU goes on: before, it takes the load for failed.
    fn await_resumed(&self) {
        let until = Instant::now() + RESUMES;
        let has_failed =
            |state: Option<State>| state.and_then(State::why) == Some(Why::PostcopyFailed);
        while self.daemon.state(self.domain).is_ok_and(has_failed) && Instant::now() < until {
            thread::sleep(LATER);
        }
    }

    /// Asks for the VM's state, and prints it once the CPUs run.
    fn ask_state(&mut self) {
        let Some((connection, questions)) = &mut self.watch else { return };
        *questions -= 1;
        let is_over = match connection.state(self.domain) {
            Ok(Some(State::Running(_))) => {
                self.started_ms = Some(self.begin.elapsed().as_secs_f64() * 1e3);
                say("the VM runs under libvirt; its RAM is loaded while it does");
                true
            }
            Ok(_) => *questions == 0,
            Err(_) => true,
        };
        if is_over {
            self.watch = None;
        }
    }

    /// Makes libvirt end a VM that has not run.
    fn give_up(&mut self, why: &str) -> anyhow::Result<Value> {
        let connection = self.connection.take().context("no connection to libvirt")?;
        Err(cancelled(connection, self.daemon, self.domain, Handover::AtOnce))
            .context(format!("{why}, before the VM ran"))
    }

    /// Finds out the state of a VM whose player has gone.
    fn without(&mut self, why: &str) -> anyhow::Result<Without> {
        // Without this connection libvirt accepts another one's attempt to continue.
        self.connection = None;
        match self.answer() {
            Some(Ok(())) => Ok(Without::Completed),
            Some(Err(error)) => after_death(self.daemon, self.domain, why, Some(&error)),
            None => after_death(self.daemon, self.domain, why, None),
        }
    }

    /// libvirt's answer to the call to finish, if it was called and answers in time.
    fn answer(&mut self) -> Option<Result<(), LibvirtError>> {
        self.finishing.take()?.recv_timeout(NOTICES).ok()
    }

    /// Makes QEMU wait for another player.
    fn replace(&mut self, why: &str, failed: Option<&Value>) -> anyhow::Result<()> {
        let again = "platen virsh-restore DOMAIN.xml COPY --recover";
        let damaged = failed.is_some_and(|event| event["damaged"] == true);
        if failed.is_some() && !(damaged && self.copies.next()) {
            bail!("{why}. The VM waits for the pages that it lacks; go on with a sound image: {again}");
        }
        self.recover()
            .with_context(|| format!("{why}, and no other can go on; try later: {again}"))?;
        say(&format!("{why}; another goes on from {}", self.copies.path()));
        Ok(())
    }

    /// Makes libvirt tell QEMU to listen for the next player.
    fn recover(&mut self) -> anyhow::Result<()> {
        self.socket = self.folder.next_socket()?;
        let until = Instant::now() + NOTICES;
        loop {
            let mut connection = self.daemon.open()?;
            match connection.prepare(self.domain, &self.socket, Handover::Resumed) {
                Ok(()) => {
                    self.connection = Some(connection);
                    return Ok(());
                }
                // libvirt, or QEMU, has not noticed yet that the last player is gone.
                Err(LibvirtError::Said { .. }) if Instant::now() < until => thread::sleep(LATER),
                Err(error @ LibvirtError::Silent { .. }) => return Err(error).context(
                    "QEMU does not answer libvirt's monitor: a vCPU waits for a page in the middle of a device access, \
                     and then only virsh destroy helps",
                ),
                Err(error) if error.is_lost() => return Err(error).context(
                    "libvirt's daemon ended as it was to continue the VM (11.3 does); QEMU outlives it: start another \
                     version of the daemon",
                ),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Completes the report of the player that has sent everything.
    fn done(&mut self, mut report: Value) -> anyhow::Result<Value> {
        match self.answer() {
            Some(Err(error)) if !error.is_lost() => {
                return Err(error)
                    .context("the VM has all of its RAM, and libvirt has not taken it over");
            }
            Some(Err(_)) => say(RESTARTED),
            _ => {}
        }
        let vm = after_load(self.daemon, self.domain)?;
        say(&format!("the VM is '{vm}' under libvirt"));
        complete(&mut report, self.deaths, self.started_ms, vm);
        Ok(report)
    }
}
