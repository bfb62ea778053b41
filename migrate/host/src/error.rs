//! The errors of this crate.

use std::io;
use std::path::PathBuf;

/// Why the configuration, a door or the registry cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The configuration is not TOML, or has an unknown key or a value of the wrong type.
    #[error("{0}")]
    Syntax(Box<toml::de::Error>),
    /// A value of the configuration is out of bounds or contradicts another.
    #[error("{key}: {detail}")]
    Value {
        /// The key.
        key: String,
        /// The defect, and what to do.
        detail: String,
    },
    /// This host is not in the configuration.
    #[error("this host is '{name}', and the configuration has no [[host]] of that name; there are: {known}. Add it, or say --name")]
    Unknown {
        /// The host's name.
        name: String,
        /// The names in the configuration.
        known: String,
    },
    /// Another line of qemu.conf sets what a door needs.
    #[error("{path}, line {line}, sets {key} to {value}, and doors need {wanted}: take the line out, then run this again")]
    Taken {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// The setting.
        key: String,
        /// Its value there.
        value: String,
        /// The value that a door needs.
        wanted: String,
    },
    /// The system refused an operation on a file, a folder or a socket.
    #[error("{what}")]
    System {
        /// The operation and its object.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl HostError {
    /// An error of the system in this operation.
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}
