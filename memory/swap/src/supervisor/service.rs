//! The interface between the supervisor and its user.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use pulse::Pulse;

/// A server, as passed to the program that this process executes.
#[derive(Debug)]
pub struct Handed<'a> {
    /// The server's process ID. The server is a child of this process.
    pub pid: u32,
    /// The supervisor's end of the socket between the two.
    pub channel: BorrowedFd<'a>,
}

/// The state that a supervisor passes to the program that its process executes.
#[derive(Debug)]
pub struct HandOver<'a> {
    /// The server that serves.
    pub server: Handed<'a>,
    /// The server that stands by to take its place.
    pub successor: Handed<'a>,
    /// Whether the successor has sent [`words::NAMES_DISK`](super::words::NAMES_DISK).
    pub names_disk: bool,
    /// Other children, to be killed and reaped.
    pub dismissed: Vec<u32>,
}

/// The state that the executed program has received.
#[derive(Debug)]
pub struct Adopted {
    /// The server that serves, and the supervisor's end of its socket.
    pub server: (u32, OwnedFd),
    /// The server that stands by, and the supervisor's end of its socket.
    pub successor: (u32, OwnedFd),
    /// Other children, to be killed and reaped.
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
    fn handle_line(&mut self, line: &str);

    /// The helper to run when the server `pid` is ready. `replaces` tells whether there was a
    /// server before. The helper of a replacement is retried until it succeeds, because the disk's
    /// users wait for it.
    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command>;

    /// Called when a server's helper has succeeded, or a server has none.
    fn is_up(&mut self) {}

    /// Called when the helper after the first start runs, as process `helper`.
    fn up_runs(&mut self, _helper: u32) {}

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

    /// How long a server may take to end when it is ordered to. A server that has not ended by then
    /// and has worked on it gets as long again, up to ten times in all.
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

    /// Called when a server was killed because the thread with this heartbeat hung, before the next
    /// server starts: that one may have to do without what the thread used.
    fn has_hung(&mut self, _slot: usize) {}

    /// A descriptor that becomes readable when the pause before the next server is to end at once.
    fn resume(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A descriptor that becomes readable when a client has sent a request
    /// ([`request`](Self::request)).
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Handles a request. `server` is the pidfd of the present server, or the reason why it cannot
    /// be replaced now. If the request asks for another server in its place, returns the command
    /// that starts it. The new server sends [`words::STANDS_BY`] when it has its memory. When it
    /// reads [`words::GO`] it kills the present server by the pidfd, waits for its end, and takes
    /// over.
    ///
    /// [`words::STANDS_BY`]: super::words::STANDS_BY
    /// [`words::GO`]: super::words::GO
    fn request(&mut self, _server: Result<BorrowedFd<'_>, &str>) -> Option<Command> {
        None
    }

    /// Whether requests reach a replacement server only some time after it is ready. The server
    /// then sends [`words::CONNECTED`](super::words::CONNECTED) or
    /// [`words::UNCONNECTED`](super::words::UNCONNECTED), and the outcome of a request for another
    /// server waits for that message.
    fn is_connected_later(&self) -> bool {
        false
    }

    /// Called when the new server stands by, before the supervisor sends "go". To replace the
    /// supervisor too, this process executes the new program (`execve`), which continues by
    /// [`resume_hand_over`](super::resume_hand_over): there is one supervisor at any time.
    ///
    /// # Errors
    ///
    /// The reason; nothing has changed.
    fn hand_over(&mut self, _state: &HandOver<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Reports the outcome of a request for another server: requests reach it, or the reason why
    /// they do not. After an error the next server must have the former settings.
    fn renewed(&mut self, _outcome: Result<(), String>) {}

    /// The service manager's socket (`NOTIFY_SOCKET`).
    fn notify_socket(&self) -> Option<String> {
        None
    }

    /// Whether the manager expects a heartbeat each second (`WATCHDOG_USEC`).
    fn manager_watches(&self) -> bool {
        false
    }

    /// Releases what servers left behind; no more servers will be started. `set_up` tells whether
    /// the helper after the first start may have set the disk up, and no helper has taken it down:
    /// otherwise another device may have the disk now.
    fn abandon(&mut self, set_up: bool);

    /// Reports a message to the user.
    fn say(&self, line: &str);
}
