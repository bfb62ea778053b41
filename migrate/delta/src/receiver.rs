//! The receiver's half. Its input comes from a peer.

use crate::cache::{Cache, SEGMENT};
use crate::channels::{ChannelCache, Segment};
use crate::table::{Run, Runs};
use crate::{Counts, Table};
use std::sync::{Arc, MutexGuard};

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
    /// There is no memory for the cache, although its size was granted; or the channels' cache is
    /// closed.
    #[error("no memory for slot {slot} of the delta cache")]
    NoMemory {
        /// The slot.
        slot: usize,
    },
}

/// The receiver of one stream, for the stream's whole life.
#[derive(Debug)]
pub struct Receiver {
    cache: Slots,
    page_size: usize,
    /// The first slot of the seed.
    base: u32,
}

#[derive(Debug)]
enum Slots {
    Own(Cache),
    /// The slots of all multifd channels.
    Shared(Arc<ChannelCache>),
}

impl Receiver {
    /// Creates a receiver with `bytes` of cache, for pages of `page_size` bytes. Both must equal
    /// the sender's.
    pub fn new(bytes: u64, page_size: usize) -> Self {
        let cache = Cache::new(bytes, page_size);
        let base = u32::try_from(cache.slots()).unwrap_or(u32::MAX);
        Self { cache: Slots::Own(cache), page_size, base }
    }

    /// Creates a receiver without a cache, for a stream whose tables refer only to the seed of the
    /// session, whose slots begin at `base`.
    pub fn without_cache(base: u32, page_size: usize) -> Self {
        Self { cache: Slots::Own(Cache::new(0, page_size)), page_size, base }
    }

    /// Creates a receiver for a multifd channel. The caller applies a table of epoch k once every
    /// channel has had its k-th SYNC.
    pub fn of_channel(cache: Arc<ChannelCache>) -> Self {
        let base = u32::try_from(cache.slots()).unwrap_or(u32::MAX);
        Self { page_size: cache.page_size(), cache: Slots::Shared(cache), base }
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
        table: Table<'_>,
        seed: u32,
    ) -> Result<Counts, TableError> {
        let slots = match &self.cache {
            Slots::Own(cache) => cache.slots(),
            Slots::Shared(cache) => cache.slots(),
        };
        let mut counts = Counts::default();
        let mut runs = Runs::new(table, plain.len(), self.page_size);
        while let Some(run) = runs.next()? {
            if seed > 0 && run.slot >= self.base {
                run.check_seed((self.base, seed))?;
                counts.seeded += run.pages;
                continue;
            }
            let (slot, pages) = (run.slot, run.pages);
            if u64::from(slot) + pages > slots as u64 {
                return Err(TableError::Slots { pages, slot, slots });
            }
            counts.deltas += self.run(&run, &mut plain[run.bytes.clone()])?;
            counts.stored += pages;
        }
        Ok(counts)
    }

    /// Applies a run, whose slots exist, to its bytes of the chunk. Returns the number of
    /// differences.
    fn run(&mut self, run: &Run<'_>, bytes: &mut [u8]) -> Result<u64, TableError> {
        let (page, mut deltas) = (self.page_size, 0);
        let mut pages = Pages::of(&mut self.cache);
        for (i, record) in bytes.chunks_mut(run.stride).enumerate() {
            let slot = run.slot as usize + i;
            let old = pages.page(slot).ok_or(TableError::NoMemory { slot })?;
            let new = &mut record[..page];
            if run.is_difference(i) {
                for (new, old) in new.iter_mut().zip(old) {
                    *old ^= *new;
                    *new = *old;
                }
                deltas += 1;
            } else {
                old.copy_from_slice(new);
            }
        }
        Ok(deltas)
    }
}

/// The pages of one run.
enum Pages<'a> {
    Own(&'a mut Cache),
    /// With the segment of the last page, locked: a lock for each page would cost more.
    Shared(&'a ChannelCache, usize, Option<MutexGuard<'a, Segment>>),
}

impl<'a> Pages<'a> {
    fn of(slots: &'a mut Slots) -> Self {
        match slots {
            Slots::Own(cache) => Self::Own(cache),
            Slots::Shared(cache) => Self::Shared(cache, usize::MAX, None),
        }
    }

    fn page(&mut self, slot: usize) -> Option<&mut [u8]> {
        match self {
            Self::Own(cache) => cache.page(slot),
            Self::Shared(cache, segment, guard) => {
                if slot / SEGMENT != *segment {
                    // Never two locks at once.
                    *guard = None;
                    *guard = Some(cache.segment(slot));
                    *segment = slot / SEGMENT;
                }
                guard.as_mut()?.page(slot, cache.page_size())
            }
        }
    }
}
