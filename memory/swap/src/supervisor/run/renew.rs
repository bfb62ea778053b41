//! Replaces a live server by another: with other settings, or of another program.
//!
//! ```text
//!  request ─► the successor starts, gets its memory ─► "stands by"
//!                 │ it fails: nothing has changed        │ upgrade: this process executes the
//!                 ▼                                      ▼ other program (`Service::hand_over`)
//!              refused                                 "go" to the successor, which kills the
//!                                                      present server, waits for its end, and
//!                                                      takes over
//! ```
//!
//! Up to "go" the present server serves, with or without a supervisor; a successor without a
//! supervisor exits. After "go" the successor needs no supervisor. So a kill of any one process at
//! any step leaves a server, or a supervisor that starts one. The store's lock admits one server at
//! a time.

use std::io::Write;
use std::process::ExitStatus;
use std::time::Instant;

use super::Supervisor;
use crate::supervisor::child::{Helper, Server, Task};
use crate::supervisor::error::{with_cause, SuperviseError};
use crate::supervisor::process::Process;
use crate::supervisor::service::{Adopted, HandOver, Handed};
use crate::supervisor::step::step;
use crate::supervisor::words;

/// Why a server does not get an order, which it would carry out some time later.
const STOPPED: &str = "it has been stopped (SIGSTOP)";

