//! Migrations that succeed: every codec, single stream and multifd, idle and dirtying.

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::table::to_f64;
use vm_tests::{Method, Outcome, Patience, Rate};

use crate::stage::{Stage, LOAD};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let moves: [(&str, bool, &[&str]); 18] = [
        ("idle_single_zstd", false, &["--channels", "0", "--codec", "zstd"]),
        ("idle_2_channels_zstd", false, &["--channels", "2", "--codec", "zstd"]),
        ("dirtying_defaults", true, &[]),
        ("dirtying_single_zstd", true, &["--channels", "0", "--codec", "zstd"]),
        ("dirtying_single_lz4", true, &["--channels", "0", "--codec", "lz4"]),
        ("dirtying_single_zlib", true, &["--channels", "0", "--codec", "zlib"]),
        ("dirtying_single_qatzip", true, &["--channels", "0", "--codec", "qatzip"]),
        ("dirtying_single_none", true, &["--channels", "0", "--codec", "none"]),
        ("dirtying_1_channel_zstd", true, &["--channels", "1", "--codec", "zstd"]),
        ("dirtying_2_channels_zstd", true, &["--channels", "2", "--codec", "zstd"]),
        ("dirtying_2_channels_lz4", true, &["--channels", "2", "--codec", "lz4"]),
        ("dirtying_2_channels_zlib", true, &["--channels", "2", "--codec", "zlib"]),
        (
            "dirtying_2_channels_qatzip",
            true,
            &["--channels", "2", "--codec", "qatzip", "--qatzip-level", "3"],
        ),
        ("dirtying_2_channels_none", true, &["--channels", "2", "--codec", "none"]),
        ("dirtying_8_channels_zstd", true, &["--channels", "8", "--codec", "zstd"]),
        ("dirtying_single_one_link", true, &["--channels", "0", "--links", "1"]),
        ("dirtying_2_channels_one_thread", true, &["--channels", "2", "--compress-threads", "1"]),
        ("dirtying_single_one_busy_thread", true, BUSY),
    ];
    let mut all: Vec<Scenario> = moves
        .into_iter()
        .map(|(name, dirtying, flags)| {
            Scenario::new(format!("moves_{name}"), move |stage| moves_well(stage, dirtying, flags))
        })
        .collect();
    all.push(Scenario::new("moves_dirtying_over_a_slow_link", slow_link));
    all.push(Scenario::new("moves_whatever_was_set_before", leftovers));
    all
}

/// One thread at a high level. On most machines it is slower than QEMU; no batch waits for it, so
/// some are sent uncompressed.
const BUSY: &[&str] = &[
    "--channels",
    "0",
    "--codec",
    "zstd",
    "--level",
    "9",
    "--compress-threads",
    "1",
    "--compress-wait-thread",
    "off",
];

fn moves_well(stage: &mut Stage, dirtying: bool, flags: &[&str]) -> Result<()> {
    let mut vm = stage.vm()?;
    let before = vm.guest.verify()?;
    if dirtying {
        vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    }
    let (mut vm, outcome) = Method::platen(flags).run(&stage.lab, vm, Patience::Helped)?;
    if dirtying {
        vm.guest.stop()?;
    }
    let after = vm.guest.verify().context("in the destination")?;
    ensure!(dirtying == (after != before), "dirtying {dirtying}: {before:?}, then {after:?}");
    check_report(&outcome)?;
    stage.park(vm);
    Ok(())
}

/// Compares platen's report with the figures of QEMU, the network device and the kernel.
fn check_report(outcome: &Outcome) -> Result<()> {
    let report = outcome.report.as_ref().context("no report")?;
    let number = |pointer: &str| -> Result<f64> {
        let value = report.pointer(pointer).and_then(Value::as_f64);
        value.with_context(|| format!("no number {pointer} in {report}"))
    };
    let near = |pointer: &str, truth: f64, slack: f64| -> Result<()> {
        let got = number(pointer)?;
        ensure!((got - truth).abs() <= slack, "{pointer} is {got}, in truth {truth}: {report}");
        Ok(())
    };
    near("/total-time", to_f64(outcome.total_ms), 5.0)?;
    near("/downtime", to_f64(outcome.downtime_ms), 5.0)?;
    // Only the device's counter includes TCP/IP headers, the harness's probes, and heartbeats.
    let slack = 65536.0 + 8192.0 * to_f64(outcome.total_ms) / 1e3;
    near("/transferred", to_f64(outcome.wire), to_f64(outcome.wire) * 0.03 + slack)?;
    for key in ["normal", "duplicate"] {
        let truth = outcome.stats["ram"][key].as_f64().context("ram of query-migrate")?;
        // The report counts the pages in the stream. QEMU 7.2 counts the same on a single stream,
        // but with multifd its `normal` is too low by up to a few packets of its channels (plain
        // bytes without headers show that).
        let slack = if number("/channels")? > 0.0 { truth * 0.01 } else { 0.0 };
        near(&format!("/{key}"), truth, slack)?;
    }
    // To the kernel's resolution of 10 ms, and without the CPU time before its start and after its
    // report is written, which is a part of a short migration on any machine.
    for (end, truth) in
        [("source", outcome.cost.source_relay), ("destination", outcome.cost.destination_relay)]
    {
        let slack = (0.15 + truth * 0.1).max(truth * 0.3);
        near(&format!("/cpu-seconds/{end}"), truth, slack)?;
    }
    ensure!(number("/throughput")? > 0.0 && number("/pages-per-second")? > 0.0, "{report}");
    for key in ["pages", "busy", "busy-rate", "compressed-size", "compression-rate"] {
        let value = number(&format!("/compression/{key}"))?;
        ensure!(value >= 0.0 && value.is_finite(), "compression.{key} is {value}");
    }
    Ok(())
}

fn slow_link(stage: &mut Stage) -> Result<()> {
    // So slow that every machine can compress all data.
    stage.lab.net.shape(Rate::Mbit(50))?;
    let mut vm = stage.vm()?;
    vm.guest.dirty(1000, 20, 16)?;
    let (mut vm, outcome) =
        Method::platen(&["--channels", "2"]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.stop()?;
    vm.guest.verify()?;
    // If the link is slower than both ends, the bytes on the link decide.
    let plain = outcome
        .report
        .as_ref()
        .and_then(|report| report["plain"].as_u64())
        .context("no plain bytes")?;
    ensure!(outcome.wire * 2 < plain, "{} bytes on the wire for {plain}", outcome.wire);
    stage.park(vm);
    Ok(())
}

/// A VM that another tool migrated before has that tool's settings, at either end.
fn leftovers(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    vm.monitor.set_capabilities(&[("multifd", true)])?;
    let settings =
        json!({"multifd-channels": 5, "multifd-compression": "zlib", "max-bandwidth": 1 << 20});
    vm.monitor.execute("migrate-set-parameters", settings)?;
    let (vm, _) = Method::platen(&["--channels", "0"]).run(&stage.lab, vm, Patience::Helped)?;
    let (mut vm, outcome) =
        Method::platen(&["--channels", "3"]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.verify()?;
    check_report(&outcome)?;
    let (mut vm, _) = Method::platen(&["--channels", "0"]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.verify()?;
    stage.park(vm);
    Ok(())
}
