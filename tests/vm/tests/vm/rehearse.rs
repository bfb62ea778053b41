//! `platen rehearse`: the VM stays whatever happens, QEMU's settings are as before, and the
//! forecast says which links a migration converges over.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::platen::{self, Platen};
use vm_tests::{Method, MonitorProxy, Patience, Qemu, Rate, Signal, Vm, VmSpec, MACHINE_7_2};

use crate::bare::{Settings, LIMIT};
use crate::ending::{are_put_back, settings, THIN, TOO_MUCH};
use crate::stage::{names_the_cause, source_goes_on, Stage, NOTICE, PATIENCE};
use crate::versions::versions;
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = vec![
        Scenario::measurement("rehearsal_forecasts_what_migrations_then_do", forecasts),
        Scenario::measurement("rehearsal_is_near_what_migrations_take", near),
        Scenario::measurement("rehearsal_measures_the_link_to_a_peer", measures),
    ];
    for (version, spec) in versions() {
        type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
        let courses: [(&str, Run); 6] = [
            ("of_an_idle_guest", idle),
            ("that_converges", converges),
            ("interrupted", interrupted),
            ("killed", killed),
            ("killed_before_switchover", |stage, spec| stranded(stage, spec, Struck::Killed)),
            ("continued_by_another_client", |stage, spec| stranded(stage, spec, Struck::Continued)),
        ];
        for (name, run) in courses {
            let spec = spec.clone();
            let name = format!("qemu_{version}_rehearsal_{name}");
            all.push(Scenario::new(name, move |stage| run(stage, &spec)));
        }
    }
    all
}

/// The longest pause of a guest in a rehearsal, milliseconds.
const PAUSE: f64 = 50.0;

fn start(stage: &Stage, vm: &Vm, flags: &[&str]) -> Result<Platen> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let words = [&["rehearse", "--qmp", &qmp], flags].concat();
    Platen::start(&stage.lab, "rehearse", vm.side(), &words)
}

/// Its report; the guest runs on, its memory is right, and QEMU's settings are `before`.
fn ends(vm: &mut Vm, mut rehearse: Platen, before: &Value) -> Result<Value> {
    rehearse.succeed(LIMIT)?;
    println!("{}", rehearse.process.output());
    ensure!(settings(vm)? == *before, "the settings are not as before");
    source_goes_on(vm, &["cancelled", "failed"])?;
    let report = rehearse.report()?;
    ensure!(report["vm"] == "running", "{report}");
    let pause = report["pause"].as_f64().context("no pause")?;
    ensure!(pause <= PAUSE, "the guest stood still for {pause} ms");
    Ok(report)
}

/// The forecast for `method` over a link of `mbit`.
fn forecast<'a>(report: &'a Value, method: &str, mbit: f64) -> Result<&'a Value> {
    let all = report["forecasts"].as_array().context("no forecasts")?;
    let near = |one: &&Value| {
        let link = one["link"].as_f64().unwrap_or(0.0);
        one["method"] == method && (link / mbit - 1.0).abs() < 0.05
    };
    all.iter().find(near).with_context(|| format!("no forecast for {mbit} Mbit/s in {report}"))
}

/// An idle guest: a QEMU that may converges at once, and is caught.
fn idle(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    Settings::new(&[]).with("max-bandwidth", json!(100 << 20)).apply(&mut vm)?;
    let before = settings(&mut vm)?;
    vm.guest.dirty(1, 0, 1)?;
    let flags = ["--seconds", "5", "--what-if", "link=100mbit,1gbit"];
    let rehearse = start(stage, &vm, &flags)?;
    let report = ends(&mut vm, rehearse, &before)?;
    for mbit in [100.0, 1000.0] {
        let seen = forecast(&report, "platen", mbit)?;
        ensure!(seen["converges"] == true, "{seen}");
    }
    // QEMU 10 asks for leave, and is never stopped.
    let pause = report["pause"].as_f64().unwrap_or(f64::NAN);
    ensure!(spec.qemu != Qemu::Ten || pause == 0.0, "a pause of {pause} ms");
    println!("  {pause} ms of pause");
    stage.park_other(vm);
    Ok(())
}

