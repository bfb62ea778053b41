//! Several guests from one image at once. Each verifies every page of its memory.

use std::path::Path;

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use vm_tests::platen::Platen;
use vm_tests::{Qemu, Vm, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::saved::{kill, player, runs_whole, saved, HELD, LIMIT};
use crate::stage::{names_the_cause, Stage, NOTICE};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    let versions = [
        ("7", Qemu::System, MACHINE_7_2, 4),
        ("10", Qemu::Ten, MACHINE_10, 1),
        ("11", Qemu::Eleven, MACHINE_11, 4),
    ];
    for (name, qemu, machine, cpus) in versions {
        let spec = VmSpec { cpus, ..VmSpec::tiny(qemu, machine) };
        type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
        let kinds: [(&str, Run); 3] = [
            ("share_one_player", share),
            ("of_a_killed_player_have_every_page", player_killed),
            ("outlive_one_of_them", qemu_killed),
        ];
        for (kind, run) in kinds {
            let spec = spec.clone();
            all.push(Scenario::new(format!("saved_{name}_clones_{kind}"), move |stage| {
                run(stage, &spec)
            }));
        }
    }
    all
}

/// Saves a guest, starts this many QEMUs and a restore of all of them.
fn start(
    stage: &mut Stage,
    spec: &VmSpec,
    count: usize,
    flags: &[&str],
) -> Result<(Vec<Vm>, Platen)> {
    let (vm, image) = saved(stage, spec)?;
    let mut clones = Vec::new();
    for _ in 0..count {
        clones.push(stage.lab.incoming_with(&vm, spec)?);
    }
    let restore = restore(stage, &clones, &image, flags)?;
    Ok((clones, restore))
}

fn address(vm: &Vm) -> String {
    format!("unix:{}", vm.platen_monitor().display())
}

fn restore(stage: &Stage, clones: &[Vm], image: &Path, flags: &[&str]) -> Result<Platen> {
    let mut words = vec!["restore".to_owned(), image.display().to_string()];
    for vm in clones {
        words.extend(["--qmp".to_owned(), address(vm)]);
    }
    words.extend(flags.iter().map(|&flag| flag.to_owned()));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Platen::start(&stage.lab, "restore", clones[0].side(), &words)
}

fn status<'a>(report: &'a Value, vm: &Vm) -> Result<&'a str> {
    let clones = report["clones"].as_array().context("no clones")?;
    let mut clones = clones.iter().filter(|clone| clone["qmp"] == address(vm));
    clones.next().and_then(|clone| clone["status"].as_str()).context("no status")
}

fn share(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut clones, mut restore) = start(stage, spec, 3, &[])?;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    ensure!(report["players"].as_array().is_some_and(|all| all.len() == 1), "{report}");
    for vm in &mut clones {
        ensure!(status(&report, vm)? == "completed", "{report}");
        runs_whole(vm).with_context(|| vm.name().to_owned())?;
    }
    Ok(())
}

/// The player is killed while all guests run and lack most of their memory.
fn player_killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut clones, mut restore) = start(stage, spec, 2, &HELD)?;
    all_run(&mut restore, &clones)?;
    for nth in 0..2 {
        kill(player(&mut restore, nth)?)?;
        player(&mut restore, nth + 1)?;
    }
    // The background is as slow as before: the guests request what they verify.
    for vm in &mut clones {
        runs_whole(vm).with_context(|| vm.name().to_owned())?;
    }
    let said = restore.process.output();
    ensure!(!said.contains("not needed"), "all was loaded before the guests were verified: {said}");
    Ok(())
}

/// One QEMU is killed while all guests run and lack most of their memory. The others request and
/// get theirs.
fn qemu_killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut clones, mut restore) = start(stage, spec, 3, &HELD)?;
    all_run(&mut restore, &clones)?;
    clones[1].process.kill()?;
    let dead = address(&clones[1]);
    restore.process.wait_for_output(&format!("{dead}: monitor {dead}: "), NOTICE)?;
    names_the_cause(&restore.complaints(), &["this QEMU has ended"])?;
    for nth in [0, 2] {
        runs_whole(&mut clones[nth]).with_context(|| clones[nth].name().to_owned())?;
    }
    let said = restore.process.output();
    ensure!(!said.contains("not needed"), "all was loaded before the guests were verified: {said}");
    Ok(())
}

fn all_run(restore: &mut Platen, clones: &[Vm]) -> Result<()> {
    for vm in clones {
        let runs = format!("{}: the VM runs", address(vm));
        restore.process.wait_for_output(&runs, NOTICE)?;
    }
    Ok(())
}
