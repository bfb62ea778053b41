//! `platen device serve`: the supervisor. It holds the store, and keeps a server running on it.
//!
//! The server is this program again, with the same arguments and what it inherits. It is on its own
//! only when this process has been killed.

use super::args::{Inherited, ServeArgs, SwapTask};
use super::backing::{self, NewFile};
use super::claims::Claims;
use super::control;
use super::offload;
use super::settings_file;
use crate::say::{say, say_untaken};
use crate::size::Size;
use anyhow::{ensure, Context};
use device::PAGE;
use rustix::event::{eventfd, EventfdFlags};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use swap::supervisor::{supervise, Service, SuperviseError};
use ublk::Buffers;

/// Bytes of the stack of a server's threads.
const STACK: &str = "262144";

/// The same where all of it is locked, and with that in memory. Threads were measured to use 24 KiB
/// at most, those of the policy included; a debug build uses several times as much.
const LOCKED_STACK: &str = if cfg!(debug_assertions) { STACK } else { "65536" };

/// How long a trainer may take: the server waits for less.
const TRAINING: Duration = Duration::from_secs(150);

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let pages = pages(args)?;
    // Read here and nowhere else: servers get the text, and not what has become of the file
    // meanwhile.
    let text = settings_text(args)?;
    let idle = settings(args, text.as_deref())?;
    for key in idle.without_effect() {
        say(&format!("policy: {key} says nothing without backing_dev: nothing is written back"));
    }
    // A server would say it too, but later.
    offload::check(args)?;
    control::check(args)?;
    // Here, and in all that is started from here.
    swap::ignore_size_signal()?;
    if args.swap {
        swap::ignore_terminal()?;
    }
    // While there is one thread: children and threads have them from here.
    let _cgroup = args.swap.then_some(Cgroup);
    if args.swap {
        say_untaken(swap::inherited());
    }
    // Nobody else reads the environment yet.
    // What a driver of a QAT device takes is not known.
    let locked = args.swap && args.codec != codec::Codec::DeflateQz;
    std::env::set_var("RUST_MIN_STACK", if locked { LOCKED_STACK } else { STACK });
    for (name, value) in swap::KEEPING {
        std::env::set_var(name, value);
    }

    // What others may have already.
    let claims = Claims::make(args)?;
    claims.hand_on()?;
    let store = Store::create(pages, store_options(args))?;
    let share = |fd: BorrowedFd<'_>| inheritable(fd.try_clone_to_owned()?);
    let store_fd = share(store.fd()).context("cannot share the store with servers")?;
    let (backing, new_backing) = match backing::make(&idle, &store, args.swap)? {
        Some((disk, new)) => {
            // Its lock goes with it to all servers.
            let disk = share(disk.fd()).context("cannot share the backing device with servers")?;
            (Some(disk), Some(new))
        }
        None => (None, None),
    };
    drop(store);
    let policy = text.map(|text| policy_file(&text).and_then(inheritable)).transpose();
    let policy = policy.context("cannot share the policy's settings with servers")?;
    let buffers = args.ublk.then(|| Buffers::file(&ublk_options(args).geometry)).transpose();
    let buffers = buffers.context("cannot make the buffers of the ublk disk")?;
    let buffers = buffers.map(inheritable).transpose()?;
    let disk = match (args.swap, args.ublk) {
        (true, false) => Some(swap::nbd::free_disk()?),
        _ => None,
    };
    let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let stop = Arc::new(stop.context("cannot make an eventfd")?);
    let asked = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        // Full only when it was asked 2^64 times.
        let _ = rustix::io::write(&asked, &1_u64.to_ne_bytes());
    })
    .context("cannot handle signals")?;
    if args.swap {
        say_untaken(swap::own());
    }
    let trains = trains(args, &idle);
    let mut service = Serving {
        args,
        claims,
        store: store_fd,
        buffers,
        backing,
        new_backing,
        policy,
        trains,
        device: None,
        disk,
    };
    let result = supervise(&mut service, std::os::fd::AsFd::as_fd(&*stop));
    if matches!(result, Err(SuperviseError::Io { .. })) {
        // There may be a server that goes on: what it listens on is its own from here.
        std::mem::forget(service.claims);
    }
    result.with_context(|| format!("device {}", args.name))
}

/// The cgroup that [`swap::inherited`] makes, left whichever way this ends.
struct Cgroup;

impl Drop for Cgroup {
    fn drop(&mut self) {
        swap::leave_cgroup();
    }
}

/// How many pages the device of these arguments has.
pub(super) fn pages(args: &ServeArgs) -> anyhow::Result<u64> {
    let (Size(size), page) = (args.size, PAGE as u64);
    ensure!(
        size > 0 && size.is_multiple_of(page),
        "--size: {size} bytes are not a number of pages of {page} bytes"
    );
    let most = store::max_pages() * page;
    ensure!(
        size <= most,
        "--size: {size} bytes are more than a device can have, {most} ({})",
        Size(most)
    );
    Ok(size / page)
}

/// What is to become of idle pages: what the supervisor has read, or without one what the file
/// says.
pub(super) fn policy_settings(
    args: &ServeArgs,
    inherited: Option<&Inherited>,
) -> anyhow::Result<policy::Settings> {
    let text = match inherited {
        None => settings_text(args)?,
        Some(inherited) => inherited.policy.map(left_text).transpose()?,
    };
    settings(args, text.as_deref())
}

fn settings(args: &ServeArgs, text: Option<&str>) -> anyhow::Result<policy::Settings> {
    let Some(text) = text else { return Ok(policy::Settings::default()) };
    let name = args.policy.as_deref().unwrap_or(Path::new("policy")).display();
    policy::Settings::read(text).with_context(|| name.to_string())
}

