//! Deaths of each process at each phase: afterwards the VM is where the table says, never in two
//! places, and never in none where one of them could have it.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::json;
use vm_tests::{Qemu, Rate, Signal, Vm, VmSpec};

use crate::bare::Flight;
use crate::course::is_free;
use crate::phase::{reach, Phase};
use crate::stage::{destination_ends, names_the_cause, Skip, Stage, NOTICE};
use crate::versions::versions;
use crate::Scenario;

/// The victim of SIGKILL; or the link, which drops everything silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    SourceQemu,
    DestinationQemu,
    SourceRelay,
    DestinationRelay,
    Link,
}

/// Where the VM has to be afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// At the source, which resumes by itself; the destination never ran it.
    Source,
    /// At the source, which resumes when its user types `migrate-continue` or cancels: QEMU checks
    /// nothing before.
    SourceWhenAsked,
    /// At the destination; the source has been killed.
    Destination,
    /// At the destination; the source is held, stopped, for a person to decide.
    DestinationInDoubt,
    /// Held at the source, stopped, with its memory; a person quits the destination and lets it go.
    SourceInDoubt,
    /// Nowhere: it died with the QEMU that had it. The other one does not run its part.
    Nowhere,
    /// At the destination, paused; it continues once both relays have been started again.
    Paused,
}

use Left::{
    Destination, DestinationInDoubt, Nowhere, Paused, Source, SourceInDoubt, SourceWhenAsked,
};
use Victim::{DestinationQemu, DestinationRelay, Link, SourceQemu, SourceRelay};

const VICTIMS: [(&str, Victim); 5] = [
    ("source_qemu", SourceQemu),
    ("destination_qemu", DestinationQemu),
    ("source_relay", SourceRelay),
    ("destination_relay", DestinationRelay),
    ("link", Link),
];

/// In the order of [`VICTIMS`].
const TABLE: [(&str, Phase, [Left; 5]); 8] = [
    ("setup", Phase::Setup, [Nowhere, Source, Source, Source, Source]),
    ("active", Phase::Active, [Nowhere, Source, Source, Source, Source]),
    (
        "pre_switchover",
        Phase::PreSwitchover,
        [Nowhere, SourceWhenAsked, SourceWhenAsked, SourceWhenAsked, SourceWhenAsked],
    ),
    ("device", Phase::Device, [Nowhere, Source, Source, Source, Source]),
    (
        "after_eof",
        Phase::AfterEof,
        [Destination, Source, DestinationInDoubt, DestinationInDoubt, DestinationInDoubt],
    ),
    (
        "postcopy_device",
        Phase::PostcopyDevice,
        [Nowhere, Source, SourceInDoubt, SourceInDoubt, Paused],
    ),
    ("postcopy", Phase::Postcopy, [Nowhere, Nowhere, Paused, Paused, Paused]),
    (
        "postcopy_end",
        Phase::PostcopyEnd,
        [Destination, Nowhere, DestinationInDoubt, DestinationInDoubt, DestinationInDoubt],
    ),
];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (version_index, (version, spec)) in versions().into_iter().enumerate() {
        let phases = TABLE.into_iter().enumerate().filter(|(_, (_, phase, _))| match phase {
            // QEMU below 10.2 has no such phase.
            Phase::PostcopyDevice => spec.qemu == Qemu::Eleven,
            // Nor does QEMU 7.2 fail when it has sent all.
            Phase::PostcopyEnd => spec.qemu != Qemu::System,
            _ => true,
        });
        for (row, (phase_name, phase, left)) in phases {
            for (column, ((victim_name, victim), left)) in VICTIMS.into_iter().zip(left).enumerate()
            {
                let spec = spec.clone();
                let name = format!("matrix_{version}_{phase_name}_{victim_name}");
                let scenario =
                    Scenario::new(name, move |stage| run(stage, &spec, phase, victim, left));
                // One victim for each phase: over the table a diagonal for each of two versions.
                let first = [Some(1), Some(3), None][version_index];
                let quick = first.is_some_and(|first| (row + first) % VICTIMS.len() == column);
                all.push(Scenario { quick, ..scenario });
            }
        }
        all.push(Scenario::new(format!("matrix_{version}_in_doubt_the_source_is_freed"), {
            move |stage| freed(stage, &spec)
        }));
    }
    all
}

