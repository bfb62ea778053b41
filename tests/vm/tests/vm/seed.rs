//! A VM migrates to a host that has an earlier save of it: pages of that save are not sent (W29b).

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use vm_tests::platen::{self, Receive};
use vm_tests::{Qemu, Vm, VmSpec, MACHINE_11, MACHINE_7_2};

use crate::saved::{image_command, start_save, LIMIT};
use crate::stage::{Stage, LOAD, NOTICE};
use crate::Scenario;

/// Whole pages in 100 updates, and MiB of the guest's data that are rewritten after the save.
const AFTER: (u64, u64) = (30, 8);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let seven = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    let eleven = VmSpec::tiny(Qemu::Eleven, MACHINE_11);
    let mut all = Vec::new();
    for (name, spec) in [("7", seven), ("11", eleven)] {
        for (kind, channels) in [("single", "0"), ("2_channels", "2")] {
            let spec = spec.clone();
            all.push(Scenario::new(format!("seed_{name}_{kind}_need_not_cross"), move |stage| {
                needs_not_cross(stage, &spec, channels)
            }));
        }
    }
    let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    for (kind, channels) in [("single", "0"), ("2_channels", "2")] {
        let spec = spec.clone();
        all.push(Scenario::new(
            format!("seed_7_{kind}_of_a_departure_is_for_the_return"),
            move |stage| returns(stage, &spec, channels),
        ));
    }
    all.push(Scenario::new("seed_that_is_damaged_costs_bytes_only", move |stage| {
        damaged(stage, &spec)
    }));
    all
}

/// A running VM and a store with a save of it, behind which the guest has changed some memory.
fn saved_before(stage: &mut Stage, spec: &VmSpec) -> Result<(Vm, PathBuf)> {
    let mut vm = stage.vm_of(spec)?;
    vm.let_migrate()?;
    let store = stage.lab.scratch("store");
    image_command(stage, &vm, &["init", &text(&store)])?;
    start_save(stage, &vm, &store.join("one"), &[])?.succeed(LIMIT)?;
    vm.guest.dirty(LOAD.0, AFTER.0, AFTER.1)?;
    let before = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", before)?;
    Ok((vm, store))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Migrates the VM to a receiver with this seed, over `channels`. Returns it there, and the report.
fn moves(stage: &Stage, mut vm: Vm, seed: &[&str], flags: &[&str]) -> Result<(Vm, Value)> {
    let mut destination = stage.lab.incoming_for(&vm)?;
    let receive = platen::receive(&stage.lab, &destination, seed)?;
    let Receive { platen: mut receive, peer } = receive;
    let wire = stage.lab.net.crossed()?;
    let flags = [flags, &["--codec", "zstd"]].concat();
    let mut migrate = platen::migrate(&stage.lab, &vm, peer, &flags)?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.process.tail())?;
    receive.succeed(NOTICE)?;
    drop(vm);
    destination.assert_running()?;
    let report = migrate.report()?;
    let there = receive.report()?;
    println!(
        "  {} of {} pages not sent, {} offered; {} bytes crossed",
        report["seed"]["pages"],
        report["normal"],
        report["seed"]["offered"],
        stage.lab.net.crossed()? - wire
    );
    ensure!(report["seed"] == there["seed"], "the ends disagree: {report} {there}");
    Ok((destination, report))
}

/// Migrates the VM to a receiver with this seed. Returns the pages offered, and those not sent.
fn migrates(stage: &mut Stage, vm: Vm, seed: &Path, channels: &str) -> Result<(u64, u64)> {
    let (mut vm, report) = moves(stage, vm, &["--seed", &text(seed)], &["--channels", channels])?;
    vm.guest.stop()?;
    vm.guest.verify().context("in the destination")?;
    stage.park_other(vm);
    let count = |what: &str| report["seed"][what].as_u64().with_context(|| format!("{report}"));
    Ok((count("offered")?, count("pages")?))
}

/// A VM goes to another host, runs there, and comes back.
fn returns(stage: &mut Stage, spec: &VmSpec, channels: &str) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    vm.let_migrate()?;
    let store = stage.lab.scratch("store");
    image_command(stage, &vm, &["init", &text(&store)])?;
    let flags = ["--channels", channels, "--write-seed", &text(&store)];
    let (mut there, gone) = moves(stage, vm, &[], &flags)?;
    let names = image_command(stage, &there, &["list", &text(&store)])?;
    println!("  {}", names.trim());
    ensure!(names.contains("seed-"), "no seed: {names}");
    image_command(stage, &there, &["verify", &text(&store)])?;
    there.guest.dirty(LOAD.0, AFTER.0, AFTER.1)?;
    let before = there.guest.work("loops")?;
    there.guest.wait_work("loops", before)?;
    there.guest.stop()?;
    there.let_migrate()?;
    let (mut vm, back) = moves(stage, there, &["--seed", &text(&store)], &flags)?;
    vm.guest.verify().context("back at its host")?;
    stage.park_other(vm);
    let bytes = |report: &Value| report["transferred"].as_f64().context("no bytes");
    let part = bytes(&back)? / bytes(&gone)?;
    println!("  the way back had {part:.2} of the bytes");
    ensure!(part < 0.7, "{part:.2} of the bytes: {gone} {back}");
    Ok(())
}

fn needs_not_cross(stage: &mut Stage, spec: &VmSpec, channels: &str) -> Result<()> {
    let (vm, store) = saved_before(stage, spec)?;
    let (offered, pages) = migrates(stage, vm, &store, channels)?;
    // On a busy machine the receiver may not have offered all when QEMU begins.
    ensure!(pages > 0 && 2 * pages > offered, "only {pages} of {offered} were not sent");
    Ok(())
}

/// Half of the units are damaged before the migration, and the rest is used.
fn damaged(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (vm, store) = saved_before(stage, spec)?;
    let mut packs = std::fs::read_dir(store.join("packs"))?;
    let pack = packs.next().context("a store without a pack")??.path();
    let file = std::fs::File::options().read(true).write(true).open(&pack)?;
    let len = file.metadata()?.len();
    for at in (64..len / 2).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 0x55], at)?;
    }
    let (offered, pages) = migrates(stage, vm, &store, "0")?;
    ensure!(pages > 0 && offered > pages, "{pages} of {offered} were not sent");
    Ok(())
}
