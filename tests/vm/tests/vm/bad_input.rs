//! Wrong addresses, wrong peers, wrong paths, noise on the port: a clear error, and the source VM
//! still runs.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::platen::{self, Platen};
use vm_tests::{Lab, Method, Patience, Rate, Vm, VmSpec};

use crate::stage::{destination_ends, names_the_cause, Stage, CREEP, LOAD, NOTICE};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("noise_on_the_port_harms_nobody", noise),
        Scenario::new("noise_before_the_peer_harms_nobody", noise_first),
        Scenario::new("nobody_listens_at_the_peer_address", nobody_listens),
        Scenario::new("the_peer_is_a_web_server", web_server),
        Scenario::new("the_peer_is_silent", silent_peer),
        Scenario::new("deliver_is_a_regular_file", |stage| bad_deliver(stage, true)),
        Scenario::new("deliver_is_not_there", |stage| bad_deliver(stage, false)),
        Scenario::new("the_destination_has_other_memory", other_memory),
        Scenario::new("a_source_that_refuses_to_migrate_uses_up_nothing", refused_start),
        Scenario::new("the_monitor_is_not_there", no_monitor),
        Scenario::new("nothing_starts_without_certificates", needs_certificates),
    ]
}

const LIMIT: Duration = Duration::from_secs(900);

/// The first bytes of a port scanner, a browser, a TLS client, a confused peer and fuzzers.
fn noises() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        b"QEVM\x00\x00\x00\x03".to_vec(),
        b"\x11\x22\x33\x44\x00\x00\x00\x01".to_vec(),
        vec![0; 4096],
        vec![0xff; 70_000],
        b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(),
        vec![],
    ];
    // Random noise of several lengths.
    let mut word = 0x0123_4567_89ab_cdef_u64;
    for len in [1, 3, 15, 16, 17, 63, 64, 65, 1000, 100_000] {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.truncate(len);
        all.push(bytes);
    }
    all
}

/// Sends each on a connection of its own; returns the connections, still open.
fn make_noise(lab: &Lab, from: &Vm, peer: SocketAddr) -> Result<Vec<TcpStream>> {
    let mut open = Vec::new();
    for (nth, bytes) in noises().into_iter().enumerate() {
        // A receiver may refuse unknown connections beyond its limit; it must not stop serving.
        let Ok(mut stream) = lab.net.connect_from(from.side(), peer) else { continue };
        stream.set_write_timeout(Some(Duration::from_secs(2)))?;
        // It may close at the first wrong byte.
        let _ = stream.write_all(&bytes);
        if nth % 3 != 0 {
            open.push(stream);
        }
    }
    for _ in 0..8 {
        open.extend(lab.net.connect_from(from.side(), peer));
    }
    ensure!(open.len() > 4, "only {} connections were accepted", open.len());
    Ok(open)
}

/// Resident memory of a process, in MiB.
fn resident_mib(platen: &Platen) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", platen.process.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024)
}

fn noise(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    stage.lab.net.shape(Rate::Mbit(300))?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    vm.is_reluctant()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &["--channels", "2"])?;
    vm.wait_active(&mut migrate.process)?;
    vm.hold_migration(CREEP)?;
    let open = make_noise(&stage.lab, &vm, receive.peer)?;
    let resident = resident_mib(&receive.platen)?;
    ensure!(resident < 400, "receive has grown to {resident} MiB");
    ensure!(migrate.process.poll()?.is_none(), "the migration ended meanwhile");
    vm.let_migrate()?;
    migrate.arrive(&mut vm, LIMIT)?;
    receive.platen.succeed(NOTICE)?;
    drop(open);
    destination.assert_running()?;
    destination.guest.stop()?;
    destination.guest.verify()?;
    stage.park(destination);
    Ok(())
}

