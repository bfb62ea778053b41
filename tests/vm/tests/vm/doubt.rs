//! The link is away for 40 s between the end of the source's stream and the destination's answer,
//! with the relays' default timeouts of 30 s: the migration ends without a person, and one VM runs.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::{Qemu, Signal, Vm, VmSpec, MACHINE_7_2};

use crate::bare::{Settings, LIMIT};
use crate::room;
use crate::stage::{
    destination_ends, names_the_cause, wait_crossed, wait_until_idle, wait_until_written,
    waits_to_write, Skip, Stage, NOTICE,
};
use crate::Scenario;

/// Longer than the time for which either relay waits for the other, 30 s.
const AWAY: Duration = Duration::from_secs(40);

/// The source relay prints a message when it is in doubt.
const IN_DOUBT: &str = "the peer was lost after the end of the stream may have reached";

/// Either end notices a silent link after 3 s. A machine that is too slow to send the end of the
/// stream before that is never in doubt; the scenario then begins again.
const TRIES: u32 = 5;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("a_cut_of_40_s_before_the_end_of_the_stream_has_arrived", |stage| {
            for _ in 0..TRIES {
                if before_it_arrives(stage)? {
                    return Ok(());
                }
            }
            bail!("the source was not in doubt in any of {TRIES} tries")
        }),
        Scenario::new("a_cut_of_40_s_before_the_confirmation_has_arrived", |stage| {
            for _ in 0..TRIES {
                if before_it_is_confirmed(stage)? {
                    return Ok(());
                }
            }
            bail!("the end of none of {TRIES} streams fitted the socket of a stopped QEMU")
        }),
    ]
}

/// A migration by the commands of the README, with the VM stopped and the end of its stream not yet
/// written.
struct Switchover {
    vm: Vm,
    destination: Vm,
    receive: Receive,
    migrate: Platen,
}

impl Switchover {
    fn reach(stage: &mut Stage) -> Result<Self> {
        let mut vm = stage.vm_of(&VmSpec::tiny(Qemu::System, MACHINE_7_2))?;
        // The pause holds the window open, and with this limit little is left to send behind it:
        // what is sent while the link is away has to fit the window of W16.
        let settings = Settings::new(&["pause-before-switchover"]);
        settings.with("downtime-limit", json!(1)).apply(&mut vm)?;
        let destination = stage.lab.incoming_for(&vm)?;
        let receive = platen::receive(&stage.lab, &destination, &[])?;
        // A busy machine has taken longer than 30 s for a handshake.
        let patient = ["--connect-timeout", "600"];
        let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &patient)?;
        // Until it begins, the source QEMU reports the end of an earlier migration.
        let deadline = Instant::now() + LIMIT;
        while vm.monitor.migration_status()? != "pre-switchover" {
            let waits = migrate.process.poll()?.is_none() && Instant::now() < deadline;
            ensure!(waits, "it does not come to the switchover; {}", migrate.process.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
        wait_until_idle(&stage.lab, [&migrate, &receive.platen])?;
        Ok(Self { vm, destination, receive, migrate })
    }

    /// Lets the source QEMU write the end of its stream.
    fn hand_over(&mut self) -> Result<()> {
        let arguments = json!({"state": "pre-switchover"});
        self.vm.monitor.execute("migrate-continue", arguments).map(drop)
    }

    /// Checks both ends' exit status and reports.
    fn both_end(&mut self, status: &str, words: &[&str]) -> Result<()> {
        for end in [&mut self.migrate, &mut self.receive.platen] {
            if status == "completed" {
                end.succeed(NOTICE)?;
            } else {
                names_the_cause(&end.fail(NOTICE)?, words)?;
            }
            let report = end.report()?;
            ensure!(report["status"] == status, "{}: {report}", end.process.name());
        }
        Ok(())
    }
}

/// Takes the link away until [`AWAY`] has passed and the source relay has given the peer up; brings
/// it back, and returns whether the source relay was in doubt.
fn outage(stage: &Stage, switchover: &mut Switchover, begun: Instant) -> Result<bool> {
    let migrate = &mut switchover.migrate.process;
    let deadline = Instant::now() + NOTICE;
    let in_doubt = loop {
        if migrate.output().contains(IN_DOUBT) {
            break true;
        }
        if migrate.poll()?.is_some() {
            break false;
        }
        ensure!(Instant::now() < deadline, "the peer is not given up; {}", migrate.tail());
        std::thread::sleep(Duration::from_millis(50));
    };
    std::thread::sleep(AWAY.saturating_sub(begun.elapsed()));
    stage.lab.net.heal();
    Ok(in_doubt)
}

/// Drops everything on the link from now on.
fn swallow(stage: &Stage) -> Result<Instant> {
    if !stage.lab.net.swallow()? {
        return Err(Skip("a loopback link cannot drop what it is given").into());
    }
    Ok(Instant::now())
}

/// The end of the stream and the STILL_OPEN behind it are lost: the destination has nothing that it
/// could start, and answers that when it is asked. False when the source was never in doubt.
fn before_it_arrives(stage: &mut Stage) -> Result<bool> {
    let mut switchover = Switchover::reach(stage)?;
    let begun = swallow(stage)?;
    switchover.hand_over()?;
    let in_doubt = outage(stage, &mut switchover, begun)?;
    switchover.both_end("failed", &["never reached", "link", "silent"])?;
    let Switchover { mut vm, mut destination, .. } = switchover;
    destination_ends(&mut destination)?;
    vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source goes on")?;
    vm.guest.verify().context("in the source")?;
    stage.park_other(vm);
    Ok(in_doubt)
}

/// The destination runs the VM, and its confirmation is lost. False when the socket of the stopped
/// destination QEMU had no room for the end of the stream, as a busy machine may have it.
fn before_it_is_confirmed(stage: &mut Stage) -> Result<bool> {
    let mut switchover = Switchover::reach(stage)?;
    // It does not read the end of the stream before the link is away.
    room::widen(switchover.receive.platen.process.id())?;
    switchover.destination.process.signal(Signal::STOP)?;
    let crossed = stage.lab.net.crossed()?;
    switchover.hand_over()?;
    // A source QEMU whose relay reads no more answers nothing.
    switchover.vm.monitor.wait_migration_event(&["device"], NOTICE)?;
    // Device state and its description have at least this many bytes, compressed.
    wait_crossed(&stage.lab, crossed + (6 << 10), &mut switchover.migrate)?;
    let relays = [&switchover.migrate, &switchover.receive.platen];
    wait_until_written(&stage.lab, &switchover.vm, relays)?;
    if waits_to_write(switchover.receive.platen.process.id()) {
        return Ok(false);
    }
    let begun = swallow(stage)?;
    switchover.destination.process.signal(Signal::CONT)?;
    switchover.destination.assert_running().context("the destination has it all")?;
    let in_doubt = outage(stage, &mut switchover, begun)?;
    ensure!(in_doubt, "the source was not in doubt; {}", switchover.migrate.process.tail());
    switchover.both_end("completed", &[])?;
    switchover.vm.wait_left()?;
    let Switchover { mut destination, .. } = switchover;
    destination.assert_running()?;
    destination.guest.verify().context("in the destination")?;
    stage.park_other(destination);
    Ok(true)
}
