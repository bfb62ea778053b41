//! Constants and the raw unit, common to the codec threads of both ends.

use codec::{Codec, UnitHeader};
use pages::Slot;
use session::{Header, Outgoing};

/// Chunks that a codec thread has in flight on its QAT instance. With a latency of 100 us for nine
/// pieces of 64 KiB, four suffice for 20 Gbit/s; twice that covers the times when the thread does
/// not run.
pub(crate) const CHUNKS_ON_DEVICE: u16 = 8;
/// Pieces that the driver has in flight: the pieces of all these chunks.
pub(crate) const PIECES_ON_DEVICE: usize = 72;

/// A DATA frame whose unit is the chunk itself; the chunk's delta table, if any, already follows
/// it.
pub(crate) fn raw(header: Header, chunk: Slot, len: usize, checksum: u64) -> Outgoing {
    let length = u32::try_from(len).unwrap_or(u32::MAX);
    let unit = UnitHeader { codec: Codec::Raw, plain_len: length, payload_len: length, checksum };
    Outgoing::Unit { header, unit, body: chunk }
}
