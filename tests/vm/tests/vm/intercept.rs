//! Migrations between the addresses of two hosts, as tools give them that know nothing of platen:
//! by `platen host intercept` they go through platen all the same. And those without a return path,
//! in the order in which Proxmox does things.

mod killed;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::{Qemu, Rate, Services, Side, Signal, Vm, VmSpec, MACHINE_7_2, PORTS};

use crate::bare::{Settings, LIMIT};
use crate::stage::{come_to_rest, Skip, Stage, NOTICE, TINY_DATA_MIB};
use crate::Scenario;
use killed::{killed, Moment, Victim};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = vec![
        Scenario::new("intercepts_a_migration_to_an_address", |stage| to_an_address(stage, 0)),
        Scenario::new("intercepts_a_migration_with_4_channels", |stage| to_an_address(stage, 4)),
        Scenario::new("intercepted_strangers_pass_unharmed", strangers_pass),
        Scenario::new("intercepted_with_the_service_killed", service_killed),
        Scenario::new("intercepted_with_nobody_at_the_other_host", nobody_there),
        Scenario::new("intercepted_beside_a_migration_by_the_door", two_ways),
        Scenario::new("proxmox_sequence", proxmox),
        Scenario::new("proxmox_while_the_rules_go", rules_go),
    ];
    for moment in [Moment::Middle, Moment::Left] {
        for victim in Victim::ALL {
            let name = format!("proxmox_{}_killed_{}", victim.name(), moment.name());
            all.push(Scenario::new(name, move |stage| killed(stage, victim, moment)));
        }
    }
    all
}

/// Bytes after which a migration is in its middle.
const MIDDLE: u64 = 8 << 20;

/// Services on both sides, and the rules at the source.
fn intercepting(stage: &Stage, lines: &str) -> Result<Services> {
    if stage.lab.net.describe() != "two network namespaces" {
        return Err(Skip("nftables needs network namespaces, which root makes").into());
    }
    let services = Services::start(&stage.lab, lines)?;
    rules(stage, &services, "on", "are intercepted")?;
    Ok(services)
}

fn rules(stage: &Stage, services: &Services, what: &str, says: &str) -> Result<()> {
    let words = ["host", "intercept", what];
    let (well, said) = services.command(&stage.lab, Side::Source, &words)?;
    ensure!(well && said.contains(says), "platen host intercept {what}: {said}");
    Ok(())
}

/// Checks the status of `platen doctor`, and its words on the interception: nothing else is amiss.
fn doctor_says(stage: &Stage, services: &Services, expected: bool, words: &str) -> Result<()> {
    let until = Instant::now() + LIMIT;
    loop {
        let (well, said) = services.command(&stage.lab, Side::Source, &["doctor"])?;
        if well == expected && said.contains(words) {
            return Ok(());
        }
        // The other host's service may get no CPU, and not answer.
        ensure!(Instant::now() < until, "platen doctor (well: {well}): {said}");
    }
}

/// A VM, a QEMU that awaits it at an address of the other host, and that address.
struct Pair {
    vm: Vm,
    destination: Vm,
    uri: String,
}

impl Pair {
    fn new(stage: &mut Stage, services: &Services, settings: &Settings, port: u16) -> Result<Self> {
        let uri = format!("tcp:{}:{port}", services.address(Side::Destination));
        Self::at(stage, settings, uri)
    }

    fn at(stage: &mut Stage, settings: &Settings, uri: String) -> Result<Self> {
        // A VM of its own, at the source, where the rules are. After a migration that was cancelled
        // with the return path on, a QEMU 7.2 without it announces one that it does not read.
        let spec = VmSpec::tiny(Qemu::System, MACHINE_7_2);
        let mut vm = stage.lab.boot_or_load(&spec, TINY_DATA_MIB)?;
        let mut destination = stage.lab.incoming_for(&vm)?;
        settings.apply(&mut vm)?;
        settings.apply(&mut destination)?;
        destination.listen(&uri)?;
        Ok(Self { vm, destination, uri })
    }

    /// The plain command of any tool.
    fn go(&mut self) -> Result<()> {
        self.vm.monitor.execute("migrate", json!({"uri": self.uri})).map(drop)
    }

    /// The VM has come to the destination whole.
    fn lands(mut self, stage: &mut Stage) -> Result<()> {
        let ends = ["completed", "failed", "cancelled"];
        let state = self.vm.wait_migration_end(&ends, LIMIT)?;
        ensure!(state == "completed", "the source is {state}");
        self.arrives(stage)
    }

