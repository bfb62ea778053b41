//! The report of a migration, with the names of `info migrate`, as text or JSON.

use crate::auto::Auto;
use crate::ending::Ending;
use crate::report_file::{aside, write_whole, NOT_TAKEN};
use crate::say::{say, show};
use anyhow::Context;
use codec::Settings;
use relay::{Counters, Source};
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// CPU time of both relays, user and system.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CpuSeconds {
    /// CPU time of the source relay, seconds. Absent in a receiver's report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<f64>,
    /// CPU time of the destination relay, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) destination: Option<f64>,
}

/// QEMU's `compression` of query-migrate (removed there in 9.1), with its definitions.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Compression {
    /// Pages that were compressed; pages of zeros are not among them.
    pub(crate) pages: u64,
    /// Pages sent uncompressed because every compression thread was busy.
    pub(crate) busy: u64,
    /// `busy` as a share of all pages, 0 to 1.
    pub(crate) busy_rate: f64,
    /// Size of those pages after compression, bytes.
    pub(crate) compressed_size: u64,
    /// Size before compression divided by size after it.
    pub(crate) compression_rate: f64,
}

/// The delta cache: pages that were sent again as differences.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Delta {
    /// Pages that were copied to the cache; pages of zeros are not among them.
    pub(crate) stored: u64,
    /// Pages of `stored` that were sent as their difference from an earlier version.
    pub(crate) pages: u64,
}

/// The seed of the receiver: pages that it has already.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SeedUse {
    /// Pages that the receiver has offered.
    pub(crate) offered: u64,
    /// Pages of the VM that were not sent because they are among these.
    pub(crate) pages: u64,
}

/// Report of one end of a migration.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Report {
    /// completed, unconfirmed, cancelled, failed, or another status of QEMU's query-migrate.
    pub(crate) status: String,
    /// Why the migration failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Whether the destination may run the VM, or have it in postcopy, after a failure. Only for
    /// `migrate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) may_run_there: Option<bool>,
    /// Name of the receiver's target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// Duration of the migration, ms.
    pub(crate) total_time: u64,
    /// Time during which the VM did not run, by QEMU's query-migrate, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) downtime: Option<u64>,
    /// Time of the last bytes from the source QEMU's socket to the destination QEMU's socket, ms.
    /// It is an upper bound of the downtime that QEMU's own estimate misses. Only after a completed
    /// precopy migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hidden_downtime: Option<f64>,
    /// Longest downtime that was allowed, ms. Only for `migrate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_downtime: Option<u64>,
    /// The most by which the guest's CPUs were slowed, per cent. Only for `migrate` with --throttle
    /// auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) throttle: Option<u8>,
    /// Why the migration did not converge and what would have ended it, with figures, if it was
    /// found not to converge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) not_converging: Option<String>,
    /// QEMU's setup time, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) setup_time: Option<u64>,
    /// Bytes that crossed the network.
    pub(crate) transferred: u64,
    /// Bytes of QEMU's migration stream.
    pub(crate) plain: u64,
    /// Throughput on the network, Mbit/s (10^6).
    pub(crate) throughput: f64,
    /// Pages of the guest per second.
    pub(crate) pages_per_second: f64,
    /// Pages with contents, sent whole.
    pub(crate) normal: u64,
    /// Pages of zeros.
    pub(crate) duplicate: u64,
    /// Passes over the guest's dirty memory, by QEMU's query-migrate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dirty_sync_count: Option<u64>,
    /// Compression at the source, under the names of QEMU's query-migrate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compression: Option<Compression>,
    /// The delta cache, if it was used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) delta: Option<Delta>,
    /// Chunks that the source sent with references to chunks before them (--history), if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) history_chunks: Option<u64>,
    /// The seed (--seed of `platen receive`), if the receiver has offered one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<SeedUse>,
    /// Counters of each codec thread's accelerator. A receiver counts from its start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) accelerators: Vec<qat::Snapshot>,
    /// Counters of each codec thread that uses libqpl, with --codec qpl.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) qpl: Vec<qpl::Snapshot>,
    /// Times that every link was lost and a new one was made.
    pub(crate) resumes: u32,
    /// Seconds without any link, counted from the last bytes that arrived.
    pub(crate) seconds_lost: f64,
    /// CPU time of the relays.
    pub(crate) cpu_seconds: CpuSeconds,
    /// --codec, as it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) codec: Option<String>,
    /// Level of a named codec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) level: Option<i32>,
    /// Decisions of --codec auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) auto: Option<Auto>,
    /// QEMU's multifd channels; 0 is a single stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) channels: Option<u8>,
    /// TCP connections between the relays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) links: Option<u16>,
    /// Version of the source QEMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) qemu: Option<String>,
    /// Status of the VM at the destination, by QEMU's query-status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vm: Option<String>,
}

