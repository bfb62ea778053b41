//! Open connections, as other threads see them: to end them, and to find those that the kernel's
//! client has given up.

use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::sockopt::socket_peercred;

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
    /// Whether it is one of the kernel's client that [`attacher`](super::ServerOptions::attacher)
    /// tells of.
    pub(super) kernel: bool,
}

impl Open {
    /// Connections with simple replies, of the kernel's client or of others, except `but`.
    pub(super) fn simple(
        &self,
        kernel: bool,
        but: Option<u64>,
    ) -> impl Iterator<Item = (u64, &Client)> {
        let all = self.streams.iter().map(|(&number, client)| (number, client));
        all.filter(move |(number, client)| {
            client.simple && client.kernel == kernel && Some(*number) != but
        })
    }

    /// Those of them that their client has given up and whose threads are not done.
    pub(super) fn given_up(
        &self,
        kernel: bool,
        but: Option<u64>,
    ) -> impl Iterator<Item = u64> + '_ {
        self.simple(kernel, but)
            .filter(|(_, client)| hung_up(&client.stream, Duration::ZERO))
            .map(|(number, _)| number)
    }
}

/// Whether a child of the process `parent` has made the connection, and lives; true if that cannot
/// be read: the server must not miss the end of the kernel's connection.
pub(super) fn is_of_child(stream: &UnixStream, parent: u32) -> bool {
    let Ok(peer) = socket_peercred(stream) else { return true };
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", peer.pid.as_raw_pid()));
    // The second field is the name in brackets, which may contain anything.
    let parent_in = |stat: &str| stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok();
    match stat {
        Ok(stat) => parent_in(&stat).is_none_or(|found: u32| found == parent),
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

/// Whether the peer is shut down in both directions, waiting for up to `wait`.
pub(crate) fn hung_up(stream: &UnixStream, wait: Duration) -> bool {
    let wait = Timespec::try_from(wait).ok();
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut fds, wait.as_ref()).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}
