//! QEMU's replies about the guest's state and its migration.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Whether the guest runs, and the reason if it does not.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RunStatus {
    /// QEMU's run state: running, paused, inmigrate, postmigrate, finish-migrate, ...
    pub status: String,
    /// Whether the guest's CPUs run.
    pub running: bool,
}

/// The reply to `query-migrate`. Every field is optional: QEMU omits those that do not apply, and
/// versions differ. A negative number counts as absent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrationInfo {
    /// none, setup, active, cancelling, cancelled, completed, failed, pre-switchover, device,
    /// postcopy-active and more; absent when there never was a migration.
    pub status: Option<String>,
    /// Milliseconds since the start, or of the whole migration.
    #[serde(deserialize_with = "number")]
    pub total_time: Option<u64>,
    /// Milliseconds of set-up.
    #[serde(deserialize_with = "number")]
    pub setup_time: Option<u64>,
    /// Milliseconds for which the guest was stopped; known at the end.
    #[serde(deserialize_with = "number")]
    pub downtime: Option<u64>,
    /// Milliseconds for which the guest would be stopped if QEMU stopped it now.
    #[serde(deserialize_with = "number")]
    pub expected_downtime: Option<u64>,
    /// Percentage by which auto-converge slows the guest.
    #[serde(deserialize_with = "number")]
    pub cpu_throttle_percentage: Option<u64>,
    /// Why it failed.
    pub error_desc: Option<String>,
    /// Counters of the guest's memory.
    pub ram: Option<RamStats>,
}

impl MigrationInfo {
    /// The status, "none" when there never was a migration.
    pub fn status(&self) -> &str {
        self.status.as_deref().unwrap_or("none")
    }

    /// Whether the migration has ended, successfully or not.
    pub fn is_over(&self) -> bool {
        matches!(self.status(), "completed" | "failed" | "cancelled")
    }

    /// Whether a migration has begun that has not ended.
    pub fn is_in_progress(&self) -> bool {
        !self.is_over() && self.status() != "none"
    }
}

/// The counters `ram` of `query-migrate`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamStats {
    /// Bytes of dirty memory left to send.
    #[serde(deserialize_with = "number")]
    pub remaining: Option<u64>,
    /// Total bytes of memory.
    #[serde(deserialize_with = "number")]
    pub total: Option<u64>,
    /// Zero pages.
    #[serde(deserialize_with = "number")]
    pub duplicate: Option<u64>,
    /// Whole pages sent.
    #[serde(deserialize_with = "number")]
    pub normal: Option<u64>,
    /// Pages dirtied per second.
    #[serde(deserialize_with = "number")]
    pub dirty_pages_rate: Option<u64>,
    /// Throughput in 10^6 bit/s.
    pub mbps: Option<f64>,
    /// How often the dirty bitmap was synchronised: the number of passes.
    #[serde(deserialize_with = "number")]
    pub dirty_sync_count: Option<u64>,
    /// Bytes of a page.
    #[serde(deserialize_with = "number")]
    pub page_size: Option<u64>,
}

/// A count. QEMU's counts are signed; a negative one must not invalidate the whole reply.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Value::deserialize(deserializer)?.as_u64())
}

#[cfg(test)]
mod tests;
