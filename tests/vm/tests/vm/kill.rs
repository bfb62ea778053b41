//! A process dies or freezes half way: the source resumes, and the remaining processes name the
//! cause and end.

use std::time::Instant;

use anyhow::{ensure, Result};
use serde_json::Value;
use vm_tests::platen::Platen;
use vm_tests::Signal;

use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, then_moves, HalfWay, Stage, NOTICE,
};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    type Run = fn(&mut Stage, &[&str]) -> Result<()>;
    let kinds: [(&str, Run); 4] = [
        ("receive_killed", receive_killed),
        ("migrate_killed", migrate_killed),
        ("destination_qemu_killed", destination_qemu_killed),
        ("receive_frozen", receive_frozen),
    ];
    let mut all = Vec::new();
    for (name, run) in kinds {
        for channels in ["0", "2"] {
            all.push(Scenario::new(format!("{name}_{channels}_channels"), move |stage| {
                run(stage, &["--channels", channels])
            }));
        }
    }
    all
}

/// Waits for `migrate` to fail with a message and a report that both name the cause.
fn fails_naming(migrate: &mut Platen, words: &[&str]) -> Result<()> {
    let said = migrate.fail(NOTICE)?;
    names_the_cause(&said, words)?;
    let report = migrate.report()?;
    ensure!(report["status"] == "failed", "the report says {}", report["status"]);
    names_the_cause(report["error"].as_str().unwrap_or("no error text"), words)
}

fn receive_killed(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } = stage.half_way(flags)?;
    receive.platen.process.signal(Signal::KILL)?;
    receive.platen.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    fails_naming(&mut migrate, &[&receive.peer.to_string(), "peer", "link"])?;
    destination_ends(&mut destination)?;
    then_moves(stage, vm)
}

fn migrate_killed(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } = stage.half_way(flags)?;
    migrate.process.signal(Signal::KILL)?;
    migrate.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    let said = receive.platen.fail(NOTICE)?;
    names_the_cause(&said, &["source", "peer", "link", "network"])?;
    destination_ends(&mut destination)?;
    then_moves(stage, vm)
}

fn destination_qemu_killed(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } = stage.half_way(flags)?;
    destination.process.signal(Signal::KILL)?;
    destination.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    fails_naming(&mut migrate, &["destination", "qemu"])?;
    let said = receive.platen.fail(NOTICE)?;
    names_the_cause(&said, &["destination", "qemu"])?;
    then_moves(stage, vm)
}

/// The peer stops reading without closing: only a timeout detects that.
fn receive_frozen(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    let HalfWay { mut vm, destination, mut receive, mut migrate } = stage.half_way(flags)?;
    receive.platen.process.signal(Signal::STOP)?;
    let frozen = Instant::now();
    fails_naming(&mut migrate, &[&receive.peer.to_string(), "peer", "link"])?;
    let noticed = frozen.elapsed();
    ensure!(noticed < NOTICE, "noticed after {noticed:?}");
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    // Resumed, it must not start a second copy of the VM.
    receive.platen.process.signal(Signal::CONT)?;
    receive.platen.fail(NOTICE)?;
    let mut destination = destination;
    destination_ends(&mut destination)?;
    let report: Value = migrate.report()?;
    ensure!(report["status"] != "completed", "{report}");
    then_moves(stage, vm)
}