/// QEMU wants to hand the VM over while it is rehearsed. Only a QEMU that heeds that it has no
/// leave does not stop the VM.
fn converges(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    Settings::new(&[]).with("max-bandwidth", json!(100 << 20)).apply(&mut vm)?;
    let before = settings(&mut vm)?;
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    let mut rehearse = start(stage, &vm, &["--seconds", "10", "--what-if", "link=1gbit"])?;
    vm.wait_active(&mut rehearse.process)?;
    let passes = |vm: &mut Vm| -> Result<u64> {
        Ok(vm.monitor.query_migrate()?["ram"]["dirty-sync-count"].as_u64().unwrap_or(0))
    };
    let deadline = Instant::now() + NOTICE;
    while passes(&mut vm)? < 2 {
        ensure!(Instant::now() < deadline, "no first pass; {}", rehearse.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    must_converge(&mut vm)?;
    let report = ends(&mut vm, rehearse, &converged(before))?;
    let pause = report["pause"].as_f64().unwrap_or(f64::NAN);
    println!("  {pause} ms of pause");
    ensure!((pause > 0.0) == (spec.qemu != Qemu::Ten), "a pause of {pause} ms");
    moves_on(stage, vm)
}

/// Whatever is left goes within this downtime.
const ANY_DOWNTIME: u64 = 2_000_000;

fn must_converge(vm: &mut Vm) -> Result<()> {
    let limit = json!({"downtime-limit": ANY_DOWNTIME});
    vm.monitor.execute("migrate-set-parameters", limit).map(drop)
}

/// The settings `before`, and the limit that this other monitor has set meanwhile.
fn converged(mut before: Value) -> Value {
    before[1]["downtime-limit"] = ANY_DOWNTIME.into();
    before
}

/// The forecast for a slow and for a fast link, and what migrations do over both.
fn forecasts(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm_of(&VmSpec::tiny(Qemu::System, MACHINE_7_2))?;
    Settings::new(&[]).apply(&mut vm)?;
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    let before = settings(&mut vm)?;
    let downtime = ["--max-downtime", "180"];
    let flags = [&["--seconds", "10", "--what-if", "link=40mbit,1gbit"][..], &downtime].concat();
    let rehearse = start(stage, &vm, &flags)?;
    let report = ends(&mut vm, rehearse, &before)?;
    let slow = forecast(&report, "platen", 40.0)?;
    ensure!(slow["converges"] == false, "{slow}");
    let why = slow["not-converging"].as_str().context("no reason")?;
    for words in ["dirties", "drain", "180 ms are allowed", "--max-downtime", "--postcopy"] {
        ensure!(why.contains(words), "no '{words}' in: {why}");
    }
    let fast = forecast(&report, "platen", 1000.0)?.clone();
    ensure!(fast["converges"] == true, "{fast}");

    // The slow link.
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    stage.lab.net.shape(THIN)?;
    let destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &PATIENCE)?;
    let flags = [&downtime[..], &PATIENCE].concat();
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
    migrate.process.wait_for_output("does not converge", LIMIT)?;
    migrate.process.signal(Signal::INT)?;
    names_the_cause(&migrate.fail(NOTICE)?, &["cancel"])?;
    receive.platen.fail(NOTICE)?;
    drop(destination);
    source_goes_on(&mut vm, &["cancelled", "failed"])?;

    // The fast link.
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    stage.lab.net.shape(Rate::Mbit(1000))?;
    let (mut vm, seen) = Method::platen(&[]).run(&stage.lab, vm, Patience::ByItself(LIMIT))?;
    println!(
        "  forecast {} ms, {} ms of downtime; it took {} and {} ms",
        fast["total-time"], fast["downtime"], seen.total_ms, seen.downtime_ms
    );
    vm.guest.stop()?;
    vm.guest.verify()?;
    stage.park_other(vm);
    Ok(())
}

/// Guests and links of which the link decides what a migration sends: updates a second, per cent of
/// whole pages, MiB; and Mbit/s.
const BOUND_BY_LINK: [((u64, u64, u64), u32); 3] =
    [((1, 0, 1), 40), ((500, 30, 16), 40), ((1000, 30, 16), 60)];
/// How far off the forecast of the bytes may be, as a factor. On a host on which others work,
/// codecs are chosen by the CPU time that is left at that moment.
const OFF: f64 = 2.0;

/// Forecasts of migrations, and the migrations.
fn near(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm_of(&VmSpec::tiny(Qemu::System, MACHINE_7_2))?;
    for ((rate, whole, mib), mbit) in BOUND_BY_LINK {
        Settings::new(&[]).apply(&mut vm)?;
        let before = settings(&mut vm)?;
        vm.guest.dirty(rate, whole, mib)?;
        let what_if = format!("link={mbit}mbit");
        let rehearse = start(stage, &vm, &["--seconds", "10", "--what-if", &what_if])?;
        let report = ends(&mut vm, rehearse, &before)?;
        let seen = forecast(&report, "platen", f64::from(mbit))?;
        let number = |key: &str| seen[key].as_f64().with_context(|| format!("no {key} in {seen}"));
        let (total, downtime) = (number("total-time")?, number("downtime")?);
        vm.guest.dirty(rate, whole, mib)?;
        stage.lab.net.shape(Rate::Mbit(mbit))?;
        let (moved, took) = Method::platen(&[]).run(&stage.lab, vm, Patience::ByItself(LIMIT))?;
        stage.lab.net.shape(Rate::Unlimited)?;
        println!(
            "  {rate} updates a second, {mbit} Mbit/s: forecast {total} and {downtime} ms, {} bytes; it took {} and {} \
             ms, {} bytes",
            seen["transferred"], took.total_ms, took.downtime_ms, took.wire
        );
        let factor = number("transferred")? / took.wire as f64;
        ensure!((1.0 / OFF..OFF).contains(&factor), "the forecast is {factor} of what was sent");
        vm = moved;
        vm.guest.stop()?;
        vm.guest.verify()?;
    }
    stage.park_other(vm);
    Ok(())
}

/// The rate of a shaped link, by bytes that the receiver discards. It then still serves its VM.
fn measures(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm_of(&VmSpec::tiny(Qemu::System, MACHINE_7_2))?;
    Settings::new(&[]).apply(&mut vm)?;
    vm.guest.dirty(1, 0, 1)?;
    let before = settings(&mut vm)?;
    stage.lab.net.shape(THIN)?;
    let destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &PATIENCE)?;
    let peer = receive.peer.to_string();
    let tls = stage.lab.certificates()?.of(vm.side()).display().to_string();
    let flags = ["--seconds", "5", "--peer", &peer, "--tls-dir", &tls];
    let rehearse = start(stage, &vm, &flags)?;
    let report = ends(&mut vm, rehearse, &before)?;
    let seen = &report["forecasts"][0];
    ensure!(seen["measured"] == true, "{seen}");
    let rate = seen["link"].as_f64().context("no rate")?;
    ensure!((20.0..44.0).contains(&rate), "{rate} Mbit/s measured where 40 are there");
    stage.lab.net.shape(Rate::Unlimited)?;
    let mut destination = destination;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &PATIENCE)?;
    migrate.arrive(&mut vm, LIMIT)?;
    receive.platen.succeed(NOTICE)?;
    destination.assert_running()?;
    destination.guest.verify()?;
    stage.park_other(destination);
    Ok(())
}