impl Report {
    /// Makes the report of a source.
    pub(crate) fn of_source(
        source: &Source,
        settings: Option<Settings>,
        total: Duration,
        cpu: f64,
    ) -> Self {
        let counters = source.counters();
        let transferred = source.session().bytes_out.load(Ordering::Relaxed);
        let mut report = Self::of(counters, transferred, total);
        report.set_resumes(source.session().resumes());
        let (busy, busy_rate) = source.busy();
        let plain = counters.compressed_plain.load(Ordering::Relaxed);
        let size = counters.compressed_size.load(Ordering::Relaxed);
        report.compression = Some(Compression {
            pages: counters.compressed_pages.load(Ordering::Relaxed),
            busy,
            busy_rate,
            compressed_size: size,
            compression_rate: ratio(plain, size),
        });
        report.accelerators = source.accelerators();
        report.qpl = source.qpl();
        report.cpu_seconds.source = Some(cpu);
        report.codec = Some(settings.map_or("auto", |settings| settings.name()).to_string());
        report.level = settings.map(|settings| settings.level());
        report.auto = Auto::of(source);
        report
    }

    /// Makes the part of the report that both ends have.
    pub(crate) fn of(counters: &Counters, transferred: u64, total: Duration) -> Self {
        let mut report = Self {
            transferred,
            plain: counters.plain.load(Ordering::Relaxed),
            normal: counters.normal.load(Ordering::Relaxed),
            duplicate: counters.duplicate.load(Ordering::Relaxed),
            delta: Some(Delta {
                stored: counters.delta_stored.load(Ordering::Relaxed),
                pages: counters.delta_pages.load(Ordering::Relaxed),
            })
            .filter(|delta| delta.stored > 0),
            seed: Some(SeedUse {
                offered: counters.seed_offered.load(Ordering::Relaxed),
                pages: counters.seed_pages.load(Ordering::Relaxed),
            })
            .filter(|seed| seed.offered > 0),
            history_chunks: Some(counters.history_parts.load(Ordering::Relaxed))
                .filter(|chunks| *chunks > 0),
            ..Self::default()
        };
        report.set_total(total);
        report
    }

    pub(crate) fn set_resumes(&mut self, (resumes, lost): (u32, Duration)) {
        self.resumes = resumes;
        self.seconds_lost = lost.as_secs_f64();
    }

    /// Sets the figures on how `migrate` tried to end the migration.
    pub(crate) fn set_ending(&mut self, ending: &Ending) {
        self.max_downtime = u64::try_from(ending.max_downtime().as_millis()).ok();
        self.throttle = Some(ending.throttle).filter(|percent| *percent > 0);
        self.not_converging.clone_from(&ending.not_converging);
    }

    pub(crate) fn set_total(&mut self, total: Duration) {
        let seconds = total.as_secs_f64().max(0.001);
        self.total_time = u64::try_from(total.as_millis()).unwrap_or(u64::MAX);
        self.throughput = self.transferred as f64 * 8.0 / 1e6 / seconds;
        self.pages_per_second = (self.normal + self.duplicate) as f64 / seconds;
    }

    /// Formats the report as one line of JSON.
    pub(crate) fn json(&self) -> String {
        // Numbers, strings and options of them always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Prints the report, and writes it to `json` if given. An error is only reported: the exit
    /// status says whether the VM has migrated.
    pub(crate) fn publish(&self, json: Option<&Path>) {
        let (path, line, text) = (json.map(Path::to_path_buf), self.json() + "\n", self.text());
        let published = aside(move || {
            let written = path.map_or(Ok(()), |path| {
                write_whole(&path, &line)
                    .with_context(|| format!("cannot write the report to {}", path.display()))
            });
            [written, show(&text)]
        });
        match published {
            Some(results) => {
                for failed in results.into_iter().filter_map(Result::err) {
                    say(&format!("{failed:#}"));
                }
            }
            None => say(NOT_TAKEN),
        }
        if let Some(warning) = self.auto.as_ref().and_then(Auto::warning) {
            say(warning);
        }
    }
}

pub(crate) fn ratio(plain: u64, size: u64) -> f64 {
    if size == 0 {
        return 1.0;
    }
    plain as f64 / size as f64
}

/// CPU time of this process so far, user and system, seconds.
pub(crate) fn process_cpu() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}
