//! Errors of the monitor's client. Each message names the remedy.

use std::io;
use std::path::PathBuf;

/// Why a monitor cannot be used, or the command that it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// There is no file at the path.
    #[error("no monitor socket at {path}; start QEMU with -qmp unix:{path},server=on,wait=off", path = path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The file at the path is not a socket.
    #[error("{path} is not a socket; give the path that QEMU got with -qmp unix:PATH,server=on,wait=off", path = path.display())]
    NotASocket {
        /// The path given.
        path: PathBuf,
    },
    /// The socket refuses the connection.
    #[error("cannot connect to the monitor at {path}; is that QEMU still running, and may this user open the socket?", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The client connected, or was queued, but no greeting arrived.
    #[error("no QMP greeting from {path} within {seconds} s; a monitor serves one client at a time, so close the other one, or give QEMU a second -qmp", path = path.display())]
    NoGreeting {
        /// The socket.
        path: PathBuf,
        /// The time waited.
        seconds: f64,
    },
    /// The monitor accepted the connection and closed it before a greeting.
    #[error("{path} closed the connection before greeting; is that QEMU shutting down?", path = path.display())]
    ClosedAtOnce {
        /// The socket.
        path: PathBuf,
    },
    /// The socket speaks another protocol, such as the human monitor or a serial port.
    #[error("{path} does not speak QMP (it says {got}); give the socket of -qmp, not that of -monitor or -serial", path = path.display())]
    NotQmp {
        /// The socket.
        path: PathBuf,
        /// The beginning of the text received.
        got: String,
    },
    /// There was no reply in time: QEMU's main loop is stuck, or stopped.
    #[error("QEMU did not answer {command} within {seconds} s")]
    TimedOut {
        /// The command.
        command: String,
        /// The time waited.
        seconds: f64,
    },
    /// QEMU refused the command, for the reason that it gives.
    #[error("QEMU refused {command}: {desc} ({class})")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, mostly `GenericError`.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// The connection ended: QEMU exited or closed its monitor.
    #[error("QEMU closed its monitor during {during}")]
    Closed {
        /// The operation under way.
        during: String,
    },
    /// A line is not QMP.
    #[error("QEMU's monitor sent what is not QMP during {during}: {got}")]
    Garbage {
        /// The operation under way.
        during: String,
        /// The beginning of the line.
        got: String,
    },
    /// A line is longer than any that QEMU sends.
    #[error("QEMU's monitor sent a line of more than {limit} bytes during {during}")]
    LineTooLong {
        /// The operation under way.
        during: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// An earlier command was sent in part only and timed out, so that no other can follow it.
    #[error("cannot send {command}: an earlier command was sent in part only before its time was up; connect to the monitor again")]
    Torn {
        /// The command.
        command: String,
    },
    /// I/O on the socket failed.
    #[error("QEMU's monitor failed during {during}")]
    Io {
        /// The operation under way.
        during: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// QEMU lacks a required capability.
    #[error("QEMU {version} has no migration capability \"{capability}\"; use a newer QEMU, or leave out what needs it")]
    NoCapability {
        /// The version of this QEMU.
        version: crate::Version,
        /// The capability.
        capability: String,
    },
    /// A migration is not over, and uses its settings.
    #[error(
        "QEMU has a migration in progress ('{status}'): wait for it or cancel it (migrate_cancel)"
    )]
    InProgress {
        /// The migration's status.
        status: String,
    },
    /// A migration is over, and QEMU does not release its channels.
    #[error("QEMU holds the channels of the migration that has {status} for more than {seconds} s; its settings stay as they are: try again later")]
    Unreleased {
        /// The migration's status: completed, failed or cancelled.
        status: String,
        /// The time waited.
        seconds: u64,
    },
    /// A reply lacks a required field, or has a wrong one.
    #[error("QEMU's reply to {command} cannot be read: {reason}")]
    Reply {
        /// The command.
        command: &'static str,
        /// The defect.
        reason: String,
    },
}

impl QmpError {
    /// Whether the monitor has answered, and QEMU has changed nothing.
    pub const fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. }
                | Self::NoCapability { .. }
                | Self::InProgress { .. }
                | Self::Unreleased { .. }
        )
    }
}

/// The beginning of a line, made printable.
pub(crate) fn excerpt(line: &[u8]) -> String {
    let shown = &line[..line.len().min(80)];
    format!("\"{}\"{}", shown.escape_ascii(), if shown.len() < line.len() { "..." } else { "" })
}
