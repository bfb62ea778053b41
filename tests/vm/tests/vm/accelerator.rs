//! Codec qatzip on the simulated QAT device (which says nothing about a real one's speed), with and
//! without faults during the migration, and codec qpl by libqpl's software path: the VM arrives
//! intact, and the report says what did the work.

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use std::time::Duration;
use vm_tests::platen;
use vm_tests::SimulatedQat;

use crate::stage::{Skip, Stage, LOAD};
use crate::Scenario;

/// The side that must have done some of the work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Device,
    Both,
    Software,
    /// Both, if a request has waited until software did it.
    BothIfLate,
}

/// A piece that a device has for longer is software's.
const PATIENCE_US: u64 = 100_000;

/// A name, the device's script, and what does the work at the source.
const DEVICES: [(&str, &str, By); 16] = [
    ("healthy", "", By::Device),
    ("refusing", "at 200 fail 500", By::Both),
    ("erring", "every 7 error -13 1", By::Both),
    ("with_failed_verification", "every 11 status -18 1", By::Both),
    ("with_wrong_checksums", "every 9 crc 1", By::Both),
    ("full", "every 40 retry 30", By::Device),
    ("full_for_ever", "at 300 retry forever", By::Both),
    ("failing_polls", "at 300 pollfail 3", By::Device),
    ("failing_all_polls", "at 300 pollfail 1000000", By::Both),
    ("late", "at 300 late 250 5", By::Both),
    ("silent", "at 300 silence", By::Both),
    ("silent_for_a_while", "at 300 silence; after 500 revive", By::BothIfLate),
    ("reset", "at 300 reset 300", By::Both),
    ("dead", "at 300 fatal", By::Both),
    ("with_little_pinned_memory", "usdm 3M", By::Device),
    ("with_no_pinned_memory", "usdm 4K", By::Software),
];

/// The same for the destination, which decompresses.
const AT_THE_DESTINATION: [(&str, &str, By); 5] = [
    ("healthy", "", By::Device),
    ("erring", "every 7 error -13 1", By::Both),
    ("lying", "every 5 flip 1", By::Device),
    ("silent", "at 300 silence", By::Both),
    ("reset", "at 300 reset 300", By::Both),
];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let source = DEVICES.into_iter().map(|(name, script, by)| {
        Scenario::new(format!("qatzip_on_a_simulated_device_{name}"), move |stage| {
            moves(stage, script, Ends { source: Some(by), destination: None }, &[])
        })
    });
    let destination = AT_THE_DESTINATION.into_iter().map(|(name, script, by)| {
        Scenario::new(format!("qatzip_decompressed_on_a_simulated_device_{name}"), move |stage| {
            moves(stage, script, Ends { source: None, destination: Some(by) }, &[])
        })
    });
    source
        .chain(destination)
        .chain([
            Scenario::new("a_simulated_device_that_lies_costs_the_migration_at_most", lies),
            Scenario::new("qatzip_without_a_device_is_software_or_refused", absent),
            Scenario::new("qpl_by_intel_s_library_in_software", by_libqpl),
            Scenario::new("qpl_without_its_library_is_software_or_refused", without_libqpl),
        ])
        .collect()
}

/// The ends that use a device, and what must have done their work.
#[derive(Clone, Copy)]
struct Ends {
    source: Option<By>,
    destination: Option<By>,
}

const LIMIT: Duration = Duration::from_secs(900);

fn moves(stage: &mut Stage, script: &str, ends: Ends, flags: &[&str]) -> Result<()> {
    let qat = SimulatedQat::new(script, stage.lab.folder())?;
    let libraries = qat.flags();
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let libraries: Vec<&str> = libraries.iter().map(String::as_str).collect();
    let accelerator = |end: Option<By>| match end {
        // A device that no thread can use is refused otherwise.
        Some(By::Software) => ["--accelerator", "auto"],
        Some(_) => ["--accelerator", "qat"],
        None => ["--accelerator", "none"],
    };
    let sink = [libraries.as_slice(), &accelerator(ends.destination)].concat();
    let mut receive = platen::receive(&stage.lab, &destination, &sink)?;
    let driver = accelerator(ends.source);
    // A busy machine starves the guest and both ends: what the last pass leaves may take longer
    // than the default downtime.
    let common = ["--channels", "0", "--codec", "qatzip", "--max-downtime", "60000"];
    let source =
        [common.as_slice(), &libraries, if flags.is_empty() { &driver } else { flags }].concat();
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &source)?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(LIMIT)?;
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify().context("in the destination")?;
    for (by, report) in
        [(ends.source, migrate.report()?), (ends.destination, receive.platen.report()?)]
    {
        let Some(by) = by else { continue };
        did(&report, by)?;
    }
    stage.park(destination);
    Ok(())
}

/// Checks what did the work.
fn did(report: &Value, by: By) -> Result<()> {
    let engines = report["accelerators"].as_array().context("no accelerators in the report")?;
    let sum = |of: &dyn Fn(&Value) -> Option<u64>| engines.iter().filter_map(of).sum::<u64>();
    let by_device = sum(&|engine| engine["by_device"].as_u64());
    let by_software = sum(&|engine| {
        let reasons = engine["by_software"].as_object()?;
        Some(reasons.values().filter_map(Value::as_u64).sum())
    });
    ensure!((by_device > 0) == (by != By::Software), "{by_device} by the device: {report}");
    // The silence is over at half a second, which on a busy machine may be soon after its begin.
    let longest = sum(&|engine| engine["longest_wait_us"].as_u64());
    let is_late = by != By::BothIfLate || longest > PATIENCE_US;
    let needs_software = by != By::Device && is_late;
    ensure!(!needs_software || by_software > 0, "nothing was done in software: {report}");
    let delivered = sum(&|engine| engine["delivered"].as_u64());
    ensure!(delivered == by_device + by_software, "{delivered} pieces: {report}");
    Ok(())
}

