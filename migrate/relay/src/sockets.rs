//! The state of QEMU's connections, by poll(2).

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
use std::time::{Duration, Instant};

/// The longest time of [`drop_waiting`].
const DROPS: Duration = Duration::from_millis(20);

/// How long a source QEMU without a return path, which has written its last byte, may take to close
/// its main connection after the destination QEMU has closed. A stopped source takes longer than a
/// busy one.
pub(crate) const LAST_EOF: Duration = Duration::from_secs(60);

/// Waits until `socket` is readable or at its end; false when `timeout` passes first.
pub(crate) fn wait_readable(socket: &impl AsFd, timeout: Option<Duration>) -> bool {
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(n) if n > 0)
}

/// Whether QEMU has its end open at this moment. Bytes that it wrote before may still be unread.
pub(crate) fn is_open(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN | PollFlags::RDHUP)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    !fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

/// Reads and drops the bytes that wait in `socket`, and those that come meanwhile.
pub(crate) fn drop_waiting(socket: &impl AsFd) {
    let (until, mut bytes) = (Instant::now() + DROPS, vec![0; 64 << 10]);
    while Instant::now() < until {
        match recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, 1..)) | Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}
