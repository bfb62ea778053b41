//! A small client of QEMU's monitor protocol (QMP), with the commands that drive a migration.
//!
//! QMP is JSON, one object a line, over a unix socket: QEMU greets, the client negotiates
//! (`qmp_capabilities`), then sends commands and gets one reply each, with events between them.
//!
//! ```text
//!  execute(command) ──► {"execute", "arguments", "id"} ──► QEMU
//!        reply     ◄── {"return" | "error", "id"}      ◄──
//!        queue     ◄── {"event", "data", "timestamp"}  ◄──      read by poll_event
//! ```
//!
//! # What fails
//!
//! Every call has a deadline. A frozen QEMU causes an error that names the command and the seconds,
//! not a hang; a late reply to a command that timed out is recognised by its id and dropped. A
//! refusal by QEMU is returned verbatim as [`QmpError::Refused`].
//!
//! # Limits
//!
//! A line of at most 16 MiB. At most 1024 waiting events, of at most 16 MiB together; beyond that
//! the oldest are dropped and counted. One monitor serves one client at a time.

mod connect;
mod error;
mod event;
mod line;
mod message;
mod migration;

pub use error::QmpError;
pub use event::{Event, Timestamp};
pub use message::Version;
pub use migration::{MigrationInfo, RamStats, RunStatus};

use std::time::{Duration, Instant};

use serde_json::{json, Value};

use event::Events;
use line::{LineSocket, ReadFailure};
use message::Reply;

/// A connection to one monitor, negotiated and ready for commands.
#[derive(Debug)]
pub struct Qmp {
    socket: LineSocket,
    version: Version,
    timeout: Duration,
    next_id: u64,
    events: Events,
    /// The numbers of the commands that timed out and are not answered yet.
    late: Vec<u64>,
}

/// The most messages that are read for a reply after its deadline.
const LATE_LINES: usize = 1024;

impl Qmp {
    /// QEMU's version, from its greeting.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The process that listens at the monitor's socket: QEMU, or the process that has given QEMU
    /// the socket. `None` if the kernel does not report it.
    pub fn peer_pid(&self) -> Option<i32> {
        self.socket.peer_pid()
    }

