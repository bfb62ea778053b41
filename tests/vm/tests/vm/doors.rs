//! Connections at a door that are silent at first, with real QEMUs behind it.

use std::io::Read;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::json;
use vm_tests::{Qemu, Services, Side, Vm, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::bare::{Settings, LIMIT};
use crate::stage::{Skip, Stage, NOTICE, TINY_DATA_MIB};
use crate::Scenario;

/// The door address of the destination, and the first of its ports.
const DOOR: Ipv4Addr = Ipv4Addr::new(127, 80, 0, 2);
const FIRST: u16 = 47_100;
/// Longer than a connection may be silent to a place of which nothing is known.
const SILENCE: Duration = Duration::from_secs(4);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (name, qemu, machine) in [
        ("7", Qemu::System, MACHINE_7_2),
        ("10", Qemu::Ten, MACHINE_10),
        ("11", Qemu::Eleven, MACHINE_11),
    ] {
        let spec = VmSpec::tiny(qemu, machine);
        all.push(Scenario::new(format!("qemu_{name}_silent_at_a_door"), move |stage| {
            silent(stage, &spec)
        }));
    }
    all
}

/// A migration whose source is silent for seconds arrives, with channels and without; the client of
/// an NBD server is not kept waiting.
fn silent(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    if stage.lab.net.describe() != "two network namespaces" {
        return Err(
            Skip("a door address is one on two hosts: this needs network namespaces").into()
        );
    }
    let services = Services::start(&stage.lab, "")?;
    for (nth, channels) in [0, 4].into_iter().enumerate() {
        let settings = Settings::multifd(channels, "none");
        // At the source, where one of an earlier scenario need not be: QEMU cannot listen at the
        // door on the host that has it.
        let mut vm = stage.lab.boot_or_load(spec, TINY_DATA_MIB)?;
        let mut destination = stage.lab.incoming_for(&vm)?;
        settings.apply(&mut vm)?;
        settings.apply(&mut destination)?;
        let door = SocketAddr::from((DOOR, FIRST + u16::try_from(nth)?));
        destination.listen(&format!("tcp:{door}"))?;
        let count = usize::try_from(channels)? + 1;
        let connections: Vec<_> = (0..count)
            .map(|_| stage.lab.net.connect_from(Side::Source, door))
            .collect::<Result<_>>()?;
        std::thread::sleep(SILENCE);
        migrate_over(stage, &mut vm, connections)?;
        let state = vm.wait_migration_end(&["completed", "failed", "cancelled"], LIMIT)?;
        ensure!(state == "completed", "the source is {state}");
        vm.wait_left()?;
        destination.assert_running()?;
        let verified = destination.guest.verify().context("in the destination")?;
        ensure!(verified.pages >= TINY_DATA_MIB * 256, "the guest has checked only {verified:?}");
        for side in [Side::Source, Side::Destination] {
            let record = services.ended(side, nth + 1)?;
            ensure!(record["status"] == "completed" && record["what"] == "vm", "{record}");
        }
        if channels == 0 {
            greeted(stage, &mut destination)?;
        }
    }
    Ok(())
}

/// QEMU's connections become these, which were made before.
fn migrate_over(stage: &Stage, vm: &mut Vm, connections: Vec<TcpStream>) -> Result<()> {
    let path = stage.lab.scratch("late");
    let listener = UnixListener::bind(&path)?;
    std::thread::spawn(move || {
        for (qemu, door) in listener.incoming().map_while(|qemu| qemu.ok()).zip(connections) {
            std::thread::spawn(move || drop(splice(&qemu, &door)));
        }
    });
    vm.monitor.execute("migrate", json!({"uri": format!("unix:{}", path.display())})).map(drop)
}

fn splice(qemu: &UnixStream, door: &TcpStream) -> std::io::Result<()> {
    let (mut from, mut to) = (door.try_clone()?, qemu.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let (mut from, mut to) = (qemu, door);
    std::io::copy(&mut from, &mut to)?;
    door.shutdown(Shutdown::Write)
}

/// The greeting of the QEMU's NBD server comes sooner than by the silence of its client. On a busy
/// machine that may take some tries.
fn greeted(stage: &Stage, vm: &mut Vm) -> Result<()> {
    let door = SocketAddr::from((DOOR, FIRST + 7));
    let (host, port) = (door.ip().to_string(), door.port().to_string());
    let address = json!({"type": "inet", "data": {"host": host, "port": port}});
    vm.monitor.execute("nbd-server-start", json!({"addr": address}))?;
    let until = Instant::now() + NOTICE;
    loop {
        let begin = Instant::now();
        let mut client = stage.lab.net.connect_from(Side::Source, door)?;
        client.set_read_timeout(Some(NOTICE))?;
        let mut magic = [0; 8];
        client.read_exact(&mut magic)?;
        ensure!(&magic == b"NBDMAGIC", "it begins with {magic:02x?}");
        let took = begin.elapsed();
        if took < Duration::from_secs(2) {
            println!("  an NBD server's greeting comes after {took:?}");
            // The server stays: QEMU 7.2 does not answer `nbd-server-stop` after such a client.
            return Ok(());
        }
        ensure!(Instant::now() < until, "each client waits for 2 s and more");
    }
}
