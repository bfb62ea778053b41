//! The calls of the supervisor to the service of a device.

use super::super::args::SwapTask;
use super::super::detach::{self, detach};
use super::super::inherited::Go;
use super::{myself, Serving};
use crate::say::say;
use crate::size::Size;
use pulse::Pulse;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;
use swap::supervisor::{HandOver, Service};

/// Time limit of a trainer; the server waits for less.
const TRAINING: Duration = Duration::from_secs(630);

/// How long a helper may take to end after swapoff has run into its timeout, or has ended just
/// before and the disk is to be detached.
const HELPER_ENDS: Duration = Duration::from_secs(10 + detach::LIMIT.as_secs());

impl Service for Serving {
    fn server(&mut self, replaces: bool) -> Command {
        self.start(false, replaces)
    }

    fn standby(&mut self) -> Option<Command> {
        self.plan.args.swap.then(|| self.start(true, true))
    }

    fn go(&self) -> String {
        Go { device: self.device, in_software: self.in_software }.to_string()
    }

    fn handle_line(&mut self, line: &str) {
        if let Some(number) = line.strip_prefix("device ") {
            self.device = number.parse().ok().or(self.device);
        }
    }

    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command> {
        *self.trouble.borrow_mut() = None;
        if let Some(new) = self.new_backing.take() {
            new.keep();
        }
        let disk = self.disk().filter(|_| self.plan.args.swap)?;
        if replaces && self.disk.is_some() {
            // The server itself connects the kernel's NBD client again: see `swap::nbd::reconnect`.
            return None;
        }
        if replaces {
            // The kernel still has the ublk disk, which may be larger than before.
            let grown = self.covered.is_outgrown_by(&disk);
            return grown.then(|| self.helper(SwapTask::Grow, disk));
        }
        let mut command = self.helper(SwapTask::On, disk);
        command.args(["--priority", &self.plan.args.swap_priority.to_string()]);
        command.args(["--pids", &format!("{pid},{}", std::process::id())]);
        Some(command)
    }

    fn is_up(&mut self) {
        if let Some(disk) = self.device.map(ublk::disk).filter(|_| self.plan.args.swap) {
            self.covered.look(&disk);
        }
    }

    fn up_runs(&mut self, helper: u32) {
        self.attacher = Some(helper);
    }

    fn down(&mut self) -> Option<Command> {
        let disk = self.disk().filter(|_| self.plan.args.swap)?;
        let mut command = self.helper(SwapTask::Off, disk);
        command.args(["--timeout", &self.plan.args.swapoff_timeout.to_string()]);
        if let Some(helper) = self.attacher {
            command.args(["--attached-by", &helper.to_string()]);
        }
        Some(command)
    }

    fn down_limit(&self) -> Duration {
        // The helper observes the timeout itself: it switches areas on again that were off already.
        Duration::from_secs(self.plan.args.swapoff_timeout) + HELPER_ENDS
    }

    fn ready_limit(&self) -> Duration {
        // A take-over takes 0.03 s per GiB; 1 s per GiB if every object has to be checked.
        let Size(size) = self.plan.args.size;
        Duration::from_secs(60 + (size >> 30))
    }

    fn train(&mut self, channel: OwnedFd) -> Option<(Command, Duration)> {
        if !self.plan.trains() {
            return None;
        }
        let mut command = myself();
        command.args(["device", "train"]).stdout(Stdio::from(channel));
        // Not our log, which may be a pipe: a writer may wait for memory while it holds the pipe's
        // lock.
        command.stderr(Stdio::null());
        Some((command, TRAINING))
    }

    fn pulse(&self) -> Option<&Pulse> {
        Some(&self.pulse)
    }

    fn has_hung(&mut self, slot: usize) {
        if !device::QAT_SLOTS.contains(&slot) || self.in_software {
            return;
        }
        self.in_software = true;
        self.say(
            "it hung in the driver of the QAT device: the next servers compress in software, until \
             `platen device upgrade`",
        );
    }

    fn resume(&self) -> Option<BorrowedFd<'_>> {
        Some(self.resume.as_fd())
    }

    fn notify_socket(&self) -> Option<String> {
        self.manager.notify.clone()
    }

    fn manager_watches(&self) -> bool {
        self.manager.watched
    }

    fn abandon(&mut self, set_up: bool) {
        // Errors are better than an endless wait for processes that have the disk open. Another
        // device may have a disk of this number by now, and keeps it.
        if self.plan.args.ublk {
            match ublk::abandon(self.device, self.owner, Duration::from_secs(30)) {
                Ok(gone) => gone.into_iter().map(ublk::disk).for_each(|disk| {
                    self.say(&format!("{} is gone: its contents are lost", disk.display()));
                }),
                Err(error) => self.say(&format!("{:#}", anyhow::Error::from(error))),
            }
        }
        let ours =
            |disk: &_| self.attacher.is_none_or(|helper| swap::nbd::is_attached_by(disk, helper));
        if let Some(disk) = self.disk.as_ref().filter(|disk| set_up && ours(disk)) {
            if let Err(error) = detach(disk) {
                self.say(&error.to_string());
            }
        }
    }

    fn requests(&self) -> Option<BorrowedFd<'_>> {
        Some(self.requests.fd())
    }

    fn request(&mut self, server: Result<BorrowedFd<'_>, &str>) -> Option<Command> {
        self.take_request(server)
    }

    fn is_connected_later(&self) -> bool {
        // The kernel's NBD client: the server says `READY` and then gives it connections.
        self.plan.args.swap && self.disk.is_some()
    }

    fn hand_over(&mut self, state: &HandOver<'_>) -> io::Result<()> {
        self.hand_over_to(state)
    }

    fn renewed(&mut self, outcome: Result<(), String>) {
        self.answer_renewal(outcome);
    }

    fn say(&self, line: &str) {
        *self.trouble.borrow_mut() = Some(line.to_owned());
        say(&format!("{}: {line}", self.plan.args.name));
    }
}
