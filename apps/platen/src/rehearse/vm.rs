//! The rehearsal of one VM, by its monitor.

use super::course::{Course, PAGE};
use crate::load::Load;
use crate::monitor::{refuse_colo, refuse_in_progress, refuse_mode, refuse_tls};
use crate::network::private_dir;
use crate::settings::Before;
use crate::settings_former::capabilities;
use anyhow::{ensure, Context};
use forecast::{Cores, DirtyCurve, Guest, Pass, QemuSettings, Sampled, Setup, Work};
use qmp::{Qmp, QmpError, Version};
use rehearse::{Discard, Totals};
use relay::UnixAddress;
use serde_json::json;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// QEMU's downtime-limit in a rehearsal, milliseconds: QEMU stops the VM, if it may at all, only
/// when next to nothing is left. (With 0 it would not read the dirty log again.)
const RELUCTANT: u64 = 1;

/// A capability of QEMU 8.1 and later.
const ACK: &str = "switchover-ack";
const BANDWIDTH: &str = "avail-switchover-bandwidth";

/// Capabilities of a rehearsal, where QEMU has them. x-ignore-shared stays as it is: it belongs to
/// the migration that is rehearsed.
const CAPABILITIES: [(&str, bool); 16] = [
    // Guards: see the module.
    ("events", true),
    ("return-path", true),
    ("pause-before-switchover", true),
    // With it another client could make the VM leave for good (migrate-start-postcopy).
    ("postcopy-ram", false),
    ("postcopy-preempt", false),
    // The guest keeps its speed.
    ("auto-converge", false),
    ("dirty-limit", false),
    // The stream is what platen would compress.
    ("multifd", false),
    ("xbzrle", false),
    ("compress", false),
    ("zero-copy-send", false),
    ("mapped-ram", false),
    ("background-snapshot", false),
    // The source must keep the RAM that it has sent.
    ("release-ram", false),
    ("dirty-bitmaps", false),
    // Disks are not rehearsed.
    ("block", false),
];

/// QEMU's state before the rehearsal.
#[derive(Debug)]
pub(super) struct BeforeIt {
    version: Version,
    max_downtime: Duration,
    max_bandwidth: Option<u64>,
    channels: u64,
}

/// Refuses a VM that cannot be rehearsed, before anything is changed.
pub(super) fn check(qmp: &mut Qmp, max_downtime: Option<u64>) -> anyhow::Result<BeforeIt> {
    refuse_in_progress(qmp, "the source QEMU")?;
    let vm = qmp.query_status()?;
    ensure!(
        vm.running,
        "the VM is '{}': a rehearsal measures how a running VM writes to its memory; let it go on first (cont)",
        vm.status
    );
    let parameters = qmp.query_parameters()?;
    refuse_tls(&parameters, "source")?;
    refuse_mode(&parameters, "the source QEMU")?;
    refuse_colo(&qmp.execute("query-migrate-capabilities", None)?, "source")?;
    let limit = parameters["downtime-limit"].as_u64();
    let limit = max_downtime.or(limit).context("QEMU has no parameter downtime-limit")?;
    Ok(BeforeIt {
        version: qmp.version(),
        max_downtime: Duration::from_millis(limit),
        max_bandwidth: parameters["max-bandwidth"].as_u64().filter(|rate| *rate > 0),
        channels: parameters["multifd-channels"].as_u64().unwrap_or(2).max(1),
    })
}

/// Result of a rehearsal.
#[derive(Debug)]
pub(super) struct Rehearsed {
    /// Duration, seconds.
    pub(super) seconds: f64,
    /// QEMU's version.
    pub(super) version: Version,
    /// Bytes of RAM.
    pub(super) ram: u64,
    pub(super) passes: Vec<Pass>,
    pub(super) totals: Totals,
    pub(super) sampled: Sampled,
    /// How long the VM stood still, by QEMU's clock.
    pub(super) pause: Duration,
    /// The run state afterwards.
    pub(super) vm: String,
    /// Cores that nothing but this process used.
    pub(super) free_cores: f64,
}

impl Rehearsed {
    /// The first message of the result.
    pub(super) fn vm_in_words(&self) -> String {
        let pause = match self.pause.as_micros() {
            0 => "it was not stopped".to_owned(),
            micros => format!("it stood still for {:.1} ms", micros as f64 / 1e3),
        };
        format!(
            "rehearsed for {:.1} s; the VM is '{}' at the source, {pause}; platen has restored QEMU's settings",
            self.seconds, self.vm
        )
    }

    pub(super) fn curve(&self) -> DirtyCurve {
        DirtyCurve::new(&self.passes, self.ram as f64)
    }
}

