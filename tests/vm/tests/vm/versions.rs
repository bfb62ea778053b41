//! Every pair of QEMU versions that this host can run, and QEMU's own compression, through the bare
//! relays.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::json;
use vm_tests::{Qemu, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::bare::{Flight, Settings, LIMIT};
use crate::stage::{Stage, CREEP, LOAD, TINY_DATA_MIB};
use crate::Scenario;

/// The QEMUs.
pub(crate) fn versions() -> [(&'static str, VmSpec); 3] {
    [
        ("7", VmSpec::tiny(Qemu::System, MACHINE_7_2)),
        ("10", VmSpec::tiny(Qemu::Ten, MACHINE_10)),
        ("11", VmSpec::tiny(Qemu::Eleven, MACHINE_11)),
    ]
}

/// The pairs of different versions, from the older to the newer, with the machine type that both
/// have.
pub(crate) fn upgrades() -> [(&'static str, VmSpec, VmSpec); 3] {
    let pair =
        |name, from, to, machine| (name, VmSpec::tiny(from, machine), VmSpec::tiny(to, machine));
    [
        pair("7_to_10", Qemu::System, Qemu::Ten, MACHINE_7_2),
        pair("7_to_11", Qemu::System, Qemu::Eleven, MACHINE_7_2),
        pair("10_to_11", Qemu::Ten, Qemu::Eleven, MACHINE_10),
    ]
}

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    let same = versions().map(|(name, spec)| (format!("{name}_to_{name}"), spec.clone(), spec));
    let upgrades = upgrades().map(|(name, from, to)| (name.to_owned(), from, to));
    for (name, from, to) in same.into_iter().chain(upgrades) {
        for channels in [0, 2, 4] {
            let (from, to) = (from.clone(), to.clone());
            all.push(Scenario::new(format!("qemu_{name}_{channels}_channels"), move |stage| {
                moves(stage, &from, &to, channels)
            }));
        }
        for method in ["zlib", "zstd"] {
            let (from, to) = (from.clone(), to.clone());
            all.push(Scenario::new(format!("qemu_{name}_multifd_{method}_passes"), move |stage| {
                passes(stage, &from, &to, method)
            }));
        }
        all.push(Scenario::new(format!("qemu_{name}_xbzrle_passes"), move |stage| {
            xbzrle(stage, &from, &to)
        }));
    }
    all
}

fn moves(stage: &mut Stage, from: &VmSpec, to: &VmSpec, channels: u32) -> Result<()> {
    let vm = stage.vm_of(from)?;
    let settings = Settings::multifd(channels, "none");
    // By default it might not compress on such a fast link.
    let mut flight = Flight::prepare(stage, vm, to, &settings, &["--codec", "zstd"])?;
    flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let crossed = stage.lab.net.crossed()?;
    flight.go()?;
    flight.land()?;
    let wire = stage.lab.net.crossed()? - crossed;
    flight.destination.guest.stop()?;
    flight.destination.guest.verify().context("in the destination")?;
    let report = flight.relay.report()?;
    let pages = report["normal"].as_u64().context("no normal pages in the report")?;
    // A stream that platen does not understand passes unchanged; then nothing would be counted.
    ensure!(pages << 12 > TINY_DATA_MIB << 20, "only {pages} pages were recognised");
    ensure!(wire < pages << 11, "{wire} bytes on the wire for {pages} pages");
    stage.park_other(flight.destination);
    Ok(())
}

/// Data that QEMU has compressed is not compressed again, and takes no more room on the wire than
/// without platen.
fn passes(stage: &mut Stage, from: &VmSpec, to: &VmSpec, method: &str) -> Result<()> {
    let mut vm = stage.vm_of(from)?;
    let settings = Settings::multifd(2, method);
    // QEMU alone first, by TCP over the same link. Its VM continues at the destination, perhaps of
    // the other version.
    settings.apply(&mut vm)?;
    let mut alone = stage.lab.incoming_with(&vm, to)?;
    settings.apply(&mut alone)?;
    let (listen, peer) = stage.lab.net.meeting_point(alone.side())?;
    alone.listen(&format!("tcp:{listen}"))?;
    let crossed = stage.lab.net.crossed()?;
    vm.monitor.execute("migrate", json!({"uri": format!("tcp:{peer}")}))?;
    let state = vm.wait_migration_end(&["completed", "failed"], LIMIT)?;
    ensure!(state == "completed", "QEMU alone: {state}");
    alone.assert_running()?;
    let by_qemu = stage.lab.net.crossed()? - crossed;
    drop(vm);
    drop(alone);

    let vm = stage.vm_of(from)?;
    let mut flight = Flight::prepare(stage, vm, to, &settings, &[])?;
    let crossed = stage.lab.net.crossed()?;
    flight.go()?;
    flight.land()?;
    let by_platen = stage.lab.net.crossed()? - crossed;
    flight.destination.guest.verify().context("in the destination")?;
    ensure!(
        by_platen < by_qemu + by_qemu / 20 + (256 << 10),
        "{by_platen} bytes on the wire, {by_qemu} by QEMU alone"
    );
    let report = flight.relay.report()?;
    let again = report["compression"]["compressed-size"].as_u64().context("no compressed-size")?;
    ensure!(again < by_platen / 4, "{again} of {by_platen} bytes were compressed a second time");
    stage.park_other(flight.destination);
    Ok(())
}

fn xbzrle(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let vm = stage.vm_of(from)?;
    // A first pass of some seconds, in which the guest touches most of a small range; the second
    // pass fills the cache with it; pages dirty in the third go as deltas. QEMU does not hand over
    // before that: with this bandwidth and limit it would have to find at most one dirty page. From
    // the second pass on it sends less, so that pass takes 8 s: longer than a busy machine lets the
    // guest stand still.
    let settings = Settings::new(&["xbzrle"])
        .with("xbzrle-cache-size", json!(64 << 20))
        .with("max-bandwidth", json!(8 << 20))
        .with("downtime-limit", json!(1));
    let mut flight = Flight::prepare(stage, vm, to, &settings, &[])?;
    flight.vm.guest.dirty(3000, 0, 16)?;
    flight.go()?;
    let deadline = Instant::now() + LIMIT;
    let mut creeps = false;
    loop {
        let stats = flight.vm.monitor.query_migrate()?;
        if !creeps && stats["ram"]["dirty-sync-count"].as_u64() > Some(1) {
            flight.vm.hold_migration(CREEP)?;
            creeps = true;
        }
        if stats["xbzrle-cache"]["pages"].as_u64() > Some(0) {
            break;
        }
        let running = matches!(stats["status"].as_str(), Some("setup" | "active"));
        ensure!(running && Instant::now() < deadline, "no page goes as a delta: {stats}");
        std::thread::sleep(Duration::from_millis(50));
    }
    flight.vm.let_migrate()?;
    flight.land()?;
    flight.destination.guest.stop()?;
    flight.destination.guest.verify().context("in the destination")?;
    stage.park_other(flight.destination);
    Ok(())
}
