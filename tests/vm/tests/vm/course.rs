//! Courses of a migration besides the simple one and postcopy: a pause before the switchover, a
//! cancel in each phase, and COLO, which is refused.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::platen::Platen;
use vm_tests::{Qemu, Rate, Signal, VmSpec};

use crate::bare::{Flight, Settings, LIMIT};
use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, wait_until_idle, waits_for_cpu, Stage, LOAD,
    NOTICE, PATIENCE, SLOW, STAYS,
};
use crate::versions::versions;
use crate::{postcopy, Scenario};

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

/// A phase of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// QEMU has connected to the relay, which has read nothing yet.
    Setup,
    /// RAM is being sent.
    Active,
    /// The VM is stopped and QEMU waits for permission to hand it over.
    PreSwitchover,
    /// The last RAM is being sent.
    Device,
    /// The source QEMU has written its whole stream, and its relay has not read the end: see
    /// [`cancelled_unread`]. QEMU 7.2 and 10 answer nothing while they write their last RAM.
    Unread,
    /// The destination QEMU's socket has the whole stream, and the destination has not confirmed
    /// it.
    AfterEof,
    /// QEMU 10.2 and later: the destination QEMU's socket has the packaged state of postcopy, and
    /// the destination has not loaded it.
    PostcopyDevice,
    /// The destination runs the VM and requests its memory.
    Postcopy,
    /// The source has sent all memory in postcopy, and the destination has not confirmed that.
    PostcopyEnd,
}

/// A rate so low that the last RAM of a VM takes longer than any delay of the test on a busy
/// machine: once the end of the stream is read, a relay rightly holds the source for a person.
const CRAWLS: Rate = Rate::Mbit(8);

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

