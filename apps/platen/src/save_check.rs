//! The checks and the settings of `platen save` before a save.

use crate::monitor::{refuse_in_progress, refuse_mode};
use crate::restore_fit::get;
use crate::saved_vm::PLAIN;
use crate::settings_former;
use anyhow::{bail, ensure};
use qmp::{Qmp, RunStatus};

/// Refuses a VM that cannot be saved, before anything is changed.
pub(crate) fn vm(qmp: &mut Qmp) -> anyhow::Result<RunStatus> {
    refuse_in_progress(qmp, "this QEMU")?;
    let vm = qmp.query_status()?;
    if !vm.running && !["paused", "suspended", "shutdown"].contains(&vm.status.as_str()) {
        bail!("the VM is '{}', and QEMU migrates no such VM: {}", vm.status, remedy(&vm.status));
    }
    let on = settings_former::capabilities(qmp)?;
    for name in ["x-colo", "x-ignore-shared", "dirty-bitmaps"] {
        if on.get(name) == Some(&true) {
            bail!("this QEMU has {name} on, which an image cannot hold: turn it off (migrate-set-capabilities)");
        }
    }
    let parameters = qmp.query_parameters()?;
    refuse_mode(&parameters, "this QEMU")?;
    let creds = parameters.get("tls-creds").cloned().unwrap_or_default();
    if creds.as_str().is_some_and(|creds| !creds.is_empty()) {
        bail!("this QEMU has tls-creds set, which hides the stream: clear it (migrate-set-parameters tls-creds \"\")");
    }
    // QEMU would wait for an answer behind a device state whose end cannot be found.
    if get(qmp, "/machine", "suppress-vmdesc")? == true {
        bail!(
            "this VM's machine has suppress-vmdesc on, so that QEMU does not describe the device state, and platen \
             cannot find its end: turn it off (qom-set /machine suppress-vmdesc false)"
        );
    }
    Ok(vm)
}

/// The remedy for a VM that QEMU does not migrate. A VM that was migrated must not go on here: it
/// would run twice.
fn remedy(status: &str) -> &'static str {
    match status {
        "postmigrate" => {
            "if it was migrated, it runs at the destination, so save it there; if it was saved with \
             --then pause, let it go on first (cont)"
        }
        "inmigrate" => "this QEMU waits for a VM itself (-incoming), and has none to save",
        _ => "let it go on first (cont)",
    }
}

/// Refuses a snapshot of a VM that does not run, or that does not continue (`continues`) after it.
pub(crate) fn snapshot(continues: bool, vm: &RunStatus) -> anyhow::Result<()> {
    ensure!(
        continues,
        "--snapshot saves the VM as it is at the beginning, and the VM goes on: for --then pause or quit, leave --snapshot out"
    );
    ensure!(
        vm.running,
        "the VM is '{}': leave --snapshot out, which a VM that does not run does not need",
        vm.status
    );
    Ok(())
}

/// Capability settings for a migration with that many multifd channels, where QEMU has the
/// capability.
pub(crate) fn capabilities(channels: u8) -> Vec<(&'static str, bool)> {
    let plain = PLAIN.into_iter();
    plain.map(|(name, on)| (name, if name == "multifd" { channels > 0 } else { on })).collect()
}

/// Capability settings for a snapshot, where QEMU has the capability. QEMU permits
/// background-snapshot with none of the others.
pub(crate) fn snapshot_capabilities() -> Vec<(&'static str, bool)> {
    let plain = PLAIN.into_iter().map(|(name, on)| match name {
        "background-snapshot" => (name, true),
        "return-path" => (name, false),
        _ => (name, on),
    });
    let others = [
        "auto-converge",
        "late-block-activate",
        "postcopy-blocktime",
        "rdma-pin-all",
        "release-ram",
        "validate-uuid",
    ];
    plain.chain(others.map(|name| (name, false))).collect()
}
