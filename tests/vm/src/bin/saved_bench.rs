//! Measures saving and restoring a VM with platen and with QEMU's own methods, in one interleaved
//! run.
//!
//! ```text
//! cargo run --release -p vm-tests --bin saved_bench [-- --rounds 5 --qemu 10 --data 700]
//! ```
//!
//! Each method saves one VM and restores it from the file, round after round in rotating order, so
//! that a change of the machine's speed affects all methods alike. The guest recomputes every byte
//! after each restore. The output is medians with their ranges. Times of `runs` end when QEMU
//! reports the VM as running, and exclude the start of QEMU. CPU time is that of QEMU without its
//! vCPUs, plus that of all other processes of the method.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::{Parser, ValueEnum};
use serde_json::{json, Value};
use vm_tests::bench::large_vm;
use vm_tests::platen::Platen;
use vm_tests::table::{render, to_f64};
use vm_tests::{cleanup, Lab, Qemu, Vm};

/// Saves and restores one VM by several ways, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Times that each way is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu10 has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "10")]
    qemu: String,
    /// Data in the guest, in MiB (at most 800).
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=800))]
    data: u64,
    /// Measure only these ways. Repeatable.
    #[arg(long, value_enum)]
    only: Vec<Way>,
}

/// A method of saving and restoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// `platen save`, `platen restore`.
    Platen,
    /// `platen restore --load`, from the same image.
    PlatenLoad,
    /// QEMU's `exec:zstd -T0 -1` and `exec:zstd -dc`.
    ExecZstd,
    /// QEMU's mapped-ram file.
    MappedRam,
    /// QEMU's mapped-ram file with two multifd channels.
    MappedRam2,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Platen => "platen",
            Self::PlatenLoad => "platen --load",
            Self::ExecZstd => "exec:zstd -1",
            Self::MappedRam => "mapped-ram",
            Self::MappedRam2 => "mapped-ram, 2 channels",
        }
    }

    /// Sets the capabilities for this method, and clears those of the others.
    fn set_up(self, vm: &mut Vm) -> Result<()> {
        let mapped = matches!(self, Self::MappedRam | Self::MappedRam2);
        let all = [("multifd", self == Self::MappedRam2), ("mapped-ram", mapped)];
        // QEMU 7.2 has no mapped-ram.
        let known = if vm.spec().qemu == Qemu::Ten { 2 } else { 1 };
        vm.monitor.set_capabilities(&all[..known])
    }
}

/// Cost of one save or restore.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    seconds: f64,
    cpu: f64,
    bytes: u64,
}

fn main() -> ExitCode {
    vm_tests::end("saved_bench", bench(&Options::parse()))
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    let spec = large_vm(&options.qemu, options.data, 300)?;
    let mut ways = vec![Way::Platen, Way::PlatenLoad, Way::ExecZstd];
    if spec.qemu == Qemu::Ten {
        ways.extend([Way::MappedRam, Way::MappedRam2]);
    }
    ways.retain(|way| options.only.is_empty() || options.only.contains(way));
    ensure!(!ways.is_empty(), "QEMU {} has none of these ways", options.qemu);
    let mut vm = lab.boot(&spec, options.data)?;
    let mut saves: Vec<Vec<Cost>> = vec![Vec::new(); ways.len()];
    let mut restores = saves.clone();
    let mut reports = Vec::new();
    for round in 0..options.rounds as usize {
        for nth in 0..ways.len() {
            let nth = (nth + round) % ways.len();
            let way = ways[nth];
            let file = lab.scratch("saved");
            saves[nth].push(save(&lab, &mut vm, way, &file)?);
            let destination = lab.incoming_for(&vm)?;
            drop(std::mem::replace(&mut vm, destination));
            let (cost, report) = restore(&lab, &mut vm, way, &file)?;
            restores[nth].push(cost);
            reports.extend(report);
            vm.guest.verify().with_context(|| format!("after {}", way.name()))?;
            std::fs::remove_file(&file)?;
        }
    }
    let table = |what: &str, runs: &[Vec<Cost>], of_bytes: bool| {
        let rows: Vec<Vec<String>> = ways
            .iter()
            .zip(runs)
            .map(|(way, runs)| {
                let mut row = vec![way.name().to_owned()];
                row.push(spread(runs, |run| run.seconds * 1e3));
                row.push(spread(runs, |run| run.cpu));
                if of_bytes {
                    row.push(spread(runs, |run| to_f64(run.bytes) / 1e6));
                }
                row
            })
            .collect();
        let head = ["way", what, "CPU s", "MB"];
        println!("{}", render(&head[..if of_bytes { 4 } else { 3 }], &rows));
    };
    table("saved, ms", &saves, true);
    table("runs, ms", &restores, false);
    for key in ["running-ms", "loaded-ms", "served-p50-ms", "served-p99-ms", "requests"] {
        let mut values: Vec<f64> = reports.iter().filter_map(|r| r[key].as_f64()).collect();
        println!("platen {key}: {}", spread_of(&mut values));
    }
    Ok(())
}

fn spread(runs: &[Cost], of: impl Fn(&Cost) -> f64) -> String {
    spread_of(&mut runs.iter().map(of).collect::<Vec<_>>())
}

/// Formats the median, and the range in brackets.
fn spread_of(values: &mut [f64]) -> String {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2), values.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.2} ({least:.2}-{most:.2})"),
        _ => "none".into(),
    }
}

const LIMIT: Duration = Duration::from_secs(600);

