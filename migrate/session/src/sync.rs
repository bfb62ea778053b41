//! A lock that stays usable after a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`. A panic aborts the process in release builds; in tests what a poisoned lock
/// guards is still whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
