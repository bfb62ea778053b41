//! Why a stream makes no image.

use std::io;

/// Why a stream was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError<E> {
    /// The stream could not be read.
    #[error("cannot read QEMU's stream at byte {at}")]
    Io {
        /// How far it was read.
        at: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The stream ends before it should.
    #[error(
        "QEMU's stream ends at byte {at}, {during}: the save was cancelled, or the file is cut off"
    )]
    Ends {
        /// Its length.
        at: u64,
        /// What was being read.
        during: &'static str,
    },
    /// Bytes that this grammar does not know.
    #[error("QEMU's stream is not understood at byte {at}: {what}")]
    Unknown {
        /// Where.
        at: u64,
        /// What was found.
        what: String,
    },
    /// Something that a save must not have.
    #[error("cannot save this VM so: {what}")]
    Refused {
        /// What, and what to do.
        what: String,
    },
    /// The two readers of the stream disagree.
    #[error("two readers of QEMU's stream disagree on the number of {what} ({ours} and {theirs}): nothing is saved; please report this with the QEMU version")]
    Disagree {
        /// Of what.
        what: &'static str,
        /// This grammar's.
        ours: u64,
        /// The tokeniser's.
        theirs: u64,
    },
    /// The sink failed.
    #[error(transparent)]
    Sink(E),
}
