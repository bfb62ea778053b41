//! The figures of a status, from the store and the device.

use super::{Accelerated, BackingStatus, BdStat, DictionaryStatus, IoStat, MmStat, Own};
use device::{Device, IoStats, OffloadStats};
use std::collections::BTreeMap;
use store::Stats;

impl BackingStatus {
    pub(super) fn of(store: &store::Store, refused: Option<&str>) -> Option<Self> {
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
}

impl DictionaryStatus {
    pub(super) fn of(device: &Device) -> Option<Self> {
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
}

impl Own {
    pub(super) fn of(device: &Device) -> Self {
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

impl BdStat {
    pub(super) fn of(store: &store::Store) -> Self {
        let done = store.backing_stats();
        Self {
            bd_count: store.stats().bd_count,
            bd_reads: done.as_ref().map_or(0, |done| done.bd_reads),
            bd_writes: done.as_ref().map_or(0, |done| done.bd_writes),
        }
    }
}