/// Noise while `receive --once` still waits: it must not count as the one migration.
fn noise_first(stage: &mut Stage) -> Result<()> {
    let vm = stage.vm()?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let open = make_noise(&stage.lab, &vm, receive.peer)?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &[])?;
    migrate.succeed(LIMIT).context(receive.platen.process.tail())?;
    receive.platen.succeed(NOTICE)?;
    drop(open);
    destination.assert_running()?;
    destination.guest.verify()?;
    stage.park(destination);
    Ok(())
}

/// Runs `platen migrate` against `peer`, which must fail soon with a message that has one of
/// `words`; the VM must run on without a migration.
fn fails_against(stage: &mut Stage, mut vm: Vm, peer: SocketAddr, words: &[&str]) -> Result<()> {
    let begin = Instant::now();
    let said = platen::migrate(&stage.lab, &vm, peer, &["--connect-timeout", "0"])?.fail(NOTICE)?;
    names_the_cause(&said, words)?;
    ensure!(begin.elapsed() < NOTICE, "after {:?}", begin.elapsed());
    still_whole(&mut vm)?;
    stage.park(vm);
    Ok(())
}

/// The VM runs, no migration is in progress, every page is right.
fn still_whole(vm: &mut Vm) -> Result<()> {
    let status =
        vm.monitor.wait_migration(&["none", "failed", "cancelled", "completed"], NOTICE)?;
    ensure!(status != "completed" || vm.monitor.run_state()? == "running", "{status}");
    vm.assert_running()?;
    vm.guest.verify()?;
    Ok(())
}

fn nobody_listens(stage: &mut Stage) -> Result<()> {
    let vm = stage.vm()?;
    let (_, peer) = stage.lab.net.meeting_point(vm.side().other())?;
    fails_against(stage, vm, peer, &[&peer.to_string()])
}

/// Serves `listener` with `answer` until the test program ends.
fn serve(listener: TcpListener, answer: &'static [u8]) {
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            if !answer.is_empty() {
                let mut request = [0; 16];
                let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
                let _ = stream.read(&mut request);
                let _ = stream.write_all(answer);
            }
            held.push(stream);
        }
    });
}

fn web_server(stage: &mut Stage) -> Result<()> {
    let vm = stage.vm()?;
    let (listen, peer) = stage.lab.net.meeting_point(vm.side().other())?;
    let listener = stage.lab.net.listen_at(vm.side().other(), listen)?;
    serve(listener, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    fails_against(stage, vm, peer, &[&peer.to_string(), "peer"])
}

fn silent_peer(stage: &mut Stage) -> Result<()> {
    let vm = stage.vm()?;
    let (listen, peer) = stage.lab.net.meeting_point(vm.side().other())?;
    serve(stage.lab.net.listen_at(vm.side().other(), listen)?, b"");
    fails_against(stage, vm, peer, &[&peer.to_string(), "peer"])
}

/// `--deliver` names something that is not a socket, or does not exist.
fn bad_deliver(stage: &mut Stage, there: bool) -> Result<()> {
    let mut vm = stage.vm()?;
    let path = stage.lab.scratch("plain");
    if there {
        std::fs::write(&path, "not a socket")?;
    }
    let deliver = format!("unix:{}", path.display());
    let flags = ["--deliver", &deliver, "--once"];
    // It may refuse the path at once, or when there is something to deliver: in either case it
    // names it.
    match platen::receive_with(&stage.lab, vm.side().other(), &flags) {
        Err(refused) => names_the_cause(&format!("{refused:#}"), &[&path.display().to_string()])?,
        Ok(mut receive) => {
            let said = platen::migrate(&stage.lab, &vm, receive.peer, &[])?.fail(NOTICE)?;
            names_the_cause(&said, &[&path.display().to_string()])?;
            let said = receive.platen.fail(NOTICE)?;
            names_the_cause(&said, &[&path.display().to_string()])?;
        }
    }
    if there {
        let content = std::fs::read_to_string(&path)?;
        ensure!(content == "not a socket", "the file was changed to {content:?}");
    }
    still_whole(&mut vm)?;
    stage.park(vm);
    Ok(())
}

/// The destination QEMU was started with another size of RAM, and reports that when the stream
/// arrives.
fn other_memory(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    let spec = VmSpec { memory_kib: vm.spec().memory_kib + 256, ..vm.spec().clone() };
    let mut destination = stage.lab.incoming_with(&vm, &spec)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    let said = platen::migrate(&stage.lab, &vm, receive.peer, &[])?.fail(NOTICE)?;
    names_the_cause(&said, &["destination"])?;
    receive.platen.fail(NOTICE)?;
    destination_ends(&mut destination)?;
    still_whole(&mut vm)?;
    stage.park(vm);
    Ok(())
}

/// The source QEMU refuses ten times, because of a disk whose format does not migrate. Without the
/// disk the same destination QEMU and the same `receive --once` have the VM.
fn refused_start(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    let disk = stage.lab.scratch("blocker.vdi");
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "vdi"]).arg(&disk).arg("1M");
    ensure!(make.status().context("qemu-img")?.success(), "qemu-img has failed");
    let file = json!({"driver": "file", "filename": disk});
    let blocker = json!({"driver": "vdi", "node-name": "blocker", "file": file});
    vm.monitor.execute("blockdev-add", blocker)?;
    let mut destination = stage.lab.incoming_for(&vm)?;
    let mut receive = platen::receive(&stage.lab, &destination, &[])?;
    for _ in 0..10 {
        let said = platen::migrate(&stage.lab, &vm, receive.peer, &[])?.fail(NOTICE)?;
        names_the_cause(&said, &["does not support live migration"])?;
        ensure!(!said.contains("in progress"), "the former try still has the target: {said}");
    }
    vm.assert_running()?;
    vm.monitor.execute("blockdev-del", json!({"node-name": "blocker"}))?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &[])?;
    migrate.arrive(&mut vm, LIMIT).context(receive.platen.process.tail())?;
    receive.platen.succeed(NOTICE)?;
    destination.assert_running()?;
    destination.guest.verify()?;
    stage.park(destination);
    Ok(())
}

