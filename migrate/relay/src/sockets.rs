//! What poll(2) says of a connection of QEMU.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Waits until `socket` is readable or ended; false when `timeout` is over first.
pub(crate) fn wait_readable(socket: &UnixStream, timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    });
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(n) if n > 0)
}

/// Whether QEMU still has its end open, now, with everything it wrote read or readable.
pub(crate) fn is_open(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN | PollFlags::RDHUP)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    !fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}
