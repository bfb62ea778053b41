//! The errors of this crate, worded for the person who has to correct their cause.

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use time::OffsetDateTime;

/// Why a certificate cannot be used or created, or why a link could not be secured.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A required file does not exist.
    #[error("there is no {what} at {}: make one with `platen cert`, or say where it is with {flag}", path.display())]
    Missing {
        /// The contents expected.
        what: &'static str,
        /// The path tried.
        path: PathBuf,
        /// The flag that sets another path.
        flag: &'static str,
    },
    /// A file cannot be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// The action: read, write or make.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// A file has unexpected contents.
    #[error("{} cannot be used: {detail}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The defect.
        detail: String,
    },
    /// The file exists already.
    #[error("{} exists: nothing is overwritten without --force", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A name cannot be in a certificate.
    #[error("'{name}' is neither a host name nor an IP address")]
    Name {
        /// The name as it was given.
        name: String,
    },
    /// The peer answered without TLS.
    #[error("{peer} speaks platen without TLS: it was started with --insecure")]
    Plain {
        /// The other end.
        peer: String,
    },
    /// The handshake failed.
    #[error("no TLS with {peer}: {reason}")]
    Refused {
        /// The other end.
        peer: String,
        /// The reason seen here, or reported by the peer.
        reason: String,
    },
    /// The handshake was not done in time. This end has sent nothing that is secured by it.
    #[error("no TLS with {peer}: its half of the handshake did not come in time")]
    Late {
        /// The other end.
        peer: String,
    },
    /// The connection was lost during the handshake. This end has sent nothing that is secured by
    /// it.
    #[error(
        "no TLS with {peer}: it closed the connection during the handshake (was it started with \
         --insecure?)"
    )]
    Cut {
        /// The other end.
        peer: String,
    },
    /// A secured link ended without close_notify, or by bytes that are not TLS.
    #[error("TLS: {reason}")]
    Broken {
        /// The reason.
        reason: String,
    },
}

impl TlsError {
    pub(crate) fn file(
        action: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { action, path, source: Arc::new(source) }
    }

    /// Wraps the error in an `io::Error`, from which [`TlsError::of`] retrieves it.
    pub(crate) fn into_io(self) -> io::Error {
        let kind = match self {
            Self::Broken { .. } => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::PermissionDenied,
        };
        io::Error::new(kind, self)
    }

    /// The TLS error inside an error of [`Reader`](crate::Reader) or [`Writer`](crate::Writer), if
    /// there is one.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

/// The peer's alert, worded for the person on this side.
pub(crate) fn describe_alert(alert: AlertDescription) -> String {
    let words = match alert {
        AlertDescription::UnknownCA => {
            "it does not know the CA of this end's certificate: both hosts need certificates of the same CA"
        }
        AlertDescription::CertificateExpired => {
            "it says that this end's certificate is out of date (if not, look at the clocks)"
        }
        AlertDescription::CertificateRequired => "it wants a certificate from this end",
        AlertDescription::AccessDenied => {
            "this end's certificate has none of the names that it allows (its --peer-name, or the hosts of its platen.toml)"
        }
        AlertDescription::CertificateRevoked => "it has this end's certificate on its list of revoked ones",
        AlertDescription::BadCertificate => {
            "it refuses this end's certificate: its name is not the one by which it was called, or it is damaged"
        }
        AlertDescription::UnsupportedCertificate => {
            "it refuses this end's certificate: it is not made for this use (it needs serverAuth and clientAuth)"
        }
        AlertDescription::DecryptError => {
            "it finds a signature wrong: this end's certificate is not signed by the CA it knows by that name"
        }
        AlertDescription::ProtocolVersion => "it does not take TLS 1.3",
        AlertDescription::HandshakeFailure => "it has no cipher in common with this end",
        other => return format!("it sends the alert {other:?}"),
    };
    words.into()
}

/// Describes a rustls error.
pub(crate) fn describe(error: &Error) -> String {
    match error {
        Error::AlertReceived(alert) => describe_alert(*alert),
        Error::NoCertificatesPresented => "it shows no certificate".into(),
        Error::InvalidCertificate(error) => describe_certificate_error(error),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => "it does not speak TLS".into(),
        Error::PeerIncompatible(rustls::PeerIncompatible::SupportedVersionsExtensionRequired)
        | Error::PeerIncompatible(rustls::PeerIncompatible::Tls13RequiredForQuic)
        | Error::PeerIncompatible(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13)
        | Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled) => {
            "it offers no TLS 1.3".into()
        }
        other => other.to_string(),
    }
}

fn describe_certificate_error(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is not signed by the CA that this end knows".into()
        }
        CertificateError::Expired => "its certificate has expired".into(),
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("its certificate expired on {}", day_of(*not_after))
        }
        CertificateError::NotValidYet => "its certificate is not valid yet".into(),
        CertificateError::NotValidYetContext { not_before, .. } => {
            format!("its certificate is valid from {} on: look at the clocks", day_of(*not_before))
        }
        CertificateError::NotValidForName => "its certificate is for another name".into(),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "its certificate is for {}, not for {}: use that name, or give the right one by --peer-name",
            names(presented).join(", "),
            expected.to_str()
        ),
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not made for this use (it needs serverAuth and clientAuth)".into()
        }
        other => format!("its certificate cannot be used: {other}"),
    }
}

/// The bare names of webpki's `DnsName("a")` and `IpAddress(1.2.3.4)`.
pub(crate) fn names(presented: &[String]) -> Vec<String> {
    let bare = |shown: &String| {
        let inner = shown.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
        inner.unwrap_or(shown).trim_matches('"').to_string()
    };
    presented.iter().map(bare).collect()
}

/// Formats the date of a moment, as 2026-11-21.
pub(crate) fn day(at: OffsetDateTime) -> String {
    let date = at.date();
    format!("{}-{:02}-{:02}", date.year(), u8::from(date.month()), date.day())
}

/// Formats the date of a moment in a certificate.
fn day_of(at: UnixTime) -> String {
    let seconds = i64::try_from(at.as_secs()).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).map_or_else(|_| format!("second {seconds}"), day)
}
