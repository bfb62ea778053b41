//! Why there is no store, and how large one may be.

use std::io;

use crate::layout::Layout;
use crate::superblock::Foreign;

/// Why a store could not be made or taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No store has so many pages, or none.
    #[error("a store cannot have {pages} pages, it has 1 to {max}", max = max_pages())]
    Pages {
        /// The number asked for.
        pages: u64,
    },
    /// The limit leaves no room for the table.
    #[error("memory limit of {limit} bytes, superblock and slot table alone need {need}")]
    Limit {
        /// The limit.
        limit: u64,
        /// Bytes that an empty store needs.
        need: u64,
    },
    /// Another server has the file, or one that was killed is not quite gone.
    #[error("store is in use by another server")]
    InUse,
    /// The file is not a store of ours.
    #[error(transparent)]
    Foreign(#[from] Foreign),
    /// The kernel refused.
    #[error("cannot {action} the store's file")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
}

/// The most pages that a store can have, somewhat more than 409 GiB: their objects' regions are
/// what a word of the slot table can name.
pub fn max_pages() -> u64 {
    let (mut low, mut high) = (1, 1 << 40);
    while low < high {
        let middle = u64::midpoint(low, high + 1);
        if Layout::of(middle).is_some() {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}
