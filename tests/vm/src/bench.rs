//! Parts that the benchmarks with guests have in common.

use anyhow::{ensure, Result};

use crate::{Qemu, VmSpec, MACHINE_10};

/// A VM of QEMU `version` ("system" or "10") with `data` MiB of data and `spare` MiB beside them.
///
/// # Errors
/// If that QEMU is not here.
pub fn large_vm(version: &str, data: u64, spare: u64) -> Result<VmSpec> {
    let (qemu, machine) = match version {
        "10" => (Qemu::Ten, MACHINE_10),
        _ => (Qemu::System, VmSpec::large().machine),
    };
    ensure!(qemu.is_there(), "there is no QEMU 10 here: scripts/fetch-qemu fetches it");
    let memory_kib = ((data + spare).next_multiple_of(2) << 10) + 8;
    Ok(VmSpec { qemu, machine, memory_kib, ..VmSpec::large() })
}
