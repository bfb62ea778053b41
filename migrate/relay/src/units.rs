//! What the codec threads of both ends agree on.

use codec::{Codec, UnitHeader};
use pages::Slot;
use session::{Header, Outgoing};

/// Chunks that a codec thread keeps in flight on its QAT instance: with a latency of 100 us for
/// nine pieces of 64 KiB, four would do for 20 Gbit/s; twice that covers the thread's absences.
pub(crate) const CHUNKS_ON_DEVICE: u16 = 8;
/// Pieces that the driver keeps in flight: those of all these chunks.
pub(crate) const PIECES_ON_DEVICE: usize = 72;

/// A DATA frame whose unit is the chunk itself; its delta table, if any, stands behind it already.
pub(crate) fn raw(header: Header, chunk: Slot, len: usize, checksum: u64) -> Outgoing {
    let length = u32::try_from(len).unwrap_or(u32::MAX);
    let unit = UnitHeader { codec: Codec::Raw, plain_len: length, payload_len: length, checksum };
    Outgoing::Unit { header, unit, body: chunk }
}
