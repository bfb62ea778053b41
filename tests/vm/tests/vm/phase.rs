//! The phases of a migration at which a test strikes, and how a migration comes there.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use serde_json::json;
use vm_tests::{Rate, Signal, VmSpec};

use crate::bare::{Flight, Settings, LIMIT};
use crate::postcopy;
use crate::room;
use crate::stage::{
    wait_until_idle, wait_until_written, waits_to_write, Stage, CREEP, LOAD, NOTICE, PATIENCE,
    SLOW, STAYS,
};

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
    /// QEMU 10.2 and later: the source has sent the packaged state of postcopy, and the destination
    /// has not loaded it.
    PostcopyDevice,
    /// The destination runs the VM and requests its memory.
    Postcopy,
    /// The source has sent all memory in postcopy, and the destination has not confirmed that.
    PostcopyEnd,
}

/// A rate so low that the last RAM of a VM takes longer than any delay of the test on a busy
/// machine: once the end of the stream is read, a relay rightly holds the source for a person.
const CRAWLS: Rate = Rate::Mbit(8);

/// How many VMs may miss a phase: on a busy machine a migration can end before the test stops a
/// process. Without the right to widen sockets a guest can also write more between QEMU's last look
/// at its dirty pages and the VM's stop than fits a socket.
const TRIES: u32 = 5;

/// A migration that has reached `phase`. In [`Phase::Setup`] and [`Phase::Unread`] the source relay
/// is stopped (SIGSTOP), in [`Phase::AfterEof`], [`Phase::PostcopyDevice`] and
/// [`Phase::PostcopyEnd`] the destination QEMU.
pub(crate) fn reach(stage: &mut Stage, spec: &VmSpec, phase: Phase) -> Result<Flight> {
    for _ in 0..TRIES {
        let mut flight = prepare(stage, spec, phase)?;
        if comes_to(stage, &mut flight, phase)? {
            return Ok(flight);
        }
        println!("  this migration missed {phase:?}: another VM tries");
        stage.lab.net.shape(Rate::Unlimited)?;
    }
    bail!("{TRIES} migrations missed {phase:?}")
}

/// A migration that is about to begin.
fn prepare(stage: &mut Stage, spec: &VmSpec, phase: Phase) -> Result<Flight> {
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
        // With little to send after the VM's stop: 50 KB and what the guest writes until then.
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
    // QEMU 11.1 that is cancelled in its setup may wait, with its VM, until the relay gives it up.
    let setup = ["--setup-timeout", if phase == Phase::Setup { "10" } else { "60" }];
    let relay = [patience, setup].concat();
    Flight::prepare_patient(stage, vm, spec, &settings, &relay, &patience)
}

/// Begins the migration and waits until it has reached `phase`; false if it has missed it.
fn comes_to(stage: &Stage, flight: &mut Flight, phase: Phase) -> Result<bool> {
    match phase {
        Phase::Setup => {
            flight.relay.process.signal(Signal::STOP)?;
            flight.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
            flight.go()?;
        }
        Phase::Active => {
            flight.begin_slowly(stage, 4 << 20)?;
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
            flight.go()?;
            flight.waits_for(&["pre-switchover"])?;
            wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
            // The rest at the VM's stop fits the socket of a relay that does not read.
            room::widen(flight.vm.process.id())?;
            flight.relay.process.signal(Signal::STOP)?;
            flight.switch_over()?;
            // From here on QEMU answers nothing before it has written all.
            flight.vm.monitor.wait_migration_event(&["device"], NOTICE)?;
        }
        Phase::AfterEof => return comes_after_eof(stage, flight),
        Phase::PostcopyDevice => return comes_to_postcopy_device(stage, flight),
        Phase::PostcopyEnd => return comes_to_postcopy_end(stage, flight),
        Phase::Postcopy => {
            flight.begin_slowly(stage, 4 << 20)?;
            flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
            flight.has_switched()?;
        }
    }
    Ok(true)
}

fn comes_after_eof(stage: &Stage, flight: &mut Flight) -> Result<bool> {
    flight.go()?;
    flight.waits_for(&["pre-switchover"])?;
    wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
    // The rest at the VM's stop fits the socket of a QEMU that does not read.
    room::widen(flight.receive.platen.process.id())?;
    flight.destination.process.signal(Signal::STOP)?;
    let crossed = stage.lab.net.crossed()?;
    flight.switch_over()?;
    // A source QEMU whose relay reads no more answers nothing.
    flight.vm.monitor.wait_migration_event(&["device"], NOTICE)?;
    // Device state and its description have at least this many bytes, compressed.
    flight.wait_crossed(stage, crossed + (6 << 10))?;
    flight.wait_until_written(stage)?;
    if flight.is_stuck() {
        return Ok(false);
    }
    let status = flight.vm.monitor.migration_status()?;
    ensure!(status == "device", "with the destination stopped the source is {status}");
    Ok(true)
}

