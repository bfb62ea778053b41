//! The helper process of a source relay that outlives it (`relay::Keeper`).

use crate::say::say;
use anyhow::Context;
use relay::Keeper;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Starts the helper, from this same program.
pub(crate) fn start() -> anyhow::Result<Keeper> {
    // `ps` shows the name, not the path by which the program was found.
    Keeper::spawn(Command::new("/proc/self/exe").arg0("platen").arg("keep"))
        .context("cannot start the process that keeps QEMU's socket open should this one be killed")
}

/// Runs as the helper.
///
/// A service manager that stops the relay's unit sends its signal to every process of it. While the
/// relay lives it decides, so the helper drops such signals; afterwards they end it.
pub(crate) fn run() -> anyhow::Result<()> {
    // Otherwise `ps` without arguments shows the last part of /proc/self/exe.
    let _ = rustix::thread::set_name(c"platen");
    let control = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let signals = swap::end_signals().context("cannot block signals")?;
    let notice = |text: &str| {
        // Signals for the relay are dropped. A read from a signalfd takes 128 bytes for a signal.
        while matches!(rustix::io::read(&signals, &mut [0; 128]), Ok(1..)) {}
        if let Err(untaken) = swap::unblock_end_signals() {
            say(&format!("{:#}", anyhow::Error::from(untaken)));
        }
        say(text);
    };
    relay::keep(&UnixStream::from(control), notice)
        .context("this command is for the use of platen itself")
}
