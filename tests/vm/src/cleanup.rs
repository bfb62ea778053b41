//! Undoes what the harness did to the machine, however the harness ends.
//!
//! Everything that outlives a function (a process group, a network namespace, a folder) is
//! registered here, and its owner has the [`Ticket`]. Dropping the ticket removes it from the list,
//! because the owner has undone it by then. [`undo_all`] undoes the rest; it runs on a panic, on
//! Ctrl-C and on SIGTERM.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::process::{kill_process_group, Pid, Signal};

/// Something that must not outlive the harness.
#[derive(Debug, Clone)]
pub enum Leftover {
    /// A process group, by its leader, which the harness has not yet waited for.
    Group(Pid),
    /// A network namespace, by name.
    Namespace(String),
    /// A folder and what is in it.
    Folder(PathBuf),
}

/// An entry in the list of things to undo, removed on drop.
#[derive(Debug)]
pub struct Ticket(u64);

static LEFTOVERS: Mutex<Vec<(u64, Leftover)>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Adds `leftover` to the list.
#[must_use = "dropping the ticket takes it off the list again"]
pub fn register(leftover: Leftover) -> Ticket {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner).push((id, leftover));
    Ticket(id)
}

impl Drop for Ticket {
    fn drop(&mut self) {
        LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner).retain(|(id, _)| *id != self.0);
    }
}

/// Undoes everything on the list, processes first, newest first.
pub fn undo_all() {
    let mut list = LEFTOVERS.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, leftover) in list.iter().rev() {
        if let Leftover::Group(pid) = leftover {
            // An error means that it is gone already.
            let _ = kill_process_group(*pid, Signal::KILL);
        }
    }
    for (_, leftover) in list.drain(..).rev() {
        match leftover {
            Leftover::Group(_) => {}
            Leftover::Namespace(name) => remove_namespace(&name),
            Leftover::Folder(path) => {
                // Best effort: the process is ending, and cannot report an error.
                let _ = std::fs::remove_dir_all(path);
            }
        }
    }
}

/// Deletes a network namespace and with it its end of the link; no error if there is none.
pub fn remove_namespace(name: &str) {
    let _ = Command::new("ip")
        .args(["netns", "del", name])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}

/// Makes [`undo_all`] run on a panic, on Ctrl-C and on SIGTERM. Call it once, from `main`.
///
/// # Errors
/// If a signal handler is installed already.
/// When a signal handler is installed already.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        eprintln!("\ninterrupted: stopping what was started");
        undo_all();
        std::process::exit(130);
    })?;
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        undo_all();
    }));
    Ok(())
}
