//! Why a restore ended.

use std::io;

use image::Damage;

/// Why an image was not given to QEMU as a whole.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlayError {
    /// A part of the image is not sound. Nothing of it was sent.
    #[error(transparent)]
    Image(#[from] Damage),
    /// The stream could not be written, or QEMU's answers not read.
    #[error("cannot {what}")]
    Io {
        /// Which direction.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// QEMU has closed its socket before it had everything.
    #[error("QEMU closed its socket before it had everything")]
    Closed,
    /// QEMU did not take the VM.
    #[error("QEMU could not load the VM (it says SHUT {0}): its log has the reason")]
    Refused(u32),
    /// QEMU said what no QEMU says here.
    #[error("QEMU's return path: {0}")]
    Back(String),
    /// The image cannot be played.
    #[error("{0}")]
    Unfit(String),
    /// Threads or memory are missing.
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