    /// The destination runs it, and every page is right. It is ended, as the next VM begins at the
    /// source.
    fn arrives(mut self, _: &mut Stage) -> Result<()> {
        self.destination.assert_running()?;
        let verified = self.destination.guest.verify().context("in the destination")?;
        ensure!(verified.pages >= TINY_DATA_MIB * 256, "the guest has checked only {verified:?}");
        Ok(())
    }
}

fn to_an_address(stage: &mut Stage, channels: u32) -> Result<()> {
    // By itself platen may send it all as it is, where the link is fast and CPUs are busy.
    let services = intercepting(stage, "codec = \"lz4\"\n")?;
    let mut pair = Pair::new(stage, &services, &Settings::multifd(channels, "none"), 46_002)?;
    let place = format!("address:{}:46002", services.address(Side::Destination));
    pair.go()?;
    pair.lands(stage)?;
    for side in [Side::Source, Side::Destination] {
        let record = services.ended(side, 1)?;
        ensure!(record["status"] == "completed" && record["place"] == place.as_str(), "{record}");
        // All of the VM went by platen, and less of it over the link.
        let (plain, sent) = (record["plain"].as_u64(), record["transferred"].as_u64());
        ensure!(plain > Some(TINY_DATA_MIB << 20) && plain > sent, "{record}");
    }
    doctor_says(stage, &services, true, "ok    interception: ")?;
    // Without the rules it goes the old way.
    rules(stage, &services, "off", "no migration")?;
    doctor_says(stage, &services, false, "FAIL  interception: migrations go past platen")?;
    let mut pair = Pair::new(stage, &services, &Settings::multifd(channels, "none"), 46_003)?;
    pair.go()?;
    pair.lands(stage)?;
    let status = services.status(Side::Source)?;
    ensure!(status["history"].as_array().map(Vec::len) == Some(1), "{status}");
    Ok(())
}

fn strangers_pass(stage: &mut Stage) -> Result<()> {
    let services = intercepting(stage, "stranger = \"refuse\"\n")?;
    let at = SocketAddr::new(services.address(Side::Destination), *PORTS.end());
    let server = stage.lab.net.listen_at(Side::Destination, at)?;
    // The client speaks first; then the server, one of them as NBD's does, which goes by platen.
    for (says, answers) in
        [(&b"GET / HTTP/1.0\r\n\r\n"[..], b"200 well"), (b"", b"220 well"), (b"", b"NBDMAGIC")]
    {
        let mut client = stage.lab.net.connect_from(Side::Source, at)?;
        client.set_read_timeout(Some(NOTICE))?;
        client.write_all(says)?;
        let begin = Instant::now();
        let (mut there, _) = server.accept()?;
        if answers == b"220 well" {
            // The other host's service has looked whether it is NBD's.
            there.write_all(answers)?;
            there = server.accept()?.0;
        }
        there.set_read_timeout(Some(NOTICE))?;
        let took = begin.elapsed();
        let mut got = vec![0; says.len()];
        there.read_exact(&mut got)?;
        ensure!(got == says, "the client's bytes are not as they were");
        there.write_all(answers)?;
        drop(there);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer)?;
        ensure!(answer == answers, "the answer is {answer:?}");
        println!("  a client that writes {} bytes is passed on after {took:?}", says.len());
    }
    let record = services.ended(Side::Source, 3)?;
    ensure!(record["what"] == "disk" && record["status"] == "completed", "{record}");
    ensure!(services.ended(Side::Destination, 2)?["status"] == "completed", "not by platen");
    let status = services.status(Side::Source)?;
    ensure!(status["strangers"] == 1, "{status}");
    // Ports beside them, and addresses of other hosts, are not touched.
    let beside = SocketAddr::new(at.ip(), PORTS.end() + 1);
    let server = stage.lab.net.listen_at(Side::Destination, beside)?;
    let client = stage.lab.net.connect_from(Side::Source, beside)?;
    ensure!(server.accept()?.1 == client.local_addr()?, "another address");
    ensure!(services.status(Side::Source)?["strangers"] == 1, "it was counted");
    Ok(())
}

