//! How `platen migrate` ends migrations: a guest that dirties its memory faster than the link
//! carries it, limits that hold, and QEMU's settings afterwards.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::table::to_f64;
use vm_tests::{Meter, Qemu, Rate, Signal, Vm, VmSpec, MACHINE_7_2};

use crate::bare::{Settings, LIMIT};
use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, wait_crossed, Stage, NOTICE, PATIENCE,
};
use crate::versions::versions;
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = vec![
        Scenario::new("a_guest_that_does_not_converge_is_reported", reported),
        Scenario::new("a_migration_is_cancelled_at_its_deadline", too_long),
        Scenario::new("settings_are_put_back_when_migrate_is_killed", killed),
        Scenario::measurement("a_bandwidth_limit_holds_0_channels", |stage| {
            limited(stage, &["--channels", "0"])
        }),
        Scenario::measurement("a_bandwidth_limit_holds_2_channels", |stage| {
            limited(stage, &["--channels", "2"])
        }),
        Scenario::measurement("a_bandwidth_limit_holds_in_postcopy", |stage| {
            limited(stage, &["--postcopy", "after", "1"])
        }),
    ];
    for (version, spec) in versions() {
        let throttled = spec.clone();
        all.push(Scenario::new(format!("qemu_{version}_ends_by_throttling"), move |stage| {
            ends(stage, &throttled, &["--throttle", "auto"], "throttle")
        }));
        all.push(Scenario::new(format!("qemu_{version}_ends_by_postcopy"), move |stage| {
            ends(stage, &spec, &["--postcopy", "when-needed"], "postcopy")
        }));
    }
    all
}

/// A link that carries less than the guest dirties: some three thousand pages a second, compressed.
pub(crate) const THIN: Rate = Rate::Mbit(40);
/// The link for a guest that gets so little of a busy machine that it dirtied no more than the link
/// before carries.
const THINNER: [Rate; 3] = [THIN, Rate::Mbit(10), Rate::Mbit(2)];
/// The guest rewrites more pages a second than that. Slowed by 91 % it rewrites a third of them: it
/// makes up for 40 ms whenever its CPU runs.
pub(crate) const TOO_MUCH: (u64, u64, u64) = (5000, 100, 16);

/// A migration of a guest that does not converge by itself.
struct Endless {
    vm: Vm,
    destination: Vm,
    receive: Receive,
    migrate: Platen,
    /// The source QEMU's settings before.
    before: Value,
    /// The destination QEMU's settings before.
    destination_before: Value,
}

impl Endless {
    fn begin(stage: &mut Stage, spec: &VmSpec, flags: &[&str]) -> Result<Self> {
        let mut vm = stage.vm_of(spec)?;
        Settings::new(&[]).with("max-bandwidth", json!(100 << 20)).apply(&mut vm)?;
        let mut destination = stage.lab.incoming_for(&vm)?;
        let destination_before = settings(&mut destination)?;
        let receive = platen::receive(&stage.lab, &destination, &PATIENCE)?;
        vm.guest.dirty(TOO_MUCH.0, TOO_MUCH.1, TOO_MUCH.2)?;
        let before = settings(&mut vm)?;
        let flags = [&["--explain"], flags, &PATIENCE].concat();
        let migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
        Ok(Self { vm, destination, receive, migrate, before, destination_before })
    }

    /// Waits until the migration is cancelled; the guest goes on with QEMU's former settings.
    /// Returns the messages, and the report.
    fn ends_cancelled(self, stage: &mut Stage) -> Result<(String, Value)> {
        let Self { mut vm, mut destination, mut receive, mut migrate, before, .. } = self;
        let said = migrate.fail(NOTICE)?;
        let report = migrate.report()?;
        ensure!(report["status"] == "cancelled", "{report}");
        are_put_back(&mut vm, &before)?;
        source_goes_on(&mut vm, &["cancelled", "failed"])?;
        receive.platen.fail(NOTICE)?;
        destination_ends(&mut destination)?;
        stage.park_other(vm);
        Ok((said, report))
    }
}

/// QEMU's migration capabilities and parameters.
pub(crate) fn settings(vm: &mut Vm) -> Result<Value> {
    let capabilities = vm.monitor.execute("query-migrate-capabilities", json!({}))?;
    Ok(json!([capabilities, vm.monitor.execute("query-migrate-parameters", json!({}))?]))
}

