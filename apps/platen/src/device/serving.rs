//! The service of `platen device serve` for its supervisor: store, disk, and the commands of
//! servers and helpers.

use super::args::SwapTask;
use super::backing::{self, NewFile};
use super::changes::Changes;
use super::claims::Claims;
use super::covered::Covered;
use super::detach::detach;
use super::inherited::{Go, Inherited};
use super::manager::Manager;
use super::pending::{arguments, requests, Renewal};
use super::plan::Plan;
use super::requests::Requests;
use super::settings_file;
use crate::say::say;
use crate::size::Size;
use anyhow::Context;
use pulse::Pulse;
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use store::Store;
use swap::supervisor::{HandOver, Service};
use ublk::{Buffers, Owner};

/// Stack size of a server's threads, in bytes.
const STACK: &str = "262144";

/// Stack size where memory is locked, and so resident. Threads use 20 KiB at most (measured, policy
/// and dictionaries included); a debug build uses several times as much.
const LOCKED_STACK: &str = if cfg!(debug_assertions) { STACK } else { "49152" };

/// Time limit of a trainer; the server waits for less.
const TRAINING: Duration = Duration::from_secs(630);

/// Clears `FD_CLOEXEC`, so that child processes inherit the descriptor.
pub(super) fn inheritable(fd: OwnedFd) -> anyhow::Result<OwnedFd> {
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    Ok(fd)
}

/// The file of the heap that a device's servers use one after the other. Only servers of swap stand
/// by for each other.
pub(super) fn heap(swap: bool) -> anyhow::Result<Option<OwnedFd>> {
    let file = swap.then(swap::heap::file).transpose().context("cannot make memory of a heap")?;
    file.map(inheritable).transpose()
}

pub(super) struct Serving {
    pub(super) plan: &'static Plan<'static>,
    /// Changes of the arguments by `platen device set`.
    pub(super) changes: Changes,
    pub(super) requests: Requests,
    pub(super) renewal: Option<Renewal>,
    /// Whether a server has hung in the accelerator's driver. Its successors use no accelerator:
    /// each would hang again, and the disk's users would wait each time.
    pub(super) in_software: bool,
    /// The last message about a server that does not serve.
    pub(super) trouble: RefCell<Option<String>>,
    /// Name and sockets, claimed once for all servers.
    pub(super) claims: Claims,
    pub(super) store: OwnedFd,
    /// Memory of the ublk disk's requests.
    pub(super) buffers: Option<OwnedFd>,
    /// Memory of the server's heap, where memory is locked.
    pub(super) heap: Option<OwnedFd>,
    pub(super) backing: Option<OwnedFd>,
    /// The backing file, if it was created for this device and no server has been ready yet.
    pub(super) new_backing: Option<NewFile>,
    /// Text of the policy's settings.
    pub(super) policy: Option<OwnedFd>,
    /// The heartbeats of a server's threads, and their memory for servers.
    pub(super) pulse: Pulse,
    pub(super) pulse_fd: OwnedFd,
    /// Readable after SIGUSR1: start the next server without a pause.
    pub(super) resume: OwnedFd,
    pub(super) manager: Manager,
    /// The owner of the ublk device.
    pub(super) owner: Owner,
    /// The ublk device, once it exists.
    pub(super) device: Option<u32>,
    /// The disk of the kernel's NBD client.
    pub(super) disk: Option<PathBuf>,
    /// The part of the ublk disk that has had swap areas.
    pub(super) covered: Covered,
    /// The process that attaches this disk. Unknown in a supervisor that another program has handed
    /// the device over to.
    pub(super) attacher: Option<u32>,
}

