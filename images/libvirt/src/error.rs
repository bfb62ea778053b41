//! Errors of the client.

use std::io;
use std::path::PathBuf;

/// Why a call of libvirt failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibvirtError {
    /// The connection to the daemon's socket failed.
    #[error("cannot connect to libvirt at {path}: does libvirtd or virtqemud run, and may this user open its socket?", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The connection broke.
    #[error("cannot {what} libvirt's socket")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The daemon closed the connection: it has ended, or refuses this user.
    #[error("libvirt's daemon has closed the connection: see its log")]
    Closed,
    /// The daemon did not answer in time.
    #[error("libvirt has not answered for {seconds} s")]
    Silent {
        /// The time limit.
        seconds: u64,
    },
    /// The daemon's own error.
    #[error("libvirt says: {message}")]
    Said {
        /// libvirt's number for the error.
        code: i32,
        /// The daemon's message, in which control characters are replaced.
        message: String,
    },
    /// The daemon requires this user to authenticate.
    #[error("libvirt wants a login at this socket: run this command as root")]
    Login,
    /// An answer that violates the protocol.
    #[error("libvirt's answer: {0}")]
    Answer(&'static str),
}

impl LibvirtError {
    /// libvirt's number for "no domain with this name or UUID".
    pub const NO_DOMAIN: i32 = 42;
    /// libvirt's number for "the migration is cancelled, as you wanted".
    pub const CANCELLED: i32 = 93;

    /// Whether the daemon has refused the call with this number.
    #[must_use]
    pub fn is(&self, number: i32) -> bool {
        matches!(self, Self::Said { code, .. } if *code == number)
    }

    /// Whether the connection has ended, and with it perhaps the daemon.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Closed | Self::Io { .. } | Self::Connect { .. })
    }

    pub(crate) fn read(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io { what: "read", source },
        }
    }

    pub(crate) fn write(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Io { what: "write to", source },
        }
    }
}

/// The reason why a domain's XML cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XmlError {
    /// The text is longer than libvirt accepts.
    #[error("it has {0} bytes, and libvirt takes 4 MiB")]
    Long(usize),
    /// The text is not XML, from this byte on.
    #[error("it is no XML at byte {0}")]
    Syntax(usize),
    /// The elements are nested too deep.
    #[error("its elements are nested more than 256 deep")]
    Deep,
    /// The domain lacks this element, which it must have.
    #[error("it has no <{0}> in <domain>: take the XML of virsh dumpxml --migratable, or of virsh save-image-dumpxml")]
    Lacks(&'static str),
    /// The text of the UUID is not a UUID.
    #[error("its <uuid> is no UUID")]
    Uuid,
}
