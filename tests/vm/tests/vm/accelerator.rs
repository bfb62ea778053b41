//! Codec qatzip on the simulated QAT device (simulated: nothing here says how fast a real one is), with and without
//! faults in mid-migration: the VM arrives whole, and the report says who did the work.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::path::PathBuf;
use vm_tests::platen::binary;
use vm_tests::Method;

use crate::stage::{Stage, LOAD};
use crate::Scenario;

/// A name, the device's script, and whether some pieces must have been done in software.
const DEVICES: [(&str, &str, bool); 9] = [
    ("healthy", "", false),
    ("refusing", "at 200 fail 500", true),
    ("erring", "every 7 error -13 1", true),
    ("with_wrong_checksums", "every 9 crc 1", true),
    ("full", "every 40 retry 30", false),
    ("failing_polls", "at 300 pollfail 3", false),
    ("late", "at 300 late 250 5", true),
    ("silent", "at 300 silence", true),
    ("reset", "at 300 reset 300", true),
];

pub(crate) fn scenarios() -> Vec<Scenario> {
    DEVICES
        .into_iter()
        .map(|(name, script, software)| {
            Scenario::new(format!("qatzip_on_a_simulated_device_{name}"), move |stage| {
                moves(stage, script, software)
            })
        })
        .collect()
}

/// A folder with the simulated libraries, built beside the binary under test.
fn libraries() -> Result<PathBuf> {
    let binary = binary()?.canonicalize()?;
    let beside = binary.parent().context("the binary lies in no folder")?;
    let folder = beside.join("qat-sim");
    std::fs::create_dir_all(&folder)?;
    for (built, name) in
        [("libqat_sim_libqat.so", "libqat.so.4"), ("libqat_sim_libusdm.so", "libusdm.so.0")]
    {
        let (built, link) = (beside.join(built), folder.join(name));
        ensure!(built.exists(), "{} is missing: make build", built.display());
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(built, link)?;
    }
    Ok(folder)
}

fn moves(stage: &mut Stage, script: &str, software: bool) -> Result<()> {
    let folder = libraries()?;
    let folder = folder.to_str().context("a folder with a plain name")?;
    // Inherited by the relay; scenarios run one at a time.
    std::env::set_var("PLATEN_QAT_SIM", script);
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let flags =
        ["--channels", "0", "--codec", "qatzip", "--accelerator", "qat", "--qat-libraries", folder];
    let (mut vm, outcome) = Method::platen(&flags).run(&stage.lab, vm)?;
    std::env::remove_var("PLATEN_QAT_SIM");
    vm.guest.stop()?;
    vm.guest.verify().context("in the destination")?;
    let report = outcome.report.as_ref().context("no report")?;
    let engines = report["accelerators"].as_array().context("no accelerators in the report")?;
    let sum = |of: &dyn Fn(&Value) -> Option<u64>| engines.iter().filter_map(of).sum::<u64>();
    let by_device = sum(&|engine| engine["by_device"].as_u64());
    let by_software = sum(&|engine| {
        let reasons = engine["by_software"].as_object()?;
        Some(reasons.values().filter_map(Value::as_u64).sum())
    });
    ensure!(by_device > 0, "the device did nothing: {report}");
    ensure!(!software || by_software > 0, "nothing was done in software: {report}");
    let delivered = sum(&|engine| engine["delivered"].as_u64());
    ensure!(delivered == by_device + by_software, "{delivered} pieces: {report}");
    stage.park(vm);
    Ok(())
}