/// A migration that has reached `phase`. In [`Phase::Setup`] and [`Phase::Unread`] the source relay
/// is stopped (SIGSTOP), in [`Phase::AfterEof`], [`Phase::PostcopyDevice`] and
/// [`Phase::PostcopyEnd`] the destination QEMU.
pub(crate) fn reach(stage: &mut Stage, spec: &VmSpec, phase: Phase) -> Result<Flight> {
    let vm = stage.vm_of(spec)?;
    let settings = match phase {
        Phase::Setup => Settings::new(&[]),
        Phase::Active => Settings::new(&[]).with("downtime-limit", json!(1)),
        // With all of the RAM still to send when the VM stops: QEMU checks after 100 ms, and until
        // then, which on a busy machine may be ten seconds later, obeys the bandwidth limit. More
        // must be left than the relays hold, or the source relay reads the end of the stream.
        Phase::Device => Settings::new(&["pause-before-switchover"])
            .with("downtime-limit", json!(600_000))
            .with("max-bandwidth", json!(1 << 20)),
        Phase::PreSwitchover => Settings::new(&["pause-before-switchover"]),
        // With so little to send that the socket of a process that does not read can hold it and
        // the device state: 50 KB.
        Phase::AfterEof | Phase::Unread => Settings::new(&["pause-before-switchover"])
            .with("downtime-limit", json!(1))
            .with("max-bandwidth", json!(50 << 20)),
        Phase::PostcopyDevice | Phase::Postcopy => postcopy::settings(false),
        Phase::PostcopyEnd => {
            postcopy::settings(false).with("max-postcopy-bandwidth", json!(8 << 20))
        }
    };
    // A relay that is stopped while QEMU works may stand still for long on a busy machine.
    let patience = if phase == Phase::Unread { ["--resume-timeout", "300"] } else { PATIENCE };
    let mut flight = Flight::prepare_patient(stage, vm, spec, &settings, &patience, &patience)?;
    match phase {
        Phase::Setup => {
            flight.relay.process.signal(Signal::STOP)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            flight.go()?;
        }
        Phase::Active => {
            stage.lab.net.shape(SLOW)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            let crossed = stage.lab.net.crossed()?;
            flight.go()?;
            flight.wait_crossed(stage, crossed + (4 << 20))?;
            stage.lab.net.shape(STAYS)?;
            let status = flight.vm.monitor.migration_status()?;
            ensure!(status == "active", "half way, the migration is {status}");
        }
        Phase::PreSwitchover => {
            flight.vm.guest.dirty(500, 0, 4)?;
            flight.go()?;
            flight.waits_for(&["pre-switchover"])?;
        }
        Phase::Device => {
            stage.lab.net.shape(CRAWLS)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            flight.go()?;
            flight.waits_for(&["pre-switchover"])?;
            let crossed = stage.lab.net.crossed()?;
            flight.switch_over()?;
            // QEMU answers nothing while it writes the last RAM.
            flight.vm.monitor.wait_migration_event(&["device"], NOTICE)?;
            flight.wait_crossed(stage, crossed + (512 << 10))?;
        }
        Phase::Unread => {
            // Idle: the rest at the VM's stop fits the socket of a relay that does not read.
            flight.go()?;
            flight.waits_for(&["pre-switchover"])?;
            wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
            flight.relay.process.signal(Signal::STOP)?;
            flight.switch_over()?;
            // From here on QEMU answers nothing before it has written all.
            flight.vm.monitor.wait_migration_event(&["device"], NOTICE)?;
        }
        Phase::AfterEof => {
            // Idle: the rest at the VM's stop fits the socket of a QEMU that does not read.
            flight.go()?;
            flight.waits_for(&["pre-switchover"])?;
            wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
            flight.destination.process.signal(Signal::STOP)?;
            let crossed = stage.lab.net.crossed()?;
            flight.switch_over()?;
            flight.waits_for(&["device"])?;
            // Device state and its description have at least this many bytes, compressed.
            flight.wait_crossed(stage, crossed + (6 << 10))?;
            wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
            let status = flight.vm.monitor.migration_status()?;
            ensure!(status == "device", "with the destination stopped the source is {status}");
        }
        Phase::PostcopyDevice => {
            stage.lab.net.shape(SLOW)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            let crossed = stage.lab.net.crossed()?;
            flight.go()?;
            flight.wait_crossed(stage, crossed + (4 << 20))?;
            stage.lab.net.shape(Rate::Unlimited)?;
            // All that was under way has to be with the destination, or its socket would have no
            // room for the packaged state: QEMU sends no more until it may.
            flight.vm.monitor.execute("migrate-set-parameters", json!({"max-bandwidth": 4096}))?;
            flight.vm.guest.stop()?;
            // Too short a time only leaves more for the destination to read once it goes on.
            std::thread::sleep(Duration::from_secs(1));
            flight.destination.process.signal(Signal::STOP)?;
            flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
            flight.waits_for(&["postcopy-device"])?;
            wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
            let status = flight.vm.monitor.migration_status()?;
            ensure!(status == "postcopy-device", "with the destination stopped it is {status}");
        }
        Phase::PostcopyEnd => {
            stage.lab.net.shape(SLOW)?;
            let crossed = stage.lab.net.crossed()?;
            flight.go()?;
            flight.wait_crossed(stage, crossed + (2 << 20))?;
            flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
            flight.has_switched()?;
            stage.lab.net.shape(Rate::Unlimited)?;
            // Slower and slower: the rest fits the socket of a destination that does not read.
            for (rate, left) in [(8 << 20, 4_u64 << 20), (512 << 10, 128 << 10)] {
                let limit = json!({"max-postcopy-bandwidth": rate});
                flight.vm.monitor.execute("migrate-set-parameters", limit)?;
                let deadline = Instant::now() + NOTICE;
                while flight.remaining()? > left {
                    ensure!(Instant::now() < deadline, "postcopy does not come to its end");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            flight.destination.process.signal(Signal::STOP)?;
            flight.let_go()?;
            let deadline = Instant::now() + NOTICE;
            while flight.remaining()? > 0 {
                ensure!(Instant::now() < deadline, "the source does not send all");
                std::thread::sleep(Duration::from_millis(10));
            }
            // Nothing remains before QEMU has written the end of its stream.
            loop {
                wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
                if !waits_for_cpu(flight.vm.process.id()) {
                    break;
                }
            }
            let status = flight.vm.monitor.migration_status()?;
            ensure!(status == "postcopy-active", "with the destination stopped it is {status}");
        }
        Phase::Postcopy => {
            stage.lab.net.shape(SLOW)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            let crossed = stage.lab.net.crossed()?;
            flight.go()?;
            flight.wait_crossed(stage, crossed + (4 << 20))?;
            flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
            flight.has_switched()?;
        }
    }
    Ok(flight)
}

impl Flight {
    /// Waits until the source's migration is in one of `states`.
    pub(crate) fn waits_for(&mut self, states: &[&str]) -> Result<String> {
        let until = [states, &["failed", "completed", "cancelled"]].concat();
        let state = self.vm.monitor.wait_migration(&until, LIMIT)?;
        ensure!(
            states.contains(&state.as_str()),
            "the source is {state}, not {states:?}; {}",
            self.relay.process.tail()
        );
        Ok(state)
    }

    /// Lets a source in pre-switchover hand over.
    pub(crate) fn switch_over(&mut self) -> Result<()> {
        let arguments = json!({"state": "pre-switchover"});
        self.vm.monitor.execute("migrate-continue", arguments).map(|_| ())
    }

    pub(crate) fn wait_crossed(&mut self, stage: &Stage, mark: u64) -> Result<()> {
        crate::stage::wait_crossed(&stage.lab, mark, &mut self.relay)
    }
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
