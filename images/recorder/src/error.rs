//! The error of a recording.

use std::convert::Infallible;
use std::io;

/// The part of a stream at whose end QEMU describes it.
pub(crate) const DEVICE_STATE: &str = "in its device state";

/// The possible causes of a stream's end in this part.
fn why_it_ends(during: &str) -> &'static str {
    if during == DEVICE_STATE {
        "the save was cancelled, the file is cut off, or the VM's machine has suppress-vmdesc=on, \
         so that QEMU does not describe the state, and platen cannot find its end: turn it off \
         (qom-set /machine suppress-vmdesc false) and save again"
    } else {
        "the save was cancelled, or the file is cut off"
    }
}

/// The reason that a stream was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError<E> {
    /// The stream could not be read.
    #[error("cannot read QEMU's stream at byte {at}")]
    Io {
        /// Offset at which reading failed.
        at: u64,
        /// The reader's error.
        source: io::Error,
    },
    /// The stream is cut off.
    #[error("QEMU's stream ends at byte {at}, {during}: {}", why_it_ends(during))]
    Ends {
        /// Length of the stream.
        at: u64,
        /// The part of the stream that ends.
        during: &'static str,
    },
    /// The grammar does not know these bytes.
    #[error("QEMU's stream is not understood at byte {at}: {what}")]
    Unknown {
        /// Offset of the bytes in the stream.
        at: u64,
        /// A description of the bytes.
        what: String,
    },
    /// A mapped-ram file is read from a pipe.
    #[error("a mapped-ram file cannot be read from a pipe: give the name of the file")]
    NoFile,
    /// The stream uses a feature that an image cannot hold.
    #[error("cannot save this VM so: {what}")]
    Refused {
        /// The feature and the remedy.
        what: String,
    },
    /// The grammar and the tokeniser disagree.
    #[error("two readers of QEMU's stream disagree on the number of {what} ({ours} and {theirs}): nothing is saved; please report this with the QEMU version")]
    Disagree {
        /// The counted thing.
        what: &'static str,
        /// The grammar's count.
        ours: u64,
        /// The tokeniser's count.
        theirs: u64,
    },
    /// A multifd channel was not recorded.
    #[error("multifd channel {channel}")]
    Channel {
        /// Number of the channel.
        channel: u8,
        /// The channel's error. Offsets are those of the channel.
        source: Box<RecordError<Infallible>>,
    },
    /// The sink failed.
    #[error(transparent)]
    Sink(E),
}

impl<E> RecordError<E> {
    /// The error of a multifd channel. An error of the sink is no error of the channel.
    pub(crate) fn of_channel(self, channel: u8) -> Self {
        let source = match self {
            Self::Io { at, source } => RecordError::Io { at, source },
            Self::Ends { at, during } => RecordError::Ends { at, during },
            Self::Unknown { at, what } => RecordError::Unknown { at, what },
            Self::NoFile => RecordError::NoFile,
            Self::Refused { what } => RecordError::Refused { what },
            Self::Disagree { what, ours, theirs } => RecordError::Disagree { what, ours, theirs },
            Self::Channel { .. } | Self::Sink(_) => return self,
        };
        Self::Channel { channel, source: Box::new(source) }
    }
}
