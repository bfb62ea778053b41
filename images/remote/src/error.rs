//! Why a file of another host cannot be read.

use std::io;

use tls::TlsError;

use crate::wire::Status;

/// Why a file of another host cannot be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// There is no connection, and the time to wait for one is over.
    #[error("cannot reach {host} (platen serve-images)")]
    Lost {
        /// Address of the server.
        host: String,
        /// The last attempt's error.
        source: io::Error,
    },
    /// One of the two hosts does not accept the other.
    #[error("{host}: no secured connection")]
    Tls {
        /// Address of the server.
        host: String,
        /// The cause.
        source: TlsError,
    },
    /// The server has refused the request.
    #[error("{host}: {name}: {text}")]
    Refused {
        /// Address of the server.
        host: String,
        /// The file.
        name: String,
        /// The kind of refusal.
        status: Status,
        /// The server's text.
        text: String,
    },
    /// The file of this name has other bytes than before.
    #[error("{host}: {name} was replaced by another file")]
    Replaced {
        /// Address of the server.
        host: String,
        /// The file.
        name: String,
    },
}

impl From<RemoteError> for io::Error {
    fn from(error: RemoteError) -> Self {
        let kind = match &error {
            RemoteError::Lost { .. } => io::ErrorKind::TimedOut,
            RemoteError::Refused { status: Status::NotFound, .. } => io::ErrorKind::NotFound,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
