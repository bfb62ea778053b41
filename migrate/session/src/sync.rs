//! A lock that stays usable after a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`. A panic aborts the process in release builds; in tests the data under a poisoned
/// lock is still consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
