//! What `platen device serve` supervises: the store, the disk, and what servers and helpers are
//! started with.

use super::args::{Inherited, SwapTask};
use super::backing::{self, NewFile};
use super::claims::Claims;
use super::plan::Plan;
use super::settings_file;
use super::supervise::Manager;
use crate::say::say;
use crate::size::Size;
use anyhow::Context;
use pulse::Pulse;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use store::Store;
use swap::supervisor::Service;
use ublk::Buffers;

/// How long a trainer may take: the server waits for less.
const TRAINING: Duration = Duration::from_secs(150);

/// A descriptor that what is started from here has as well.
pub(super) fn inheritable(fd: OwnedFd) -> anyhow::Result<OwnedFd> {
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    Ok(fd)
}

pub(super) struct Serving<'a> {
    plan: &'a Plan<'a>,
    /// Name and sockets, which servers after the first must not have to get again.
    pub(super) claims: Claims,
    store: OwnedFd,
    /// Memory of the ublk disk's requests.
    buffers: Option<OwnedFd>,
    backing: Option<OwnedFd>,
    /// The backing file, if it was made for this device and no server has come up yet.
    new_backing: Option<NewFile>,
    /// The text of the policy's settings.
    policy: Option<OwnedFd>,
    /// The progress of each server's threads, and the same memory for servers.
    pulse: Pulse,
    pulse_fd: OwnedFd,
    /// Readable after SIGUSR1: the next server is to start without a pause.
    resume: OwnedFd,
    manager: Manager,
    /// The ublk device, once it exists.
    device: Option<u32>,
    /// The disk of the kernel's NBD client.
    disk: Option<PathBuf>,
}

impl<'a> Serving<'a> {
    /// Makes all that servers share.
    pub(super) fn new(
        plan: &'a Plan<'a>,
        claims: Claims,
        policy: Option<&str>,
        resume: OwnedFd,
        manager: Manager,
    ) -> anyhow::Result<Self> {
        let args = plan.args;
        let store = Store::create(plan.pages, plan.store_options())?;
        let share = |fd: BorrowedFd<'_>| inheritable(fd.try_clone_to_owned()?);
        let store_fd = share(store.fd()).context("cannot share the store with servers")?;
        let (backing, new_backing) = match backing::make(&plan.policy, &store, args.swap)? {
            Some((disk, new)) => {
                // Every server has the disk's lock with it.
                let disk = share(disk.fd());
                let disk = disk.context("cannot share the backing device with servers")?;
                (Some(disk), Some(new))
            }
            None => (None, None),
        };
        drop(store);
        let policy = policy.map(|text| settings_file::share(text).and_then(inheritable));
        let policy =
            policy.transpose().context("cannot share the policy's settings with servers")?;
        let buffers = args.ublk.then(|| Buffers::file(&plan.ublk_options().geometry)).transpose();
        let buffers = buffers.context("cannot make the buffers of the ublk disk")?;
        let buffers = buffers.map(inheritable).transpose()?;
        let disk = match (args.swap, args.ublk) {
            (true, false) => Some(swap::nbd::free_disk()?),
            _ => None,
        };
        let pulse_fd = Pulse::file().context("cannot make memory for signs of life")?;
        let pulse_fd = inheritable(pulse_fd)?;
        let pulse = Pulse::open(&pulse_fd).context("cannot map signs of life")?;
        Ok(Self {
            plan,
            claims,
            store: store_fd,
            buffers,
            backing,
            new_backing,
            policy,
            pulse,
            pulse_fd,
            resume,
            manager,
            device: None,
            disk,
        })
    }

    fn disk(&self) -> Option<PathBuf> {
        self.device.map(ublk::disk).or_else(|| self.disk.clone())
    }

    fn helper(&self, task: SwapTask, disk: PathBuf) -> Command {
        let mut command = myself();
        command.args(["device", "swap-helper", task.word(), "--disk"]).arg(disk);
        if let (Some(_), Some(address)) = (&self.disk, &self.plan.args.nbd) {
            let connections = self.plan.swap_connections();
            command.arg("--socket").arg(address.path());
            command.args(["--connections", &connections.to_string()]);
        }
        command
    }
}

