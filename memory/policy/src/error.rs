//! Errors of starting a policy.

use std::io;

use store::MAX_WORKERS;

use crate::settings::SettingsError;

/// Why a policy could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The settings cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The codec of the device's pages cannot be set up.
    #[error(transparent)]
    Codec(codec::SettingsError),
    /// All of the store's workers are taken.
    #[error("no room for another thread: the store has {MAX_WORKERS} workers")]
    Full,
    /// The kernel refused.
    #[error("cannot make {what}")]
    Io {
        /// The object that could not be made.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}
