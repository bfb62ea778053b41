//! Helper processes for swapon, swapoff and the kernel's NBD client: work that may take long or be
//! killed.

use super::args::{SwapHelperArgs, SwapTask};
use super::detach::{detach, detach_at_end};
use crate::say::say;
use anyhow::{bail, ensure, Context};
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use swap::supervisor::NOT_BEGUN;
use swap::{area, Subject};

pub(crate) fn run(args: &SwapHelperArgs) -> anyhow::Result<ExitCode> {
    swap::close_inherited()?;
    // A half-finished swapon or swapoff is worse than a finished one.
    swap::ignore_signals()?;
    let disk = args.disk.as_path();
    match args.task {
        SwapTask::On => on(args, disk),
        SwapTask::Grow => {
            grow(disk);
            Ok(ExitCode::SUCCESS)
        }
        SwapTask::Off => off(args, disk).map(|()| ExitCode::SUCCESS),
        SwapTask::Detach => {
            let detached = swap::nbd::detach(disk);
            detached.with_context(|| format!("cannot detach {}", disk.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn on(args: &SwapHelperArgs, disk: &Path) -> anyhow::Result<ExitCode> {
    if let Some(socket) = &args.socket {
        if let Err(error) = swap::nbd::limit_requests(disk, nbd::MAX_SIMPLE_READ) {
            say(&format!("cannot limit the requests to {}: {error}", disk.display()));
        }
        let attached = swap::nbd::attach(socket, args.listener, disk, args.connections);
        if let Err(error) = attached {
            say(&format!("cannot attach {}: {error}", disk.display()));
            // Then another device has attached it since its number was chosen, and swaps to it.
            let others = error.kind() == ErrorKind::ResourceBusy;
            return Ok(if others { NOT_BEGUN.into() } else { ExitCode::FAILURE });
        }
    }
    let begun = area::begin(disk, args.priority)
        .with_context(|| format!("cannot swap to {}", disk.display()));
    if begun.is_err() && args.socket.is_some() {
        if let Err(error) = detach(disk) {
            say(&error.to_string());
        }
    }
    let areas = begun?;
    let used = area::in_use(disk)?;
    ensure!(used.is_some(), "{} was made swap, and is not in /proc/swaps", disk.display());
    say(&match areas {
        1 => format!("swapping to {} with priority {}", disk.display(), args.priority),
        _ => format!(
            "swapping to {} in {areas} areas with priorities from {} down",
            disk.display(),
            args.priority
        ),
    });
    for item in swap::check(&Subject {
        pids: &args.pids,
        disk: Some(disk),
        memory: None,
        keeper: store::Keeper::THREAD,
    }) {
        say(&item.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// Swaps to the rest of a disk that has grown. A failure is reported and not retried: the present
/// areas remain in use.
fn grow(disk: &Path) {
    match area::extend(disk) {
        Ok(areas) => say(&format!("swapping to {} in {areas} areas more", disk.display())),
        Err(error) => say(&format!("no further swap area on {}: {error}", disk.display())),
    }
}

fn off(args: &SwapHelperArgs, disk: &Path) -> anyhow::Result<()> {
    // This process may be swapped out, swap out pages and be killed like any other, because nothing
    // depends on it. Inherited precautions that cannot be undone do no harm.
    let _ = rustix::process::configure_io_flusher_behavior(false);
    let _ = std::fs::write("/proc/self/oom_score_adj", "0");
    if let (Some(_), Some(helper)) = (&args.socket, args.attached_by) {
        // A helper of the start that was killed may have attached nothing.
        if !swap::nbd::is_attached_by(disk, helper) {
            say(&format!("this device has not attached {}: leaving it alone", disk.display()));
            return Ok(());
        }
    }
    let before = area::in_use(disk)?;
    if let Some(used) = &before {
        say(&format!("taking {} MiB back from {}", used.used_kib >> 10, disk.display()));
        let watched = disk.to_owned();
        let report = move || loop {
            std::thread::sleep(Duration::from_secs(5));
            if let Ok(Some(used)) = area::in_use(&watched) {
                say(&format!("{} MiB left", used.used_kib >> 10));
            }
        };
        // This thread ends with the process. Where memory is too short for it, swapoff is what
        // matters.
        let _ = std::thread::Builder::new().name("progress".into()).spawn(report);
        let deadline = Instant::now() + Duration::from_secs(args.timeout);
        area::off::off(disk, deadline)
            .with_context(|| format!("cannot take all back from {}", disk.display()))?;
    }
    if area::in_use(disk)?.is_some() {
        bail!("{} is still swapped to", disk.display());
    }
    if args.socket.is_some() {
        let detached = detach_at_end(disk);
        // After a failed start there may be nothing to detach.
        if before.is_some() {
            detached?;
        }
    }
    Ok(())
}
