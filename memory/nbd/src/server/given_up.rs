//! Connections that the kernel's client has given up.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use device::Backend;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::clients::{hung_up, is_of_child, Open};
use super::Server;

impl<B: Backend> Server<B> {
    pub(super) fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds out, and notes, whether connection `number` is one of the kernel's client.
    pub(super) fn is_of_kernel(&self, number: u64, stream: &UnixStream) -> bool {
        // While the kernel's disk has no server, nothing is asked that may take memory.
        if self.open().streams.get(&number).is_some_and(|client| client.kernel) {
            return true;
        }
        let of_child = self.options.attacher.is_some_and(|parent| is_of_child(stream, parent));
        let mut open = self.open();
        let Some(client) = open.streams.get_mut(&number) else { return false };
        client.kernel |= of_child;
        client.kernel
    }

    pub(super) fn remove_client(&self, number: u64) {
        if self.open().streams.remove(&number).is_some_and(|client| client.simple) {
            self.simple.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits until the threads of all connections that the kernel's client has given up are done,
    /// or this connection is given up too; returns whether it is.
    ///
    /// That client shuts a connection down before it sends unanswered requests again on another
    /// one. So a request just read from `stream` may be a write that another thread is still doing;
    /// or it may come after a write that was done again, and that the other thread would undo. A
    /// connection without another one beside it needs no check: a later one waits for it here.
    ///
    /// The connections of the client that is swapped to (`kernel`) do not wait for those of other
    /// clients, which may be of another disk of the kernel, nor do these wait for them.
    pub(super) fn wait_for_others(&self, number: u64, kernel: bool, stream: &UnixStream) -> bool {
        if self.simple.load(Ordering::Acquire) < 2 {
            return false;
        }
        let (own, others) = self.given_up(number, kernel, stream);
        if !others {
            return own;
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        // Two connections that were both given up do not wait for each other.
        while !hung_up(stream, AGAIN) && self.open().given_up(kernel, Some(number)).next().is_some()
        {
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        hung_up(stream, Duration::ZERO)
    }

    /// Whether this connection has been given up, and whether another one has: one system call for
    /// 31 of them.
    fn given_up(&self, number: u64, kernel: bool, stream: &UnixStream) -> (bool, bool) {
        let open = self.open();
        let mut others = open.simple(kernel, Some(number)).map(|(_, client)| &client.stream);
        let mut fds: [_; 32] = std::array::from_fn(|_| PollFd::new(stream, PollFlags::empty()));
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut given_up = (false, false);
        loop {
            let mut len = 1;
            for (fd, other) in fds[1..].iter_mut().zip(others.by_ref()) {
                *fd = PollFd::new(other, PollFlags::empty());
                len += 1;
            }
            if poll(&mut fds[..len], Some(&now)).is_ok() {
                let gone = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::HUP);
                given_up.0 |= gone(&fds[0]);
                given_up.1 |= fds[1..len].iter().any(gone);
            }
            if len < fds.len() {
                return given_up;
            }
        }
    }
}

/// How often a waiting connection looks again.
const AGAIN: Duration = Duration::from_millis(5);
