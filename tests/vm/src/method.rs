//! Methods of migrating a VM, and the cost of each migration.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Error, Result};
use serde_json::{json, Value};

use crate::lab::{certified_name, Lab};
use crate::platen;
use crate::qemu::{Vm, DOWNTIME_LIMIT};
use crate::simulated::SimulatedQat;

/// QEMU's own multifd compressors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Uncompressed pages.
    None,
    /// zlib level 1, QEMU's default.
    Zlib,
    /// zstd level 1, QEMU's default.
    Zstd,
}

/// A method of migrating a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Method {
    /// QEMU alone, one TCP connection, uncompressed.
    Qemu,
    /// QEMU alone, this many multifd channels.
    QemuMultifd(u32, Compression),
    /// The same with QEMU's own TLS, both ends showing certificates as platen's do.
    QemuMultifdTls(u32, Compression),
    /// QEMU alone with its `compress` capability (gone in 9.1): zlib threads on the main
    /// connection, all at their defaults.
    QemuCompress,
    /// QEMU alone with its `xbzrle` capability, with a cache of half the RAM or more.
    QemuXbzrle,
    /// platen between the two QEMUs, with TLS unless `--insecure` is among the flags, which are for
    /// `platen migrate`; `--seed=PATH` is for `platen receive`.
    Platen(Vec<String>),
    /// The same with codec qatzip on a simulated QAT device at the source, with this script.
    PlatenSimulatedQat(&'static str),
}

/// CPU seconds by process, without the guest's CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// The source QEMU.
    pub source_qemu: f64,
    /// The destination QEMU.
    pub destination_qemu: f64,
    /// `platen migrate`, its whole life; without the threads of a simulated device.
    pub source_relay: f64,
    /// `platen receive`, its whole life.
    pub destination_relay: f64,
}

impl Cost {
    /// The sum.
    pub fn total(&self) -> f64 {
        self.source_qemu + self.destination_qemu + self.source_relay + self.destination_relay
    }
}

/// The cost of a completed migration.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Milliseconds from start to completion, as the source QEMU counts them.
    pub total_ms: u64,
    /// Milliseconds without a running VM, as the source QEMU counts them.
    pub downtime_ms: u64,
    /// Bytes that crossed the link, both ways, headers included.
    pub wire: u64,
    /// CPU seconds.
    pub cost: Cost,
    /// CPU seconds of a simulated device's threads, which no host would spend.
    pub simulated: f64,
    /// The source QEMU's `query-migrate`.
    pub stats: Value,
    /// platen's report of the source end.
    pub report: Option<Value>,
}

/// How a migration may end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// By itself, within this time: for measurements. The error is [`DidNotEnd`] otherwise.
    ByItself(Duration),
    /// With help: QEMU's downtime limit is lifted after a while ([`Vm::wait_migration_end`]). For
    /// tests, which verify what arrives, on slow machines too.
    Helped,
}

impl Patience {
    fn limit(self) -> Duration {
        match self {
            Self::ByItself(limit) => limit,
            Self::Helped => Duration::from_secs(300),
        }
    }
}

/// A migration that had to end by itself did not: QEMU found no moment at which to stop the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DidNotEnd(pub Duration);

impl fmt::Display for DidNotEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "did not end in {} s", self.0.as_secs())
    }
}

impl std::error::Error for DidNotEnd {}

impl Method {
    /// platen with these flags.
    pub fn platen(flags: &[&str]) -> Self {
        Self::Platen(flags.iter().map(|flag| String::from(*flag)).collect())
    }

