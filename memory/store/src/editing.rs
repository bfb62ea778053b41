//! One modification of a page at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// One modification at a time for each page: two that pinned the same object would wait for each
/// other. Pages share locks; a lock is held for as long as one page takes to be edited.
#[derive(Debug, Default)]
pub(crate) struct Editing([Mutex<()>; 32]);

impl Editing {
    pub(crate) fn lock(&self, index: u64) -> MutexGuard<'_, ()> {
        let at = usize::try_from(index % self.0.len() as u64).expect("below 32");
        // Nothing is left half done by a panic while a lock is held.
        self.0[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
