//! One observation of a migration.

use std::time::Duration;

/// The phase of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The migration has not begun to send.
    Setup,
    /// The migration sends RAM while the VM runs.
    Precopy,
    /// The VM has stopped, and QEMU waits for leave to hand it over (pause-before-switchover).
    Waiting,
    /// The VM has stopped, or is about to, and still belongs to the source.
    Switchover,
    /// The destination runs the VM.
    Postcopy,
    /// The migration has ended.
    Over,
}

impl Phase {
    /// Whether a cancel disturbs nothing: the migration is not about to end.
    pub(crate) fn may_be_cancelled(self) -> bool {
        matches!(self, Self::Setup | Self::Precopy | Self::Waiting)
    }

    /// The phase of a status of QEMU's query-migrate.
    pub fn of(status: &str) -> Self {
        match status {
            "none" | "setup" | "wait-unplug" => Self::Setup,
            "active" => Self::Precopy,
            "pre-switchover" => Self::Waiting,
            "device" => Self::Switchover,
            status if status.starts_with("postcopy") => Self::Postcopy,
            _ => Self::Over,
        }
    }
}

/// One observation of a migration. Bytes of pages are uncompressed bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time since the migration's start.
    pub at: Duration,
    /// The migration's phase.
    pub phase: Phase,
    /// Bytes of RAM.
    pub total: u64,
    /// Bytes of pages that are dirty by QEMU's bitmap.
    pub remaining: u64,
    /// How often QEMU has read the dirty log.
    pub syncs: u64,
    /// Bytes of the pages sent so far, zero pages included.
    pub sent: u64,
    /// As `sent`, without zero pages, which cost next to nothing.
    pub data: u64,
    /// Bytes of pages per second that drained lately while QEMU had to wait, and the relay did not
    /// wait for QEMU (which reads the dirty log, or has nothing to send); 0 while unknown.
    pub drain: f64,
    /// Bytes that the links have sent.
    pub wire: u64,
    /// Bytes of pages that the guest dirties per second, by QEMU's last measurement.
    pub dirty_rate: Option<f64>,
    /// The bandwidth that QEMU assumes, bytes per second.
    pub bandwidth: Option<f64>,
    /// How long the bytes delivered last were under way between the QEMUs.
    pub delay: Duration,
    /// Per cent by which QEMU slows the vCPUs.
    pub throttle: u8,
    /// QEMU's downtime-limit.
    pub downtime_limit: Option<Duration>,
    /// QEMU's own limit of bytes per second (max-bandwidth), if it has one.
    pub max_bandwidth: Option<u64>,
}
