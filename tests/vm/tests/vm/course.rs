//! Courses of a migration besides the simple one and postcopy: a pause before the switchover, a
//! cancel in each phase, and COLO, which is refused.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::platen::Platen;
use vm_tests::{Qemu, Rate, Signal, VmSpec};

use crate::bare::{Flight, Settings, LIMIT};
use crate::phase::{reach, Phase};
use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, wait_until_idle, Stage, LOAD, NOTICE,
};
use crate::versions::versions;
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
    let courses: [(&str, Run); 7] = [
        ("pause_before_switchover", |stage, spec| pauses(stage, spec, 0)),
        ("pause_before_switchover_2_channels", |stage, spec| pauses(stage, spec, 2)),
        ("cancel_in_setup", |stage, spec| cancels(stage, spec, Phase::Setup)),
        ("cancel_in_active", |stage, spec| cancels(stage, spec, Phase::Active)),
        ("cancel_in_pre_switchover", |stage, spec| cancels(stage, spec, Phase::PreSwitchover)),
        ("cancel_in_device", |stage, spec| cancels(stage, spec, Phase::Unread)),
        ("cancel_in_postcopy", cancel_in_postcopy),
    ];
    let mut all = Vec::new();
    for (version, spec) in versions() {
        for (name, run) in courses {
            let spec = spec.clone();
            all.push(Scenario::new(format!("qemu_{version}_{name}"), move |stage| {
                run(stage, &spec)
            }));
        }
        // QEMU 11.1 does not show COLO in the stream: a bare relay cannot refuse it.
        if spec.qemu != Qemu::Eleven {
            all.push(Scenario::new(format!("qemu_{version}_colo_is_refused"), move |stage| {
                colo(stage, &spec)
            }));
        }
    }
    all
}

/// How long a QEMU whose last RAM fits the socket of a stopped relay may take to answer.
const FITS: Duration = Duration::from_secs(30);

/// A migration that was cancelled in [`Phase::Unread`]. On a busy machine a guest can write more
/// between the last look of QEMU 7.2 at its dirty pages and the VM's stop than fits the socket.
/// QEMU then answers nothing until the relay reads. Another VM takes its place.
fn cancelled_unread(stage: &mut Stage, spec: &VmSpec) -> Result<Flight> {
    for _ in 0..5 {
        let mut flight = reach(stage, spec, Phase::Unread)?;
        if flight.vm.monitor.answers("migrate_cancel", FITS)? {
            return Ok(flight);
        }
    }
    bail!("the last RAM of five migrations did not fit the socket of a stopped relay")
}

fn pauses(stage: &mut Stage, spec: &VmSpec, channels: u32) -> Result<()> {
    let vm = stage.vm_of(spec)?;
    let mut settings = Settings::multifd(channels, "none");
    settings.on.push("pause-before-switchover");
    let mut flight = Flight::prepare(stage, vm, spec, &settings, &[])?;
    flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    flight.go()?;
    let ends = ["pre-switchover", "failed", "completed"];
    let state = flight.vm.wait_migration_end(&ends, LIMIT)?;
    ensure!(state == "pre-switchover", "the source is {state}");
    // The source has the VM, stopped; the destination has nothing that it could start.
    let here = flight.vm.monitor.run_state()?;
    ensure!(here == "finish-migrate", "before the switchover the source's VM is {here}");
    let there = flight.destination.monitor.run_state()?;
    ensure!(there == "inmigrate", "before the switchover the destination's VM is {there}");
    flight.switch_over()?;
    flight.land()?;
    flight.destination.guest.stop()?;
    flight.destination.guest.verify()?;
    stage.park_other(flight.destination);
    Ok(())
}

/// `migrate_cancel` as a user types it: the source resumes at once, the destination ends, and the
/// same VM can migrate again.
fn cancels(stage: &mut Stage, spec: &VmSpec, phase: Phase) -> Result<()> {
    let mut flight = match phase {
        Phase::Unread => cancelled_unread(stage, spec)?,
        _ => {
            let mut flight = reach(stage, spec, phase)?;
            flight.vm.monitor.execute("migrate_cancel", json!({}))?;
            flight
        }
    };
    if phase == Phase::Setup {
        flight.relay.process.signal(Signal::CONT)?;
        return cancelled_in_setup(stage, flight, spec);
    }
    // QEMU shuts down the return path before it records the cancellation: its own thread may see
    // the socket fail first.
    let states = ["cancelled", "failed"];
    if phase == Phase::PreSwitchover {
        flight.vm.wait_back(&states, NOTICE)?;
        flight.vm.guest.stop()?;
        flight.vm.guest.verify()?;
    } else if phase == Phase::Unread {
        flight.vm.wait_back(&states, NOTICE)?;
        flight.vm.guest.verify()?;
    } else {
        source_goes_on(&mut flight.vm, &states)?;
    }
    if phase == Phase::Unread {
        flight.relay.process.signal(Signal::CONT)?;
    }
    names_the_cause(&flight.relay.fail(NOTICE)?, &["cancel", "source"])?;
    flight.receive.platen.fail(NOTICE)?;
    destination_ends(&mut flight.destination)?;
    again(stage, flight, spec)
}

