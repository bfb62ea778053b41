//! Methods of saving a VM to a file and restoring it: platen's and QEMU's own, with their costs.
//!
//! QEMU's methods save a VM that is paused. `platen save` pauses the VM itself, and notes that it
//! ran. Times of a restore begin when the destination's QEMU waits, so they exclude the start of
//! QEMU. CPU time is that of QEMU without its vCPUs, plus that of all
//! other processes of the method.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::ValueEnum;
use serde_json::{json, Value};

use crate::platen::Platen;
use crate::{Lab, Vm};

/// The time limit of a save or a restore.
const LIMIT: Duration = Duration::from_secs(600);

/// A method of saving and restoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Way {
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

/// Cost of a save.
#[derive(Clone, Copy, Debug, Default)]
pub struct Saved {
    /// Wall time.
    pub seconds: f64,
    /// CPU time.
    pub cpu: f64,
    /// Allocated bytes of the file.
    pub bytes: u64,
}

/// Cost of a restore.
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// Wall time until QEMU reports the VM as running.
    pub runs: f64,
    /// Wall time until the guest has answered on its console.
    pub answers: f64,
    /// CPU time until everything is loaded.
    pub cpu: f64,
    /// platen's report, of [`Way::Platen`].
    pub report: Option<Value>,
}

impl Way {
    /// Name in a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Platen => "platen",
            Self::PlatenLoad => "platen --load",
            Self::ExecZstd => "QEMU, exec:zstd -1",
            Self::MappedRam => "QEMU, mapped-ram",
            Self::MappedRam2 => "QEMU, mapped-ram, 2 channels",
        }
    }

    fn is_platen(self) -> bool {
        matches!(self, Self::Platen | Self::PlatenLoad)
    }

    /// Whether the VM's QEMU has this method.
    ///
    /// # Errors
    /// The monitor does not answer.
    pub fn is_known(self, vm: &mut Vm) -> Result<bool> {
        Ok(!matches!(self, Self::MappedRam | Self::MappedRam2) || has_mapped_ram(vm)?)
    }

    /// Sets the capabilities for this method, and clears those of the others.
    fn set_up(self, vm: &mut Vm) -> Result<()> {
        let mapped = matches!(self, Self::MappedRam | Self::MappedRam2);
        let all = [("multifd", self == Self::MappedRam2), ("mapped-ram", mapped)];
        let known = if has_mapped_ram(vm)? { 2 } else { 1 };
        vm.monitor.set_capabilities(&all[..known])
    }

    /// Pauses the VM and saves it; it stays paused.
    ///
    /// # Errors
    /// QEMU or platen fails.
    pub fn save(self, lab: &Lab, vm: &mut Vm, file: &Path) -> Result<Saved> {
        if !self.is_platen() {
            vm.monitor.execute("stop", json!({}))?;
        }
        self.set_up(vm)?;
        let (begin, before) = (Instant::now(), cpu(vm)?);
        if self.is_platen() {
            let qmp = format!("unix:{}", vm.platen_monitor().display());
            let image = file.display().to_string();
            let words = ["save", "--qmp", &qmp, &image, "--then", "pause"];
            Platen::start(lab, "save", vm.side(), &words)?.succeed(LIMIT)?;
        } else {
            let uri = match self {
                Self::ExecZstd => format!("exec:zstd -q -T0 -1 -f -o {}", file.display()),
                _ => format!("file:{}", file.display()),
            };
            vm.monitor.execute(
                "migrate-set-parameters",
                json!({"max-bandwidth": 0, "multifd-channels": 2}),
            )?;
            vm.monitor.execute("migrate", json!({ "uri": uri }))?;
            let state = migration_end(vm)?;
            ensure!(state == "completed", "QEMU's migration to {uri} is {state}");
        }
        let seconds = begin.elapsed().as_secs_f64();
        let cpu = cpu(vm)? - before;
        // A mapped-ram file has holes.
        Ok(Saved { seconds, cpu, bytes: file.metadata()?.blocks() * 512 })
    }

    /// Restores into `vm`, which waits for a migration, until it runs and all its memory is loaded.
    ///
    /// # Errors
    /// QEMU or platen fails, or the guest does not answer.
    pub fn restore(self, lab: &Lab, vm: &mut Vm, file: &Path) -> Result<Restored> {
        let (begin, before) = (Instant::now(), cpu(vm)?);
        let mut platen = None;
        if self.is_platen() {
            let qmp = format!("unix:{}", vm.platen_monitor().display());
            let image = file.display().to_string();
            let load: &[&str] = if self == Self::PlatenLoad { &["--load"] } else { &[] };
            let words = [&["restore", "--qmp", &qmp, &image], load].concat();
            platen = Some(Platen::start(lab, "restore", vm.side(), &words)?);
        } else {
            let uri = match self {
                Self::ExecZstd => format!("exec:zstd -q -dc {}", file.display()),
                _ => format!("file:{}", file.display()),
            };
            self.set_up(vm)?;
            vm.monitor.execute("migrate-set-parameters", json!({"multifd-channels": 2}))?;
            vm.listen(&uri)?;
            let state = migration_end(vm)?;
            ensure!(state == "completed", "QEMU's migration from {uri} is {state}");
        }
        if self == Self::PlatenLoad {
            platen.as_mut().context("platen runs")?.succeed(LIMIT)?;
        }
        if !self.is_platen() {
            // The VM was paused when it was saved.
            vm.monitor.execute("cont", json!({}))?;
        }
        wait_running(vm)?;
        let runs = begin.elapsed().as_secs_f64();
        vm.guest.ping()?;
        let answers = begin.elapsed().as_secs_f64();
        let mut report = None;
        if self == Self::Platen {
            let platen = platen.as_mut().context("platen runs")?;
            platen.succeed(LIMIT)?;
            report = Some(platen.report()?);
        }
        Ok(Restored { runs, answers, cpu: cpu(vm)? - before, report })
    }
}

fn has_mapped_ram(vm: &mut Vm) -> Result<bool> {
    let known = vm.monitor.execute("query-migrate-capabilities", json!({}))?;
    Ok(known.to_string().contains("\"mapped-ram\""))
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

/// CPU seconds: of the VM's QEMU without its vCPUs, of what it has run by `exec:`, and of this
/// process's children, that have ended.
fn cpu(vm: &Vm) -> Result<f64> {
    let children = ended_children("/proc/self/stat")?;
    let of_exec = ended_children(&format!("/proc/{}/stat", vm.process.id()))?;
    Ok(vm.process.host_cpu()? + children + of_exec)
}

/// CPU seconds of the ended children in a /proc stat file. Fields count from 0; proc(5) counts them
/// from 1.
fn ended_children(path: &str) -> Result<f64> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    let (_, rest) = text.rsplit_once(')').context("no name")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The name is field 1.
    let ticks = |at: usize| fields.get(at - 2).and_then(|field| field.parse::<f64>().ok());
    let sum = ticks(15).zip(ticks(16)).map(|(user, system)| user + system);
    Ok(sum.context("no times")? / 100.0)
}