/// A device whose output is wrong despite its own verification: verified pieces are done again, and
/// the destination refuses a unit that was not verified. The VM is intact at one end or the other.
fn lies(stage: &mut Stage) -> Result<()> {
    let qat = SimulatedQat::new("at 500 flip 20", stage.lab.folder())?;
    let libraries = qat.flags();
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let flags = [
        ["--channels", "0", "--codec", "qatzip", "--accelerator", "qat"].as_slice(),
        &[&libraries[0], &libraries[1]],
    ];
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags.concat())?;
    let ended = migrate.ends(&mut vm, LIMIT)?;
    receive.platen.process.wait(LIMIT)?;
    if ended.status.success() {
        destination.assert_running()?;
        destination.guest.stop()?;
        destination.guest.verify().context("in the destination")?;
        stage.park(destination);
        return Ok(());
    }
    let report = migrate.report()?;
    let error = report["error"].as_str().unwrap_or_default();
    ensure!(error.contains("checksum") || error.contains("unit"), "another error: {report}");
    vm.assert_running()?;
    vm.guest.stop()?;
    vm.guest.verify().context("in the source, after a unit was refused")?;
    stage.park(vm);
    Ok(())
}

/// Without a device `auto` works in software and says so; `qat` and `qatzip` refuse before they
/// change anything.
fn absent(stage: &mut Stage) -> Result<()> {
    for (script, reason, software) in [
        ("absent", "no QAT device", "codec qatzip in software"),
        ("instances 0", "no QAT device", "codec qatzip in software"),
        ("usdm 64K; instances 1", "memlock", "no pinned memory"),
    ] {
        let qat = SimulatedQat::new(script, stage.lab.folder())?;
        let libraries = qat.flags();
        let mut vm = stage.vm()?;
        let mut destination = stage.lab.incoming_for(&vm)?;
        let mut receive = platen::receive(&stage.lab, &destination, &[])?;
        let common = ["--channels", "0", "--codec", "qatzip", &libraries[0], &libraries[1]];
        let strict = [common.as_slice(), &["--accelerator", "qat"]].concat();
        let mut refused = platen::migrate(&stage.lab, &vm, receive.peer, &strict)?;
        let complaints = refused.fail(LIMIT)?;
        ensure!(complaints.contains(reason), "no reason: {complaints}");
        vm.assert_running()?;
        let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &common)?;
        migrate.succeed(LIMIT).with_context(|| receive.platen.process.tail())?;
        receive.platen.succeed(LIMIT)?;
        let said = migrate.process.output();
        ensure!(said.contains(software), "it does not say so: {said}");
        destination.assert_running()?;
        destination.guest.verify().context("in the destination")?;
        stage.park(destination);
    }
    Ok(())
}

/// libqpl compresses, and a receiver without it decompresses.
fn by_libqpl(stage: &mut Stage) -> Result<()> {
    if !platen::has_qpl() {
        ensure!(
            std::env::var("PLATEN_SKIP_QPL").is_ok_and(|value| value == "1"),
            "there is no libqpl here: `scripts/fetch-qpl` fetches it"
        );
        return Err(Skip("libqpl is missing, as PLATEN_SKIP_QPL says").into());
    }
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let flags = ["--channels", "0", "--codec", "qpl"];
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(LIMIT)?;
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify().context("in the destination")?;
    let said = migrate.process.output();
    ensure!(said.contains("codec qpl by libqpl 1."), "it does not say what compresses: {said}");
    let report = migrate.report()?;
    let threads = report["qpl"].as_array().context("no counters of libqpl")?;
    let sum = |key: &str| threads.iter().filter_map(|one| one[key].as_u64()).sum::<u64>();
    ensure!(report["codec"] == "qpl" && sum("units") > 100, "libqpl did nothing: {report}");
    ensure!(sum("verified") > 0 && sum("failures") + sum("without") == 0, "{report}");
    stage.park(destination);
    Ok(())
}

/// Without libqpl `auto` makes the same units by libdeflate and says so; `iaa` refuses before it
/// changes anything.
fn without_libqpl(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let common = ["--channels", "0", "--codec", "qpl", "--qpl-library", "/nowhere/libqpl.so.1"];
    let strict = [common.as_slice(), &["--accelerator", "iaa"]].concat();
    let mut refused = platen::migrate(&stage.lab, &vm, receive.peer, &strict)?;
    let complaints = refused.fail(LIMIT)?;
    ensure!(complaints.contains("cannot load /nowhere/libqpl.so.1"), "no reason: {complaints}");
    vm.assert_running()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &common)?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(LIMIT)?;
    let said = migrate.process.output();
    ensure!(said.contains("codec qpl by libdeflate: cannot load"), "it does not say so: {said}");
    destination.assert_running()?;
    destination.guest.verify().context("in the destination")?;
    stage.park(destination);
    Ok(())
}
