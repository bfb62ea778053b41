//! `platen device train`: trains a dictionary for a server, in a process of its own. The supervisor
//! starts it, and kills it if it takes long. Its result is not trusted.
//!
//! The process shares nothing with server and supervisor that it could hold while it waits for
//! memory. Standard output is its end of a socket pair; standard input and error are `/dev/null`,
//! because a log that is a pipe has one lock for all writers. The supervisor reports an exit status
//! other than 0.

use crate::say::say;
use anyhow::Context;
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Limit of the address space, in bytes: training takes some 30 MiB, the program itself the rest.
const MEMORY: u64 = 512 << 20;

/// Limit of CPU time, in seconds: training takes about one.
const CPU: u64 = 60;

/// Timeout for a silent server. A closed connection is noticed at once.
const PATIENCE: Duration = Duration::from_secs(600);

pub(crate) fn run() -> anyhow::Result<()> {
    for untaken in swap::apart(MEMORY, CPU) {
        say(&format!("{:#}", anyhow::Error::from(untaken)));
    }
    // No other process is started here, and no other descriptor is open.
    let channel = rustix::stdio::stdout().try_clone_to_owned()?;
    for which in [Timeout::Recv, Timeout::Send] {
        let set = set_socket_timeout(&channel, which, Some(PATIENCE));
        set.context("standard output is no socket")?;
    }
    policy::train(&mut UnixStream::from(channel)).context("cannot train")
}