/// A service that is killed leaves the rules: migrations fail at once. Its unit then does as
/// configured: they go the old way, or fail on. The next service restores interception.
fn service_killed(stage: &mut Stage) -> Result<()> {
    for (policy, says) in [("refuse", "fail at once"), ("forward", "no migration")] {
        let lines = format!("intercept_stopped = \"{policy}\"\n");
        let mut services = intercepting(stage, &lines)?;
        services.kill(Side::Source)?;
        refused(stage, &services)?;
        rules(stage, &services, "stopped", says)?;
        if policy == "refuse" {
            refused(stage, &services)?;
        } else {
            let mut pair = Pair::new(stage, &services, &Settings::multifd(0, "none"), 46_001)?;
            pair.go()?;
            pair.lands(stage)?;
        }
        services.start_one(&stage.lab, Side::Source)?;
        rules(stage, &services, "on", "are intercepted")?;
        let mut pair = Pair::new(stage, &services, &Settings::multifd(0, "none"), 46_001)?;
        pair.go()?;
        pair.lands(stage)?;
        ensure!(services.ended(Side::Source, 1)?["status"] == "completed", "not through platen");
        rules(stage, &services, "off", "no migration")?;
    }
    Ok(())
}

/// A migration that fails at once, and leaves the VM where it is.
fn refused(stage: &mut Stage, services: &Services) -> Result<()> {
    let mut pair = Pair::new(stage, services, &Settings::multifd(0, "none"), 46_000)?;
    let begin = Instant::now();
    // QEMU says so at once, or by its state.
    if pair.go().is_ok() {
        pair.vm.monitor.wait_migration(&["failed"], NOTICE)?;
    }
    ensure!(begin.elapsed() < NOTICE, "it hung");
    pair.vm.assert_running()
}

/// The other host's service does not run: as `unreachable` says.
fn nobody_there(stage: &mut Stage) -> Result<()> {
    for policy in ["refuse", "forward"] {
        let lines = format!("unreachable = \"{policy}\"\n");
        let mut services = intercepting(stage, &lines)?;
        services.kill(Side::Destination)?;
        if policy == "refuse" {
            refused(stage, &services)?;
        } else {
            // Its own connection to that address comes not back to its own door.
            let mut pair = Pair::new(stage, &services, &Settings::multifd(2, "none"), 46_001)?;
            pair.go()?;
            pair.lands(stage)?;
        }
        let record = services.ended(Side::Source, 1)?;
        let status = if policy == "refuse" { "failed" } else { "forwarded" };
        ensure!(record["status"] == status, "{record}");
        ensure!(record["cause"].as_str().is_some_and(|cause| cause.contains("cannot connect")));
        let history = services.status(Side::Source)?;
        ensure!(history["history"].as_array().map(Vec::len) == Some(1), "a loop: {history}");
        rules(stage, &services, "off", "no migration")?;
    }
    Ok(())
}

/// Two migrations at one door, one by its address and one by interception: the second one is reset
/// with its cause, and the first one goes on.
fn two_ways(stage: &mut Stage) -> Result<()> {
    let services = intercepting(stage, "")?;
    let door = |nth: u16| SocketAddr::from(([127, 80, 0, 2], 47_100 + nth));
    let address = |nth: u16| SocketAddr::new(services.address(Side::Destination), 46_000 + nth);
    for (nth, first, second) in [(1, address(1), door(1)), (2, door(2), address(2))] {
        let settings = Settings::multifd(0, "none");
        let mut pair = Pair::at(stage, &settings, format!("tcp:{first}"))?;
        pair.vm.hold_migration(4)?;
        pair.go()?;
        services.carrier(Side::Source, MIDDLE)?;
        // The reset may come before the connection is known to be one, and before the bytes.
        if let Ok(mut other) = stage.lab.net.connect_from(Side::Source, second) {
            other.set_read_timeout(Some(NOTICE))?;
            let _ = other.write_all(b"QEVM\0\0\0\x03");
            let got = other.read(&mut [0; 1]);
            ensure!(!matches!(got, Ok(1)), "it was answered");
        }
        pair.vm.let_migrate()?;
        pair.lands(stage)?;
        for side in [Side::Source, Side::Destination] {
            let record = services.ended(side, nth)?;
            ensure!(record["status"] == "completed", "{record}");
        }
    }
    let said = services.said(Side::Source);
    ensure!(said.matches("came another way").count() == 2, "{said}");
    Ok(())
}

