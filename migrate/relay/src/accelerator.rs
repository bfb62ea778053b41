//! Accelerators for codec qatzip, and their counters.

use codec::{Codec, Encoded};
use qat::Qat;
use qatzip::{QatZip, QatZipError};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A device, through one of its two drivers.
#[derive(Debug, Clone)]
pub enum Accelerator {
    /// Our own driver of libqat: many pieces in flight for each codec thread.
    Qat(Arc<Qat>),
    /// Intel's QATzip: one call at a time for each codec thread.
    QatZip(Arc<QatZip>),
}

/// Counters of one codec thread's accelerator: pieces of 64 KiB for the driver, whole units for
/// QATzip.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum AcceleratorSnapshot {
    /// The driver's counters.
    Qat(qat::Snapshot),
    /// QATzip's.
    QatZip(QatZipSnapshot),
}

/// Units of one QATzip session. The names are the driver's where the meaning is the same.
#[derive(Debug, Clone, Default, Serialize)]
pub struct QatZipSnapshot {
    /// Units in all.
    pub delivered: u64,
    /// Units compressed by the device.
    pub by_device: u64,
    /// Units compressed in software, by reason.
    pub by_software: QatZipSoftware,
    /// Why QATzip is unusable for the rest of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed: Option<String>,
}

/// Units that QATzip did not compress.
#[derive(Debug, Clone, Default, Serialize)]
pub struct QatZipSoftware {
    /// Smaller than QATzip's minimum for a device.
    pub short: u64,
    /// No instance was free.
    pub busy: u64,
    /// QATzip is unusable, or there is no session.
    pub closed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct QatZipCounters {
    by_device: AtomicU64,
    short: AtomicU64,
    busy: AtomicU64,
    closed: AtomicU64,
    why: OnceLock<String>,
}

impl QatZipCounters {
    fn snapshot(&self) -> QatZipSnapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let by_software = QatZipSoftware {
            short: read(&self.short),
            busy: read(&self.busy),
            closed: read(&self.closed),
        };
        let by_device = read(&self.by_device);
        let software = by_software.short + by_software.busy + by_software.closed;
        QatZipSnapshot {
            delivered: by_device + software,
            by_device,
            by_software,
            closed: self.why.get().cloned(),
        }
    }
}

/// The counters of one codec thread's accelerator, readable from any thread.
#[derive(Debug, Clone)]
pub(crate) enum AcceleratorCounters {
    Qat(Arc<qat::Counters>),
    QatZip(Arc<QatZipCounters>),
}

impl AcceleratorCounters {
    pub(crate) fn snapshot(&self) -> AcceleratorSnapshot {
        match self {
            Self::Qat(counters) => AcceleratorSnapshot::Qat(counters.snapshot()),
            Self::QatZip(counters) => AcceleratorSnapshot::QatZip(counters.snapshot()),
        }
    }
}

/// One codec thread's QATzip session, while it works.
#[derive(Debug)]
pub(crate) struct QatZipWorker {
    session: Option<qatzip::Session>,
    counters: Arc<QatZipCounters>,
}

impl QatZipWorker {
    pub(crate) fn new(library: &Arc<QatZip>, level: i32) -> Self {
        let counters = Arc::new(QatZipCounters::default());
        let session = match qatzip::Session::new(library, level) {
            Ok(session) => Some(session),
            Err(error) => {
                let _ = counters.why.set(error.to_string());
                None
            }
        };
        Self { session, counters }
    }

    pub(crate) fn counters(&self) -> Arc<QatZipCounters> {
        self.counters.clone()
    }

    /// Compresses a unit; `None` if software has to.
    pub(crate) fn encode(&mut self, plain: &[u8], out: &mut [u8]) -> Option<Encoded> {
        let done = match &mut self.session {
            Some(session) => session.compress(plain, out),
            None => {
                count(&self.counters.closed);
                return None;
            }
        };
        match done {
            Ok(len) if len < plain.len() => {
                count(&self.counters.by_device);
                Some(Encoded { codec: Codec::DeflateQz, len })
            }
            // The device has compressed it without gain.
            Ok(_) | Err(QatZipError::NoRoom { .. }) => {
                count(&self.counters.by_device);
                Some(Encoded { codec: Codec::Raw, len: plain.len() })
            }
            Err(QatZipError::TooShort { .. }) => {
                count(&self.counters.short);
                None
            }
            Err(QatZipError::Busy) => {
                count(&self.counters.busy);
                None
            }
            // For good: QATzip's session cannot be opened again.
            Err(error) => {
                let _ = self.counters.why.set(error.to_string());
                self.session = None;
                count(&self.counters.closed);
                None
            }
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
