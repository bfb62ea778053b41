//! The options of a store, and its limits.

use std::time::Duration;

use crate::error::StoreError;
use crate::layout::{Layout, PAGE};

/// A server's options; none of them is written to the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Limit of the file's memory in bytes, table included; 0 for none.
    pub mem_limit: u64,
    /// Pages to which a store grows when it is taken over, if it has fewer; 0 for those that it
    /// has. A store that cannot grow is taken over with the pages that it has.
    pub grow_to: u64,
    /// Bytes that a [`Keeper`](crate::Keeper) allocates ahead of need. The default covers a fifth
    /// of a second at 300 MB/s; a server under memory pressure wants 64 MiB to 256 MiB.
    pub reserve: u64,
    /// How long a write without a ready slab waits while the kernel leaves one request of the
    /// keeper for memory unanswered, before the write fails with
    /// [`PutError::Full`](crate::PutError::Full). Only time in which the keeper's thread sleeps in
    /// that request counts, or a tenth of the CPU time that it uses there: a write waits for a
    /// keeper that gets no CPU. Outside of such requests 5 s in the place of a shorter patience
    /// count in the same way.
    pub patience: Duration,
    /// While the machine is short of memory ([`Store::is_short`](crate::Store::is_short)): the part
    /// of the limit, as its divisor, that pages stored as they are may take, beside one such page
    /// for each page that is stored smaller. A write of one more fails as full: it would take as
    /// much memory as it frees. If hardly any written page compresses, they are stored all the same
    /// (`refusals.rs`), and so they are while they leave memory for a backing device
    /// ([`Store::expect_writeback`](crate::Store::expect_writeback)). 0: any number.
    pub whole_part: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mem_limit: 0,
            grow_to: 0,
            reserve: 64 << 20,
            patience: Duration::from_secs(1),
            whole_part: 0,
        }
    }
}

/// A limit in pages; none is the most.
pub(crate) fn in_pages(limit: u64) -> u64 {
    if limit == 0 {
        u64::MAX
    } else {
        limit / PAGE as u64
    }
}

/// The limit of a store in pages.
///
/// # Errors
///
/// [`StoreError::Limit`] for one that is too small for the table.
pub(crate) fn limit_pages(layout: &Layout, options: &Options) -> Result<u64, StoreError> {
    let limit = in_pages(options.mem_limit);
    if limit < layout.fixed_pages() {
        let need = layout.fixed_pages() * PAGE as u64;
        return Err(StoreError::Limit { limit: options.mem_limit, need });
    }
    Ok(limit)
}