impl Serving {
    /// Creates everything that servers share.
    pub(super) fn new(
        plan: &'static Plan<'static>,
        changes: Changes,
        claims: Claims,
        policy: Option<&str>,
        resume: OwnedFd,
        manager: Manager,
        owner: Owner,
    ) -> anyhow::Result<Self> {
        let args = plan.args;
        let store = Store::create(plan.pages, plan.store_options())?;
        let share = |fd: BorrowedFd<'_>| inheritable(fd.try_clone_to_owned()?);
        let store_fd = share(store.fd()).context("cannot share the store with servers")?;
        let (backing, new_backing) = match backing::make(&plan.policy, &store, args.swap)? {
            Some((disk, new)) => {
                // Every server also holds the disk's lock.
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
        let heap = heap(args.swap)?;
        let disk = match (args.swap, args.ublk) {
            (true, false) => Some(swap::nbd::free_disk()?),
            _ => None,
        };
        let pulse_fd = Pulse::file().context("cannot make memory for signs of life")?;
        let pulse_fd = inheritable(pulse_fd)?;
        let pulse = Pulse::open(&pulse_fd).context("cannot map signs of life")?;
        Ok(Self {
            plan,
            changes,
            requests: requests(&claims)?,
            renewal: None,
            in_software: false,
            trouble: RefCell::new(None),
            claims,
            store: store_fd,
            buffers,
            heap,
            backing,
            new_backing,
            policy,
            pulse,
            pulse_fd,
            resume,
            manager,
            owner,
            device: None,
            disk,
            covered: Covered::default(),
            attacher: None,
        })
    }

    pub(super) fn disk(&self) -> Option<PathBuf> {
        self.device.map(ublk::disk).or_else(|| self.disk.clone())
    }

    fn helper(&self, task: SwapTask, disk: PathBuf) -> Command {
        let mut command = myself();
        command.args(["device", "swap-helper", task.word(), "--disk"]).arg(disk);
        if let (Some(_), Some(address)) = (&self.disk, &self.plan.args.nbd) {
            let connections = self.plan.swap_connections();
            command.arg("--socket").arg(address.path());
            // This process, whatever program it executes: see `Claims::make`.
            command.args(["--listener", &std::process::id().to_string()]);
            command.args(["--connections", &connections.to_string()]);
        }
        command
    }
}

/// This program, even if its file has been replaced. It sets its own name: see `device::run`.
fn myself() -> Command {
    program(OWN)
}

/// How long a helper may take to end after swapoff has run into its timeout.
const HELPER_ENDS: Duration = Duration::from_secs(10);

const OWN: &str = "/proc/self/exe";

fn program(path: &str) -> Command {
    let mut command = Command::new(path);
    command.arg0("platen");
    command
}

impl Serving {
    fn start(&self, standby: bool, replaces: bool) -> Command {
        self.command(None, &self.inherited(standby, replaces), &self.changes, self.plan)
    }

    /// The descriptors and names that a server inherits.
    pub(super) fn inherited(&self, standby: bool, replaces: bool) -> Inherited {
        let mut inherited = Inherited {
            store: self.store.as_raw_fd(),
            buffers: self.buffers.as_ref().map(AsRawFd::as_raw_fd),
            heap: self.heap.as_ref().map(AsRawFd::as_raw_fd),
            backing: self.backing.as_ref().map(AsRawFd::as_raw_fd),
            pulse: Some(self.pulse_fd.as_raw_fd()),
            policy: self.policy.as_ref().map(AsRawFd::as_raw_fd),
            device: self.device,
            disk: self.disk.as_ref().map(|disk| disk.display().to_string()),
            standby,
            replaces,
            in_software: self.in_software,
            ..Inherited::default()
        };
        self.claims.note(&mut inherited);
        inherited
    }

    /// The command that starts a server, of this program or of the program at `path`.
    pub(super) fn command(
        &self,
        path: Option<&str>,
        inherited: &Inherited,
        changes: &Changes,
        plan: &Plan<'_>,
    ) -> Command {
        let mut command = program(path.unwrap_or(OWN));
        command.args(arguments(changes)).arg("--inherited").arg(inherited.to_string());
        // The stack use of a QAT device's driver is unknown.
        let locked = plan.args.swap && plan.args.codec != codec::Codec::DeflateQz;
        command.env("RUST_MIN_STACK", if locked { LOCKED_STACK } else { STACK });
        command
    }
}

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
            let mut helper = self.helper(SwapTask::Detach, disk.clone());
            if let Err(error) = detach(&mut helper, disk) {
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
