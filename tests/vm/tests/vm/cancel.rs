//! A migration that is cancelled half way: the source resumes, the destination ends, the next
//! migration succeeds.

use anyhow::{ensure, Result};
use serde_json::json;
use vm_tests::Signal;

use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, then_moves, HalfWay, Stage, NOTICE,
};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for channels in ["0", "2"] {
        all.push(Scenario::new(format!("cancel_by_ctrl_c_{channels}_channels"), move |stage| {
            cancel(stage, channels, &["cancelled"], |half_way| {
                half_way.migrate.process.signal(Signal::INT)
            })
        }));
        all.push(Scenario::new(format!("cancel_by_monitor_{channels}_channels"), move |stage| {
            cancel(stage, channels, &["cancelled", "failed"], |half_way| {
                half_way.vm.monitor.execute("migrate_cancel", json!({})).map(|_| ())
            })
        }));
    }
    all
}

/// `states`: the statuses that the report may have.
fn cancel(
    stage: &mut Stage,
    channels: &str,
    states: &[&str],
    call_off: impl Fn(&mut HalfWay) -> Result<()>,
) -> Result<()> {
    let mut half_way = stage.half_way(&["--channels", channels])?;
    call_off(&mut half_way)?;
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } = half_way;

    // QEMU shuts down the return path before it records the cancellation: its own thread may see
    // the socket fail first, and report the migration as failed.
    source_goes_on(&mut vm, &["cancelled", "failed"])?;
    let ended = migrate.process.wait(NOTICE)?;
    ensure!(!ended.status.success(), "migrate reports success");
    ensure!(ended.killed_by().is_none(), "migrate died of {}", ended.status);
    names_the_cause(&migrate.complaints(), &["cancel"])?;
    let report = migrate.report()?;
    let status = report["status"].as_str().unwrap_or("nothing");
    ensure!(states.contains(&status), "the report says {status}");
    receive.platen.fail(NOTICE)?;
    destination_ends(&mut destination)?;
    then_moves(stage, vm)
}