impl BeforeIt {
    /// Makes the inputs of forecasts. `workers` is the number of codec threads.
    pub(super) fn setup(&self, seen: &Rehearsed, workers: f64) -> Setup {
        /// Bytes of pages per second of a QEMU that sent too little to measure it.
        const FAST: f64 = 1e9;
        /// The rate at which QEMU finds that pages are zeros.
        const ZEROS: f64 = 4e9;
        let Totals { pages, data_pages, first_pages, first_data_pages, .. } = seen.totals;
        let page = seen.totals.page_size as f64;
        let (again, again_data) = (pages - first_pages, data_pages - first_data_pages);
        let (ram, data) = (seen.ram as f64, first_data_pages as f64 * page);
        let source = seen.totals.fastest.map_or(FAST, |pages| pages * page);
        let guest = Guest {
            ram,
            data,
            source,
            zeros: (ram - data).max(0.0) / ZEROS,
            // QEMU's own CPU time is not in these forecasts.
            zeros_cpu: [0.0; 2],
            data_share: if again > 0 { again_data as f64 / again as f64 } else { 1.0 },
            curve: seen.curve(),
        };
        let work = Work { page: controller::Config::new(1).other_ns_per_byte, wire: 0.0 };
        let cores = Cores { workers, free: seen.free_cores, work, there: None };
        Setup {
            guest,
            sampled: seen.sampled.clone(),
            cores,
            qemu_cores: Cores { work: Work::default(), ..cores },
            device: None,
            qemu: QemuSettings {
                version: (self.version.major, self.version.minor),
                max_bandwidth: self.max_bandwidth.map(|rate| rate as f64),
                channels: self.channels as f64,
            },
            max_downtime: self.max_downtime,
            postcopy: true,
        }
    }
}

/// Sets QEMU up, rehearses for about `length`, and cancels. QEMU's settings stay changed.
/// Afterwards the VM runs, or the error says that it does not.
pub(super) fn rehearse(
    qmp: &mut Qmp,
    settings: &mut Before,
    length: Duration,
    interrupted: &AtomicBool,
) -> anyhow::Result<Rehearsed> {
    let known = capabilities(qmp)?;
    let mut wanted = CAPABILITIES.to_vec();
    if known.contains_key(ACK) {
        wanted.push((ACK, true));
    }
    let parameters = qmp.query_parameters()?;
    settings.set(qmp, &wanted)?;
    settings.set_parameter(qmp, "max-bandwidth", json!(0))?;
    settings.set_parameter(qmp, "downtime-limit", json!(RELUCTANT))?;
    if parameters.get(BANDWIDTH).is_some() {
        settings.set_parameter(qmp, BANDWIDTH, json!(0))?;
    }
    let dir = private_dir()?;
    let address = UnixAddress::from(dir.path().join("rehearse.sock"));
    let discard =
        Discard::listen(address, PAGE.into(), crate::relay_options::delta_cache_default())?;
    // Earlier events mean nothing here.
    while qmp.poll_event(Duration::ZERO)?.is_some() {}
    // From here on the helper cancels a migration that waits to hand the VM over.
    settings.cancel_held_at_death()?;
    let load = Load::now();
    let mut course = Course::new(length);
    if let Err(error) = begin(qmp, &discard) {
        if !is_silent(&error) {
            // Another client's migration may be in progress, which platen must not cancel.
            settings.migration_is_over()?;
        }
        return Err(error);
    }
    let watched = course.watch(qmp, &discard, interrupted);
    let watched = match watched {
        // QEMU's migration fails with its socket, and the helper process does the rest.
        Err(error) if is_silent(&error) => return Err(error),
        watched => watched,
    };
    let ended = course.end(qmp, &discard);
    let (free_cores, vm) = (load.free_cores(), qmp.query_status());
    // Another client's migration is not the helper's to cancel either.
    if ended.is_ok() || course.over {
        settings.migration_is_over()?;
    }
    match (watched, ended) {
        (Ok(()), ended) => ended?,
        (Err(error), Ok(())) => return Err(error),
        (Err(error), Err(stuck)) => return Err(error.context(format!("{stuck:#}"))),
    }
    ensure!(
        !course.schedule.passes().is_empty(),
        "QEMU stopped the VM before its first pass over the RAM was over (was its downtime-limit raised \
         meanwhile?): nothing is known of the guest's writes"
    );
    Ok(Rehearsed {
        seconds: course.begun.elapsed().as_secs_f64(),
        version: qmp.version(),
        ram: course.ram,
        passes: course.schedule.passes().to_vec(),
        totals: discard.totals(),
        sampled: discard.sampled(),
        pause: course.pause,
        vm: vm?.status,
        free_cores,
    })
}

/// Starts the migration of a VM that still runs.
fn begin(qmp: &mut Qmp, discard: &Discard) -> anyhow::Result<()> {
    let vm = qmp.query_status()?;
    ensure!(vm.running, "the VM was stopped meanwhile: it is '{}'", vm.status);
    Ok(qmp.migrate(&discard.uri())?)
}

/// Whether an error means that the monitor is of no use any more.
pub(super) fn is_silent(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(|error: &QmpError| !error.is_refusal())
}
