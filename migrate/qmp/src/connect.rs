//! Connects to a monitor, and negotiates with it.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::error::{self, QmpError};
use crate::event::Events;
use crate::line::{LineSocket, ReadFailure};
use crate::message::Greeting;
use crate::Qmp;

/// The most messages for a former client that a connection skips.
const STALE_MESSAGES: u32 = 256;

/// Whether a line is a QMP reply or event.
fn is_message(line: &[u8]) -> bool {
    let message: Option<serde_json::Map<String, Value>> = serde_json::from_slice(line).ok();
    message.is_some_and(|message| {
        ["return", "error", "event"].iter().any(|key| message.contains_key(*key))
    })
}

impl Qmp {
    /// Connects to the monitor at `path`, checks that it is one, and negotiates.
    ///
    /// `timeout` bounds this call as a whole, and later on each command.
    ///
    /// # Errors
    ///
    /// No socket, no listener, no greeting in time (a monitor serves one client at a time, so
    /// another may be connected), or a greeting that is not QMP.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        Self::negotiate(
            LineSocket::connect(path, deadline, timeout)?,
            path,
            deadline,
            timeout,
            None,
        )
    }

    /// As [`Qmp::connect`], and enables [`Qmp::execute_out_of_band`].
    ///
    /// # Errors
    ///
    /// As for [`Qmp::connect`].
    pub fn connect_out_of_band(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        let enable = Some(json!({ "enable": ["oob"] }));
        let socket = LineSocket::connect(path, deadline, timeout)?;
        Self::negotiate(socket, path, deadline, timeout, enable)
    }

    /// As [`Qmp::connect`], over an existing connection to a monitor.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::connect`], with `connection` as the path.
    pub fn over(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let (socket, deadline) = (LineSocket::over(stream), Instant::now() + timeout);
        Self::negotiate(socket, Path::new("connection"), deadline, timeout, None)
    }

    fn negotiate(
        mut socket: LineSocket,
        path: &Path,
        deadline: Instant,
        timeout: Duration,
        enable: Option<Value>,
    ) -> Result<Self, QmpError> {
        // QEMU sends what the former client did not read to the next one, before its greeting.
        let mut left = STALE_MESSAGES;
        let greeting = loop {
            let line = socket.read_line(deadline).map_err(|failure| match failure {
                ReadFailure::TimedOut => {
                    QmpError::NoGreeting { path: path.to_owned(), seconds: timeout.as_secs_f64() }
                }
                ReadFailure::Closed => QmpError::ClosedAtOnce { path: path.to_owned() },
                other => other.during("the greeting", timeout),
            })?;
            if let Ok(greeting) = serde_json::from_slice::<Greeting>(&line) {
                break greeting;
            }
            if left == 0 || !is_message(&line) {
                return Err(QmpError::NotQmp { path: path.to_owned(), got: error::excerpt(&line) });
            }
            left -= 1;
        };
        let version = greeting.qmp.version.qemu;
        let (events, late) = (Events::default(), Vec::new());
        let mut this = Self { socket, version, timeout, next_id: 1, events, late };
        this.execute_by("execute", "qmp_capabilities", enable, deadline, timeout)?;
        Ok(this)
    }
}
