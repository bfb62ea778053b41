//! What a device holds and what it costs, as the server says it: JSON on the control socket.

use device::{Device, IoStats, OffloadStats};
use policy::{Policy, PolicyStats};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use store::Stats;

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) pid: u32,
    pub(crate) codec: String,
    pub(crate) level: i32,
    /// Bytes that clients see.
    pub(crate) disksize: u64,
    /// Threads that large requests are split over, beside the transports' own.
    pub(crate) workers: usize,
    pub(crate) transports: Vec<Transport>,
    pub(crate) mm_stat: MmStat,
    pub(crate) io_stat: IoStat,
    pub(crate) bd_stat: BdStat,
    pub(crate) platen: Own,
    /// Where pages are written back to; none if nowhere.
    #[serde(default)]
    pub(crate) backing: Option<BackingStatus>,
    /// What a QAT device has done; none without one.
    #[serde(default)]
    pub(crate) accelerator: Option<Accelerated>,
    /// The dictionaries; none without.
    #[serde(default)]
    pub(crate) dictionaries: Option<DictionaryStatus>,
    /// Why none are trained, though they were to be.
    #[serde(default)]
    pub(crate) untrained: Option<String>,
    /// What was done with idle pages; none while they are left alone.
    #[serde(default)]
    pub(crate) policy: Option<PolicyStats>,
    /// How the policy knows that memory is short: `trigger` or `average` of the kernel's pressure
    /// stall information, or `none`: then it does not.
    #[serde(default)]
    pub(crate) pressure: Option<String>,
}

/// A way in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Transport {
    pub(crate) kind: String,
    pub(crate) address: String,
    /// Clients that are connected.
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

/// zram's `bd_stat`, in its order: pages, and blocks of 4 KiB since this server has the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BdStat {
    pub(crate) bd_count: u64,
    pub(crate) bd_reads: u64,
    pub(crate) bd_writes: u64,
}

/// The backing device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackingStatus {
    pub(crate) name: String,
    /// Whether it goes around the page cache.
    pub(crate) direct: bool,
    pub(crate) bd_blocks: u64,
    pub(crate) bd_free: u64,
    /// Blocks that a killed server may still be writing.
    pub(crate) bd_doubtful: u64,
    pub(crate) bd_written_today: u64,
    pub(crate) bd_failed_reads: u64,
    pub(crate) bd_failed_writes: u64,
    /// Why nothing more is written.
    pub(crate) stopped: Option<String>,
    /// Why there is none, though there was.
    pub(crate) refused: Option<String>,
}

impl BackingStatus {
    fn of(store: &store::Store, refused: Option<&str>) -> Option<Self> {
        let refused = refused.map(str::to_owned);
        let Some(stats) = store.backing_stats() else {
            return refused.map(|refused| Self { refused: Some(refused), ..Self::default() });
        };
        Some(Self {
            name: stats.name,
            direct: stats.direct,
            bd_blocks: stats.blocks,
            bd_free: stats.free,
            bd_doubtful: stats.doubtful,
            bd_written_today: store.written_today(),
            bd_failed_reads: stats.failed_reads,
            bd_failed_writes: stats.failed_writes,
            stopped: stats.stopped.map(|stopped| stopped.to_string()),
            refused,
        })
    }

    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 7] {
        [
            ("bd_direct", self.direct.into(), "1 if it goes around the page cache", false),
            ("bd_blocks", self.bd_blocks, "Blocks of 4 KiB", false),
            ("bd_free", self.bd_free, "Blocks that are free", false),
            (
                "bd_doubtful",
                self.bd_doubtful,
                "Blocks not used: a killed server may still be writing them",
                false,
            ),
            ("bd_written_today", self.bd_written_today, "Blocks written today (UTC)", false),
            (
                "bd_failed_reads",
                self.bd_failed_reads,
                "Reads that failed, or gave other bytes",
                true,
            ),
            ("bd_failed_writes", self.bd_failed_writes, "Writes that failed", true),
        ]
    }
}

/// What a QAT device has done, and what was done in its stead. Pages that are written while no
/// instance is well are in none of these: nobody gave them to a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accelerated {
    pub(crate) threads: u64,
    /// Threads whose instance takes pages just now.
    pub(crate) on_device: u64,
    /// Pages that a device has compressed.
    pub(crate) offloaded: u64,
    /// Pages that were given to a device and done in software, and why.
    pub(crate) redone: u64,
    pub(crate) reasons: BTreeMap<String, u64>,
    /// Pages with a device just now.
    pub(crate) in_flight: u64,
    /// Times that the device was full.
    pub(crate) retries: u64,
    /// Pages not answered for in time.
    pub(crate) deadlines: u64,
    /// Answers that came after their page had been done in software.
    pub(crate) late: u64,
    /// Times that an instance was no longer trusted, and was trusted again.
    pub(crate) suspicions: u64,
    pub(crate) recoveries: u64,
    /// Outputs that were decompressed and compared.
    pub(crate) verified: u64,
    /// Longest time that a page was under way, microseconds.
    pub(crate) longest_wait_us: u64,
}

