//! What can go wrong, and whose fault it is.

use std::path::PathBuf;
use std::time::Duration;

/// Why the library cannot be used at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A library is not there or cannot be loaded. On most machines that is as it should be.
    #[error("cannot load {library}: {reason}")]
    Library {
        /// The file or SONAME.
        library: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// It is there and too old.
    #[error("{library} has no {symbol}: QATzip 1.1 or later is needed")]
    Symbol {
        /// The file or SONAME.
        library: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The library's session parameters are not laid out as we know them.
    #[error("{library}: {what}: not a QATzip this version knows")]
    Layout {
        /// The file or SONAME.
        library: PathBuf,
        /// What was found.
        what: String,
    },
    /// Another QATzip is in use. Two of them would share nothing but the device.
    #[error("QATzip is already loaded, from {loaded:?}")]
    Loaded {
        /// Where from.
        loaded: crate::Paths,
    },
}

/// The first thing that went wrong between us and the library; after it, nobody calls it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct Closed {
    /// The call that failed.
    pub call: &'static str,
    /// How.
    pub reason: String,
}

impl Closed {
    pub(crate) fn new(call: &'static str, reason: impl Into<String>) -> Self {
        Self { call, reason: reason.into() }
    }
}

/// Why there is no result. In every case the output means nothing and the caller does the work in
/// software.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QatZipError {
    /// QATzip is out of use for the rest of this process.
    #[error("QATzip is out of use: {0}")]
    Closed(#[from] Closed),
    /// All instances are taken, or the device is being reset. Later calls may succeed.
    #[error("no QAT instance is free")]
    Busy,
    /// QATzip would do so few bytes in software.
    #[error("{len} bytes are too few for QATzip, at least {}", crate::MIN_PLAIN)]
    TooShort {
        /// Plain bytes.
        len: usize,
    },
    /// More than a unit holds.
    #[error("{len} bytes are too many for one call, at most {}", codec::MAX_PLAIN)]
    TooLong {
        /// Plain bytes, or bytes of payload.
        len: usize,
    },
    /// The result does not fit: data that does not compress.
    #[error("the result of {len} bytes does not fit into {room}")]
    NoRoom {
        /// Bytes of the result.
        len: usize,
        /// Bytes of room.
        room: usize,
    },
    /// A payload that software must decode: not sound, or with members no device takes.
    #[error("not for the device: {0}")]
    Unsuitable(String),
    /// A level that QATzip does not have.
    #[error("QATzip has no level {0}, expected 1 to 9")]
    Level(i32),
    /// No memory for the session's buffers.
    #[error("no memory for a session ({bytes} bytes)")]
    Memory {
        /// Bytes wanted.
        bytes: usize,
    },
    /// The session's thread cannot be started.
    #[error("cannot start a thread for QATzip: {0}")]
    Thread(String),
}

pub(crate) fn silent(call: &'static str, deadline: Duration) -> Closed {
    Closed::new(call, format!("no answer within {} ms", deadline.as_millis()))
}
