//! A failed precaution.

use std::io;

/// A precaution that could not be taken. The caller decides whether to serve without it; the check
/// shows it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}")]
pub struct Untaken {
    /// The operation that failed.
    pub action: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}
