//! `platen advise`: it looks at a running VM and changes nothing, and its verdicts have reasons.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::platen::Platen;
use vm_tests::table::to_f64;
use vm_tests::{Qemu, Signal, Vm, VmSpec, MACHINE_7_2};

use crate::bare::{Settings, LIMIT};
use crate::ending::{settings, TOO_MUCH};
use crate::stage::{names_the_cause, Stage, NOTICE};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("advice_for_a_running_vm_changes_nothing", looks),
        Scenario::new("advice_that_is_interrupted_changes_nothing", interrupted),
    ]
}

fn start(stage: &Stage, vm: &Vm, flags: &[&str]) -> Result<Platen> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let words = [&["advise", "--qmp", &qmp, "--same-host"], flags].concat();
    Platen::start(&stage.lab, "advise", vm.side(), &words)
}

/// QEMU's settings, and what it reports of its last migration.
fn state(vm: &mut Vm) -> Result<Value> {
    Ok(json!([settings(vm)?, vm.monitor.query_migrate()?]))
}

/// The VM runs, was not migrated, has its memory, and QEMU's [`state`] is `before`.
fn is_as_before(vm: &mut Vm, before: &Value) -> Result<()> {
    let now = state(vm)?;
    ensure!(now == *before, "before: {before}, now: {now}");
    let loops = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", loops)?;
    vm.guest.stop()?;
    vm.guest.verify()?;
    Ok(())
}

fn alternative<'a>(advice: &'a Value, method: &str) -> Result<&'a Value> {
    let all = advice["alternatives"].as_array().context("no alternatives")?;
    let found = all.iter().find(|one| one["method"] == method);
    found.with_context(|| format!("no {method} in {advice}"))
}

fn looks(stage: &mut Stage) -> Result<()> {
    let spec = VmSpec { cpus: 2, ..VmSpec::tiny(Qemu::System, MACHINE_7_2) };
    let mut vm = stage.vm_of(&spec)?;
    Settings::new(&[]).apply(&mut vm)?;
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    let before = state(&mut vm)?;
    let links = ["--what-if", "link=2m", "--what-if", "link=10g"];
    let flags = [&["--sample", "--sample-memory", "--max-downtime", "180"][..], &links].concat();
    let report = advice_on_work(stage, &mut vm, &flags)?;
    is_as_before(&mut vm, &before)?;

    ensure!(report["vm"]["ram"] == spec.memory_kib << 10, "{}", report["vm"]);
    ensure!(report["vm"]["cpus"] == 2 && report["vm"]["state"] == "running", "{}", report["vm"]);
    ensure!(report["pages"] == "guest", "the pages are {}", report["pages"]);
    for kind in ["codecs", "codecs-again", "codecs-single"] {
        let codecs = report[kind].as_array().with_context(|| format!("no {kind}"))?;
        ensure!(codecs.iter().any(|one| one["codec"] == "zstd"), "no zstd in {kind}: {codecs:?}");
        for one in codecs {
            let ratio = one["ratio"].as_f64().unwrap_or(0.0);
            ensure!(one["sampled"].as_u64() > Some(0) && ratio > 0.9, "{kind}: {one}");
        }
    }
    let [slow, fast] = [&report["advice"][0], &report["advice"][1]];
    let data = slow["data"].as_u64().context("no data")?;
    // 40 MiB of the guest's own, and its page cache and kernel.
    ensure!(((30 << 20)..(129 << 20)).contains(&data), "{data} bytes of data");
    let dirty = slow["dirty-rate"].as_u64().unwrap_or(0);
    ensure!(dirty > LEAST, "{dirty} bytes dirtied a second");
    let never = alternative(slow, "QEMU, no compression")?;
    ensure!(never["verdict"] == "never", "over 2 Mbit/s: {never}");
    let why = never["not-converging"].as_str().context("no reason")?;
    for words in ["dirties", "drain", "180 ms are allowed"] {
        ensure!(why.contains(words), "no '{words}' in: {why}");
    }
    let ends = alternative(fast, "QEMU, no compression")?;
    ensure!(
        ends["verdict"] == "converges" && fast["commands"].is_array(),
        "over 10 Gbit/s: {fast}"
    );
    stage.park_other(vm);
    Ok(())
}

/// Bytes that a guest that works changes in a second, at least.
const LEAST: u64 = 1_000_000;
/// Pages that the guest rewrites in a second if its CPU runs often enough for that.
const WORKS: f64 = 2000.0;
/// How often to ask for advice on a guest that gets no CPU.
const TRIES: u32 = 8;

/// The report of an advice during which the guest worked.
fn advice_on_work(stage: &Stage, vm: &mut Vm, flags: &[&str]) -> Result<Value> {
    for _ in 0..TRIES {
        let (before, begun) = (vm.guest.work("whole")?, Instant::now());
        let mut advise = start(stage, vm, flags)?;
        advise.succeed(LIMIT)?;
        let pages = to_f64(vm.guest.work("whole")? - before) / begun.elapsed().as_secs_f64();
        println!("{}", advise.process.output());
        let report = advise.report()?;
        let dirty = report["advice"][0]["dirty-rate"].as_u64().unwrap_or(0);
        if pages >= WORKS || dirty > LEAST {
            return Ok(report);
        }
        println!("  the guest rewrote {pages:.0} pages a second: asked again");
    }
    bail!("the guest got no CPU in {TRIES} tries")
}

fn interrupted(stage: &mut Stage) -> Result<()> {
    let spec = VmSpec { cpus: 2, ..VmSpec::tiny(Qemu::System, MACHINE_7_2) };
    let mut vm = stage.vm_of(&spec)?;
    Settings::new(&[]).apply(&mut vm)?;
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    let before = state(&mut vm)?;
    let mut advise = start(stage, &vm, &["--sample", "--sample-memory"])?;
    let deadline = Instant::now() + NOTICE;
    while vm.monitor.execute("query-dirty-rate", json!({}))?["status"] != "measuring" {
        ensure!(Instant::now() < deadline, "QEMU does not measure; {}", advise.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    advise.process.signal(Signal::INT)?;
    names_the_cause(&advise.fail(NOTICE)?, &["interrupted"])?;
    is_as_before(&mut vm, &before)?;
    stage.park_other(vm);
    Ok(())
}