/// Pauses the VM and saves it; it stays paused.
fn save(lab: &Lab, vm: &mut Vm, way: Way, file: &Path) -> Result<Cost> {
    vm.monitor.execute("stop", json!({}))?;
    way.set_up(vm)?;
    let (begin, before) = (Instant::now(), vm.process.host_cpu()?);
    let children = children_cpu()?;
    match way {
        Way::Platen | Way::PlatenLoad => {
            let qmp = format!("unix:{}", vm.platen_monitor().display());
            let image = file.display().to_string();
            let words = ["save", "--qmp", &qmp, &image, "--then", "pause"];
            Platen::start(lab, "save", vm.side(), &words)?.succeed(LIMIT)?;
        }
        Way::ExecZstd => {
            let uri = format!("exec:zstd -q -T0 -1 -f -o {}", file.display());
            migrate(vm, &uri)?;
        }
        Way::MappedRam | Way::MappedRam2 => migrate(vm, &format!("file:{}", file.display()))?,
    }
    let seconds = begin.elapsed().as_secs_f64();
    let mut cpu = vm.process.host_cpu()? - before + children_cpu()? - children;
    if way == Way::ExecZstd {
        cpu += exec_cpu(vm)?;
    }
    use std::os::unix::fs::MetadataExt;
    // A mapped-ram file has holes.
    let bytes = file.metadata()?.blocks() * 512;
    Ok(Cost { seconds, cpu, bytes })
}

fn migrate(vm: &mut Vm, uri: &str) -> Result<()> {
    vm.monitor
        .execute("migrate-set-parameters", json!({"max-bandwidth": 0, "multifd-channels": 2}))?;
    vm.monitor.execute("migrate", json!({ "uri": uri }))?;
    let state = migration_end(vm)?;
    ensure!(state == "completed", "QEMU's migration to {uri} is {state}");
    Ok(())
}

/// Restores into `vm`, which waits for a migration, until it runs. Returns platen's report, if the
/// method has one.
fn restore(lab: &Lab, vm: &mut Vm, way: Way, file: &Path) -> Result<(Cost, Option<Value>)> {
    let (begin, before, children) = (Instant::now(), vm.process.host_cpu()?, children_cpu()?);
    let mut report = None;
    let mut seconds = None;
    match way {
        Way::Platen | Way::PlatenLoad => {
            let qmp = format!("unix:{}", vm.platen_monitor().display());
            let image = file.display().to_string();
            let load: &[&str] = if way == Way::PlatenLoad { &["--load"] } else { &[] };
            let words = [&["restore", "--qmp", &qmp, &image], load].concat();
            let mut restore = Platen::start(lab, "restore", vm.side(), &words)?;
            if way == Way::Platen {
                wait_running(vm)?;
                seconds = Some(begin.elapsed().as_secs_f64());
            }
            restore.succeed(LIMIT)?;
            if way == Way::Platen {
                report = Some(restore.report()?);
            }
        }
        Way::ExecZstd => load(vm, way, &format!("exec:zstd -q -dc {}", file.display()))?,
        Way::MappedRam | Way::MappedRam2 => load(vm, way, &format!("file:{}", file.display()))?,
    }
    if vm.monitor.run_state()? != "running" {
        // The VM was paused when it was saved.
        vm.monitor.execute("cont", json!({}))?;
    }
    wait_running(vm)?;
    let seconds = seconds.unwrap_or_else(|| begin.elapsed().as_secs_f64());
    let mut cpu = vm.process.host_cpu()? - before + children_cpu()? - children;
    if way == Way::ExecZstd {
        cpu += exec_cpu(vm)?;
    }
    Ok((Cost { seconds, cpu, bytes: 0 }, report))
}

fn load(vm: &mut Vm, way: Way, uri: &str) -> Result<()> {
    way.set_up(vm)?;
    vm.monitor.execute("migrate-set-parameters", json!({"multifd-channels": 2}))?;
    vm.listen(uri)?;
    let state = migration_end(vm)?;
    ensure!(state == "completed", "QEMU's migration from {uri} is {state}");
    Ok(())
}

/// Waits for the end of QEMU's migration and returns its status. Polls often, since callers measure
/// the time.
fn migration_end(vm: &mut Vm) -> Result<String> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = vm.monitor.migration_status()?;
        if ["completed", "failed", "cancelled"].contains(&state.as_str()) {
            return Ok(state);
        }
        ensure!(Instant::now() < deadline, "QEMU's migration stays {state}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wait_running(vm: &mut Vm) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while vm.monitor.run_state()? != "running" {
        if Instant::now() > deadline {
            bail!("{} does not run", vm.name());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// CPU seconds of this process's children that have ended.
fn children_cpu() -> Result<f64> {
    stat("/proc/self/stat", 15)
}

/// CPU seconds of a QEMU's ended children, which it ran by `exec:`. They belong to one migration,
/// since each QEMU here runs at most one.
fn exec_cpu(vm: &Vm) -> Result<f64> {
    stat(&format!("/proc/{}/stat", vm.process.id()), 15)
}

/// Sum of fields `first` and `first + 1` of a /proc stat file, in seconds. Fields count from 0;
/// proc(5) counts them from 1.
fn stat(path: &str, first: usize) -> Result<f64> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    let (_, rest) = text.rsplit_once(')').context("no name")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The name is field 1.
    let ticks = |at: usize| fields.get(at - 2).and_then(|field| field.parse::<f64>().ok());
    let sum = ticks(first).zip(ticks(first + 1)).map(|(user, system)| user + system);
    Ok(sum.context("no times")? / 100.0)
}
