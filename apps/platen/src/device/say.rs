//! Lines for a person, from processes that must not wait for one.

use rustix::event::{poll, PollFd, PollFlags, Timespec};

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
