//! Why a supervisor ends.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

/// Why the supervisor has ended, other than because it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// Nothing can be started, or watched.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
    /// The first server has not come up: what it said is its own error.
    #[error("the server does not start: it ended with {0}")]
    Start(ExitStatus),
    /// What was to be run when the server had come up has failed.
    #[error("what follows the start has failed: {0}")]
    Up(ExitStatus),
    /// The server was told to end, and did not. What it kept is given up.
    #[error("the server did not end in {limit:?} and was killed{}", if *gone { "" } else { "; the kernel keeps it until a disk answers" })]
    Stuck {
        /// How long it was waited for.
        limit: Duration,
        /// Whether it has ended by that.
        gone: bool,
    },
}

pub(super) fn failed(action: &'static str) -> impl FnOnce(io::Error) -> SuperviseError {
    move |source| SuperviseError::Io { action, source }
}

/// The error, with the kernel's word.
pub(super) fn with_cause(error: &SuperviseError) -> String {
    match error {
        SuperviseError::Io { source, .. } => format!("{error}: {source}"),
        other => other.to_string(),
    }
}