/// Dictionaries of zstd, trained from the device's own pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DictionaryStatus {
    /// How many there are.
    pub(crate) dictionaries: u64,
    /// How many there may be yet.
    pub(crate) dictionary_places: u64,
    /// Bytes of the one that pages are written with.
    pub(crate) dictionary_size: u64,
    /// What that saved of pages held out from training, of 10000.
    pub(crate) dictionary_gain: u64,
    /// Pages in memory that need one to be read.
    pub(crate) dictionary_pages: u64,
    /// Bytes of the server's memory for their tables, of those that may come too.
    pub(crate) dictionary_tables: u64,
    /// Those that were damaged when the store was taken over.
    pub(crate) dictionaries_lost: u64,
}

impl DictionaryStatus {
    fn of(device: &Device) -> Option<Self> {
        let (store, all) = (device.store(), device.dictionaries());
        let there = store.dictionaries();
        if there == 0 && all.rooms() == 0 {
            return None;
        }
        let mut bytes = Box::new([0; store::MAX_DICTIONARY]);
        let newest = all.newest().map(|(tag, _)| usize::from(tag - store::DICTIONARY_TAG));
        let newest = newest.and_then(|place| store.dictionary(place, &mut bytes).ok());
        Some(Self {
            dictionaries: there as u64,
            dictionary_places: all.rooms() as u64,
            dictionary_size: newest.map_or(0, |newest| newest.len as u64),
            dictionary_gain: newest.map_or(0, |newest| newest.gain),
            dictionary_pages: store.dictionary_pages().iter().sum(),
            dictionary_tables: all.memory() as u64,
            dictionaries_lost: (0..there).filter(|&place| all.at(place).is_none()).count() as u64,
        })
    }

    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 7] {
        [
            ("dictionaries", self.dictionaries, "Dictionaries in the store", false),
            ("dictionary_places", self.dictionary_places, "Those that may be trained yet", false),
            ("dictionary_size", self.dictionary_size, "Bytes of the one in use", false),
            (
                "dictionary_gain",
                self.dictionary_gain,
                "What it saved of pages held out from training, of 10000",
                false,
            ),
            ("dictionary_pages", self.dictionary_pages, "Pages that need one to be read", false),
            (
                "dictionary_tables",
                self.dictionary_tables,
                "Bytes of memory for their tables",
                false,
            ),
            ("dictionaries_lost", self.dictionaries_lost, "Those found damaged", false),
        ]
    }
}

/// What zram has no name for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Own {
    pub(crate) pages_read: u64,
    pub(crate) pages_written: u64,
    pub(crate) requests: u64,
    /// Requests that were shared between threads.
    pub(crate) split_requests: u64,
    /// Bytes of `mem_used_total` that are ready and not used.
    pub(crate) mem_ready: u64,
    /// Pages that are compressed with their neighbours.
    pub(crate) grouped_pages: u64,
    /// Groups of such.
    pub(crate) groups: u64,
    /// Pages that were damaged when the store was taken over.
    pub(crate) lost_pages: u64,
    /// Servers that there have been, this one too.
    pub(crate) generation: u64,
    /// The first page that could not be read, and why.
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
            dictionaries: DictionaryStatus::of(device),
            untrained: policy.and_then(Policy::untrained).map(|error| {
                std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source())
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(": ")
            }),
            policy: policy.map(Policy::stats),
            pressure: policy.map(|policy| policy.pressure().to_owned()),
        }
    }

    /// What is so or not, as [`MmStat::fields`]: 1 if it is.
    pub(crate) fn flags(&self) -> Vec<(&'static str, u64, &'static str)> {
        let mut flags = vec![(
            "damage",
            self.platen.damage.is_some().into(),
            "1 if a page could not be read as it was written",
        )];
        if let Some(backing) = &self.backing {
            let (stopped, refused) = (backing.stopped.is_some(), backing.refused.is_some());
            flags.extend([
                ("writeback_stopped", stopped.into(), "1 if nothing more is written back"),
                ("backing_refused", refused.into(), "1 if the backing device is not used any more"),
            ]);
        }
        if let Some(pressure) = &self.pressure {
            let known = pressure != "none";
            flags.push(("pressure_known", known.into(), "0 if nobody says when memory is short"));
        }
        flags
    }

    /// Plain bytes by the byte of memory in use, tables and all. What is on the backing device is
    /// no part of either. What is only ready for the next writes is the same however much is
    /// stored, and is left out.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub(crate) fn ratio(&self) -> f64 {
        let used = self.mm_stat.mem_used_total.saturating_sub(self.platen.mem_ready);
        let elsewhere = self.bd_stat.bd_count * device::PAGE as u64;
        self.mm_stat.orig_data_size.saturating_sub(elsewhere) as f64 / used.max(1) as f64
    }
}