    /// Migrates `vm` to a new QEMU at the other side and returns it there, running, with the cost.
    ///
    /// # Errors
    /// If it does not complete, also [`DidNotEnd`]; the VM is lost then.
    pub fn run(&self, lab: &Lab, mut vm: Vm, patience: Patience) -> Result<(Vm, Outcome)> {
        let mut destination = lab.incoming_for(&vm)?;
        let wire = lab.net.crossed()?;
        let before = [vm.process.host_cpu()?, destination.process.host_cpu()?];
        let mut simulated = 0.0;
        let (relays, report) = match self {
            Self::Platen(flags) => through_platen(lab, &mut vm, &destination, flags, patience)?,
            Self::PlatenSimulatedQat(script) => {
                let qat = SimulatedQat::new(script, lab.folder())?;
                let mut flags = qat.flags();
                let qatzip = ["--codec", "qatzip", "--accelerator", "qat", "--channels", "0"];
                flags.extend(qatzip.map(String::from));
                let (mut relays, report) =
                    through_platen(lab, &mut vm, &destination, &flags, patience)?;
                simulated = qat.device_cpu()?;
                relays[0] -= simulated;
                (relays, report)
            }
            _ => {
                self.by_qemu_alone(lab, &mut vm, &mut destination, patience)?;
                ([0.0; 2], None)
            }
        };
        let cost = Cost {
            source_qemu: vm.process.host_cpu()? - before[0],
            destination_qemu: destination.process.host_cpu()? - before[1],
            source_relay: relays[0],
            destination_relay: relays[1],
        };
        let wire = lab.net.crossed()? - wire;
        let stats = vm.monitor.query_migrate()?;
        ensure!(stats["status"] == "completed", "the source's migration is {}", stats["status"]);
        vm.wait_left()?;
        destination.assert_running()?;
        let number =
            |key: &str| stats[key].as_u64().with_context(|| format!("no {key} in {stats}"));
        let (total_ms, downtime_ms) = (number("total-time")?, number("downtime")?);
        Ok((destination, Outcome { total_ms, downtime_ms, wire, cost, simulated, stats, report }))
    }

    fn by_qemu_alone(
        &self,
        lab: &Lab,
        vm: &mut Vm,
        destination: &mut Vm,
        patience: Patience,
    ) -> Result<()> {
        let (listen, peer) = lab.net.meeting_point(destination.side())?;
        self.prepare(vm)?;
        self.prepare(destination)?;
        if matches!(self, Self::QemuMultifdTls(..)) {
            use_tls(lab, vm, "client")?;
            use_tls(lab, destination, "server")?;
        }
        destination.listen(&format!("tcp:{listen}"))?;
        vm.monitor.execute("migrate", json!({"uri": format!("tcp:{peer}")}))?;
        let ends = ["completed", "failed", "cancelled"];
        let begin = Instant::now();
        for end in [vm, destination] {
            let status = match patience {
                Patience::ByItself(limit) => {
                    let left = limit.saturating_sub(begin.elapsed());
                    let waited = end.monitor.wait_migration(&ends, left);
                    waited.map_err(|error| too_late(error, begin, limit))?
                }
                Patience::Helped => end.wait_migration_end(&ends, patience.limit())?,
            };
            if status != "completed" {
                let why = end.monitor.query_migrate()?;
                bail!("migration of {} {status}: {}", end.name(), why["error-desc"]);
            }
        }
        Ok(())
    }

    /// The settings common to all methods, and this one's own. All are set, because a VM that was
    /// migrated here by another method still has that method's. For platen these are QEMU's
    /// defaults: platen makes its own settings.
    ///
    /// # Errors
    /// As [`Monitor::execute`](crate::Monitor::execute).
    pub fn prepare(&self, vm: &mut Vm) -> Result<()> {
        let (channels, compression) = match self {
            Self::QemuMultifd(channels, compression)
            | Self::QemuMultifdTls(channels, compression) => (Some(*channels), *compression),
            _ => (None, Compression::None),
        };
        let compression = match compression {
            Compression::None => "none",
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
        };
        // One at a time if they exclude each other: QEMU checks the whole set after each change.
        vm.monitor.set_capabilities(&[("multifd", false), ("xbzrle", false)])?;
        let known = vm.monitor.execute("query-migrate-capabilities", json!({}))?;
        if known.as_array().is_some_and(|all| all.iter().any(|one| one["capability"] == "compress"))
        {
            vm.monitor.set_capabilities(&[("compress", *self == Self::QemuCompress)])?;
        } else {
            ensure!(*self != Self::QemuCompress, "{} has no capability compress", vm.name());
        }
        vm.monitor.set_capabilities(&[
            ("events", true),
            ("return-path", true),
            ("multifd", channels.is_some()),
            ("xbzrle", *self == Self::QemuXbzrle),
        ])?;
        // QEMU needs a power of two.
        let cache = (vm.spec().memory_kib << 10).next_power_of_two() / 2;
        let parameters = json!({
            "xbzrle-cache-size": cache,
            "max-bandwidth": 0,
            "downtime-limit": DOWNTIME_LIMIT,
            "multifd-channels": channels.unwrap_or(2),
            "multifd-compression": compression,
            "tls-creds": "",
            "tls-hostname": "",
        });
        vm.monitor.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }
}