fn strike(stage: &Stage, flight: &mut Flight, phase: Phase, victim: Victim) -> Result<()> {
    let process = match victim {
        SourceQemu => &mut flight.vm.process,
        DestinationQemu => &mut flight.destination.process,
        SourceRelay => &mut flight.relay.process,
        DestinationRelay => &mut flight.receive.platen.process,
        Link => {
            if !stage.lab.net.swallow()? {
                return Err(Skip("a loopback link cannot swallow what it is given").into());
            }
            std::thread::sleep(Duration::from_millis(100));
            return wake(flight, phase, victim);
        }
    };
    process.signal(Signal::KILL)?;
    process.wait(NOTICE)?;
    wake(flight, phase, victim)
}

/// Resumes the processes that [`reach`] has stopped, after the others have had time to do something
/// wrong.
fn wake(flight: &mut Flight, phase: Phase, victim: Victim) -> Result<()> {
    std::thread::sleep(Duration::from_millis(200));
    match phase {
        Phase::Setup if victim != SourceRelay => flight.relay.process.signal(Signal::CONT),
        Phase::AfterEof | Phase::PostcopyDevice | Phase::PostcopyEnd
            if victim != DestinationQemu =>
        {
            flight.destination.process.signal(Signal::CONT)
        }
        _ => Ok(()),
    }
}

fn run(stage: &mut Stage, spec: &VmSpec, phase: Phase, victim: Victim, left: Left) -> Result<()> {
    let mut flight = reach(stage, spec, phase)?;
    strike(stage, &mut flight, phase, victim)?;
    match left {
        Source | SourceWhenAsked => {
            relays_end(&mut flight, phase, victim)?;
            if left == SourceWhenAsked {
                // Refused if QEMU has noticed that there is nothing to continue.
                let _ = flight.switch_over();
            }
            flight.vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source goes on")?;
            if !matches!(phase, Phase::AfterEof | Phase::PostcopyDevice) {
                flight.vm.guest.stop()?;
            }
            flight.vm.guest.verify().context("in the source")?;
            if victim != DestinationQemu {
                never_ran(&mut flight.destination, phase)?;
            }
            stage.park_other(flight.vm);
        }
        Destination | DestinationInDoubt => {
            flight.destination.assert_running().context("the destination has it all")?;
            flight.destination.guest.verify().context("in the destination")?;
            if left == DestinationInDoubt {
                held_back(&mut flight.vm)?;
                said(&mut flight, "two copies cannot run")?;
                held_back(&mut flight.vm)?;
                flight.vm.process.kill()?;
            }
            relays_end(&mut flight, phase, victim)?;
            flight.destination.assert_running().context("after the source has gone")?;
            stage.park_other(flight.destination);
        }
        SourceInDoubt => {
            held_back(&mut flight.vm)?;
            let said = said(&mut flight, "two copies cannot run")?;
            held_back(&mut flight.vm)?;
            // It may have loaded the VM, and paused the migration.
            flight.destination.process.kill()?;
            if victim == SourceRelay {
                end_keeper(&said)?;
            } else {
                flight.relay.process.signal(Signal::INT)?;
            }
            flight.vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source goes on")?;
            flight.vm.guest.verify().context("in the source")?;
            relays_end(&mut flight, phase, victim)?;
            stage.park_other(flight.vm);
        }
        Nowhere if phase == Phase::PostcopyEnd => {
            // The source still has it, as it was when it was handed over: a person decides.
            held_back(&mut flight.vm)?;
            said(&mut flight, "two copies cannot run")?;
            held_back(&mut flight.vm)?;
        }
        Nowhere if matches!(phase, Phase::Postcopy | Phase::PostcopyDevice) => {
            relays_end(&mut flight, phase, victim)?;
            let (end, source) = match victim {
                SourceQemu => (&mut flight.destination, false),
                _ => (&mut flight.vm, true),
            };
            let paused = ["postcopy-paused", "completed", "failed"];
            let state = end.monitor.wait_migration_event(&paused, NOTICE)?;
            ensure!(state == "postcopy-paused", "who is left is {state}");
            if source {
                held_back(end)?;
            }
        }
        Nowhere => {
            if phase == Phase::Setup {
                // It may have read no byte of that migration, and waits for the next one.
                flight.relay.process.kill()?;
                receiver_ends(&mut flight, phase)?;
            } else {
                relays_end(&mut flight, phase, victim)?;
            }
            never_ran(&mut flight.destination, phase)?;
        }
        Paused => {
            if phase == Phase::PostcopyDevice {
                // The source learns from its peer that the destination has loaded the VM.
                said(&mut flight, "two copies cannot run")?;
                held_back(&mut flight.vm)?;
                stage.lab.net.heal();
                flight.let_go()?;
            }
            // Both notice it by themselves, whichever process died.
            flight.pauses()?;
            relays_end(&mut flight, phase, victim)?;
            stage.lab.net.heal();
            stage.lab.net.shape(Rate::Unlimited)?;
            flight.let_go()?;
            flight.recover(stage)?;
            flight.land()?;
            if phase == Phase::Postcopy {
                flight.destination.guest.stop()?;
            }
            flight.destination.guest.verify().context("after the recovery")?;
            stage.park_other(flight.destination);
        }
    }
    Ok(())
}

