//! `--codec auto`: the VM arrives intact over any link, and the report states the choice and its
//! reason.

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::time::Duration;
use vm_tests::{platen, Method, Outcome, Patience, Rate, SimulatedQat, VmSpec};

use crate::stage::{Stage, LOAD};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("auto_over_a_slow_link", slow),
        Scenario::new("auto_over_a_fast_link", |stage| fast(stage, &[])),
        Scenario::new("auto_within_half_a_core", |stage| fast(stage, &["--max-cpu", "0.5"])),
        Scenario::new("auto_with_incompressible_memory", incompressible),
        Scenario::new("auto_with_a_simulated_qat_device", |stage| device(stage, "")),
        Scenario::new("auto_with_a_simulated_qat_device_that_dies", |stage| {
            device(stage, "at 300 fatal")
        }),
        Scenario::new("auto_is_told_a_level", told_a_level),
        Scenario::new("auto_is_given_cpus_that_are_not_there", no_such_cpu),
    ]
}

const LIMIT: Duration = Duration::from_secs(900);

/// Bytes of QEMU's stream, before and after, with a codec (all of its levels).
fn sent(report: &Value, codec: &str) -> (u64, u64) {
    let parts = report["auto"]["codecs"].as_array().cloned().unwrap_or_default();
    let parts = parts.iter().filter(|part| part["codec"] == codec);
    let sum = |key: &str| parts.clone().filter_map(|part| part[key].as_u64()).sum();
    (sum("plain"), sum("size"))
}

/// The report of a migration, whose codecs must add up to all bytes read.
fn report(outcome: &Outcome) -> Result<Value> {
    let report = outcome.report.clone().context("no report")?;
    ensure!(report["codec"] == "auto", "{report}");
    let codecs = ["none", "lz4", "zstd", "qatzip"].map(|codec| sent(&report, codec));
    let plain: u64 = codecs.iter().map(|(plain, _)| plain).sum();
    ensure!(report["plain"].as_u64() == Some(plain), "the codecs add up to {plain}: {report}");
    let size: u64 = codecs.iter().map(|(_, size)| size).sum();
    let wire = report["transferred"].as_u64().context("no bytes on the wire")?;
    // Headers, and everything outside of chunks.
    ensure!((size..size + size / 20 + (1 << 20)).contains(&wire), "{size} of {wire}: {report}");
    Ok(report)
}

/// Data that waits for the link is compressed better than by zstd 1: over the first of these
/// links, in Mbit/s, unless the machine is busy. Where other programs have the CPUs, `auto` plans
/// with the part of a core that its threads get, and zstd 1 may then be the best choice at 25
/// Mbit/s although the link is the bottleneck. So a slower link is tried. This does not show from
/// which rate on `auto` takes higher levels: the simulations of `controller/sim` hold that, as
/// they depend on no machine. Every attempt must report the link as its bottleneck.
fn slow(stage: &mut Stage) -> Result<()> {
    for rate in [25, 8, 3] {
        stage.lab.net.shape(Rate::Mbit(rate))?;
        if compresses_better(stage)? {
            return Ok(());
        }
        println!("  at {rate} Mbit/s less than half is compressed better than by zstd 1");
    }
    bail!("no link is slow enough for a level above 1")
}