/// Has `vm` use TLS for its next migration, as its `endpoint`: "client" or "server".
fn use_tls(lab: &Lab, vm: &mut Vm, endpoint: &str) -> Result<()> {
    let certificates = lab.certificates()?;
    // QEMU wants these names.
    let folder = lab.folder().join(format!("qemu-tls-{}", certified_name(vm.side())));
    std::fs::create_dir_all(&folder)?;
    let from = certificates.of(vm.side());
    for (file, name) in [("ca.pem", "ca-cert"), ("cert.pem", "{}-cert"), ("key.pem", "{}-key")] {
        let name = folder.join(name.replace("{}", endpoint)).with_extension("pem");
        if !name.exists() {
            std::fs::copy(from.join(file), &name)
                .with_context(|| format!("cannot copy {file} to {}", name.display()))?;
        }
    }
    let id = format!("tls-{endpoint}");
    let objects = vm.monitor.execute("qom-list", json!({"path": "/objects"}))?;
    if !objects.as_array().is_some_and(|all| all.iter().any(|one| one["name"] == id)) {
        let object = json!({
            "qom-type": "tls-creds-x509",
            "id": id,
            "dir": folder.display().to_string(),
            "endpoint": endpoint,
            "verify-peer": true,
        });
        vm.monitor.execute("object-add", object)?;
    }
    let parameters = json!({"tls-creds": id, "tls-hostname": certified_name(vm.side().other())});
    vm.monitor.execute("migrate-set-parameters", parameters)?;
    Ok(())
}

/// Migrates the VM through two relays; returns their CPU seconds and the source's report.
fn through_platen(
    lab: &Lab,
    vm: &mut Vm,
    destination: &Vm,
    flags: &[String],
    patience: Patience,
) -> Result<([f64; 2], Option<Value>)> {
    let flags = flags.iter().map(String::as_str);
    let (mut of_receive, flags): (Vec<&str>, Vec<&str>) =
        flags.partition(|flag| flag.starts_with("--seed="));
    of_receive.extend(flags.iter().filter(|flag| **flag == "--insecure"));
    let mut receive = platen::receive(lab, destination, &of_receive)?;
    let mut migrate = platen::migrate(lab, vm, receive.peer, &flags)?;
    let limit = patience.limit();
    let source = match patience {
        Patience::ByItself(_) => match migrate.process.ends_within(limit)? {
            true => migrate.succeed(limit),
            false => bail!(DidNotEnd(limit)),
        },
        Patience::Helped => migrate.arrive(vm, limit),
    };
    let source = source.with_context(|| receive.platen.process.tail())?;
    let sink = receive.platen.succeed(limit)?;
    let report = migrate.report()?;
    ensure!(report["status"] == "completed", "exit status 0, but the report says {report}");
    Ok(([source.cpu, sink.cpu], Some(report)))
}

/// The result of waiting since `begin`: past the limit it is an error, whatever was seen last.
fn too_late(error: Error, begin: Instant, limit: Duration) -> Error {
    if begin.elapsed() < limit {
        return error;
    }
    Error::new(DidNotEnd(limit))
}
