//! The service of `platen device serve` for its supervisor: store, disk, and the commands of
//! servers and helpers.

mod service;

use super::args::SwapTask;
use super::backing::{self, NewFile};
use super::changes::Changes;
use super::claims::Claims;
use super::covered::Covered;
use super::inherited::Inherited;
use super::manager::Manager;
use super::pending::{arguments, requests, Renewal};
use super::plan::Plan;
use super::requests::Requests;
use super::settings_file;
use anyhow::Context;
use pulse::Pulse;
use std::cell::RefCell;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use store::Store;
use ublk::{Buffers, Owner};

/// Stack size of a server's threads, in bytes.
const STACK: &str = "262144";

/// Stack size where memory is locked, and so resident. Threads use 20 KiB at most (measured, policy
/// and dictionaries included); a debug build uses several times as much.
const LOCKED_STACK: &str = if cfg!(debug_assertions) { STACK } else { "49152" };

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
pub(super) fn myself() -> Command {
    program(OWN)
}

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
