//! Why a host was not enrolled.

use std::io;

/// Why a host was not enrolled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnrolError {
    /// The text is no token.
    #[error("this is no token: {0}")]
    Token(String),
    /// The other end cannot be reached, or the connection was lost.
    #[error("{what}")]
    Connection {
        /// The operation that failed.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// The other end has sent an unexpected message.
    #[error("{0}")]
    Message(String),
    /// The host of the CA has refused.
    #[error("the host of the CA refuses: {0}")]
    Refused(String),
    /// The CA cannot be used.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// No key or certificate can be made, or TLS does not accept it.
    #[error("cannot make or use a certificate: {0}")]
    Certificate(String),
    /// The offer has ended before a host joined.
    #[error("{0}")]
    Over(String),
}

impl EnrolError {
    pub(crate) fn connection(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Connection { what, source }
    }

    pub(crate) fn certificate(error: impl std::fmt::Display) -> Self {
        Self::Certificate(error.to_string())
    }
}