/// Proxmox's settings: no return path, no multifd; the target is stopped (`-S`).
fn as_proxmox(stage: &mut Stage, services: &Services, port: u16) -> Result<Pair> {
    let mut pair = Pair::new(stage, services, &Settings::multifd(0, "none"), port)?;
    for vm in [&mut pair.vm, &mut pair.destination] {
        vm.monitor.set_capabilities(&[("return-path", false)])?;
    }
    // Before the VM has come this is what -S is: it does not start by itself.
    pair.destination.monitor.execute("stop", json!({}))?;
    Ok(pair)
}

fn proxmox(stage: &mut Stage) -> Result<()> {
    let services = intercepting(stage, "")?;
    for (nth, rate) in [Rate::Unlimited, Rate::Mbit(100)].into_iter().enumerate() {
        stage.lab.net.shape(rate)?;
        let mut pair = as_proxmox(stage, &services, 46_001)?;
        pair.go()?;
        // It asks the source again and again, and believes it.
        let state = pair.vm.wait_migration_end(&["completed", "failed", "cancelled"], LIMIT)?;
        ensure!(state == "completed", "the source is {state}");
        pair.destination.monitor.execute("cont", json!({}))?;
        // Then it ends the source.
        pair.vm.process.kill()?;
        pair.arrives(stage)?;
        for side in [Side::Source, Side::Destination] {
            let record = services.ended(side, nth + 1)?;
            ensure!(record["status"] == "unconfirmed", "{record}");
        }
    }
    Ok(())
}

/// The rules go while a migration runs, whose connection the kernel translates: as at each restart
/// of the service. Nothing of it is lost.
fn rules_go(stage: &mut Stage) -> Result<()> {
    for policy in ["forward", "refuse"] {
        let lines = format!("intercept_stopped = \"{policy}\"\n");
        let mut services = intercepting(stage, &lines)?;
        let mut pair = as_proxmox(stage, &services, 46_004)?;
        pair.vm.hold_migration(4)?;
        pair.go()?;
        services.carrier(Side::Source, MIDDLE)?;
        // The rest takes longer than all that is done meanwhile.
        pair.vm.hold_migration(1)?;
        services.kill(Side::Source)?;
        let says = if policy == "refuse" { "fail at once" } else { "no migration" };
        rules(stage, &services, "stopped", says)?;
        rules(stage, &services, "off", "no migration")?;
        services.start_one(&stage.lab, Side::Source)?;
        rules(stage, &services, "on", "are intercepted")?;
        pair.vm.let_migrate()?;
        let state = pair.vm.wait_migration_end(&["completed", "failed"], LIMIT)?;
        ensure!(state == "completed", "the source is {state}");
        starts_there(stage, &services, pair)?;
        rules(stage, &services, "off", "no migration")?;
    }
    Ok(())
}

/// Everything arrives, and the VM starts when it is told to.
fn starts_there(stage: &mut Stage, services: &Services, mut pair: Pair) -> Result<()> {
    pair.destination.monitor.execute("cont", json!({}))?;
    pair.arrives(stage)?;
    for side in [Side::Source, Side::Destination] {
        let record = services.ended(side, 1)?;
        ensure!(record["status"] == "unconfirmed", "{record}");
    }
    Ok(())
}

/// The destination QEMU ends, or has no VM that it would start.
fn never_starts(destination: &mut Vm) -> Result<()> {
    let until = Instant::now() + NOTICE;
    while destination.process.poll()?.is_none() {
        if Instant::now() > until {
            let (state, seen) = (destination.monitor.run_state(), seen(destination.process.id()));
            let tail = destination.process.tail();
            bail!("the destination QEMU, {state:?}, does not end; {seen}; {tail}");
        }
        // It may answer once more, and must not run.
        let state = destination.monitor.run_state();
        ensure!(state.as_deref().unwrap_or_default() != "running", "the destination runs the VM");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The kernel's view of a process and of the TCP connections in its network, for an error message.
fn seen(process: u32) -> String {
    let read = |name| std::fs::read_to_string(format!("/proc/{process}/{name}"));
    let status = read("status").unwrap_or_default();
    let state = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
    let tcp = read("net/tcp").unwrap_or_default();
    // Addresses, state and queues; 0A is a socket that listens.
    let open = tcp.lines().filter(|line| !line.contains(" 0A ")).map(|line| line.get(..60));
    format!("{state}, {}", open.flatten().collect::<Vec<_>>().join(" | "))
}

fn kill(pid: i32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid).context("a process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).context("kill")
}
