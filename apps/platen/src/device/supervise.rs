//! `platen device serve`: the supervisor. It holds the store, and keeps a server running on it.
//!
//! The server is this program again, with the same arguments and what it inherits. It is on its own
//! only when this process has been killed.

use super::args::ServeArgs;
use super::claims::Claims;
use super::control;
use super::plan::Plan;
use super::serving::Serving;
use super::settings_file;
use crate::say::{say, say_untaken};
use anyhow::Context;
use rustix::event::{eventfd, EventfdFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use swap::supervisor::{supervise, SuperviseError};

/// Bytes of the stack of a server's threads.
const STACK: &str = "262144";

/// The same where all of it is locked, and with that in memory. Threads were measured to use 24 KiB
/// at most, those of the policy included; a debug build uses several times as much.
const LOCKED_STACK: &str = if cfg!(debug_assertions) { STACK } else { "65536" };

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    // The only place where the file is read: servers get this text, whatever happens to the file.
    let text = settings_file::of(args)?;
    let plan = Plan::new(args, text.as_deref())?;
    for key in plan.policy.without_effect() {
        say(&format!("policy: {key} says nothing without backing_dev: nothing is written back"));
    }
    control::check(args)?;
    // Before there is a thread that the signal could end.
    let resume = swap::resume_signal().context("cannot take SIGUSR1")?;
    let (_cgroup, manager) = prepare(args)?;
    // First what another device may have already.
    let claims = Claims::make(args)?;
    claims.hand_on()?;
    let mut service = Serving::new(&plan, claims, text.as_deref(), resume, manager)?;
    let stop = stop_on_signal()?;
    if args.swap {
        say_untaken(swap::own());
    }
    let result = supervise(&mut service, stop.as_fd());
    if matches!(result, Err(SuperviseError::Io { .. })) {
        // A server may continue: the sockets that it listens on are its own from now on.
        std::mem::forget(service.claims);
    }
    result.with_context(|| format!("device {}", args.name))
}

/// Precautions and environment that this process and all that it starts have in common. Called
/// while there is one thread. The service manager is this process's alone.
fn prepare(args: &ServeArgs) -> anyhow::Result<(Option<Cgroup>, Manager)> {
    swap::ignore_size_signal()?;
    if args.swap {
        swap::ignore_terminal()?;
    }
    let cgroup = args.swap.then_some(Cgroup);
    if args.swap {
        say_untaken(swap::inherited());
    }
    let notify = std::env::var("NOTIFY_SOCKET").ok();
    let watched = std::env::var_os("WATCHDOG_USEC").is_some();
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        std::env::remove_var(name);
    }
    // How much stack the driver of a QAT device uses is not known.
    let locked = args.swap && args.codec != codec::Codec::DeflateQz;
    std::env::set_var("RUST_MIN_STACK", if locked { LOCKED_STACK } else { STACK });
    for (name, value) in swap::KEEPING {
        std::env::set_var(name, value);
    }
    Ok((cgroup, Manager { notify, watched }))
}

/// What the environment says of the service manager.
pub(super) struct Manager {
    /// Its socket.
    pub(super) notify: Option<String>,
    /// Whether it expects a message each second.
    pub(super) watched: bool,
}

/// A descriptor that becomes readable when a signal asks this process to exit.
fn stop_on_signal() -> anyhow::Result<Arc<OwnedFd>> {
    let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let stop = Arc::new(stop.context("cannot make an eventfd")?);
    let asked = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        // Full only after 2^64 signals.
        let _ = rustix::io::write(&asked, &1_u64.to_ne_bytes());
    })
    .context("cannot handle signals")?;
    Ok(stop)
}

/// The cgroup that [`swap::inherited`] makes, left whichever way this ends.
struct Cgroup;

impl Drop for Cgroup {
    fn drop(&mut self) {
        swap::leave_cgroup();
    }
}
