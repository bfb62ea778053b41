//! `platen device serve`: the supervisor. It holds the store, and keeps a server running on it.
//!
//! The server is this program with the same arguments and its inherited descriptors. It runs
//! without a supervisor only when this process has been killed.

use super::args::ServeArgs;
use super::claims::Claims;
use super::control;
use super::manager::Manager;
use super::owner;
use super::plan::Plan;
use super::serving::Serving;
use super::settings_file;
use crate::say::{say, say_by_a_thread, say_untaken};
use anyhow::Context;
use std::os::fd::AsFd;
use swap::supervisor::{resume_hand_over, supervise, SuperviseError};
use ublk::Owner;

pub(crate) fn run(args: &'static ServeArgs) -> anyhow::Result<()> {
    // The only place that reads the file: servers get this text, whatever happens to the file.
    // After `execve` the text is inherited too.
    let adopt = args.adopt.as_ref();
    let text = match adopt {
        None => settings_file::of(args)?,
        Some(handed) => settings_file::inherited(&handed.inherited)?,
    };
    let plan = Box::leak(Box::new(Plan::new(args, text.as_deref())?));
    if adopt.is_none() {
        plan.check_threads()?;
    }
    for key in plan.policy.without_effect() {
        say(&format!("policy: {key} has no effect without backing_dev: nothing is written back"));
    }
    control::check(args)?;
    // Before there is a thread that a signal could end.
    let resume = swap::resume_signal().context("cannot take SIGUSR1")?;
    let stop = swap::end_signals().context("cannot take SIGTERM")?;
    let (_cgroup, manager, owner) = prepare(args)?;
    if args.swap && adopt.is_some() {
        say_untaken(swap::own());
    }
    // First the resources that another device may hold.
    let claims = match adopt {
        None => Claims::make(args, true)?,
        Some(handed) => Claims::adopt(args, handed)?,
    };
    if adopt.is_none() {
        claims.succeed(args.ublk.then_some(owner))?;
    }
    claims.hand_on()?;
    let changes = args.changed.clone().unwrap_or_default();
    let mut service = match adopt {
        None => Serving::new(plan, changes, claims, text.as_deref(), resume, manager, owner)?,
        Some(handed) => Serving::adopt(plan, changes, claims, handed, resume, manager, owner)?,
    };
    if args.swap && adopt.is_none() {
        say_untaken(swap::own());
    }
    if args.swap {
        say_untaken(swap::prefer_alone().err());
    }
    say_by_a_thread();
    let result = match adopt {
        None => supervise(&mut service, stop.as_fd()),
        Some(handed) => {
            let adopted = service.adopted(handed)?;
            resume_hand_over(&mut service, stop.as_fd(), adopted)
        }
    };
    if matches!(result, Err(SuperviseError::Io { .. })) {
        // A server may continue to run, and then it owns the sockets.
        std::mem::forget(service.claims);
    }
    result.with_context(|| format!("device {}", args.name))
}

/// Takes the precautions and sets the environment that all processes of the device share. Must be
/// called while there is one thread. The service manager's variables are for this process alone.
fn prepare(args: &ServeArgs) -> anyhow::Result<(Option<Cgroup>, Manager, Owner)> {
    swap::ignore_size_signal()?;
    if args.swap {
        swap::ignore_terminal()?;
        // Threads of a server that takes over then need no memory beside their stacks.
        say_untaken(swap::ignore_faults().err());
    }
    let cgroup = args.swap.then_some(Cgroup);
    // They persist across `execve`.
    if args.swap && args.adopt.is_none() {
        say_untaken(swap::inherited());
    }
    let notify = std::env::var("NOTIFY_SOCKET").ok();
    let watched = std::env::var_os("WATCHDOG_USEC").is_some();
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        std::env::remove_var(name);
    }
    for (name, value) in swap::KEEPING {
        std::env::set_var(name, value);
    }
    let owner = owner::of_supervisor(args.adopt.is_some());
    Ok((cgroup, Manager { notify, watched }, owner))
}

/// The cgroup that [`swap::inherited`] makes; dropping this leaves it.
struct Cgroup;

impl Drop for Cgroup {
    fn drop(&mut self) {
        swap::leave_cgroup();
    }
}
