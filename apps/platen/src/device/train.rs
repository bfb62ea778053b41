//! `platen device train`: the process that trains a dictionary for a server. Its supervisor starts
//! it, and kills it when it takes long; what it makes is read with suspicion.
//!
//! It has nothing in common with server and supervisor that it could hold while it waits for
//! memory: standard output is its end of a pair of sockets, the other two are `/dev/null` (a log
//! that is a pipe has one lock for all who write to it). How it ended is its status, which the
//! supervisor says when it is not 0.

use crate::say::say;
use anyhow::Context;
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Address space that it may take: training takes some 30 MiB, this program's own the rest.
const MEMORY: u64 = 512 << 20;

/// Seconds of CPU: it takes about one.
const CPU: u64 = 60;

/// How long it waits for a server that says nothing. One that is gone is heard at once.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn run() -> anyhow::Result<()> {
    for untaken in swap::apart(MEMORY, CPU) {
        say(&format!("{:#}", anyhow::Error::from(untaken)));
    }
    // Where nothing else is started with it, and nothing but this is open.
    let channel = rustix::stdio::stdout().try_clone_to_owned()?;
    for which in [Timeout::Recv, Timeout::Send] {
        let set = set_socket_timeout(&channel, which, Some(PATIENCE));
        set.context("standard output is no socket")?;
    }
    policy::train(&mut UnixStream::from(channel)).context("cannot train")
}
