//! Services, carriers and QEMUs that are killed during an intercepted migration.

use super::*;

/// When somebody is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// The VM runs at the source, and pages go over.
    Middle,
    /// The source QEMU has completed, and the destination QEMU has not read the end.
    Left,
}

impl Moment {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Middle => "in_the_middle",
            Self::Left => "when_the_source_has_completed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Victim {
    SourceService,
    DestinationService,
    SourceCarrier,
    DestinationCarrier,
    SourceQemu,
    DestinationQemu,
}

impl Victim {
    pub(super) const ALL: [Self; 6] = [
        Self::SourceService,
        Self::DestinationService,
        Self::SourceCarrier,
        Self::DestinationCarrier,
        Self::SourceQemu,
        Self::DestinationQemu,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::SourceService => "source_service",
            Self::DestinationService => "destination_service",
            Self::SourceCarrier => "source_carrier",
            Self::DestinationCarrier => "destination_carrier",
            Self::SourceQemu => "source_qemu",
            Self::DestinationQemu => "destination_qemu",
        }
    }
}

/// A migration without a return path in which somebody is killed.
pub(super) fn killed(stage: &mut Stage, victim: Victim, moment: Moment) -> Result<()> {
    let mut services = intercepting(stage, "")?;
    let mut pair = as_proxmox(stage, &services, 46_004)?;
    // The pause makes the moment one that a test can hit.
    pair.vm.monitor.set_capabilities(&[("pause-before-switchover", moment == Moment::Left)])?;
    match moment {
        Moment::Middle => pair.vm.hold_migration(2)?,
        // Little is left behind the pause: it has to fit the kernel's buffers, as nobody reads it.
        Moment::Left => pair.vm.is_reluctant()?,
    }
    pair.go()?;
    let carriers =
        [services.carrier(Side::Source, MIDDLE)?, services.carrier(Side::Destination, MIDDLE)?];
    if moment == Moment::Left {
        pair.vm.monitor.wait_migration(&["pre-switchover"], NOTICE)?;
        // Bytes that are under way would take the room that the rest needs.
        come_to_rest(&stage.lab, [u32::try_from(carriers[0])?, u32::try_from(carriers[1])?])?;
        pair.destination.process.signal(Signal::STOP)?;
        let on = json!({"state": "pre-switchover"});
        pair.vm.monitor.execute("migrate-continue", on)?;
        let state = pair.vm.monitor.wait_migration(&["completed", "failed"], NOTICE)?;
        ensure!(state == "completed", "the source is {state}");
        // As Proxmox does now; the answer comes once the destination QEMU goes on.
    }
    match victim {
        Victim::SourceService => services.kill(Side::Source)?,
        Victim::DestinationService => services.kill(Side::Destination)?,
        Victim::SourceCarrier => kill(carriers[0])?,
        Victim::DestinationCarrier => kill(carriers[1])?,
        Victim::SourceQemu => pair.vm.process.kill().map(drop)?,
        Victim::DestinationQemu => pair.destination.process.kill().map(drop)?,
    }
    if moment == Moment::Left && victim != Victim::DestinationQemu {
        pair.destination.process.signal(Signal::CONT)?;
    }
    for side in [Side::Source, Side::Destination] {
        if [Victim::SourceService, Victim::DestinationService]
            [usize::from(side == Side::Destination)]
            == victim
        {
            services.start_one(&stage.lab, side)?;
        }
    }
    match (victim, moment) {
        (Victim::SourceService | Victim::DestinationService, Moment::Middle) => {
            pair.vm.let_migrate()?;
            let state = pair.vm.wait_migration_end(&["completed", "failed"], LIMIT)?;
            ensure!(state == "completed", "the source is {state}");
            starts_there(stage, &services, pair)
        }
        // The source QEMU may go: everything is with platen.
        (Victim::SourceService | Victim::DestinationService | Victim::SourceQemu, Moment::Left) => {
            starts_there(stage, &services, pair)
        }
        (Victim::SourceQemu, Moment::Middle) => {
            // It was killed with its VM. The destination has a part of it, and does not start.
            fails_at(&services, &[Side::Source, Side::Destination])?;
            never_starts(&mut pair.destination)
        }
        (_, Moment::Middle) => {
            let mut vm = pair.vm;
            vm.wait_back(&["failed", "cancelled"], NOTICE).context("the source goes on")?;
            vm.guest.verify().context("in the source")?;
            if victim != Victim::DestinationQemu {
                never_starts(&mut pair.destination)?;
            }
            fails_at(&services, &[Side::Source, Side::Destination])?;
            Ok(())
        }
        (_, Moment::Left) => left_behind(stage, &services, pair, victim),
    }
}

/// The source QEMU has completed, and a part of its stream may be lost: then the VM is there,
/// stopped and whole, the destination never starts it, and platen says so on the side that it can
/// say it on.
fn left_behind(
    stage: &mut Stage,
    services: &Services,
    mut pair: Pair,
    victim: Victim,
) -> Result<()> {
    let records = [services.ended(Side::Source, 1)?, services.ended(Side::Destination, 1)?];
    if victim == Victim::SourceCarrier && records[1]["status"] == "unconfirmed" {
        // The destination's end had it all by then. The killed process says to look.
        ensure!(records[0]["status"] == "failed", "{records:?}");
        pair.destination.monitor.execute("cont", json!({}))?;
        return pair.arrives(stage);
    }
    for record in &records {
        ensure!(record["status"] == "failed", "{record}");
        ensure!(record["cause"].as_str().is_some_and(|cause| !cause.is_empty()), "{record}");
    }
    let killed_carrier = [Victim::SourceCarrier, Victim::DestinationCarrier].contains(&victim);
    if killed_carrier && ends_whole(&mut pair.destination)? {
        // The killed process had passed on every byte, but not that they were all. The messages say
        // to look at both hosts.
        pair.destination.monitor.execute("cont", json!({}))?;
        return pair.arrives(stage);
    }
    // A person who reads that lets it go on where it is.
    let mut vm = pair.vm;
    ensure!(vm.monitor.run_state()? == "postmigrate", "the source has lost its VM");
    vm.monitor.execute("cont", json!({}))?;
    vm.assert_running()?;
    vm.guest.verify().context("in the source")?;
    Ok(())
}

/// Whether the destination QEMU has loaded the whole VM, stopped, and not ended without it.
fn ends_whole(destination: &mut Vm) -> Result<bool> {
    let until = Instant::now() + NOTICE;
    while destination.process.poll()?.is_none() {
        // A QEMU that is ending does not answer.
        match destination.monitor.run_state().as_deref().unwrap_or_default() {
            "paused" => return Ok(true),
            "running" => bail!("the destination runs the VM by itself"),
            _ => ensure!(Instant::now() < until, "{}", seen(destination.process.id())),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(false)
}

fn fails_at(services: &Services, sides: &[Side]) -> Result<()> {
    for side in sides {
        let record = services.ended(*side, 1)?;
        ensure!(record["status"] == "failed", "{record}");
        ensure!(record["cause"].as_str().is_some_and(|cause| !cause.is_empty()), "{record}");
    }
    Ok(())
}
