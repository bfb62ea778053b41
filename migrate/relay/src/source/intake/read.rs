//! One chunk of the bytes that a socket has.

use crate::sockets::wait_readable;
use rustix::fd::AsFd;
use rustix::net::{recv, RecvFlags};
use std::time::{Duration, Instant};

/// How long a chunk that is not full waits for more bytes: long enough for QEMU's next write (of
/// about 130 KB), short enough not to matter for a handshake.
const LINGER: Duration = Duration::from_millis(1);
/// The most that a chunk waits in all, when bytes arrive slowly.
const LINGER_TOTAL: Duration = Duration::from_millis(5);

/// Reads until `out` is full or the socket has no more bytes; returns 0 only at the socket's end.
/// `patient` tells for a number of bytes whether they wait for more.
pub(crate) fn read_chunk(
    socket: &impl AsFd,
    out: &mut [u8],
    patient: impl Fn(usize) -> bool,
) -> usize {
    let mut done = 0;
    let mut until = None;
    while done < out.len() {
        match recv(socket, &mut out[done..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => break,
            Ok((_, got)) => done += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if done == 0 => {
                wait_readable(socket, None);
            }
            Err(rustix::io::Errno::AGAIN) => {
                let now = Instant::now();
                let until = *until.get_or_insert(now + LINGER_TOTAL);
                let left = until.saturating_duration_since(now).min(LINGER);
                if !patient(done) || left.is_zero() || !wait_readable(socket, Some(left)) {
                    break;
                }
            }
            // A reset: QEMU has closed with bytes of the return path unread. This is an end too.
            Err(_) => break,
        }
    }
    done
}
