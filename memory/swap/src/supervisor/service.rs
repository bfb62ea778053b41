//! The interface between the supervisor and its user.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use pulse::Pulse;

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
