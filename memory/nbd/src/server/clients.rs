//! Open connections, as other threads see them: to end them, and to find those that the kernel's
//! client has given up.

use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// Open connections, so that other threads can end them.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub(super) streams: HashMap<u64, Client>,
    pub(super) stopped: bool,
    /// Connections of [`Server::dial`](super::Server::dial) that have no thread yet.
    pub(super) dialled: VecDeque<UnixStream>,
    /// How many of those connections have yet to get their memory before others are accepted.
    pub(super) awaited: usize,
}

/// A copy of a connection's socket.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) stream: UnixStream,
    /// Whether the connection is served with simple replies only.
    pub(super) simple: bool,
    /// Whether the server has made the connection itself.
    pub(super) dialled: bool,
}

impl Open {
    /// Connections with simple replies, except `but`, that their client has given up and whose
    /// threads are not done.
    pub(super) fn given_up(&self, but: Option<u64>) -> impl Iterator<Item = u64> + '_ {
        self.streams
            .iter()
            .filter(move |(&number, client)| Some(number) != but && client.simple)
            .filter(|(_, client)| hung_up(&client.stream, Duration::ZERO))
            .map(|(&number, _)| number)
    }
}

/// Whether the peer is shut down in both directions, waiting for up to `wait`.
pub(crate) fn hung_up(stream: &UnixStream, wait: Duration) -> bool {
    let wait = Timespec::try_from(wait).ok();
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut fds, wait.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}