fn no_monitor(stage: &mut Stage) -> Result<()> {
    let vm = stage.vm()?;
    let missing = stage.lab.scratch("monitor");
    let qmp = format!("unix:{}", missing.display());
    let (_, peer) = stage.lab.net.meeting_point(vm.side().other())?;
    let words = ["migrate", "--qmp", &qmp, "--peer", &peer.to_string(), "--insecure"];
    let mut run = Platen::start(&stage.lab, "migrate", vm.side(), &words)?;
    names_the_cause(&run.fail(NOTICE)?, &[&missing.display().to_string()])?;
    stage.park(vm);
    Ok(())
}

/// A host without a certificate gets an error with a remedy, and nothing is sent unencrypted.
fn needs_certificates(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    let nothing = stage.lab.scratch("no-certificates").display().to_string();
    let (listen, peer) = stage.lab.net.meeting_point(vm.side().other())?;
    let listener = stage.lab.net.listen_at(vm.side().other(), listen)?;
    listener.set_nonblocking(true)?;
    let tls = ["--tls-dir", &nothing];
    let said = platen::migrate(&stage.lab, &vm, peer, &tls)?.fail(NOTICE)?;
    names_the_cause(&said, &["platen cert"])?;
    names_the_cause(&said, &["--insecure"])?;
    ensure!(listener.accept().is_err(), "it called the peer without a certificate");
    let status = vm.monitor.migration_status()?;
    ensure!(status != "active" && status != "setup", "the migration is {status}");
    let flags = [&["--deliver", "unix:/nonexistent", "--once"], &tls[..]].concat();
    match platen::receive_with(&stage.lab, vm.side(), &flags) {
        Ok(_) => bail!("it listens without a certificate"),
        Err(refused) => names_the_cause(&format!("{refused:#}"), &["platen cert"])?,
    }
    // And a permitted migration works.
    let (mut vm, _) = Method::platen(&[]).run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.verify()?;
    stage.park(vm);
    Ok(())
}
