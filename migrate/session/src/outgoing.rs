//! A frame to be sent.

use crate::frame::Header;
use crate::frame_type::FrameType;
use codec::UnitHeader;
use pages::Slot;

/// A frame that any link may send.
#[derive(Debug)]
pub enum Outgoing {
    /// A sequenced frame without payload.
    Bare(Header),
    /// DATA: the unit's header and the buffer with its payload.
    Unit {
        /// The link fills in the payload length.
        header: Header,
        /// The unit's own header.
        unit: UnitHeader,
        /// The first `unit.payload_len + header.table_len` bytes are the payload.
        body: Slot,
    },
    /// A free frame.
    Free(FrameType, Vec<u8>),
    /// An ACK of bytes written to QEMU: the link collects its entries and sends it.
    Acks,
}

impl Outgoing {
    /// The header of a sequenced frame.
    pub(crate) fn header(&self) -> Option<&Header> {
        match self {
            Self::Bare(header) | Self::Unit { header, .. } => Some(header),
            Self::Free(..) | Self::Acks => None,
        }
    }
}
