//! Status of a device: contents, memory, CPU time. The server sends it as JSON on the control
//! socket.

mod fields;
mod figures;

use super::footprint::Footprint;
use device::Device;
use policy::{Policy, PolicyStats};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Status of one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Name of the device.
    pub(crate) name: String,
    /// Version of platen.
    pub(crate) version: String,
    /// Process ID of the server.
    pub(crate) pid: u32,
    /// Codec of new pages.
    pub(crate) codec: String,
    /// Level of that codec.
    pub(crate) level: i32,
    /// Size of the device, bytes.
    pub(crate) disksize: u64,
    /// Threads that help with large requests.
    pub(crate) workers: usize,
    /// Transports by which clients reach the device.
    pub(crate) transports: Vec<Transport>,
    /// Memory, under the names of zram's `mm_stat`.
    pub(crate) mm_stat: MmStat,
    /// Requests, under the names of zram's `io_stat`.
    pub(crate) io_stat: IoStat,
    /// Writeback, under the names of zram's `bd_stat`; counted since this server started.
    pub(crate) bd_stat: BdStat,
    /// Counters that zram does not have.
    pub(crate) platen: Own,
    /// The backing device.
    #[serde(default)]
    pub(crate) backing: Option<BackingStatus>,
    /// Counters of the QAT device.
    #[serde(default)]
    pub(crate) accelerator: Option<Accelerated>,
    /// Why no QAT device compresses, where one may (`--accelerator`).
    #[serde(default)]
    pub(crate) unaccelerated: Option<String>,
    /// The zstd dictionaries.
    #[serde(default)]
    pub(crate) dictionaries: Option<DictionaryStatus>,
    /// Why the policy cannot train dictionaries.
    #[serde(default)]
    pub(crate) untrained: Option<String>,
    /// Counters of the policy; null while it is disabled.
    #[serde(default)]
    pub(crate) policy: Option<PolicyStats>,
    /// Source of the policy's knowledge of memory pressure: `trigger` or `average` of the kernel's
    /// pressure stall information, or `none`.
    #[serde(default)]
    pub(crate) pressure: Option<String>,
    /// Files of the device that were removed or replaced: no client finds it by them.
    #[serde(default)]
    pub(crate) removed: Vec<String>,
    /// Memory beside the store; `platen device stat` adds it.
    #[serde(default)]
    pub(crate) footprint: Option<Footprint>,
}

/// One transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Transport {
    /// ublk, kernel-nbd, fuse or nbd.
    pub(crate) kind: String,
    /// Path of the block device, of the file, or of the socket.
    pub(crate) address: String,
    /// Connected clients.
    pub(crate) connections: usize,
}

/// zram's `mm_stat`, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MmStat {
    pub(crate) orig_data_size: u64,
    pub(crate) compr_data_size: u64,
    pub(crate) mem_used_total: u64,
    pub(crate) mem_limit: u64,
    pub(crate) mem_used_max: u64,
    pub(crate) same_pages: u64,
    pub(crate) pages_compacted: u64,
    pub(crate) huge_pages: u64,
    pub(crate) huge_pages_since: u64,
}

/// zram's `io_stat`, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IoStat {
    pub(crate) failed_reads: u64,
    pub(crate) failed_writes: u64,
    pub(crate) invalid_io: u64,
    pub(crate) notify_free: u64,
}

/// zram's `bd_stat`, in its order, in pages and 4-KiB blocks; reads and writes since this server
/// opened the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BdStat {
    pub(crate) bd_count: u64,
    pub(crate) bd_reads: u64,
    pub(crate) bd_writes: u64,
}

/// Status of the backing device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackingStatus {
    /// Path of the file or block device.
    pub(crate) name: String,
    /// Whether I/O bypasses the page cache.
    pub(crate) direct: bool,
    pub(crate) bd_blocks: u64,
    pub(crate) bd_free: u64,
    pub(crate) bd_doubtful: u64,
    pub(crate) bd_written_today: u64,
    pub(crate) bd_failed_reads: u64,
    pub(crate) bd_failed_writes: u64,
    /// Why the server writes no more pages to the backing device.
    pub(crate) stopped: Option<String>,
    /// Why the server could not take the backing device over.
    pub(crate) refused: Option<String>,
}

/// Counters of the QAT device. Pages that are written while no instance is usable are in none of
/// these counters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accelerated {
    pub(crate) threads: u64,
    pub(crate) on_device: u64,
    pub(crate) offloaded: u64,
    pub(crate) redone: u64,
    /// `redone` by reason.
    pub(crate) reasons: BTreeMap<String, u64>,
    pub(crate) in_flight: u64,
    pub(crate) retries: u64,
    pub(crate) deadlines: u64,
    pub(crate) late: u64,
    pub(crate) suspicions: u64,
    pub(crate) recoveries: u64,
    pub(crate) verified: u64,
    pub(crate) longest_wait_us: u64,
}

/// Dictionaries of zstd, trained from the device's own pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DictionaryStatus {
    pub(crate) dictionaries: u64,
    pub(crate) dictionary_places: u64,
    pub(crate) dictionary_size: u64,
    pub(crate) dictionary_gain: u64,
    pub(crate) dictionary_pages: u64,
    pub(crate) dictionary_tables: u64,
    pub(crate) dictionaries_lost: u64,
}

/// Counters that zram does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Own {
    pub(crate) pages_read: u64,
    pub(crate) pages_written: u64,
    pub(crate) requests: u64,
    pub(crate) split_requests: u64,
    pub(crate) mem_ready: u64,
    pub(crate) grouped_pages: u64,
    pub(crate) groups: u64,
    pub(crate) lost_pages: u64,
    pub(crate) generation: u64,
    /// First page that could not be read, and the reason.
    pub(crate) damage: Option<String>,
}

impl Status {
    pub(crate) fn of(
        name: &str,
        device: &Device,
        transports: Vec<Transport>,
        policy: Option<&Policy>,
        refused: Option<&str>,
    ) -> Self {
        let store = device.store();
        let settings = device.settings();
        Self {
            name: name.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            codec: settings.codec().name().to_owned(),
            level: settings.level(),
            disksize: store.pages() * device::PAGE as u64,
            workers: device.workers(),
            transports,
            mm_stat: store.stats().into(),
            io_stat: device.stats().into(),
            bd_stat: BdStat::of(store),
            backing: BackingStatus::of(store, refused),
            platen: Own::of(device),
            accelerator: device.offload_stats().as_ref().map(Accelerated::from),
            unaccelerated: None,
            dictionaries: DictionaryStatus::of(device),
            untrained: policy.and_then(Policy::untrained).map(|error| {
                std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source())
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(": ")
            }),
            policy: policy.map(Policy::stats),
            pressure: policy.map(|policy| policy.pressure().to_owned()),
            removed: Vec::new(),
            footprint: None,
        }
    }

    /// Uncompressed bytes per byte of memory in use, tables included. Pages on the backing device
    /// are excluded from both. Memory held ready for the next writes is excluded, because it does
    /// not depend on how much is stored.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub(crate) fn ratio(&self) -> f64 {
        let used = self.mm_stat.mem_used_total.saturating_sub(self.platen.mem_ready);
        let elsewhere = self.bd_stat.bd_count * device::PAGE as u64;
        self.mm_stat.orig_data_size.saturating_sub(elsewhere) as f64 / used.max(1) as f64
    }
}