/// A guest that dirties its memory, and a rehearsal of it that has begun to send. Returns the
/// settings before, too.
fn half_way(stage: &mut Stage, spec: &VmSpec) -> Result<(Vm, Platen, Value)> {
    let mut vm = stage.vm_of(spec)?;
    Settings::new(&[]).with("max-bandwidth", json!(100 << 20)).apply(&mut vm)?;
    let before = settings(&mut vm)?;
    vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
    let mut rehearse = start(stage, &vm, &["--seconds", "600"])?;
    vm.wait_active(&mut rehearse.process)?;
    ensure!(settings(&mut vm)? != before, "rehearse has changed nothing");
    Ok((vm, rehearse, before))
}

fn interrupted(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, mut rehearse, before) = half_way(stage, spec)?;
    rehearse.process.signal(Signal::INT)?;
    let said = rehearse.fail(NOTICE)?;
    names_the_cause(&said, &["interrupted"])?;
    ensure!(said.contains("'running'"), "no state of the VM in: {said}");
    ensure!(settings(&mut vm)? == before, "the settings are not as before");
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    stage.park_other(vm);
    Ok(())
}

fn killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, mut rehearse, before) = half_way(stage, spec)?;
    rehearse.process.signal(Signal::KILL)?;
    rehearse.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    are_put_back(&mut vm, &before)?;
    moves_on(stage, vm)
}

/// A rehearsal whose VM waits to be handed over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Struck {
    /// It is killed.
    Killed,
    /// Another client tells QEMU to go on.
    Continued,
}

/// QEMU has stopped the VM and waits to hand it over, and the rehearsal does not hear of it. No
/// version is asked for leave (`switchover-ack`), so that the other guards are all there is.
fn stranded(stage: &mut Stage, spec: &VmSpec, struck: Struck) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    Settings::new(&[]).with("max-bandwidth", json!(100 << 20)).apply(&mut vm)?;
    let before = settings(&mut vm)?;
    let path = stage.lab.scratch("monitor");
    let proxy =
        MonitorProxy::start(&path, &vm.platen_monitor(), "switchover-ack", "pre-switchover")?;
    let qmp = format!("unix:{}", proxy.path().display());
    // One that is killed must not end by itself before that.
    let seconds = if struck == Struck::Killed { "600" } else { "20" };
    let words = ["rehearse", "--qmp", &qmp, "--seconds", seconds];
    let mut rehearse = Platen::start(&stage.lab, "rehearse", vm.side(), &words)?;
    vm.wait_active(&mut rehearse.process)?;
    must_converge(&mut vm)?;
    vm.monitor
        .wait_migration(&["pre-switchover"], NOTICE)
        .with_context(|| rehearse.process.tail())?;
    let deadline = Instant::now() + NOTICE;
    while !proxy.fell_silent() {
        ensure!(Instant::now() < deadline, "the monitor tells no pre-switchover");
        std::thread::sleep(Duration::from_millis(5));
    }
    match struck {
        Struck::Killed => {
            rehearse.process.signal(Signal::KILL)?;
            rehearse.process.wait(NOTICE)?;
        }
        Struck::Continued => {
            vm.monitor.execute("migrate-continue", json!({"state": "pre-switchover"}))?;
        }
    }
    vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source must go on")?;
    if struck == Struck::Continued {
        // Its monitor stays silent.
        rehearse.fail(NOTICE)?;
    }
    vm.guest.verify()?;
    are_put_back(&mut vm, &converged(before))?;
    moves_on(stage, vm)
}

/// The next migration is not disturbed.
fn moves_on(stage: &mut Stage, mut vm: Vm) -> Result<()> {
    vm.let_migrate()?;
    let (mut vm, _) = Method::platen(&[]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.verify()?;
    stage.park_other(vm);
    Ok(())
}
