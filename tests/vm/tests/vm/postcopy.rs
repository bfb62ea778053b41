//! Postcopy with and without a preempt channel, by bare relays and by `platen migrate`, its pause
//! and recovery, with each version of QEMU and from each version to the newer ones.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::{Rate, Signal, Vm, VmSpec};

use crate::bare::{Flight, Settings, LIMIT};
use crate::stage::{Stage, CREEP, LOAD, NOTICE, PATIENCE, SLOW};
use crate::versions::{upgrades, versions};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    type Between = fn(&mut Stage, &VmSpec, &VmSpec) -> Result<()>;
    type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
    let between: [(&str, Between); 4] = [
        ("postcopy", |stage, from, to| completes(stage, from, to, false)),
        ("postcopy_preempt", |stage, from, to| completes(stage, from, to, true)),
        ("postcopy_recovers", |stage, from, to| recovers(stage, from, to, false)),
        ("postcopy_preempt_recovers", |stage, from, to| recovers(stage, from, to, true)),
    ];
    let of_one: [(&str, Run); 2] =
        [("postcopy_by_migrate", by_migrate), ("ctrl_c_in_postcopy_by_migrate", ctrl_c_by_migrate)];
    let same = versions().map(|(name, spec)| (name, spec.clone(), spec));
    let mut all = Vec::new();
    for (name, from, to) in same.into_iter().chain(upgrades()) {
        for (course, run) in between {
            let (from, to) = (from.clone(), to.clone());
            all.push(Scenario::new(format!("qemu_{name}_{course}"), move |stage| {
                run(stage, &from, &to)
            }));
        }
    }
    for (name, spec) in versions() {
        for (course, run) in of_one {
            let spec = spec.clone();
            all.push(Scenario::new(format!("qemu_{name}_{course}"), move |stage| {
                run(stage, &spec)
            }));
        }
    }
    all
}

/// The source's rate in postcopy beside the requested pages, MiB/s: a VM's idle memory stays with
/// it until [`Flight::let_go`].
const TRICKLE: u64 = 1;

/// The settings of postcopy at both ends.
pub(crate) fn settings(preempt: bool) -> Settings {
    Settings::new(if preempt { &["postcopy-ram", "postcopy-preempt"] } else { &["postcopy-ram"] })
        .with("downtime-limit", json!(1))
        .with("max-postcopy-bandwidth", json!(TRICKLE << 20))
}

/// Starts postcopy over a slow link while the guest works: it faults on pages that have not
/// arrived.
fn into_postcopy(stage: &mut Stage, from: &VmSpec, to: &VmSpec, preempt: bool) -> Result<Flight> {
    into_postcopy_with(stage, from, to, &settings(preempt), &PATIENCE)
}

/// The same with these settings of both QEMUs and these flags of both relays.
pub(crate) fn into_postcopy_with(
    stage: &mut Stage,
    from: &VmSpec,
    to: &VmSpec,
    settings: &Settings,
    flags: &[&str],
) -> Result<Flight> {
    stage.lab.net.shape(SLOW)?;
    let vm = stage.vm_of(from)?;
    let mut flight = Flight::prepare_patient(stage, vm, to, settings, flags, flags)?;
    flight.vm.guest.dirty(LOAD.0, LOAD.1, 32)?;
    let crossed = stage.lab.net.crossed()?;
    flight.vm.hold_migration(CREEP)?;
    flight.go()?;
    flight.wait_crossed(stage, crossed + (2 << 20))?;
    flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
    flight.has_switched()?;
    Ok(flight)
}

fn completes(stage: &mut Stage, from: &VmSpec, to: &VmSpec, preempt: bool) -> Result<()> {
    let mut flight = into_postcopy(stage, from, to, preempt)?;
    flight.requests_pages()?;
    flight.let_go()?;
    lands(stage, flight).map(drop)
}

/// Lets a migration in postcopy end over a fast link, and verifies the VM. Returns the source
/// relay's report.
pub(crate) fn lands(stage: &mut Stage, mut flight: Flight) -> Result<Value> {
    stage.lab.net.shape(Rate::Unlimited)?;
    flight.land()?;
    flight.destination.guest.stop()?;
    flight.destination.guest.verify()?;
    let report = flight.relay.report()?;
    stage.park_other(flight.destination);
    Ok(report)
}

/// `platen migrate` controls the migration, and its user switches it to postcopy.
fn by_migrate(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, mut destination, mut migrate, mut receive) =
        into_postcopy_by_migrate(stage, spec)?;
    stage.lab.net.shape(Rate::Unlimited)?;
    let_go(&mut vm)?;
    migrate.succeed(LIMIT)?;
    receive.platen.succeed(NOTICE)?;
    drop(vm);
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify()?;
    stage.park_other(destination);
    Ok(())
}

