//! The receiver's half. Its input comes from a peer.

use crate::cache::Cache;
use crate::table::Runs;
use crate::Counts;

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
    /// A page of the seed is not sent as a difference.
    #[error("delta table has a page for slot {slot} of the seed, which never changes, at {at}")]
    Seed {
        /// The run's first slot.
        slot: u32,
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
    /// The first slot of the seed.
    base: u32,
}

impl Receiver {
    /// Creates a receiver with `bytes` of cache, for pages of `page_size` bytes. Both must equal
    /// the sender's.
    pub fn new(bytes: u64, page_size: usize) -> Self {
        let cache = Cache::new(bytes, page_size);
        let base = u32::try_from(cache.slots()).unwrap_or(u32::MAX);
        Self { cache, base }
    }

    /// Creates a receiver without a cache, for a stream whose tables refer only to the seed of the
    /// session, whose slots begin at `base`.
    pub fn without_cache(base: u32, page_size: usize) -> Self {
        Self { cache: Cache::new(0, page_size), base }
    }

    /// Turns the differences in `plain` into pages, as `table` describes. Runs that refer to the
    /// seed, of `seed` pages, are left as they are: [`fill`](crate::fill) has done them.
    ///
    /// # Errors
    /// The table is invalid. The contents of chunk and cache are then unspecified, and the stream
    /// cannot continue.
    pub fn apply(
        &mut self,
        plain: &mut [u8],
        table: &[u8],
        seed: u32,
    ) -> Result<Counts, TableError> {
        let page = self.cache.page_size();
        let slots = self.cache.slots();
        let mut counts = Counts::default();
        let mut runs = Runs::new(table, plain.len(), page);
        while let Some(run) = runs.next()? {
            if seed > 0 && run.slot >= self.base {
                run.check_seed((self.base, seed))?;
                counts.seeded += run.pages;
                continue;
            }
            let (first_slot, pages) = (run.slot, run.pages);
            if u64::from(first_slot) + pages > slots as u64 {
                return Err(TableError::Slots { pages, slot: first_slot, slots });
            }
            for (i, record) in plain[run.bytes.clone()].chunks_mut(run.stride).enumerate() {
                let slot = first_slot as usize + i;
                let old = self.cache.page(slot).ok_or(TableError::NoMemory { slot })?;
                let new = &mut record[..page];
                if run.is_difference(i) {
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
        }
        Ok(counts)
    }
}
