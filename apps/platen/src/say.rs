//! What platen says to a person. Nobody may be there to hear it: neither a pipe that is full, nor a terminal that has
//! gone, may hold up or end a process that a VM or a disk needs (the macros of `std` wait, and panic).

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::io::{self, ErrorKind, Write};

/// Says a line on standard error, or leaves it out when nobody takes it just now: whoever is to read it may be
/// swapped out to the very disk that waits for us, or has stopped the terminal.
pub(crate) fn say(line: &str) {
    let stderr = rustix::stdio::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0) {
        // Nobody to tell that nobody listens.
        let _ = rustix::io::write(stderr, format!("platen: {line}\n").as_bytes());
    }
}

/// Writes what a command was asked for to standard output. Who has closed it has seen enough: that is no error.
///
/// # Errors
///
/// It cannot be written.
pub(crate) fn show(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to standard output"))
        }
        _ => Ok(()),
    }
}