fn comes_to_postcopy_device(stage: &Stage, flight: &mut Flight) -> Result<bool> {
    flight.begin_slowly(stage, 4 << 20)?;
    stage.lab.net.shape(Rate::Unlimited)?;
    // All that was under way has to be with the destination, or its socket would have no room for
    // the packaged state: QEMU sends no more until it may.
    flight.vm.monitor.execute("migrate-set-parameters", json!({"max-bandwidth": 4096}))?;
    flight.vm.guest.stop()?;
    // Too short a time only leaves more for the destination to read once it goes on: its socket has
    // room for that and for the packaged state.
    std::thread::sleep(Duration::from_secs(1));
    room::widen(flight.receive.platen.process.id())?;
    flight.destination.process.signal(Signal::STOP)?;
    flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
    flight.waits_for(&["postcopy-device"])?;
    wait_until_idle(&stage.lab, [&flight.relay, &flight.receive.platen])?;
    // The receiver may still have a part of the state: each victim's end is the same then.
    let status = flight.vm.monitor.migration_status()?;
    ensure!(status == "postcopy-device", "with the destination stopped it is {status}");
    Ok(true)
}

/// The source's rates in postcopy, bytes per second, each until so many bytes are left. Slower and
/// slower: the rest fits the socket of a destination that does not read, and is not sent before
/// that stops.
const SLOWER: [(u64, u64); 3] = [(8 << 20, 4 << 20), (512 << 10, 512 << 10), (64 << 10, 128 << 10)];

fn comes_to_postcopy_end(stage: &Stage, flight: &mut Flight) -> Result<bool> {
    stage.lab.net.shape(SLOW)?;
    let crossed = stage.lab.net.crossed()?;
    flight.vm.hold_migration(CREEP)?;
    flight.go()?;
    flight.wait_crossed(stage, crossed + (2 << 20))?;
    flight.vm.monitor.execute("migrate-start-postcopy", json!({}))?;
    flight.has_switched()?;
    stage.lab.net.shape(Rate::Unlimited)?;
    for (rate, left) in SLOWER {
        let limit = json!({"max-postcopy-bandwidth": rate});
        flight.vm.monitor.execute("migrate-set-parameters", limit)?;
        // On a busy machine QEMU sends more slowly than it may.
        let (mut least, mut deadline) = (u64::MAX, Instant::now() + NOTICE);
        loop {
            let remaining = flight.remaining()?;
            if remaining <= left {
                break;
            }
            if remaining < least {
                (least, deadline) = (remaining, Instant::now() + NOTICE);
            }
            ensure!(Instant::now() < deadline, "postcopy stays at {remaining} bytes");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    room::widen(flight.receive.platen.process.id())?;
    flight.destination.process.signal(Signal::STOP)?;
    flight.let_go()?;
    let deadline = Instant::now() + NOTICE;
    while flight.remaining()? > 0 {
        if flight.is_stuck() {
            return Ok(false);
        }
        ensure!(Instant::now() < deadline, "the source does not send all");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Nothing remains before QEMU has written the end of its stream.
    flight.wait_until_written(stage)?;
    let status = flight.vm.monitor.migration_status()?;
    if flight.is_stuck() || status == "completed" {
        // The rest did not fit, or all was there before the destination stopped.
        return Ok(false);
    }
    ensure!(status == "postcopy-active", "with the destination stopped it is {status}");
    Ok(true)
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

    /// Begins the migration of a guest that works, over a slow link; so many bytes have crossed it,
    /// and the first pass over the memory goes on for many seconds ([`CREEP`]).
    fn begin_slowly(&mut self, stage: &Stage, bytes: u64) -> Result<()> {
        stage.lab.net.shape(SLOW)?;
        self.vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
        let crossed = stage.lab.net.crossed()?;
        self.vm.hold_migration(CREEP)?;
        self.go()?;
        self.wait_crossed(stage, crossed + bytes)
    }

    fn wait_until_written(&self, stage: &Stage) -> Result<()> {
        wait_until_written(&stage.lab, &self.vm, [&self.relay, &self.receive.platen])
    }

    /// Whether the receiver has bytes for which the socket of a destination QEMU that is stopped
    /// has no room. These are not acknowledged, and the source relay may have to leave as many
    /// unread: if then the source QEMU ends, that is a cancel (W21), and if a relay ends, the
    /// destination does not get them.
    fn is_stuck(&self) -> bool {
        waits_to_write(self.receive.platen.process.id())
    }
}
