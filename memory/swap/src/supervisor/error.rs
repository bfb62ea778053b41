//! Errors that end a supervisor.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

/// Why the supervisor ended without being asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// A process cannot be started or watched.
    #[error("cannot {action}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The first server did not get ready; it has printed its own error.
    #[error("the server does not start: it ended with {0}")]
    Start(ExitStatus),
    /// The helper after the first start failed.
    #[error("what follows the start has failed: {0}")]
    Up(ExitStatus),
    /// The server did not end when it was ordered to. Its contents are lost.
    #[error("the server did not end in {limit:?} and was killed{}", if *gone { "" } else { "; the kernel keeps it until a disk answers" })]
    Stuck {
        /// How long the supervisor waited.
        limit: Duration,
        /// Whether the server has exited since.
        gone: bool,
    },
}

pub(super) fn failed(action: &'static str) -> impl FnOnce(io::Error) -> SuperviseError {
    move |source| SuperviseError::Io { action, source }
}

/// The error with its cause.
pub(super) fn with_cause(error: &SuperviseError) -> String {
    match error {
        SuperviseError::Io { source, .. } => format!("{error}: {source}"),
        other => other.to_string(),
    }
}
