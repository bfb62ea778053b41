//! Authorization: the wrong CA, the wrong name, no TLS, and a VM that is not allowed are refused
//! with the reason at both ends, without harm to a running migration.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use vm_tests::platen::{self, Receive};
use vm_tests::{Certificates, Method, Patience, Rate, Side, Signal, Vm, VmSpec};

use crate::stage::{
    names_the_cause, wait_crossed, Stage, CREEP, DATA_MIB, HALF_WAY, LOAD, NOTICE, PACE,
};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for channels in ["0", "2"] {
        all.push(Scenario::new(format!("moves_insecure_{channels}_channels"), move |stage| {
            insecure(stage, channels)
        }));
    }
    all.push(Scenario::new("intruders_are_turned_away_and_harm_nobody", intruders));
    all.push(Scenario::new("receive_serves_the_vms_it_allows_and_no_other", allowed_only));
    all
}

const LIMIT: Duration = Duration::from_secs(400);

fn insecure(stage: &mut Stage, channels: &str) -> Result<()> {
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let (mut vm, _) = Method::platen(&["--channels", channels, "--insecure"]).run(
        &stage.lab,
        vm,
        Patience::Helped,
    )?;
    vm.guest.stop()?;
    vm.guest.verify()?;
    stage.park(vm);
    Ok(())
}

/// Tries to connect by `platen relay` with `flags`; its message must have `here`, and one of the
/// receiver's `there`.
fn turned_away(
    stage: &Stage,
    from: Side,
    receive: &mut Receive,
    flags: &[&str],
    (here, there): (&str, &str),
) -> Result<()> {
    let socket = stage.lab.scratch("intruder");
    let mut relay = platen::start_relay(&stage.lab, from, &socket, receive.peer, flags)?;
    let said = relay.fail(NOTICE)?;
    names_the_cause(&said, &[here]).with_context(|| format!("with {flags:?}"))?;
    receive.platen.process.wait_for_output(there, NOTICE).with_context(|| format!("with {flags:?}"))
}

/// Ends a running `receive`, which must have counted what it refused: these, and those that it was
/// too busy to answer in time, which came again. It names each of the first ten.
fn ends_having_counted(mut receive: Receive, least: usize) -> Result<()> {
    receive.platen.process.signal(Signal::TERM)?;
    receive.platen.process.wait(NOTICE)?;
    let output = receive.platen.process.output();
    let named = output.matches("turned a connection away: ").count();
    ensure!((least..10).contains(&named), "{named} were named, not {least}: {output}");
    let counted = format!("connections turned away: {named}");
    ensure!(output.lines().any(|line| line.ends_with(&counted)), "not {counted}: {output}");
    Ok(())
}

fn intruders(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    let from = vm.side();
    stage.lab.net.shape(Rate::Mbit(100))?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let deliver = format!("mine=unix:{}", destination.incoming_socket().display());
    let qmp = format!("mine=unix:{}", destination.platen_monitor().display());
    let address = format!("{}.test", if from == Side::Source { "source" } else { "destination" });
    let flags = ["--deliver", &deliver, "--qmp", &qmp, "--peer-name", &address];
    let mut receive = platen::receive_with(&stage.lab, from.other(), &flags)?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let crossed = stage.lab.net.crossed()?;
    vm.is_reluctant()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &["--name", "mine"])?;
    vm.wait_active(&mut migrate.process)?;
    vm.hold_migration(PACE)?;
    wait_crossed(&stage.lab, crossed + HALF_WAY, &mut migrate)?;
    vm.hold_migration(1)?;

    // Another site's CA: neither end believes the other.
    let elsewhere = stage.lab.scratch("ca");
    let ip = receive.peer.ip().to_string();
    let foreign = Certificates::new(&elsewhere, [&[&address, &ip], &["nobody.test"]])?;
    let tls = foreign.of(Side::Source).display().to_string();
    let words = ("not signed by the CA that this end knows", "does not know the CA");
    turned_away(stage, from, &mut receive, &["--tls-dir", &tls], words)?;
    // It trusts our CA, but has no certificate of it.
    let ours = stage.lab.certificates()?;
    let ca = ours.of(from).join("ca.pem").display().to_string();
    let words = ("does not know the CA of this end", "not signed by the CA that this end knows");
    turned_away(stage, from, &mut receive, &["--tls-dir", &tls, "--tls-ca", &ca], words)?;
    // Our CA, but another host's name.
    let other = ours.issue(&["other.test"])?.display().to_string();
    let words = ("none of the names that it allows", "is for other.test; allowed here");
    turned_away(stage, from, &mut receive, &["--tls-dir", &other], words)?;
    // The receiver is not the one that the source expects.
    let own = ours.of(from).display().to_string();
    let words = ("not for elsewhere.test", "its name is not the one by which it was called");
    let flags = ["--tls-dir", &own, "--peer-name", "elsewhere.test"];
    turned_away(stage, from, &mut receive, &flags, words)?;
    let words = ("this end takes TLS only", "started with --insecure");
    turned_away(stage, from, &mut receive, &["--insecure"], words)?;

    ensure!(migrate.process.poll()?.is_none(), "the migration ended meanwhile");
    stage.lab.net.shape(Rate::Unlimited)?;
    vm.let_migrate()?;
    migrate.arrive(&mut vm, LIMIT)?;
    ends_having_counted(receive, 5)?;
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify()?;
    stage.park(destination);
    Ok(())
}

