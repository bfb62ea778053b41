//! A guest runs from an image of the other host, and verifies every page of its memory.

use anyhow::{ensure, Result};
use vm_tests::platen::{restore_from, serve_images, Platen, Served};
use vm_tests::{Qemu, Rate, Vm, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::saved::{runs_whole, saved, HELD, LIMIT};
use crate::stage::{Stage, NOTICE};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (name, qemu, machine) in [
        ("7", Qemu::System, MACHINE_7_2),
        ("10", Qemu::Ten, MACHINE_10),
        ("11", Qemu::Eleven, MACHINE_11),
    ] {
        let spec = VmSpec::tiny(qemu, machine);
        type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
        let kinds: [(&str, Run); 3] = [
            ("runs_at_once", runs_at_once),
            ("waits_for_a_server_that_is_started_again", server_killed),
            ("waits_for_a_cut_link", link_cut),
        ];
        for (kind, run) in kinds {
            let spec = spec.clone();
            let name = format!("saved_{name}_on_another_host_{kind}");
            all.push(Scenario::new(name, move |stage| run(stage, &spec)));
        }
    }
    all
}

/// Saves a guest, and starts a restore of it at one end from a server at the other one.
fn start(stage: &mut Stage, spec: &VmSpec, flags: &[&str]) -> Result<(Vm, Served, Platen)> {
    let (vm, image) = saved(stage, spec)?;
    let destination = stage.lab.incoming_with(&vm, spec)?;
    drop(vm);
    let folder = image.parent().expect("a file lies in a folder");
    let served = serve_images(&stage.lab, destination.side().other(), folder, None)?;
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let restore = restore_from(&stage.lab, &destination, &served, &name, flags)?;
    Ok((destination, served, restore))
}

fn runs_at_once(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    stage.lab.net.shape(Rate::Mbit(1000))?;
    let (mut vm, _served, mut restore) = start(stage, spec, &[])?;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    ensure!(report["mode"] == "instant", "it was not: {report}");
    runs_whole(&mut vm)?;
    stage.park_other(vm);
    Ok(())
}

/// The guest lacks most of its memory when the server is killed.
fn server_killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, mut served, mut restore) = start(stage, spec, &HELD)?;
    restore.process.wait_for_output("the VM runs", NOTICE)?;
    served.process.kill()?;
    // The guest writes its memory all the time, and asks for it.
    restore.process.wait_for_output("does not answer", NOTICE)?;
    let _again = serve_images(&stage.lab, vm.side().other(), &served.folder, Some(served.listen))?;
    restore.process.wait_for_output("answers again", NOTICE)?;
    runs_whole(&mut vm)
}

/// The guest lacks most of its memory when the link drops everything for a while.
fn link_cut(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, _served, mut restore) = start(stage, spec, &HELD)?;
    restore.process.wait_for_output("the VM runs", NOTICE)?;
    stage.lab.net.set_up(false)?;
    restore.process.wait_for_output("does not answer", NOTICE)?;
    stage.lab.net.set_up(true)?;
    restore.process.wait_for_output("answers again", NOTICE)?;
    runs_whole(&mut vm)
}
