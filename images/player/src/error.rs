//! Errors of a restore.

use std::io;

use image::Damage;

/// The reason that QEMU did not receive the whole image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlayError {
    /// A part of the image is damaged. No byte of that part was sent.
    #[error(transparent)]
    Image(#[from] Damage),
    /// The stream could not be written, or the return path could not be read.
    #[error("cannot {what}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// QEMU closed its socket before it had everything.
    #[error("QEMU closed its socket before it had everything")]
    Closed,
    /// QEMU did not complete the step for which the restore waits.
    #[error("QEMU has not sent {what} for {seconds} s: see its log and its monitor")]
    Silent {
        /// The awaited message.
        what: &'static str,
        /// The time limit.
        seconds: u64,
    },
    /// QEMU failed to load the VM and sent SHUT with this value.
    #[error("QEMU could not load the VM (it says SHUT {0}): its log has the reason")]
    Refused(u32),
    /// QEMU violated the protocol of the return path.
    #[error("QEMU's return path: {0}")]
    Back(String),
    /// The image cannot be served by postcopy.
    #[error("{0}")]
    Unfit(String),
    /// The threads that decode units have ended.
    #[error("decompression has ended after {given} units, and the image has {units}")]
    Ended {
        /// Units that were decoded.
        given: u64,
        /// Units of the image.
        units: u64,
    },
    /// Threads or memory could not be allocated.
    #[error("cannot set up decompression")]
    SetUp(#[source] io::Error),
}

impl PlayError {
    pub(crate) fn read(source: io::Error) -> Self {
        Self::Io { what: "read QEMU's return path", source }
    }

    pub(crate) fn write(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Io { what: "write the stream to QEMU", source },
        }
    }
}