const NAMES: [&str; 2] = ["alpha", "beta"];

fn allowed_only(stage: &mut Stage) -> Result<()> {
    let one = stage.vm()?;
    let one = match one.side() {
        Side::Source => one,
        // The second one boots at the source.
        Side::Destination => Method::platen(&[]).run(&stage.lab, one, Patience::Helped)?.0,
    };
    let mut vms: [Vm; 2] = [one, stage.lab.boot_or_load(&VmSpec::small(), DATA_MIB / 2)?];
    stage.lab.net.shape(Rate::Mbit(200))?;
    let mut destinations = Vec::new();
    let mut words = Vec::new();
    for (vm, name) in vms.iter().zip(NAMES) {
        let destination = stage.lab.incoming_for(vm)?;
        let allow = format!("{name}=unix:{}", destination.incoming_socket().display());
        let qmp = format!("{name}=unix:{}", destination.platen_monitor().display());
        words.extend(["--allow".to_owned(), allow, "--qmp".to_owned(), qmp]);
        destinations.push(destination);
    }
    let flags: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut receive = platen::receive_with(&stage.lab, Side::Destination, &flags)?;
    let mut moves = Vec::new();
    let crossed = stage.lab.net.crossed()?;
    for ((vm, name), channels) in vms.iter_mut().zip(NAMES).zip(["0", "2"]) {
        vm.guest.dirty(LOAD.0 / 2, LOAD.1, LOAD.2)?;
        let flags = ["--name", name, "--channels", channels];
        vm.is_reluctant()?;
        let mut migrate = platen::migrate(&stage.lab, vm, receive.peer, &flags)?;
        // Each is held before the next one starts, which takes long on a busy machine.
        vm.wait_active(&mut migrate.process)?;
        vm.hold_migration(CREEP)?;
        moves.push(migrate);
    }
    wait_crossed(&stage.lab, crossed + HALF_WAY / 2, &mut moves[0])?;
    for vm in &mut vms {
        vm.hold_migration(1)?;
    }
    let words = ("no target named 'gamma' is allowed here", "no target named 'gamma'");
    turned_away(stage, Side::Source, &mut receive, &["--name", "gamma"], words)?;
    let words = ("alpha, beta", "say which target by --name");
    turned_away(stage, Side::Source, &mut receive, &[], words)?;
    for (migrate, name) in moves.iter_mut().zip(NAMES) {
        ensure!(migrate.process.poll()?.is_none(), "{name} was moved too fast to be disturbed");
    }
    stage.lab.net.shape(Rate::Unlimited)?;
    for vm in &mut vms {
        vm.let_migrate()?;
    }
    for ((migrate, vm), name) in moves.iter_mut().zip(&mut vms).zip(NAMES) {
        migrate.arrive(vm, LIMIT).context(name)?;
    }
    ends_having_counted(receive, 2)?;
    for (mut destination, name) in destinations.into_iter().zip(NAMES) {
        destination.assert_running().context(name)?;
        destination.guest.stop()?;
        destination.guest.verify().context(name)?;
        // The second one is smaller than other scenarios expect.
        if name == NAMES[0] {
            stage.park(destination);
        }
    }
    Ok(())
}
