//! The types of frames (W9).

/// The type of a frame (W9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameType {
    /// Opens a stream. It has sequence number 0 in its direction.
    Open = 1,
    /// Carries one chunk, as a unit.
    Data = 2,
    /// States that QEMU's socket was still open after all bytes before this frame (W20).
    StillOpen = 3,
    /// States that QEMU has closed its socket, or shut down its side of it.
    Eof = 4,
    /// Acknowledges the bytes written to QEMU, per stream.
    Ack = 5,
    /// Has no payload; shows that the link works.
    Heartbeat = 6,
    /// Ends the session early; carries the reason.
    Abort = 7,
    /// Carries the sender's report; the migration is over.
    Finish = 8,
    /// Offers pages that the server has already (W29b).
    Seed = 9,
}

impl FrameType {
    pub(crate) fn from_wire(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Open,
            2 => Self::Data,
            3 => Self::StillOpen,
            4 => Self::Eof,
            5 => Self::Ack,
            6 => Self::Heartbeat,
            7 => Self::Abort,
            8 => Self::Finish,
            9 => Self::Seed,
            _ => return None,
        })
    }

    /// Whether frames of this type carry a sequence number of their stream.
    pub(crate) fn is_sequenced(self) -> bool {
        matches!(self, Self::Open | Self::Data | Self::StillOpen | Self::Eof)
    }
}