/// This program, though its file may have been replaced. It calls itself by its name: see
/// `device::run`.
fn myself() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("platen");
    command
}

impl Serving<'_> {
    fn start(&self, standby: bool, replaces: bool) -> Command {
        let mut inherited = Inherited {
            store: self.store.as_raw_fd(),
            buffers: self.buffers.as_ref().map(AsRawFd::as_raw_fd),
            backing: self.backing.as_ref().map(AsRawFd::as_raw_fd),
            pulse: Some(self.pulse_fd.as_raw_fd()),
            policy: self.policy.as_ref().map(AsRawFd::as_raw_fd),
            device: self.device,
            disk: self.disk.as_ref().map(|disk| disk.display().to_string()),
            standby,
            replaces,
            ..Inherited::default()
        };
        self.claims.note(&mut inherited);
        let mut command = myself();
        command.args(std::env::args_os().skip(1)).arg("--inherited").arg(inherited.to_string());
        command
    }
}

impl Service for Serving<'_> {
    fn server(&mut self, replaces: bool) -> Command {
        self.start(false, replaces)
    }

    fn standby(&mut self) -> Option<Command> {
        self.plan.args.swap.then(|| self.start(true, true))
    }

    fn go(&self) -> String {
        self.device.map_or_else(|| "-".to_owned(), |id| id.to_string())
    }

    fn said(&mut self, line: &str) {
        if let Some(number) = line.strip_prefix("device ") {
            self.device = number.parse().ok().or(self.device);
        }
    }

    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command> {
        if let Some(new) = self.new_backing.take() {
            new.keep();
        }
        let disk = self.disk().filter(|_| self.plan.args.swap)?;
        if replaces {
            // The kernel has kept the ublk disk, and waits for the NBD client.
            return self.disk.is_some().then(|| self.helper(SwapTask::Again, disk));
        }
        let mut command = self.helper(SwapTask::On, disk);
        command.args(["--priority", &self.plan.args.swap_priority.to_string()]);
        command.args(["--pids", &format!("{pid},{}", std::process::id())]);
        Some(command)
    }

    fn down(&mut self) -> Option<Command> {
        let disk = self.disk().filter(|_| self.plan.args.swap)?;
        Some(self.helper(SwapTask::Off, disk))
    }

    fn down_limit(&self) -> Duration {
        Duration::from_secs(self.plan.args.swapoff_timeout)
    }

    fn ready_limit(&self) -> Duration {
        // Taking a store over takes 0.03 s for a GiB; a second where every object has to be asked
        // what is true.
        let Size(size) = self.plan.args.size;
        Duration::from_secs(60 + (size >> 30))
    }

    fn train(&mut self, channel: OwnedFd) -> Option<(Command, Duration)> {
        if !self.plan.trains() {
            return None;
        }
        let mut command = myself();
        command.args(["device", "train"]).stdout(Stdio::from(channel));
        // Not our log, which may be a pipe: who writes to one may have to wait for memory, with its
        // lock.
        command.stderr(Stdio::null());
        Some((command, TRAINING))
    }

    fn pulse(&self) -> Option<&Pulse> {
        Some(&self.pulse)
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

    fn abandon(&mut self) {
        // Errors are better than waiting for ever for those who have the disk open.
        if let Some(id) = self.device {
            match ublk::abandon(id, Duration::from_secs(30)) {
                Ok(()) => self
                    .say(&format!("{} is gone: what was on it is lost", ublk::disk(id).display())),
                Err(error) => self.say(&format!("{:#}", anyhow::Error::from(error))),
            }
        }
        if let Some(disk) = &self.disk {
            // It may not be attached.
            let _ = swap::nbd::detach(disk);
        }
    }

    fn say(&self, line: &str) {
        say(&format!("{}: {line}", self.plan.args.name));
    }
}