impl Own {
    fn of(device: &Device) -> Self {
        let (io, store) = (device.stats(), device.store());
        Self {
            pages_read: io.pages_read,
            pages_written: io.pages_written,
            requests: io.requests,
            split_requests: io.split_requests,
            mem_ready: store.stats().mem_ready,
            grouped_pages: store.stats().grouped_pages,
            groups: store.stats().groups,
            lost_pages: store.lost_pages(),
            generation: store.generation(),
            damage: device.damage().map(ToString::to_string),
        }
    }
}

impl From<&OffloadStats> for Accelerated {
    fn from(stats: &OffloadStats) -> Self {
        let engines = &stats.engines;
        let sum = |of: fn(&qat::Snapshot) -> u64| engines.iter().map(of).sum();
        let mut reasons = BTreeMap::new();
        for (reason, count) in engines.iter().flat_map(|engine| &engine.by_software) {
            let name = serde_json::to_value(reason).ok();
            let name = name.as_ref().and_then(|name| name.as_str()).unwrap_or("other");
            *reasons.entry(name.to_owned()).or_default() += count;
        }
        Self {
            threads: engines.len() as u64,
            on_device: stats.on_device as u64,
            offloaded: sum(|one| one.by_device),
            redone: sum(qat::Snapshot::software),
            reasons,
            in_flight: sum(|one| one.in_flight),
            retries: sum(|one| one.retries),
            deadlines: sum(|one| one.deadlines),
            late: sum(|one| one.late),
            suspicions: sum(|one| one.suspicions),
            recoveries: sum(|one| one.recoveries),
            verified: sum(|one| one.verified),
            longest_wait_us: engines.iter().map(|one| one.longest_wait_us).max().unwrap_or(0),
        }
    }
}

impl Accelerated {
    /// As [`MmStat::fields`], without the reasons.
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 12] {
        [
            ("threads", self.threads, "Threads with a QAT instance each", false),
            ("on_device", self.on_device, "Threads whose instance takes pages now", false),
            ("offloaded", self.offloaded, "Pages that a QAT device has compressed", true),
            ("redone", self.redone, "Pages given to a device and done in software", true),
            ("in_flight", self.in_flight, "Pages with a device now", false),
            ("retries", self.retries, "Times that a device was full", true),
            ("deadlines", self.deadlines, "Pages not answered for in time", true),
            ("late", self.late, "Answers after their page had been redone", true),
            ("suspicions", self.suspicions, "Times that an instance lost its trust", true),
            ("recoveries", self.recoveries, "Times that an instance was used again", true),
            ("verified", self.verified, "Outputs decompressed and compared", true),
            ("longest_wait_us", self.longest_wait_us, "Longest way of a page, microseconds", false),
        ]
    }
}

impl From<Stats> for MmStat {
    fn from(stats: Stats) -> Self {
        Self {
            orig_data_size: stats.orig_data_size,
            compr_data_size: stats.compr_data_size,
            mem_used_total: stats.mem_used_total,
            mem_limit: stats.mem_limit,
            mem_used_max: stats.mem_used_max,
            same_pages: stats.same_pages,
            pages_compacted: stats.pages_compacted,
            huge_pages: stats.huge_pages,
            huge_pages_since: stats.huge_pages_since,
        }
    }
}

impl From<IoStats> for IoStat {
    fn from(stats: IoStats) -> Self {
        Self {
            failed_reads: stats.failed_reads,
            failed_writes: stats.failed_writes,
            invalid_io: stats.invalid_io,
            notify_free: stats.notify_free,
        }
    }
}

