//! How the library is started, and why the device cannot be used although the libraries are there.

use crate::instance::Unfit;
use crate::watchdog::Hang;
use qat_abi::CpaStatus;
use std::time::Duration;

/// Options of starting the library.
#[derive(Debug, Clone)]
pub struct StartOptions {
    /// Process name given to the library: a section of its configuration file, if there is one. The
    /// default is the environment's `QAT_SECTION_NAME`, or "SHIM" as in QATzip.
    pub section: String,
    /// Interval between polls for events of the device. Default 10 ms.
    pub event_interval: Duration,
    /// Whether the user requires the device: see [`Qat::check_engines`](crate::Qat::check_engines).
    /// Default false.
    pub required: bool,
}

impl Default for StartOptions {
    fn default() -> Self {
        let section = std::env::var("QAT_SECTION_NAME").unwrap_or_else(|_| "SHIM".into());
        Self { section, event_interval: Duration::from_millis(10), required: false }
    }
}

/// Why the device cannot be used although the libraries are there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// `icp_sal_userIsQatAvailable` returns false: there is no device, no virtual function, or no
    /// permission for /dev/vfio.
    #[error("libqat finds no usable QAT device on this host")]
    Unavailable,
    /// This process has started QAT already; the library can be started only once.
    #[error("this process has started QAT already")]
    AlreadyStarted,
    /// `icp_sal_userStartMultiProcess` failed: all virtual functions are in use, or the service qat
    /// (qatmgr) does not run.
    #[error("icp_sal_userStartMultiProcess(\"{section}\") answered {status}")]
    Start {
        /// The section.
        section: String,
        /// `CpaStatus`.
        status: CpaStatus,
    },
    /// The section's name contains a NUL byte.
    #[error("section name {0:?} has a NUL byte")]
    Section(String),
    /// No thread could be started for the library's start, or for the device's events: without it
    /// a dead device would look like a slow one.
    #[error("cannot start a thread for the QAT library: {0}")]
    Thread(String),
    /// The library's start does not return. It is left to a thread of its own, and this process
    /// cannot use QAT.
    #[error(transparent)]
    Hang(#[from] Hang),
    /// The library started, but there is no instance for compression.
    #[error("no instance for compression ({} found that cannot be used{}); the device's service may be set to crypto only", .0.len(), first(.0))]
    NoInstance(Vec<Unfit>),
}

/// The first unfit instance, and why.
fn first(unfit: &[Unfit]) -> String {
    unfit.first().map_or(String::new(), |unfit| format!("; {} lacks {}", unfit.name, unfit.lacks))
}
