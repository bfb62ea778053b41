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
pub(crate) fn run() -> anyhow::Result<()> {
    // Otherwise `ps` without arguments shows the last part of /proc/self/exe.
    let _ = rustix::thread::set_name(c"platen");
    let control = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    relay::keep(&UnixStream::from(control), say)
        .context("this command is for the use of platen itself")
}
