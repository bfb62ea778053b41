//! The interface between the supervisor and its user.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use pulse::Pulse;

/// A server, as the program that this process becomes finds it.
#[derive(Debug)]
pub struct Handed<'a> {
    /// Its process number. It is a child of this process.
    pub pid: u32,
    /// The supervisor's end of the socket between the two.
    pub channel: BorrowedFd<'a>,
}

/// What a supervisor hands to the program that its process becomes.
#[derive(Debug)]
pub struct HandOver<'a> {
    /// The server that serves.
    pub server: Handed<'a>,
    /// The server that stands by to take its place.
    pub successor: Handed<'a>,
    /// Children that were killed and not yet seen to have ended.
    pub dismissed: Vec<u32>,
}

/// What such a program has been handed.
#[derive(Debug)]
pub struct Adopted {
    /// The server that serves, and the supervisor's end of its socket.
    pub server: (u32, OwnedFd),
    /// The server that stands by, and the supervisor's end of its socket.
    pub successor: (u32, OwnedFd),
    /// Children that were killed.
    pub dismissed: Vec<u32>,
}

/// The service to supervise.
pub trait Service {
    /// The command that starts a server. The supervisor sets its standard input; `replaces` tells
    /// whether there was a server before.
    fn server(&mut self, replaces: bool) -> Command;

    /// The command that starts a stand-by server; `None` for none. It starts serving when it reads
    /// the line "go" followed by what [`go`](Self::go) returns, and ends at the end of its input.
    fn standby(&mut self) -> Option<Command> {
        None
    }

    /// The arguments for the stand-by server.
    fn go(&self) -> String {
        String::new()
    }

    /// Handles a line from the server other than "ready".
    fn said(&mut self, line: &str);

    /// The helper to run when the server `pid` is ready: the first one, or a replacement. For a
    /// replacement it is retried until it succeeds, because the disk's users wait for it.
    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command>;

    /// The helper to run before the server may end.
    fn down(&mut self) -> Option<Command>;

    /// How long `down` may take.
    fn down_limit(&self) -> Duration;

    /// How long a replacement server may take to be ready. Each server that was too late doubles
    /// the limit for the next one, up to 16 times, for slow machines. The helper after a start has
    /// the same limit.
    fn ready_limit(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// How long a server may take to end when it is told to.
    fn end_limit(&self) -> Duration {
        Duration::from_secs(30)
    }

    /// The trainer to run for the socket that the server sent, and its time limit. The supervisor
    /// ignores its result; the server sees it.
    fn train(&mut self, _channel: OwnedFd) -> Option<(Command, Duration)> {
        None
    }

    /// The servers' heartbeats, if they have any: a server that hangs is killed and replaced.
    fn pulse(&self) -> Option<&Pulse> {
        None
    }

    /// A descriptor that becomes readable when the pause before the next server is to end at once.
    fn resume(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A descriptor that becomes readable when somebody has a request ([`request`](Self::request)).
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes a request. If it asks for another server in the place of the present one, whose pidfd
    /// is `server`, gives the command that starts it. That server says [`words::STANDS_BY`] when it
    /// has its memory. When it reads [`words::GO`] it kills the present one by the pidfd, waits for
    /// its end, and takes over. `server` is the reason where that is not possible now.
    ///
    /// [`words::STANDS_BY`]: super::words::STANDS_BY
    /// [`words::GO`]: super::words::GO
    fn request(&mut self, _server: Result<BorrowedFd<'_>, &str>) -> Option<Command> {
        None
    }

    /// The new server stands by, and is told to go next. A service whose supervisor is to be
    /// another program as well makes this process that program, which continues by
    /// [`resume_hand_over`](super::resume_hand_over): there is one supervisor at any time.
    ///
    /// # Errors
    ///
    /// Why nothing has changed.
    fn hand_over(&mut self, _state: &HandOver<'_>) -> io::Result<()> {
        Ok(())
    }

    /// The outcome of a request for another server: it serves, or why it does not. With an error
    /// the next server is to be as the former one was.
    fn renewed(&mut self, _outcome: Result<(), String>) {}

    /// The service manager's socket (`NOTIFY_SOCKET`).
    fn notify_socket(&self) -> Option<String> {
        None
    }

    /// Whether the manager expects a sign of life each second (`WATCHDOG_USEC`).
    fn manager_watches(&self) -> bool {
        false
    }

    /// Releases what servers left behind; no more servers will be started.
    fn abandon(&mut self);

    /// Reports a message to the user.
    fn say(&self, line: &str);
}