/// The destination has the VM: the first Ctrl-C must not start the source's as well, the second
/// pauses the migration.
fn ctrl_c_by_migrate(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (mut vm, mut destination, mut migrate, _receive) = into_postcopy_by_migrate(stage, spec)?;
    migrate.process.signal(Signal::INT)?;
    // Two signals that a process has not yet taken are one.
    migrate.process.wait_for_output("pages of it are still to come", NOTICE)?;
    let here = vm.monitor.run_state()?;
    ensure!(here != "running", "the source's VM is {here}, which the destination has");
    destination.assert_running()?;
    ensure!(migrate.process.poll()?.is_none(), "one Ctrl-C ended it");
    migrate.process.signal(Signal::INT)?;
    for end in [&mut vm, &mut destination] {
        let state = end
            .monitor
            .wait_migration_event(&["postcopy-paused", "completed", "failed"], NOTICE)?;
        ensure!(state == "postcopy-paused", "{} is {state}", end.name());
    }
    let here = vm.monitor.run_state()?;
    ensure!(here != "running", "the source's VM is {here}");
    let said = migrate.fail(NOTICE)?;
    ensure!(said.contains("migrate-recover"), "it says: {said}");
    Ok(())
}

/// A migration by `platen migrate` whose VM runs at the destination, over a slow link.
fn into_postcopy_by_migrate(stage: &mut Stage, spec: &VmSpec) -> Result<(Vm, Vm, Platen, Receive)> {
    stage.lab.net.shape(SLOW)?;
    let mut vm = stage.vm_of(spec)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    for end in [&mut vm, &mut destination] {
        settings(false).apply(end)?;
    }
    let receive = platen::receive(&stage.lab, &destination, &[])?;
    vm.guest.dirty(LOAD.0, LOAD.1, 32)?;
    let crossed = stage.lab.net.crossed()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &[])?;
    vm.wait_active(&mut migrate.process)?;
    vm.hold_migration(CREEP)?;
    crate::stage::wait_crossed(&stage.lab, crossed + (2 << 20), &mut migrate)?;
    vm.monitor.execute("migrate-start-postcopy", json!({}))?;
    let states = ["postcopy-active", "completed", "failed"];
    for end in [&mut vm, &mut destination] {
        let state = end.monitor.wait_migration(&states, NOTICE)?;
        ensure!(state == "postcopy-active", "{} is {state}", end.name());
    }
    let deadline = Instant::now() + NOTICE;
    while destination.monitor.run_state()? != "running" {
        ensure!(Instant::now() < deadline, "the destination does not run the VM");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((vm, destination, migrate, receive))
}

/// Lifts the rate limit for the rest of the memory.
fn let_go(vm: &mut Vm) -> Result<()> {
    vm.monitor.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": 0})).map(drop)
}

impl Flight {
    /// Lets a migration in postcopy complete.
    pub(crate) fn let_go(&mut self) -> Result<()> {
        let_go(&mut self.vm)
    }

    /// Bytes of memory that the source has not sent.
    pub(crate) fn remaining(&mut self) -> Result<u64> {
        let stats = self.vm.monitor.query_migrate()?;
        let ram = &stats["ram"]["remaining"];
        ram.as_u64().with_context(|| format!("not in postcopy: {stats}"))
    }

    /// Waits until the destination has requested a page.
    pub(crate) fn requests_pages(&mut self) -> Result<()> {
        let deadline = Instant::now() + NOTICE;
        while self.requests()? == 0 {
            ensure!(Instant::now() < deadline, "the destination asks for no page");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Pages that the destination has requested.
    pub(crate) fn requests(&mut self) -> Result<u64> {
        let stats = self.vm.monitor.query_migrate()?;
        stats["ram"]["postcopy-requests"].as_u64().context("no postcopy-requests")
    }

    /// Waits until both ends are in postcopy. QEMU 7.2's source reports that before it has sent the
    /// command for it.
    pub(crate) fn has_switched(&mut self) -> Result<()> {
        self.waits_for(&["postcopy-active"])?;
        let states = ["postcopy-active", "completed", "failed"];
        let state = self.destination.monitor.wait_migration(&states, NOTICE)?;
        ensure!(state == "postcopy-active", "the destination is {state}");
        // Before it runs the VM it does not pause but fails, whatever carries the stream.
        let deadline = Instant::now() + NOTICE;
        while self.destination.monitor.run_state()? != "running" {
            ensure!(Instant::now() < deadline, "the destination does not run the VM");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits until both ends have paused in postcopy.
    pub(crate) fn pauses(&mut self) -> Result<()> {
        let paused = ["postcopy-paused", "completed", "failed"];
        for end in [&mut self.vm, &mut self.destination] {
            let state = end.monitor.wait_migration_event(&paused, NOTICE)?;
            ensure!(state == "postcopy-paused", "{} is {state}", end.name());
        }
        let here = self.vm.monitor.run_state()?;
        ensure!(here != "running", "in postcopy the source's VM is {here}");
        Ok(())
    }
}

/// Both relays are killed in postcopy and started again, and the migration completes.
fn recovers(stage: &mut Stage, from: &VmSpec, to: &VmSpec, preempt: bool) -> Result<()> {
    let flight = into_postcopy(stage, from, to, preempt)?;
    recovers_from(stage, flight)
}

/// The same for a migration that is in postcopy.
pub(crate) fn recovers_from(stage: &mut Stage, mut flight: Flight) -> Result<()> {
    for relay in [&mut flight.receive.platen, &mut flight.relay] {
        relay.process.signal(Signal::KILL)?;
        relay.process.wait(NOTICE)?;
    }
    flight.pauses()?;
    flight.let_go()?;
    flight.recover(stage)?;
    lands(stage, flight).map(drop)
}
