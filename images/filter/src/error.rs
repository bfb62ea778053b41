//! The reasons for which a stream ends early.

use std::io;

/// Why a stream could not be converted as a whole.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// Reading, writing or the start of threads failed.
    #[error("cannot {what}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The format has no such level.
    #[error("{format} has no level {level}: it has {least} to {most}")]
    Level {
        /// The format's name.
        format: &'static str,
        /// The requested level.
        level: i32,
        /// The lowest level.
        least: i32,
        /// The highest level.
        most: i32,
    },
    /// A frame is damaged, of another format, or truncated.
    #[error("frame {number} at byte {offset} of the {format} stream: {reason}")]
    Frame {
        /// The format's name.
        format: &'static str,
        /// The frame's number, from 0.
        number: u64,
        /// The frame's first byte in the stream.
        offset: u64,
        /// The defect.
        reason: String,
    },
    /// The codec refused to compress.
    #[error("{format} cannot compress: {reason}")]
    Codec {
        /// The format's name.
        format: &'static str,
        /// The library's reason.
        reason: String,
    },
}

/// Adds the operation that failed to an I/O error.
pub(crate) fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> FilterError {
    move |source| FilterError::Io { what, source }
}