    /// Runs `command` and returns its result, within the timeout given to [`Qmp::connect`].
    ///
    /// Events that arrive meanwhile are queued for [`Qmp::poll_event`].
    ///
    /// # Errors
    ///
    /// [`QmpError::Refused`] with QEMU's message; [`QmpError::TimedOut`], after which the
    /// connection is still usable; [`QmpError::Closed`] when QEMU has exited.
    pub fn execute(&mut self, command: &str, arguments: Option<Value>) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, self.timeout)
    }

    /// As [`Qmp::execute`], with its own timeout, for a command that is known to take long.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn execute_within(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        self.execute_by("execute", command, arguments, Instant::now() + timeout, timeout)
    }

    /// As [`Qmp::execute`], but QEMU handles the command outside of its main loop: a QEMU in
    /// postcopy whose main loop waits for a page answers nothing else. The monitor must come from
    /// [`Qmp::connect_out_of_band`].
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`]. QEMU refuses commands that are not allowed out of band.
    pub fn execute_out_of_band(
        &mut self,
        command: &str,
        arguments: Option<Value>,
    ) -> Result<Value, QmpError> {
        let timeout = self.timeout;
        self.execute_by("exec-oob", command, arguments, Instant::now() + timeout, timeout)
    }

    /// Returns the oldest event not yet returned. Waits up to `timeout` for one; `None` if none
    /// arrived.
    ///
    /// # Errors
    ///
    /// [`QmpError::Closed`] when QEMU has exited and no event is left; or a line is not QMP.
    pub fn poll_event(&mut self, timeout: Duration) -> Result<Option<Event>, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.events.pop() {
                return Ok(Some(event));
            }
            match self.receive(deadline) {
                // A reply to a command that timed out. A peer that sends only such replies must not
                // delay the return beyond the deadline.
                Ok(Some(_)) if Instant::now() >= deadline => return Ok(None),
                Ok(_) => {}
                Err(ReadFailure::TimedOut) => return Ok(None),
                Err(failure) => return Err(failure.during("waiting for events", timeout)),
            }
        }
    }

    /// The number of commands that timed out and that QEMU has not answered since. A QEMU whose
    /// main loop waits answers none, and stops to read its monitor when too many wait there. Does
    /// not wait: reads the replies that have come.
    pub fn unanswered(&mut self) -> usize {
        // The next command reports a connection that has failed.
        while !self.late.is_empty() && self.receive(Instant::now()).is_ok() {}
        self.late.len()
    }

    /// The number of events that were dropped because the queue was full.
    pub fn events_dropped(&self) -> u64 {
        self.events.dropped
    }

    fn execute_by(
        &mut self,
        verb: &str,
        command: &str,
        arguments: Option<Value>,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ verb: command, "id": id });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments;
        }
        let failed = |failure: ReadFailure| failure.during(command, timeout);
        self.socket.write_line(request.to_string(), deadline).map_err(failed)?;
        let reply = self.reply_to(id, deadline).inspect_err(|failure| {
            // Commands out of band have a queue of their own.
            if matches!(failure, ReadFailure::TimedOut) && verb == "execute" {
                self.late.push(id);
            }
        });
        match reply.map_err(failed)? {
            Reply { error: Some(error), .. } => Err(QmpError::Refused {
                command: command.to_owned(),
                class: error.class,
                desc: error.desc,
            }),
            Reply { value: Some(value), .. } => Ok(value),
            _ => Err(QmpError::Garbage {
                during: command.to_owned(),
                got: "a reply with neither return nor error".to_owned(),
            }),
        }
    }

    /// Reads up to the reply to the command `id`.
    fn reply_to(&mut self, id: u64, deadline: Instant) -> Result<Reply, ReadFailure> {
        let mut late = 0;
        loop {
            let reply = self.receive(deadline)?;
            // QEMU answers a line that it could not parse with an error without an id. That line
            // was this client's.
            let ours = |reply: &Reply| {
                reply.id == Some(id) || (reply.id.is_none() && reply.error.is_some())
            };
            match reply.filter(ours) {
                Some(reply) => return Ok(reply),
                // The reply may wait behind events if this process has stood still meanwhile. A
                // flood of events must not delay the return.
                None if Instant::now() >= deadline && late == LATE_LINES => {
                    return Err(ReadFailure::TimedOut);
                }
                None => late += usize::from(Instant::now() >= deadline),
            }
        }
    }

    /// Reads one line. Queues an event and returns `None` for it.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Reply>, ReadFailure> {
        let line = self.socket.read_line(deadline)?;
        let garbage = || ReadFailure::Garbage(error::excerpt(&line));
        let value: Value = serde_json::from_slice(&line).map_err(|_| garbage())?;
        if value.get("event").is_some() {
            let event = serde_json::from_value(value).map_err(|_| garbage())?;
            self.events.push(event, line.len());
            return Ok(None);
        }
        // `return` may be null, which differs from a missing field: `derive` cannot tell the two
        // apart.
        let returned = value.get("return").cloned();
        let mut reply: Reply = serde_json::from_value(value).map_err(|_| garbage())?;
        if returned.is_none() && reply.error.is_none() {
            return Err(garbage());
        }
        reply.value = returned;
        self.late.retain(|late| Some(*late) != reply.id);
        Ok(Some(reply))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    /// This process has stood still after it had sent its command.
    #[test]
    fn a_reply_that_waits_behind_events_at_the_deadline_is_read() {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
        writeln!(qemu, "{}", json!({ "QMP": { "version": version, "capabilities": [] } })).unwrap();
        writeln!(qemu, "{}", json!({ "return": {}, "id": 1 })).unwrap();
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut waits = |events: usize, id: u64| {
            let reply = json!({ "return": {}, "id": id });
            writeln!(qemu, "{}{reply}", "{\"event\":\"STOP\"}\n".repeat(events)).unwrap();
        };
        waits(LATE_LINES, 7);
        assert_eq!(qmp.reply_to(7, Instant::now()).unwrap().id, Some(7));
        waits(LATE_LINES + 1, 8);
        assert!(matches!(qmp.reply_to(8, Instant::now()), Err(ReadFailure::TimedOut)));
    }
}
