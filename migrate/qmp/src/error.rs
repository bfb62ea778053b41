//! Why the monitor could not be used, in words that say what to do.

use std::io;
use std::path::PathBuf;

/// Why a monitor cannot be talked to, or what it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// Nothing at the path.
    #[error("no monitor socket at {path}; start QEMU with -qmp unix:{path},server=on,wait=off", path = path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Something else than a socket at the path.
    #[error("{path} is not a socket; give the path that QEMU got with -qmp unix:PATH,server=on,wait=off", path = path.display())]
    NotASocket {
        /// What was given.
        path: PathBuf,
    },
    /// A socket that could not be connected to.
    #[error("cannot connect to the monitor at {path}; is that QEMU still running, and may this user open the socket?", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Connected or queued, but not served.
    #[error("no QMP greeting from {path} within {seconds} s; a monitor serves one client at a time, so close the other one, or give QEMU a second -qmp", path = path.display())]
    NoGreeting {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        seconds: f64,
    },
    /// Connected and hung up on.
    #[error("{path} closed the connection before greeting; is that QEMU shutting down?", path = path.display())]
    ClosedAtOnce {
        /// The socket.
        path: PathBuf,
    },
    /// Something else than QMP speaks there, such as the human monitor or a serial port.
    #[error("{path} does not speak QMP (it says {got}); give the socket of -qmp, not that of -monitor or -serial", path = path.display())]
    NotQmp {
        /// The socket.
        path: PathBuf,
        /// The beginning of what it said.
        got: String,
    },
    /// No reply in time: QEMU's main loop is stuck, or stopped.
    #[error("QEMU did not answer {command} within {seconds} s")]
    TimedOut {
        /// The command.
        command: String,
        /// How long was waited.
        seconds: f64,
    },
    /// QEMU said no. The words are its own.
    #[error("QEMU refused {command}: {desc} ({class})")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, mostly `GenericError`.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// The connection ended: QEMU exited, or its monitor was taken away.
    #[error("QEMU closed its monitor during {during}")]
    Closed {
        /// What was going on.
        during: String,
    },
    /// A line that is not QMP.
    #[error("QEMU's monitor sent what is not QMP during {during}: {got}")]
    Garbage {
        /// What was going on.
        during: String,
        /// The beginning of it.
        got: String,
    },
    /// A line longer than any that QEMU sends.
    #[error("QEMU's monitor sent a line of more than {limit} bytes during {during}")]
    LineTooLong {
        /// What was going on.
        during: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// An earlier command ran out of time half sent, so that nothing can follow it.
    #[error("cannot send {command}: an earlier command was sent in part only before its time was up; connect to the monitor again")]
    Torn {
        /// The command.
        command: String,
    },
    /// The socket failed.
    #[error("QEMU's monitor failed during {during}")]
    Io {
        /// What was going on.
        during: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A capability that is needed is not there.
    #[error("QEMU {version} has no migration capability \"{capability}\"; use a newer QEMU, or leave out what needs it")]
    NoCapability {
        /// The version of this QEMU.
        version: crate::Version,
        /// The capability.
        capability: String,
    },
    /// A reply that lacks what it must have.
    #[error("QEMU's reply to {command} cannot be read: {reason}")]
    Reply {
        /// The command.
        command: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// The beginning of a line, fit to print whatever is in it.
pub(crate) fn excerpt(line: &[u8]) -> String {
    let shown = &line[..line.len().min(80)];
    format!("\"{}\"{}", shown.escape_ascii(), if shown.len() < line.len() { "..." } else { "" })
}
