//! Sizes of a connection's buffers, and how much may be in flight.

use device::PAGE;

use crate::wire::{CHUNK, DATA_CHUNK, REQUEST};

/// The buffers whose size depends on [`ServerOptions::compact`](crate::ServerOptions::compact).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Bytes of a slice of a large request.
    pub(super) slice: usize,
    /// Bytes of `output`.
    pub(super) output: usize,
}

impl Sizes {
    pub(crate) const fn new(compact: bool) -> Self {
        if compact {
            COMPACT
        } else {
            FAST
        }
    }
}

const FAST: Sizes = Sizes { slice: 256 << 10, output: 256 << 10 };
const COMPACT: Sizes = Sizes { slice: 48 << 10, output: 64 << 10 };
/// Slices in flight at a time.
pub(super) const SLICES: usize = 8;
/// Slices for reads. The others are for writes, which need only workers to complete and must never
/// wait for reads.
pub(super) const READS: usize = SLICES - 2;
/// The bytes of the longest read of whole pages that is answered with an error, instead of ending
/// the connection, wherever its unreadable page is: with simple replies, and with small buffers
/// too, since the next server of a disk may have these. The kernel's client asks for more at a time
/// from Linux 6.9 on, so a server limits the requests of its disk to this.
pub const MAX_SIMPLE_READ: usize = READS * COMPACT.slice;
/// Reads that may wait for a slice. The kernel's client has 128 requests in flight on a connection.
pub(super) const WAITING: usize = 512;
/// Large requests at a time: those with slices in flight, and one of each kind between two slices.
pub(super) const LARGES: usize = SLICES + 2;
/// Requests up to this length need no slice.
pub(super) const SMALL: usize = 32 << 10;
pub(super) const INPUT: usize = 128 << 10;
/// Space in `output` reserved for reply headers of large requests in flight and of waiting reads,
/// all of which may fail at once.
pub(super) const RESERVE: usize = (2 * SLICES + WAITING) * DATA_CHUNK;
/// Extents in one reply of block status.
pub(super) const EXTENTS: usize = 512;
/// Pages examined for one reply of block status.
pub(super) const LOOKED_AT: u64 = 1 << 18;
/// The tag of a request that the thread waits for.
pub(super) const NOW: u64 = u64::MAX;

pub(super) static ZEROS: [u8; PAGE] = [0; PAGE];

/// Memory of a connection in bytes, without its queue; `compact` as in
/// [`ServerOptions`](crate::ServerOptions::compact).
#[must_use]
pub const fn connection_memory(compact: bool) -> usize {
    let Sizes { slice, output } = Sizes::new(compact);
    INPUT + output + SLICES * (slice + 2 * PAGE) + SMALL + 2 * PAGE + (64 << 10)
}

const _: () = assert!(INPUT >= 2 * (REQUEST + SMALL) && INPUT > 2 * crate::handshake::INPUT);
const _: () = assert!(COMPACT.output >= RESERVE + DATA_CHUNK + SMALL + CHUNK + 8 * EXTENTS);
const _: () = assert!(MAX_SIMPLE_READ <= READS * FAST.slice);
const _: () = assert!(COMPACT.slice > SMALL && COMPACT.slice.is_multiple_of(PAGE));
