//! Locks that serialize modifications of a page.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Serializes modifications of each page: two threads that pin the same object would wait for each
/// other's pin. Pages share locks; a lock is held while one page is edited.
#[derive(Debug, Default)]
pub(crate) struct Editing([Mutex<()>; 32]);

impl Editing {
    pub(crate) fn lock(&self, index: u64) -> MutexGuard<'_, ()> {
        let at = usize::try_from(index % self.0.len() as u64).expect("below 32");
        // A panic under this lock interrupts no update.
        self.0[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
