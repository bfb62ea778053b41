//! VMs whose RAM is a memfd, and VMs with huge pages, are saved and restored.

use anyhow::{ensure, Context, Result};
use rustix::fs::{fallocate, ftruncate, memfd_create, FallocateFlags, MemfdFlags};
use vm_tests::{Memory, Qemu, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::saved::{
    chained, is_loaded_first, is_whole, mode, players_die, runs_at_once, saved, start_restore,
    LIMIT,
};
use crate::stage::{Skip, Stage};
use crate::Scenario;

/// Limit for huge pages that the kernel finds when they are needed, and how many of them VMs that
/// run at once may take.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
const NEEDED: u64 = 1024;

/// RAM of a VM with huge pages, KiB.
const HUGE_KIB: u64 = 130 << 10;

pub(crate) fn scenarios() -> Vec<Scenario> {
    type Run = fn(&mut Stage, &VmSpec, &VmSpec) -> Result<()>;
    let memfd: &[(&str, Run)] = &[
        ("runs_at_once", runs_at_once),
        ("is_loaded_first", is_loaded_first),
        ("second_save_of_a_store_outlives_the_first", chained),
        ("survives_the_death_of_players", players_die),
    ];
    let huge: &[(&str, Run)] =
        &[("is_loaded_first", is_loaded_first), ("falls_back", falls_back_to_load)];
    let vms = [
        ("memfd_7", Memory::Memfd, Qemu::System, MACHINE_7_2),
        ("memfd_11", Memory::Memfd, Qemu::Eleven, MACHINE_11),
        // A multiple of 2 MiB of RAM, of which QEMU before 9.0 loses dirty bits (see `VmSpec`).
        ("huge_pages_10", Memory::Huge, Qemu::Ten, MACHINE_10),
        ("huge_pages_11", Memory::Huge, Qemu::Eleven, MACHINE_11),
    ];
    let mut all = Vec::new();
    for (name, memory, qemu, machine) in vms {
        let tiny = VmSpec::tiny(qemu, machine);
        let (kinds, memory_kib) = match memory {
            Memory::Huge => (huge, HUGE_KIB),
            Memory::Anonymous | Memory::Memfd => (memfd, tiny.memory_kib),
        };
        let spec = VmSpec { memory, memory_kib, ..tiny };
        for &(kind, run) in kinds {
            let spec = spec.clone();
            all.push(Scenario::new(format!("saved_{name}_{kind}"), move |stage| {
                if spec.memory == Memory::Huge {
                    allow_huge_pages()?;
                }
                run(stage, &spec, &spec)
            }));
        }
    }
    all
}

/// A restore at once loads RAM with huge pages first, and reports why.
fn falls_back_to_load(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    let mut restore = start_restore(stage, &destination, &image, &[])?;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    let reason = report["fallback"].as_str().unwrap_or_default();
    ensure!(mode(&report) == "load" && reason.contains("huge pages"), "{report}");
    is_whole(stage, destination)
}

/// Lets the kernel make huge pages. The limit stays: other tests may run, and a limit takes no
/// memory.
fn allow_huge_pages() -> Result<()> {
    let Ok(text) = std::fs::read_to_string(HUGE_PAGES) else {
        return Err(Skip("this kernel has no huge pages of 2 MiB").into());
    };
    let limit: u64 = text.trim().parse().context(HUGE_PAGES)?;
    if limit < NEEDED && std::fs::write(HUGE_PAGES, NEEDED.to_string()).is_err() {
        return Err(Skip("only root may let the kernel make huge pages").into());
    }
    // The memory of a host that has run for hours is in pieces. The kernel moves them together.
    if take_huge_pages().is_err() {
        let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
        if take_huge_pages().is_err() {
            return Err(Skip("the memory of this host is in too many pieces for huge pages").into());
        }
    }
    Ok(())
}

/// Takes the huge pages of two VMs, and gives them back.
fn take_huge_pages() -> std::io::Result<()> {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let pages = memfd_create("huge pages", flags)?;
    let len = (2 * HUGE_KIB) << 10;
    ftruncate(&pages, len)?;
    Ok(fallocate(&pages, FallocateFlags::empty(), 0, len)?)
}
