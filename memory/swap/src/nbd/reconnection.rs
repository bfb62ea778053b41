//! The progress of giving a disk new connections in the place of dead ones.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::handshake::greeted;
use super::netlink::ENOSPC;

/// How long requests wait for a new server.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// The pause before a failed attempt to reconnect is repeated.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// The pause before the kernel is asked again whether it has found a connection dead.
pub(super) const SOON: Duration = Duration::from_millis(10);

/// How often the kernel is asked whether it has found a connection of the dead server dead. A
/// connection that it has not taken by then is one more than it had. The asks take 10 s or more.
/// They are counted, because a thread that gets no CPU for 10 s has asked once.
const DEAD: u32 = 1000;

/// The progress of [`reconnect`](super::reconnect). A repeated attempt goes on where the last one
/// failed: to the server, a connection that ends is one that the kernel has given up.
pub(super) struct Reconnection<'a> {
    connect: &'a dyn Fn() -> io::Result<UnixStream>,
    /// Connections that the kernel has not taken yet.
    pub(super) left: usize,
    /// As many connections after their handshakes.
    pending: VecDeque<UnixStream>,
    /// Whether the kernel has taken any.
    pub(super) some: bool,
    /// Requests since the kernel took the last one.
    asks: u32,
    /// When all began.
    since: Instant,
}

impl<'a> Reconnection<'a> {
    pub(super) fn new(connect: &'a dyn Fn() -> io::Result<UnixStream>, connections: usize) -> Self {
        let left = connections.max(1);
        let pending = VecDeque::with_capacity(left);
        Self { connect, left, pending, some: false, asks: 0, since: Instant::now() }
    }

    /// Makes the connections that are left.
    pub(super) fn dial(&mut self) -> io::Result<()> {
        while self.pending.len() < self.left {
            self.pending.push_back(greeted((self.connect)()?)?.0);
        }
        Ok(())
    }

    /// Passes connections to the kernel by `give`, one at a time: each replaces one that the kernel
    /// has found dead.
    pub(super) fn attempt(
        &mut self,
        stop: &impl Fn() -> bool,
        give: &mut dyn FnMut(&UnixStream) -> io::Result<()>,
    ) -> io::Result<()> {
        while !stop() {
            let Some(pending) = self.pending.front() else { break };
            let given = give(pending);
            self.asks = self.asks.saturating_add(1);
            // This is checked after an error too, since the answer alone may be lost. A connection
            // that is passed twice would have two readers.
            if is_taken(pending) {
                self.pending.pop_front();
                self.left -= 1;
                (self.some, self.asks) = (true, 0);
                continue;
            }
            match given {
                Err(error) if error.raw_os_error() != Some(ENOSPC) => return Err(error),
                _ if self.asks < DEAD => std::thread::sleep(SOON),
                _ if !self.some && self.since.elapsed() < PATIENCE => std::thread::sleep(AGAIN),
                _ => {
                    // They stay open, since the server would take their end for a lost client.
                    self.pending.drain(..).for_each(std::mem::forget);
                    self.left = 0;
                }
            }
        }
        Ok(())
    }
}

/// Whether the kernel has taken a connection. The kernel reports success also if it has not,
/// because no dead connection was there to replace (`nbd_genl_reconfigure`). When it takes a
/// connection, it sets the disk's [`TIMEOUT`](super::TIMEOUT) as the time limit of sends, which
/// nobody else does.
fn is_taken(stream: &UnixStream) -> bool {
    matches!(stream.write_timeout(), Ok(Some(_)))
}
