//! Booted guests, saved as migration streams: to boot one under TCG and to fill its memory takes
//! several seconds of CPU, to load it a tenth of that.
//!
//! A state belongs to the program that saved it, so that no change of the harness, the guest or
//! QEMU meets an old state. The VM is stopped while QEMU saves it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::json;
use twox_hash::XxHash3_64;

use crate::image;
use crate::lab::VmSpec;
use crate::qemu::Vm;

/// The time limit of saving or loading.
const LIMIT: Duration = Duration::from_secs(300);

/// The file of the state of a guest with this configuration, filled with `fill_mib` MiB.
///
/// # Errors
/// If this program or QEMU's version cannot be read.
pub(crate) fn path(spec: &VmSpec, fill_mib: u64, initramfs: &Path) -> Result<PathBuf> {
    let program = std::fs::read(std::env::current_exe()?)?;
    let kernel = std::fs::read(image::kernel()?)?;
    let version = Command::new(spec.qemu.program()).arg("--version").output();
    let version = version.with_context(|| spec.qemu.program().display().to_string())?.stdout;
    let parts: [&[u8]; 4] = [&program, &kernel, &version, initramfs.as_os_str().as_encoded_bytes()];
    let key = parts.iter().fold(0, |key, part| XxHash3_64::oneshot_with_seed(key, part));
    let prefix = prefix(spec, fill_mib);
    Ok(image::folder().join(format!("{prefix}{key:016x}.state")))
}

/// Part of the name that the states of all programs for this configuration have in common.
fn prefix(spec: &VmSpec, fill_mib: u64) -> String {
    let key = XxHash3_64::oneshot(format!("{spec:?}").as_bytes());
    format!("boot-{:?}-{fill_mib}-{key:016x}-", spec.qemu)
}

/// Writes the state of a guest that waits for commands to `path`, and removes states of earlier
/// programs. The VM is stopped then.
///
/// # Errors
/// If QEMU or the file system refuses.
pub(crate) fn save(vm: &mut Vm, fill_mib: u64, path: &Path) -> Result<()> {
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    vm.monitor.execute("stop", json!({}))?;
    vm.monitor.execute("migrate-set-parameters", json!({"max-bandwidth": 0}))?;
    vm.monitor.execute("migrate", json!({"uri": exec("cat >", &unfinished)}))?;
    let state = vm.monitor.wait_migration(&["completed", "failed"], LIMIT)?;
    if state != "completed" {
        let _ = std::fs::remove_file(&unfinished);
        bail!("the state of {} cannot be saved as {}", vm.name(), path.display());
    }
    std::fs::rename(&unfinished, path)?;
    let prefix = prefix(vm.spec(), fill_mib);
    for entry in std::fs::read_dir(image::folder())? {
        let other = entry?.path();
        let name = other.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with(&prefix) && name.ends_with(".state") && other != path {
            // Another run may have removed it.
            let _ = std::fs::remove_file(other);
        }
    }
    Ok(())
}

/// Loads a state into a QEMU that waits for a migration, and lets the guest run.
///
/// # Errors
/// If QEMU refuses it, or the guest does not answer; the message names the file.
pub(crate) fn load(vm: &mut Vm, path: &Path) -> Result<()> {
    try_load(vm, path)
        .with_context(|| format!("{} cannot be loaded: remove it", path.display()))
        .map_err(|error| error.context(vm.process.tail()))
}

fn try_load(vm: &mut Vm, path: &Path) -> Result<()> {
    vm.listen(&exec("cat <", path))?;
    let deadline = Instant::now() + LIMIT;
    while vm.monitor.run_state()? == "inmigrate" {
        if Instant::now() > deadline {
            bail!("{} is still loading after {LIMIT:?}", vm.name());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    vm.monitor.execute("cont", json!({}))?;
    vm.guest.ping()
}

/// QEMU's address for a shell command with a redirection.
fn exec(command: &str, path: &Path) -> String {
    format!("exec:{command} '{}'", path.display().to_string().replace('\'', "'\\''"))
}