/// Migrates a guest; returns whether most of its bytes were compressed better than by zstd 1.
fn compresses_better(stage: &mut Stage) -> Result<bool> {
    let mut vm = stage.vm()?;
    vm.guest.dirty(1000, 20, 16)?;
    let (mut vm, outcome) = Method::platen(&["--explain"]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.stop()?;
    vm.guest.verify()?;
    let report = report(&outcome)?;
    ensure!(report["auto"]["bottleneck"] == "link", "{report}");
    ensure!(report["auto"]["link-too-fast"] == false, "{report}");
    let parts = report["auto"]["codecs"].as_array().cloned().unwrap_or_default();
    let strong = parts.iter().filter(|part| part["level"].as_i64() > Some(1));
    let strong: u64 = strong.filter_map(|part| part["plain"].as_u64()).sum();
    let all = report["plain"].as_u64().context("no plain bytes")?;
    stage.park(vm);
    Ok(2 * strong > all)
}

fn fast(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let (mut vm, outcome) = Method::platen(flags).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.stop()?;
    vm.guest.verify()?;
    report(&outcome)?;
    stage.park(vm);
    Ok(())
}

/// Incompressible memory is sent uncompressed and costs little CPU time, even if the link is the
/// bottleneck.
fn incompressible(stage: &mut Stage) -> Result<()> {
    let vm = stage.lab.boot_or_load(&VmSpec { random: true, ..VmSpec::small() }, 256)?;
    stage.lab.net.shape(Rate::Mbit(500))?;
    let (mut vm, outcome) = Method::platen(&[]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.verify()?;
    let report = report(&outcome)?;
    let plain = report["plain"].as_u64().context("no plain bytes")?;
    let (raw, _) = sent(&report, "none");
    // The destination has as much work with such bytes, except that it tries no codec.
    let cpu = |end: &str| report["cpu-seconds"][end].as_f64().context("no CPU seconds");
    let (source, destination) = (cpu("source")?, cpu("destination")?);
    println!("  {raw} of {plain} bytes as they are; CPU: {source:.2} s, {destination:.2} s");
    ensure!(raw > plain / 2, "only {raw} of {plain} bytes went as they are: {report}");
    ensure!(source < 3.0 * destination, "{source} CPU seconds, {destination} there: {report}");
    let size = report["transferred"].as_u64().context("no bytes on the wire")?;
    ensure!(size < plain + plain / 20, "{size} bytes for {plain}");
    Ok(())
}

/// Links in Mbit/s, of which one is slow enough that a busy machine compresses for it.
const SLOWER: [u32; 3] = [500, 100, 25];

/// A device is one more choice, which its end can withdraw. On a machine that cannot fill the link
/// there is nothing to choose: all goes as it is.
fn device(stage: &mut Stage, script: &str) -> Result<()> {
    for mbit in SLOWER {
        stage.lab.net.shape(Rate::Mbit(mbit))?;
        if is_chosen(stage, script)? {
            return Ok(());
        }
        println!("  at {mbit} Mbit/s nothing went by the device");
    }
    bail!("nothing went by the device over links of {SLOWER:?} Mbit/s")
}

/// Migrates with a device; returns whether something went by it.
fn is_chosen(stage: &mut Stage, script: &str) -> Result<bool> {
    let qat = SimulatedQat::new(script, stage.lab.folder())?;
    let libraries = qat.flags();
    let mut flags: Vec<&str> = libraries.iter().map(String::as_str).collect();
    flags.extend(["--accelerator", "qat"]);
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(LIMIT)?;
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify().context("in the destination")?;
    let report = migrate.report()?;
    let (plain, _) = sent(&report, "qatzip");
    stage.park(destination);
    Ok(plain > 0)
}

fn told_a_level(stage: &mut Stage) -> Result<()> {
    refused(stage, &["--level", "3"], "for example zstd")
}

fn no_such_cpu(stage: &mut Stage) -> Result<()> {
    refused(stage, &["--cpus", "1023"], "1023")?;
    refused(stage, &["--cpus", "3-1"], "backwards")
}

/// It fails at once with this message, and the VM is not affected.
fn refused(stage: &mut Stage, flags: &[&str], words: &str) -> Result<()> {
    let mut vm = stage.vm()?;
    let nobody = "127.0.0.1:1".parse()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, nobody, flags)?;
    let ended = migrate.process.wait(LIMIT)?;
    let said = migrate.process.output();
    ensure!(!ended.status.success() && said.contains(words), "{ended:?}: {said}");
    vm.guest.verify()?;
    stage.park(vm);
    Ok(())
}