/// Waits until the source relay, or its keeper, which writes to the same log, has said `words`.
fn said(flight: &mut Flight, words: &str) -> Result<String> {
    let deadline = Instant::now() + NOTICE;
    loop {
        let output = flight.relay.process.output();
        if output.contains(words) {
            return Ok(output);
        }
        let said = flight.relay.process.tail();
        ensure!(Instant::now() < deadline, "nobody says that {words}; {said}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends the keeper that names itself in `said`, as its message tells a person to.
fn end_keeper(said: &str) -> Result<()> {
    let number = said.split("(kill ").nth(1).and_then(|rest| rest.split(')').next());
    let number = number.context("no process is named")?.parse()?;
    let keeper = rustix::process::Pid::from_raw(number).context("a process's number")?;
    rustix::process::kill_process(keeper, rustix::process::Signal::TERM)?;
    Ok(())
}

/// The remaining relays end with a message that names the cause.
fn relays_end(flight: &mut Flight, phase: Phase, victim: Victim) -> Result<()> {
    if victim != SourceRelay {
        names_the_cause(&flight.relay.fail(NOTICE)?, &CAUSES)?;
    }
    if victim != DestinationRelay {
        receiver_ends(flight, phase)?;
    }
    Ok(())
}

/// The causes that an error may name.
const CAUSES: [&str; 7] =
    ["source", "peer", "link", "destination", "qemu", "network", "interrupted"];

/// The receiver ends with a message that names the cause. If no byte of a migration has arrived, it
/// waits for the next one, because that does not count for `--once`.
fn receiver_ends(flight: &mut Flight, phase: Phase) -> Result<()> {
    let receive = &mut flight.receive.platen;
    if phase == Phase::Setup && is_free(receive)? {
        receive.process.kill()?;
        return Ok(());
    }
    names_the_cause(&receive.fail(NOTICE)?, &CAUSES)
}

/// The destination has ended by itself, or still waits for its first byte.
fn never_ran(destination: &mut Vm, phase: Phase) -> Result<()> {
    if phase == Phase::Setup && destination.process.poll()?.is_none() {
        // The monitor of a QEMU that is ending does not answer.
        if let Ok(state) = destination.monitor.run_state() {
            ensure!(state == "inmigrate", "the destination is {state}");
            return Ok(());
        }
    }
    destination_ends(destination)
}

/// The source has the VM, stopped, and does not start it.
fn held_back(vm: &mut Vm) -> Result<()> {
    let until = Instant::now() + Duration::from_millis(600);
    while Instant::now() < until {
        let state = vm.monitor.run_state()?;
        ensure!(state != "running", "the source runs what the destination runs");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// In doubt, with the destination found dead: a person cancels at the source, which resumes.
fn freed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut flight = reach(stage, spec, Phase::AfterEof)?;
    for process in [&mut flight.relay.process, &mut flight.destination.process] {
        process.signal(Signal::KILL)?;
        process.wait(NOTICE)?;
    }
    held_back(&mut flight.vm)?;
    flight.vm.monitor.execute("migrate_cancel", json!({}))?;
    flight.vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source is freed")?;
    flight.vm.guest.verify()?;
    flight.receive.platen.fail(NOTICE)?;
    stage.park_other(flight.vm);
    Ok(())
}