/// Waits until the settings are `before`.
pub(crate) fn are_put_back(vm: &mut Vm, before: &Value) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = settings(vm)?;
        if now == *before {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the settings were {before}, and are {now}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// With nothing allowed that would end it, the migration is reported with figures. It goes on, and
/// can be cancelled.
fn reported(stage: &mut Stage) -> Result<()> {
    let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    let flags = [["--throttle", "off"], ["--postcopy", "never"], ["--max-downtime", "180"]];
    for rate in THINNER {
        stage.lab.net.shape(rate)?;
        let mut endless = Endless::begin(stage, &spec, flags.as_flattened())?;
        let waited = endless.migrate.process.wait_for_output("does not converge", LIMIT);
        match endless.migrate.process.poll()? {
            None => {
                waited?;
                // So that it does not converge after all before it is cancelled.
                stage.lab.net.shape(THINNER[2])?;
                return is_reported(stage, endless);
            }
            Some(_) => endless.migrate.succeed(NOTICE)?,
        };
        println!("  it converges by itself at {rate:?}");
        endless.receive.platen.succeed(NOTICE)?;
        endless.destination.guest.stop()?;
        stage.park_other(endless.destination);
    }
    bail!("it converges over all of {THINNER:?}")
}

fn is_reported(stage: &mut Stage, mut endless: Endless) -> Result<()> {
    let status = endless.vm.monitor.migration_status()?;
    ensure!(status == "active", "reported, the migration is {status}");
    endless.migrate.process.signal(Signal::INT)?;
    let (said, report) = endless.ends_cancelled(stage)?;
    let figures = report["not-converging"].as_str().context("nothing says why")?;
    ensure!(said.contains(figures), "no '{figures}' in: {said}");
    let words =
        ["dirties", "drain", "Mbit/s", "180 ms are allowed", "--max-downtime", "--postcopy"];
    for words in words {
        ensure!(figures.contains(words), "no '{words}' in: {figures}");
    }
    // Decisions that only --explain shows: the moment to stop, and the longer downtime.
    for words in ["QEMU is to stop the VM when", "are left after a pass and do not become less"] {
        ensure!(said.contains(words), "no '{words}' in: {said}");
    }
    Ok(())
}

/// The first pass takes longer than the time until the deadline.
fn too_long(stage: &mut Stage) -> Result<()> {
    stage.lab.net.shape(THIN)?;
    let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    let endless = Endless::begin(stage, &spec, &["--deadline", "4"])?;
    let (said, _) = endless.ends_cancelled(stage)?;
    names_the_cause(&said, &["not over after 4 s"])
}

/// The same guest moves with the means that is allowed.
fn ends(stage: &mut Stage, spec: &VmSpec, flags: &[&str], means: &str) -> Result<()> {
    for rate in THINNER {
        stage.lab.net.shape(rate)?;
        if ends_by(stage, spec, flags, means)? {
            return Ok(());
        }
        println!("  it converges by itself at {rate:?}");
    }
    bail!("it needed no {means} over any of {THINNER:?}")
}

/// Returns whether the means was needed.
fn ends_by(stage: &mut Stage, spec: &VmSpec, flags: &[&str], means: &str) -> Result<bool> {
    let Endless { mut vm, mut destination, mut receive, mut migrate, before, destination_before } =
        Endless::begin(stage, spec, flags)?;
    migrate.succeed(LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(NOTICE)?;
    let report = migrate.report()?;
    let said = migrate.process.output();
    println!("  {} ms, {} ms of downtime", report["total-time"], report["downtime"]);
    let needed = match means {
        "throttle" => match report["throttle"].as_u64() {
            Some(percent) => {
                ensure!((2..=99).contains(&percent), "slowed by {percent} %");
                true
            }
            None => false,
        },
        _ => said.contains("postcopy begins"),
    };
    are_put_back(&mut vm, &before)?;
    are_put_back(&mut destination, &destination_before)?;
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify()?;
    stage.park_other(destination);
    Ok(needed)
}

/// A migrate that is killed leaves nothing of its settings.
fn killed(stage: &mut Stage) -> Result<()> {
    stage.lab.net.shape(THIN)?;
    let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    let crossed = stage.lab.net.crossed()?;
    let Endless { mut vm, mut destination, mut receive, mut migrate, before, .. } =
        Endless::begin(stage, &spec, &["--throttle", "auto"])?;
    wait_crossed(&stage.lab, crossed + (4 << 20), &mut migrate)?;
    ensure!(settings(&mut vm)? != before, "migrate has changed nothing");
    migrate.process.signal(Signal::KILL)?;
    migrate.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed", "cancelled"])?;
    are_put_back(&mut vm, &before)?;
    receive.platen.fail(NOTICE)?;
    destination_ends(&mut destination)?;
    stage.park_other(vm);
    Ok(())
}

/// In no second more crosses the link than the limit allows.
fn limited(stage: &mut Stage, flags: &[&str]) -> Result<()> {
    /// Bytes per second.
    const RATE: f64 = 3e6;
    /// The bytes that may cross at once after a pause: 17 ms of the rate (crate `turns`), and the
    /// handshakes.
    const AT_ONCE: f64 = 65536.0;
    let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
    let mut vm = stage.vm_of(&spec)?;
    Settings::new(&[]).apply(&mut vm)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let all = [&["--max-bandwidth", "24mbit"], flags].concat();
    let there = destination.side();
    let (mut meter, begin) = (Meter::default(), Instant::now());
    meter.read(|| stage.lab.net.arrived(there))?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &all)?;
    loop {
        let ended = migrate.process.poll()?;
        meter.read(|| stage.lab.net.arrived(there))?;
        if ended.is_some() {
            break;
        }
        ensure!(begin.elapsed() < LIMIT, "it does not end; {}", migrate.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut most: f64 = 0.0;
    for stretch in meter.stretches(Duration::from_secs(1)) {
        let allowed = RATE * 1.03 * stretch.length.as_secs_f64() + AT_ONCE;
        let used = to_f64(stretch.bytes) / allowed;
        ensure!(used <= 1.0, "{} bytes in {:?}", stretch.bytes, stretch.length);
        most = most.max(used);
    }
    println!("  {:.1} % of what is allowed", 100.0 * most);
    migrate.succeed(NOTICE)?;
    receive.platen.succeed(NOTICE)?;
    if flags.contains(&"--postcopy") {
        let ram = &vm.monitor.query_migrate()?["ram"];
        ensure!(ram["postcopy-bytes"].as_u64() > Some(0), "it was no postcopy: {ram}");
    }
    destination.assert_running()?;
    destination.guest.verify()?;
    stage.park_other(destination);
    Ok(())
}
