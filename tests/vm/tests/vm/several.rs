//! Several VMs through one `receive`, and the bare relay, with the test in the role of libvirt.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::json;
use vm_tests::{platen, Method, Patience, Rate, Side, Signal, Vm, VmSpec};

use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, then_moves, wait_crossed, Stage, DATA_MIB,
    HALF_WAY, LOAD, NOTICE, PATIENCE, STAYS,
};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("two_at_once_through_one_receive", two_at_once),
        Scenario::new("relay_single", |stage| relay(stage, 0)),
        Scenario::new("relay_2_channels", |stage| relay(stage, 2)),
        Scenario::new("relay_killed_0_channels", |stage| relay_killed(stage, 0)),
        Scenario::new("relay_killed_2_channels", |stage| relay_killed(stage, 2)),
    ]
}

const LIMIT: Duration = Duration::from_secs(400);

fn two_at_once(stage: &mut Stage) -> Result<()> {
    let one = stage.vm()?;
    // Both must be at the same side, where the other boots.
    let one = match one.side() {
        Side::Source => one,
        Side::Destination => Method::Qemu.run(&stage.lab, one, Patience::Helped)?.0,
    };
    let mut vms = [one, stage.lab.boot_or_load(&VmSpec::small(), DATA_MIB / 2)?];
    Method::platen(&[]).prepare(&mut vms[0])?;
    let mut destinations = Vec::new();
    let mut words = Vec::new();
    for (vm, name) in vms.iter().zip(NAMES) {
        let destination = stage.lab.incoming_for(vm)?;
        let deliver = format!("{name}=unix:{}", destination.incoming_socket().display());
        let qmp = format!("{name}=unix:{}", destination.platen_monitor().display());
        words.extend(["--deliver".to_owned(), deliver, "--qmp".to_owned(), qmp]);
        destinations.push(destination);
    }
    let flags: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut receive = platen::receive_with(&stage.lab, destinations[0].side(), &flags)?;

    let mut moves = Vec::new();
    for ((vm, name), channels) in vms.iter_mut().zip(NAMES).zip(["0", "2"]) {
        vm.guest.dirty(LOAD.0 / 2, LOAD.1, LOAD.2)?;
        let flags = ["--name", name, "--channels", channels];
        moves.push(platen::migrate(&stage.lab, vm, receive.peer, &flags)?);
    }
    for ((migrate, vm), name) in moves.iter_mut().zip(&mut vms).zip(NAMES) {
        migrate.arrive(vm, LIMIT).context(name)?;
    }
    for (mut destination, name) in destinations.into_iter().zip(NAMES) {
        destination.assert_running().context(name)?;
        destination.guest.stop()?;
        destination.guest.verify().context(name)?;
        // The second one is smaller than other scenarios expect.
        if name == NAMES[0] {
            stage.park(destination);
        }
    }
    // Without --once it continues to serve, and ends when it is told to.
    ensure!(receive.platen.process.poll()?.is_none(), "receive ended without being told to");
    receive.platen.process.signal(Signal::TERM)?;
    receive.platen.process.wait(NOTICE)?;
    Ok(())
}

const NAMES: [&str; 2] = ["alpha", "beta"];

/// Sets both QEMUs up by hand, as libvirt would.
fn set_up(vm: &mut Vm, channels: u32) -> Result<()> {
    vm.monitor.set_capabilities(&[
        ("events", true),
        ("return-path", true),
        ("multifd", channels > 0),
    ])?;
    let parameters = json!({"max-bandwidth": 0, "multifd-channels": channels.max(1)});
    vm.monitor.execute("migrate-set-parameters", parameters)?;
    Ok(())
}

fn relay(stage: &mut Stage, channels: u32) -> Result<()> {
    let mut vm = stage.vm()?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    set_up(&mut vm, channels)?;
    set_up(&mut destination, channels)?;
    destination.listen(&format!("unix:{}", destination.incoming_socket().display()))?;
    let deliver = format!("unix:{}", destination.incoming_socket().display());
    let flags = ["--deliver", &deliver, "--once"];
    let mut receive = platen::receive_with(&stage.lab, destination.side(), &flags)?;
    let socket = stage.lab.scratch("relay");
    let mut relay = platen::relay(&stage.lab, vm.side(), &socket, receive.peer, &[])?;

    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    vm.monitor.execute("migrate", json!({"uri": format!("unix:{}", socket.display())}))?;
    let state = vm.wait_migration_end(&["completed", "failed"], LIMIT)?;
    ensure!(state == "completed", "{state}; {}", relay.process.tail());
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify()?;
    receive.platen.succeed(NOTICE)?;
    // It waits for the next VM until it is told to end; that is no failure of a migration.
    if relay.process.poll()?.is_none() {
        relay.process.signal(Signal::TERM)?;
        relay.process.wait(NOTICE)?;
    }
    ensure!(!relay.process.output().contains("panicked"), "{}", relay.process.output());
    stage.park(destination);
    Ok(())
}

fn relay_killed(stage: &mut Stage, channels: u32) -> Result<()> {
    let mut vm = stage.vm()?;
    stage.lab.net.shape(Rate::Mbit(100))?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    set_up(&mut vm, channels)?;
    // This one sets the destination up itself.
    let mut receive = platen::receive(&stage.lab, &destination, &PATIENCE)?;
    let socket = stage.lab.scratch("relay");
    let mut relay = {
        let channels = channels.to_string();
        platen::relay(&stage.lab, vm.side(), &socket, receive.peer, &["--channels", &channels])?
    };
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    vm.is_reluctant()?;
    let crossed = stage.lab.net.crossed()?;
    vm.monitor.execute("migrate", json!({"uri": format!("unix:{}", socket.display())}))?;
    wait_crossed(&stage.lab, crossed + HALF_WAY, &mut relay)?;
    stage.lab.net.shape(STAYS)?;

    relay.process.signal(Signal::KILL)?;
    relay.process.wait(NOTICE)?;
    source_goes_on(&mut vm, &["failed"])?;
    let said = receive.platen.fail(NOTICE)?;
    names_the_cause(&said, &["source", "peer", "link", "network"])?;
    destination_ends(&mut destination)?;
    then_moves(stage, vm)
}
