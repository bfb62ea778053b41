//! Counters of a compressor.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// Counters of a compressor, written by its thread and read by any.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) units: AtomicU64,
    pub(crate) too_long: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) without: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) verified: AtomicU64,
    // The lock is taken only after a failure.
    last_failure: Mutex<Option<String>>,
}

/// Counters of a codec thread that uses libqpl.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Snapshot {
    /// Units that libqpl made.
    pub units: u64,
    /// Units that libqpl did not make smaller; they were sent uncompressed.
    pub too_long: u64,
    /// Units that libdeflate made after libqpl had failed.
    pub failures: u64,
    /// Units that libdeflate made after the thread had given libqpl up.
    pub without: u64,
    /// Attempts to submit a job while every queue of the device was full.
    pub retries: u64,
    /// Units that were inflated again and compared.
    pub verified: u64,
    /// The last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

impl Counters {
    /// Reads all counters.
    pub fn snapshot(&self) -> Snapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let last = self.last_failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        Snapshot {
            units: read(&self.units),
            too_long: read(&self.too_long),
            failures: read(&self.failures),
            without: read(&self.without),
            retries: read(&self.retries),
            verified: read(&self.verified),
            last_failure: last.clone(),
        }
    }

    pub(crate) fn failed(&self, why: String) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last_failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *last = Some(why);
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