/// A migration of which the relay has read no byte does not count: the same relays carry the next
/// one. After a few bytes it ends like others.
fn cancelled_in_setup(stage: &mut Stage, mut flight: Flight, spec: &VmSpec) -> Result<()> {
    source_goes_on(&mut flight.vm, &["cancelled", "failed"])?;
    // A relay that continues shows nothing: it has had its time when it waits for something.
    wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
    if flight.relay.process.poll()?.is_some() {
        names_the_cause(&flight.relay.fail(NOTICE)?, &["cancel", "source"])?;
        // If the relay had read only a few bytes, the target is free for the next migration.
        if is_free(&mut flight.receive.platen)? {
            flight.receive.platen.process.kill()?;
        } else {
            flight.receive.platen.fail(NOTICE)?;
        }
        // It may never have had a connection.
        flight.destination.process.kill()?;
        return again(stage, flight, spec);
    }
    flight.go()?;
    flight.land()?;
    flight.destination.guest.verify()?;
    stage.park_other(flight.destination);
    Ok(())
}

/// Waits until the receiver has ended, or says that its target is free for another migration; that
/// is true.
pub(crate) fn is_free(receive: &mut Platen) -> Result<bool> {
    let deadline = Instant::now() + NOTICE;
    while receive.process.poll()?.is_none() {
        if receive.process.output().contains("the target is free again") {
            return Ok(true);
        }
        ensure!(Instant::now() < deadline, "the target is not free; {}", receive.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(false)
}

/// The VM that stayed migrates after all.
pub(crate) fn again(stage: &mut Stage, flight: Flight, spec: &VmSpec) -> Result<()> {
    stage.lab.net.heal();
    stage.lab.net.shape(Rate::Unlimited)?;
    let Flight { vm, .. } = flight;
    let mut flight = Flight::prepare(stage, vm, spec, &Settings::new(&[]), &[])?;
    flight.go()?;
    flight.land().context("the next migration of the same VM")?;
    flight.destination.guest.verify()?;
    stage.park_other(flight.destination);
    Ok(())
}

/// QEMU 10 refuses it. QEMU 7.2 does what it does, but there must be no second VM.
fn cancel_in_postcopy(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut flight = reach(stage, spec, Phase::Postcopy)?;
    let refused = flight.vm.monitor.execute("migrate_cancel", json!({})).is_err();
    ensure!(refused || spec.qemu == Qemu::System, "QEMU 10 cancels in postcopy");
    stage.lab.net.shape(Rate::Unlimited)?;
    flight.let_go()?;
    if refused {
        flight.land()?;
        flight.destination.guest.stop()?;
        flight.destination.guest.verify()?;
        stage.park_other(flight.destination);
        return Ok(());
    }
    let ends = ["completed", "failed", "cancelled", "postcopy-paused"];
    flight.vm.monitor.wait_migration(&ends, NOTICE)?;
    std::thread::sleep(Duration::from_millis(300));
    let state = flight.vm.monitor.run_state()?;
    ensure!(state != "running", "the source runs the VM again, which the destination has: {state}");
    flight.relay.process.wait(NOTICE)?;
    flight.receive.platen.process.wait(NOTICE)?;
    Ok(())
}

fn colo(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    if vm.monitor.set_capabilities(&[("x-colo", true)]).is_err() {
        // QEMU was built without it: nothing to refuse.
        println!("  this QEMU has no COLO: it refuses the capability itself");
        stage.park_other(vm);
        return Ok(());
    }
    vm.monitor.set_capabilities(&[("x-colo", false)])?;
    let mut flight = Flight::prepare(stage, vm, spec, &Settings::new(&[]), &[])?;
    // At the source only, so that the relay has to refuse it.
    flight.vm.monitor.set_capabilities(&[("x-colo", true)])?;
    flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    flight.go()?;
    let said = flight.relay.fail(NOTICE)?;
    names_the_cause(&said, &["x-colo"])?;
    source_goes_on(&mut flight.vm, &["failed"])?;
    // It was refused before the destination had a byte of it.
    let there = flight.destination.monitor.run_state()?;
    ensure!(there == "inmigrate", "the destination is {there}");
    flight.vm.monitor.set_capabilities(&[("x-colo", false)])?;
    again(stage, flight, spec)
}
