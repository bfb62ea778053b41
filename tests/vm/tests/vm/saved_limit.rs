//! A guest that writes faster than it is saved.

use anyhow::{ensure, Context, Result};
use vm_tests::{Qemu, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::saved::{image_command, is_whole, settings, start_restore, start_save, LIMIT};
use crate::stage::{names_the_cause, Stage, LOAD};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let versions = [
        ("7", Qemu::System, MACHINE_7_2),
        ("10", Qemu::Ten, MACHINE_10),
        ("11", Qemu::Eleven, MACHINE_11),
    ];
    let scenario = |(name, qemu, machine)| {
        let spec = VmSpec::tiny(qemu, machine);
        let name = format!("saved_{name}_does_not_converge_and_is_stopped_at_the_limit");
        Scenario::new(name, move |stage| does_not_converge(stage, &spec))
    };
    versions.into_iter().map(scenario).collect()
}

/// A guest writes faster than it is saved. It runs until the limit, is stopped for the rest, and
/// has its settings afterwards.
fn does_not_converge(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    const LIVE: u64 = 5;
    let mut vm = stage.vm_of(spec)?;
    vm.is_reluctant()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let image = stage.lab.scratch("image");
    let flags = ["--live-limit", &LIVE.to_string(), "--then", "pause"];
    let mut save = start_save(stage, &vm, &image, &flags)?;
    vm.wait_active(&mut save.process)?;
    // Fewer bytes than the guest writes, on a machine of any speed.
    vm.hold_migration(3)?;
    save.succeed(LIMIT)?;
    names_the_cause(&save.complaints(), &["writes faster than it is saved: stopped after 5 s"])?;
    let report = save.report()?;
    ensure!(report["unsent"] == 0, "pages were not sent: {report}");
    vm.wait_left()?;
    let migration = vm.monitor.execute("query-migrate", serde_json::json!({}))?;
    let stopped = migration["downtime"].as_u64().with_context(|| migration.to_string())?;
    let total = report["total-ms"].as_u64().with_context(|| report.to_string())?;
    ensure!(total >= stopped + LIVE * 1000, "it was stopped earlier, for {stopped} ms: {report}");
    let limit = settings(&mut vm)?[1]["downtime-limit"].clone();
    ensure!(limit == 1, "the downtime limit was 1 before, and is {limit}");
    vm.monitor.execute("cont", serde_json::json!({}))?;
    image_command(stage, &vm, &["verify", &image.display().to_string()])?;
    let destination = stage.lab.incoming_for(&vm)?;
    is_whole(stage, vm)?;
    start_restore(stage, &destination, &image, &[])?.succeed(LIMIT)?;
    is_whole(stage, destination)?;
    // `is_whole` has parked both source and destination.
    stage.discard();
    Ok(())
}
