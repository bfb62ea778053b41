//! What a supervisor asks of those that use it.

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

/// What is to be supervised.
pub trait Service {
    /// The command that starts a server. Its standard input is the supervisor's; `replaces` tells
    /// whether there was one before.
    fn server(&mut self, replaces: bool) -> Command;

    /// The command that starts one that stands by; `None` where none is wanted. It goes when it
    /// reads the line "go" with what [`go`](Self::go) adds, and ends when it reads nothing any
    /// more.
    fn standby(&mut self) -> Option<Command> {
        None
    }

    /// What the one that stands by has to know.
    fn go(&self) -> String {
        String::new()
    }

    /// A line that the server has said, other than "ready".
    fn said(&mut self, line: &str);

    /// What is to be run now that the server `pid` is ready: for the first one or for a later one.
    /// For a later one it is run again and again until it succeeds: whoever has the disk waits for
    /// it.
    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command>;

    /// What is to be run before the server may end.
    fn down(&mut self) -> Option<Command>;

    /// How long `down` may take.
    fn down_limit(&self) -> Duration;

    /// How long a server that replaces another one may take until it is ready, longer on a machine
    /// that is slow: each that was too late gives the next one twice as long, up to 16 times. What
    /// follows the start of a server may take as long.
    fn ready_limit(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// How long a server may take to end when it is told to.
    fn end_limit(&self) -> Duration {
        Duration::from_secs(30)
    }

    /// What is to be run when the server asks for training, by the socket that it sent along, and
    /// how long it may take. Nobody waits for it, and what comes of it is the server's to see.
    fn train(&mut self, _channel: OwnedFd) -> Option<(Command, Duration)> {
        None
    }

    /// The signs of life of servers, if they give any: one that hangs is killed and replaced.
    fn pulse(&self) -> Option<&Pulse> {
        None
    }

    /// A descriptor that becomes readable when a server that waits for its pause is to be started
    /// at once.
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

    /// The socket of the service manager that has started this process (`NOTIFY_SOCKET`).
    fn notify_socket(&self) -> Option<String> {
        None
    }

    /// Whether that manager expects to hear each second that the supervisor lives (`WATCHDOG_USEC`).
    fn manager_watches(&self) -> bool {
        false
    }

    /// Gives up what servers left behind, when no more will be started.
    fn abandon(&mut self);

    /// Tells whoever watches.
    fn say(&self, line: &str);
}
