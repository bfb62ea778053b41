//! The receiver's half. Its input comes from a peer.

use crate::cache::Cache;
use crate::table::Reader;
use crate::{Counts, RECORD_HEAD};

/// Why a table is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The table ends in the middle of a run, or a number in it is too large.
    #[error("delta table of {len} bytes breaks off or has no number at {at}")]
    Broken {
        /// Offset in the table.
        at: usize,
        /// The table's length.
        len: usize,
    },
    /// A run has no pages, or more than the chunk has.
    #[error("delta table names {pages} pages from byte {from} of a chunk of {len}")]
    Pages {
        /// Pages of the run.
        pages: u64,
        /// Where the first page begins.
        from: u64,
        /// Bytes of the chunk.
        len: usize,
    },
    /// A run names a slot that the cache does not have.
    #[error("delta table names {pages} slots from {slot} of {slots}")]
    Slots {
        /// Slots of the run.
        pages: u64,
        /// The first slot.
        slot: u32,
        /// Slots of the cache.
        slots: usize,
    },
    /// Bits beyond those of the run's pages are set.
    #[error("delta table has bits for more than the {pages} pages of a run at {at}")]
    Bits {
        /// Pages of the run.
        pages: u64,
        /// Offset in the table.
        at: usize,
    },
    /// There is no memory for the cache, although its size was granted.
    #[error("no memory for slot {slot} of the delta cache")]
    NoMemory {
        /// The slot.
        slot: usize,
    },
}

/// The receiver of one stream, for the stream's whole life.
#[derive(Debug)]
pub struct Receiver {
    cache: Cache,
}

impl Receiver {
    /// Creates a receiver with `bytes` of cache, for pages of `page_size` bytes. Both must equal
    /// the sender's.
    pub fn new(bytes: u64, page_size: usize) -> Self {
        Self { cache: Cache::new(bytes, page_size) }
    }

    /// Turns the differences in `plain` into pages, as `table` describes.
    ///
    /// # Errors
    /// The table is invalid. The contents of chunk and cache are then unspecified, and the stream
    /// cannot continue.
    pub fn apply(&mut self, plain: &mut [u8], table: &[u8]) -> Result<Counts, TableError> {
        let page = self.cache.page_size();
        let slots = self.cache.slots();
        let mut counts = Counts::default();
        let mut reader = Reader::new(table);
        let (mut at, mut slot) = (0_u64, 0_u32);
        while !reader.is_empty() {
            let begin = reader.at;
            let broken = |at| TableError::Broken { at, len: table.len() };
            let gap = reader.varint().ok_or(broken(begin))?;
            let pages = u64::from(reader.varint().ok_or(broken(begin))?);
            let step = reader.signed().ok_or(broken(begin))?;
            let from = at + u64::from(gap);
            let end =
                from + (pages * (RECORD_HEAD + page) as u64).saturating_sub(RECORD_HEAD as u64);
            let (first, last) = match (usize::try_from(from), usize::try_from(end)) {
                (Ok(first), Ok(last)) if pages > 0 && last <= plain.len() => (first, last),
                _ => return Err(TableError::Pages { pages, from, len: plain.len() }),
            };
            let first_slot = slot.wrapping_add(step.cast_unsigned());
            if u64::from(first_slot) + pages > slots as u64 {
                return Err(TableError::Slots { pages, slot: first_slot, slots });
            }
            // At most the number of pages in the chunk, as checked above.
            let n = usize::try_from(pages).unwrap_or(0);
            let bits = reader.bytes(n.div_ceil(8)).ok_or(broken(begin))?;
            if n % 8 > 0 && bits[n / 8] >> (n % 8) != 0 {
                return Err(TableError::Bits { pages, at: begin });
            }
            let records = plain[first..last].chunks_mut(RECORD_HEAD + page);
            for (i, record) in records.enumerate() {
                let slot = first_slot as usize + i;
                let old = self.cache.page(slot).ok_or(TableError::NoMemory { slot })?;
                let new = &mut record[..page];
                if bits[i / 8] >> (i % 8) & 1 != 0 {
                    for (new, old) in new.iter_mut().zip(old) {
                        *old ^= *new;
                        *new = *old;
                    }
                    counts.deltas += 1;
                } else {
                    old.copy_from_slice(new);
                }
            }
            counts.stored += pages;
            at = end;
            // There are at most 2^32 slots, so the result is a slot or one past the last.
            slot = first_slot.wrapping_add(u32::try_from(n).unwrap_or(0));
        }
        Ok(counts)
    }
}