impl Supervisor<'_> {
    /// The reason why the server cannot be replaced now.
    fn busy(&self) -> Option<&'static str> {
        let ready = self.server.as_ref().is_some_and(|server| server.ready.is_some());
        let helps = |task: Task| matches!(task, Task::Up { .. } | Task::Down);
        if self.stopping || self.ending || self.down_again.is_some() {
            Some("the device ends")
        } else if self.successor.is_some() || self.renewing {
            Some("its server is being replaced already; try again when that is over")
        } else if !ready || !self.been_up || self.up_again.is_some() {
            Some("it has no server that serves at the moment; try again when it has one")
        } else if self.helpers.iter().any(|helper| helps(helper.task)) {
            Some("its server has just started, and its disk is being set up; try again")
        } else {
            None
        }
    }

    /// Handles a request, and starts a successor if it asks for one.
    pub(super) fn request(&mut self) {
        let server = match (self.busy(), &self.server) {
            (None, Some(server)) => Ok(server.child.pidfd()),
            (busy, _) => Err(busy.unwrap_or("it has no server at the moment")),
        };
        let Some(command) = self.service.request(server) else { return };
        match Server::spawn(command) {
            Ok(mut successor) => {
                successor.deadline = Some(Instant::now() + self.service.ready_limit());
                self.successor = Some(successor);
                step("successor started");
            }
            Err(error) => self.service.renewed(Err(with_cause(&error))),
        }
    }

    /// Handles the successor's messages and its exit.
    pub(super) fn hear_successor(&mut self) {
        let Some(successor) = &mut self.successor else { return };
        let lines = successor.lines();
        successor.names_disk |= lines.iter().any(|line| line == words::NAMES_DISK);
        if lines.iter().any(|line| line == words::STANDS_BY) {
            return self.hand_over();
        }
        if let Ok(Some(status)) = successor.child.try_wait() {
            self.successor = None;
            self.note_kill(Some(status));
            self.service.renewed(Err(format!("the new server ended with {status}")));
        }
    }

    /// Kills a successor that does not stand by in time.
    pub(super) fn enforce_renewal(&mut self) {
        let deadline = self.successor.as_ref().and_then(|successor| successor.deadline);
        if deadline.is_some_and(|at| at <= Instant::now()) {
            let limit = self.service.ready_limit();
            self.refuse_renewal(&format!("the new server did not get its memory in {limit:?}"));
        }
    }

    /// Kills a successor that has not been sent "go", and reports why.
    pub(super) fn refuse_renewal(&mut self, why: &str) {
        if let Some(successor) = self.successor.take() {
            self.dismiss(successor.child);
            self.service.renewed(Err(why.to_owned()));
        }
    }

    /// Fails a pending request when a server has exited.
    pub(super) fn renewal_failed(&mut self, status: ExitStatus) {
        self.refuse_renewal("the present server has died, and is being replaced; try again");
        if std::mem::take(&mut self.renewing) {
            let why = format!("the new server has died ({status}) before it served");
            self.service.renewed(Err(why));
        }
    }

    /// Handles the server's reports on its client's connections.
    pub(super) fn connected(&mut self, taken: bool) {
        if let Some(server) = &mut self.server {
            server.connected = Some(taken);
        }
        self.renewal_served();
    }

    /// Ends a pending request once requests reach the new server, which is ready.
    pub(super) fn renewal_served(&mut self) {
        let Some(server) = self.server.as_ref().filter(|_| self.renewing) else { return };
        let helps = |helper: &Helper| matches!(helper.task, Task::Up { .. });
        if server.ready.is_none() || self.helpers.iter().any(helps) || self.up_again.is_some() {
            return;
        }
        let outcome = match (self.service.is_connected_later(), server.connected) {
            (true, None) => return,
            (true, Some(false)) => {
                Err("the kernel's NBD client has taken no connection of the new server".to_owned())
            }
            _ => Ok(()),
        };
        self.renewing = false;
        self.service.renewed(outcome);
    }

    /// Hands over to a successor that stands by.
    fn hand_over(&mut self) {
        let (Some(server), Some(successor)) = (&self.server, &self.successor) else { return };
        step("stands by");
        if successor.is_stopped() {
            return self.refuse_renewal(&format!("the new server cannot be told to go: {STOPPED}"));
        }
        let state = HandOver {
            server: handed(server),
            successor: handed(successor),
            names_disk: successor.names_disk,
            // Helpers, such as a trainer, belong to the present server.
            dismissed: (self.dismissed.iter())
                .chain(self.helpers.iter().map(|helper| &helper.child))
                .chain(self.standby.as_ref().map(|standby| &standby.child))
                .map(Process::id)
                .collect(),
        };
        if let Err(error) = self.service.hand_over(&state) {
            return self.refuse_renewal(&error.to_string());
        }
        self.succeed();
    }

    /// Adopts the server and the successor that this process started before `execve`.
    pub(in crate::supervisor) fn adopt(&mut self, adopted: Adopted) -> Result<(), SuperviseError> {
        step("adopting");
        // Starts no server until the present one has exited.
        self.restart = None;
        (self.been_up, self.set_up, self.up_begun, self.started) = (true, true, true, 1);
        for pid in adopted.dismissed {
            // A child that has already been reaped has no such number.
            if let Ok(child) = Process::adopt(pid) {
                self.dismiss(child);
            }
        }
        let adopt = |(pid, channel)| Server::adopt(pid, channel);
        let mut server = adopt(adopted.server)?;
        server.ready = Some(Instant::now());
        self.server = Some(server);
        self.successor = Some(adopt(adopted.successor)?);
        self.succeed();
        Ok(())
    }

    /// Sends "go" to the successor, and kills the present server.
    fn succeed(&mut self) {
        let Some(mut successor) = self.successor.take() else { return };
        let line = format!("{}{}\n", words::GO, self.service.go());
        step("before go");
        let told = match successor.is_stopped() {
            true => Err(STOPPED.to_owned()),
            false => {
                successor.channel.write_all(line.as_bytes()).map_err(|error| error.to_string())
            }
        };
        if let Err(why) = told {
            self.dismiss(successor.child);
            self.service.renewed(Err(format!("the new server cannot be told to go: {why}")));
            // The former stand-by server may be gone: start one.
            return self.stand_by();
        }
        step("told to go");
        self.end_training();
        successor.deadline = Some(self.to_be_ready());
        self.started += 1;
        self.renewing = true;
        // The successor kills it too, in case this process is killed here.
        if let Some(server) = self.server.replace(successor) {
            self.dismiss(server.child);
        }
        step("server killed");
        self.watchdog.reset();
        // The stand-by server has the former program or settings.
        if let Some(standby) = self.standby.take() {
            self.dismiss(standby.child);
        }
    }
}

fn handed(server: &Server) -> Handed<'_> {
    use std::os::fd::AsFd;
    Handed { pid: server.child.id(), channel: server.channel.as_fd() }
}