impl MmStat {
    /// Names, values, what they are, and whether they only grow.
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 9] {
        [
            ("orig_data_size", self.orig_data_size, "Bytes of the pages stored", false),
            ("compr_data_size", self.compr_data_size, "Bytes of their compressed forms", false),
            ("mem_used_total", self.mem_used_total, "Bytes of memory, tables and all", false),
            ("mem_limit", self.mem_limit, "Bytes of memory allowed, 0 for any number", false),
            ("mem_used_max", self.mem_used_max, "The most bytes of memory there were", false),
            ("same_pages", self.same_pages, "Pages of one word over and over", false),
            ("pages_compacted", self.pages_compacted, "Pages of memory freed by compaction", true),
            ("huge_pages", self.huge_pages, "Pages stored as they are", false),
            ("huge_pages_since", self.huge_pages_since, "Pages ever stored as they are", true),
        ]
    }
}

impl IoStat {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 4] {
        [
            ("failed_reads", self.failed_reads, "Pages that could not be read", true),
            ("failed_writes", self.failed_writes, "Pages that could not be written", true),
            ("invalid_io", self.invalid_io, "Requests that were not valid", true),
            ("notify_free", self.notify_free, "Pages that clients have freed", true),
        ]
    }
}

impl BdStat {
    fn of(store: &store::Store) -> Self {
        let done = store.backing_stats();
        Self {
            bd_count: store.stats().bd_count,
            bd_reads: done.as_ref().map_or(0, |done| done.bd_reads),
            bd_writes: done.as_ref().map_or(0, |done| done.bd_writes),
        }
    }

    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 3] {
        [
            ("bd_count", self.bd_count, "Pages on the backing device", false),
            ("bd_reads", self.bd_reads, "Blocks of 4 KiB read from the backing device", true),
            ("bd_writes", self.bd_writes, "Blocks of 4 KiB written to the backing device", true),
        ]
    }
}

impl Own {
    /// As [`MmStat::fields`].
    pub(crate) fn fields(&self) -> [(&'static str, u64, &'static str, bool); 9] {
        [
            ("pages_read", self.pages_read, "Pages read", true),
            ("pages_written", self.pages_written, "Pages written", true),
            ("requests", self.requests, "Requests", true),
            ("split_requests", self.split_requests, "Requests shared between threads", true),
            ("mem_ready", self.mem_ready, "Bytes of memory ready and not used", false),
            ("grouped_pages", self.grouped_pages, "Pages compressed with neighbours", false),
            ("groups", self.groups, "Groups of neighbours compressed as one", false),
            ("lost_pages", self.lost_pages, "Pages found damaged when taken over", false),
            ("generation", self.generation, "Servers that there have been", false),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What zram's files in `/sys/block/zramN` have, in their order
    /// (Documentation/admin-guide/blockdev/zram.rst).
    const MM_STAT: [&str; 9] = [
        "orig_data_size",
        "compr_data_size",
        "mem_used_total",
        "mem_limit",
        "mem_used_max",
        "same_pages",
        "pages_compacted",
        "huge_pages",
        "huge_pages_since",
    ];
    const IO_STAT: [&str; 4] = ["failed_reads", "failed_writes", "invalid_io", "notify_free"];
    const BD_STAT: [&str; 3] = ["bd_count", "bd_reads", "bd_writes"];

    /// The keys of an object of numbers, in the order in which they are written, and the numbers.
    fn written(value: &impl Serialize) -> (Vec<String>, Vec<u64>) {
        let text = serde_json::to_string(value).unwrap();
        let pairs = text.trim_matches(['{', '}']).split(',');
        pairs
            .map(|pair| pair.split_once(':').unwrap())
            .map(|(key, number)| (key.trim_matches('"').to_owned(), number.parse::<u64>().unwrap()))
            .unzip()
    }

    /// What is shown, in the table and to Prometheus, is what is written, under zram's names in
    /// zram's order.
    fn compare<const N: usize>(
        zrams: [&str; N],
        value: &impl Serialize,
        fields: [(&'static str, u64, &'static str, bool); N],
    ) {
        let (keys, numbers) = written(value);
        assert_eq!(keys, zrams);
        assert_eq!(fields.map(|field| field.0), zrams);
        assert_eq!(fields.map(|field| field.1)[..], numbers);
    }

    #[test]
    fn counters_have_zram_s_names_in_zram_s_order() {
        let mm = MmStat {
            orig_data_size: 1,
            compr_data_size: 2,
            mem_used_total: 3,
            mem_limit: 4,
            mem_used_max: 5,
            same_pages: 6,
            pages_compacted: 7,
            huge_pages: 8,
            huge_pages_since: 9,
        };
        compare(MM_STAT, &mm, mm.fields());
        let io = IoStat { failed_reads: 1, failed_writes: 2, invalid_io: 3, notify_free: 4 };
        compare(IO_STAT, &io, io.fields());
        let bd = BdStat { bd_count: 1, bd_reads: 2, bd_writes: 3 };
        compare(BD_STAT, &bd, bd.fields());
    }
}