fn settings_text(args: &ServeArgs) -> anyhow::Result<Option<String>> {
    args.policy.as_deref().map(settings_file::read).transpose()
}

/// A file in memory with the settings.
fn policy_file(text: &str) -> anyhow::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("policy", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(text.as_bytes())?;
    Ok(file.into())
}

/// The text in a descriptor that a supervisor has left.
fn left_text(number: i32) -> anyhow::Result<String> {
    let file = std::fs::File::from(super::serve::descriptor(number)?);
    settings_file::bounded(file).context("cannot read the policy's settings")
}

/// Whether dictionaries are trained, where there is a supervisor.
///
/// Also while the host swaps to the disk: nobody waits there for what a trainer holds. The trainer
/// may wait for memory, for the very disk, for ever. The server waits for nobody's word, and shares
/// no lock with it (`policy/channel.rs`); the supervisor starts it while memory is not short, as it
/// starts everything else, and never waits for its end. It is the first to be killed for memory,
/// and has no more than it is allowed. Its memory is not locked, and is its own process's: all of
/// it comes back when that ends.
pub(super) fn trains(args: &ServeArgs, idle: &policy::Settings) -> bool {
    args.codec == codec::Codec::Zstd && idle.trains()
}

/// Connections that the kernel's NBD client is given: one for each CPU that may ask at once.
pub(super) fn swap_connections(args: &ServeArgs) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    cpus.min(usize::from(args.connections))
}

/// What the store of these arguments may have.
pub(super) fn store_options(args: &ServeArgs) -> store::Options {
    let mut options = store::Options::default();
    if let Some(Size(limit)) = args.mem_limit {
        options.mem_limit = limit;
    }
    match (args.reserve, args.swap) {
        (Some(Size(reserve)), _) => options.reserve = reserve,
        (None, true) => options.reserve = share_of_memory(16, 8 << 20, 512 << 20),
        (None, false) => {}
    }
    if args.swap {
        // The kernel keeps a page that cannot be written and tries others; whoever reads waits
        // behind us.
        options.patience = Duration::from_millis(50);
    }
    options
}

/// The ublk device of these arguments.
pub(super) fn ublk_options(args: &ServeArgs) -> ublk::Options {
    let Size(size) = args.size;
    let budget = args
        .buffers
        .map_or_else(|| share_of_memory(128, 1 << 20, 256 << 20), |Size(budget)| budget);
    let mut options = ublk::Options::new(size / PAGE as u64, args.queues, budget);
    // A command that takes longer has met a bug of the kernel's: somebody should hear of it.
    options.timeout = Duration::from_secs(60);
    options
}

/// A part of the machine's memory, `least` to `most`.
fn share_of_memory(part: u64, least: u64, most: u64) -> u64 {
    let info = rustix::system::sysinfo();
    let unit = u64::from(info.mem_unit.max(1));
    (info.totalram.saturating_mul(unit) / part).clamp(least, most)
}

/// A descriptor that what is started from here has as well.
fn inheritable(fd: OwnedFd) -> anyhow::Result<OwnedFd> {
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    Ok(fd)
}

struct Serving<'a> {
    args: &'a ServeArgs,
    /// What no server after the first may have to get again.
    claims: Claims,
    store: OwnedFd,
    buffers: Option<OwnedFd>,
    /// What pages are written back to.
    backing: Option<OwnedFd>,
    /// Its file, if it was made for this device, as long as no server has come up.
    new_backing: Option<NewFile>,
    /// The text of the policy's settings.
    policy: Option<OwnedFd>,
    /// Dictionaries are.
    trains: bool,
    /// The ublk device, once there is one.
    device: Option<u32>,
    /// The disk of the kernel's NBD client.
    disk: Option<PathBuf>,
}

impl Serving<'_> {
    fn disk(&self) -> Option<PathBuf> {
        self.device.map(ublk::disk).or_else(|| self.disk.clone())
    }

    fn helper(&self, task: SwapTask, disk: PathBuf) -> Command {
        let mut command = myself();
        command.args(["device", "swap-helper", task.word(), "--disk"]).arg(disk);
        if let (Some(_), Some(address)) = (&self.disk, &self.args.nbd) {
            let connections = swap_connections(self.args);
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
        self.args.swap.then(|| self.start(true, true))
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
        let disk = self.disk().filter(|_| self.args.swap)?;
        if replaces {
            // The kernel has kept the ublk disk, and waits for the NBD client.
            return self.disk.is_some().then(|| self.helper(SwapTask::Again, disk));
        }
        let mut command = self.helper(SwapTask::On, disk);
        command.args(["--priority", &self.args.swap_priority.to_string()]);
        command.args(["--pids", &format!("{pid},{}", std::process::id())]);
        Some(command)
    }

    fn down(&mut self) -> Option<Command> {
        let disk = self.disk().filter(|_| self.args.swap)?;
        Some(self.helper(SwapTask::Off, disk))
    }

    fn down_limit(&self) -> Duration {
        Duration::from_secs(self.args.swapoff_timeout)
    }

    fn ready_limit(&self) -> Duration {
        // Taking a store over takes 0.03 s for a GiB; a second where every object has to be asked
        // what is true.
        let Size(size) = self.args.size;
        Duration::from_secs(60 + (size >> 30))
    }

    fn train(&mut self, channel: OwnedFd) -> Option<(Command, Duration)> {
        if !self.trains {
            return None;
        }
        let mut command = myself();
        command.args(["device", "train"]).stdout(Stdio::from(channel));
        // Not our log, which may be a pipe: who writes to one may have to wait for memory, with its
        // lock.
        command.stderr(Stdio::null());
        Some((command, TRAINING))
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
        say(&format!("{}: {line}", self.args.name));
    }
}
