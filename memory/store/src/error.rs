//! Errors of making a store.

use std::io;

use crate::layout::max_pages;
use crate::superblock::Foreign;

/// Why a store could not be made or taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The number of pages is 0 or too large.
    #[error("a store cannot have {pages} pages, it has 1 to {max}", max = max_pages())]
    Pages {
        /// The number asked for.
        pages: u64,
    },
    /// The limit leaves no room for the table.
    #[error("memory limit of {limit} bytes, superblock and slot table alone need {need}: raise the limit (--mem-limit), or make the device smaller")]
    Limit {
        /// The limit.
        limit: u64,
        /// Bytes that an empty store needs.
        need: u64,
    },
    /// Another server has the file, or a killed one has not fully exited.
    #[error("store is in use by another server")]
    InUse,
    /// The file is not a store of ours.
    #[error(transparent)]
    Foreign(#[from] Foreign),
    /// The kernel refused.
    #[error("cannot {action} the store's file")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}
