//! Ports that several migrations have, one after the other.

use super::*;
use std::os::unix::net::UnixStream;

/// libvirt gives the port of a QEMU that has ended to the next one, whose VM is another.
#[test]
fn a_qemu_that_takes_the_port_of_another_one_gets_no_byte_of_its_vm() {
    let rig = Rig::new("");
    let _b = rig.start(B);
    let first = rig.listen_as_qemu(B, 49152);
    // Its session is open, and its migration begins later, as after an outage.
    let mut relay = rig.relay_to(B, "door:49152");
    relay.says("listening on");
    let path = relay.last().split("unix:").nth(1).unwrap().split([',', ' ', ';']).next().unwrap();
    let mut source = UnixStream::connect(path).unwrap();
    drop(first);
    let second = rig.listen_as_qemu(B, 49152);
    second.set_nonblocking(true).unwrap();
    // The relay may end meanwhile.
    let _ = source.write_all(&rig::main_stream(10));
    until(|| {
        let reached = second.accept().is_ok();
        assert!(!reached, "another VM's QEMU is reached");
        !rig.status(B)["history"].as_array().unwrap().is_empty()
    });
    let cause = rig.ended(B, 1)["cause"].as_str().unwrap().to_owned();
    assert!(cause.contains("another process listens at"), "{cause}");
    drop((source, relay));
    let _a = rig.start(A);
    drop(second);
    migrates(&rig, A, 49152);
}

/// W4d: nothing of a VM is at this host yet.
#[test]
fn a_relay_killed_before_its_migration_leaves_its_port_to_the_next_at_once() {
    let rig = Rig::new("resume_timeout = 3600\n");
    let mut b = rig.start(B);
    let qemu = rig.listen_as_qemu(B, 49152);
    let mut relay = rig.relay_to(B, "door:49152");
    relay.says("listening on");
    relay.kill();
    b.says("waiting up to 3600 s");
    let _a = rig.start(A);
    let stream = rig::main_stream(300);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    until(|| status_of(&rig.status(B), "completed") == 1);
    // The source that was killed might still ask (W28).
    let running = &rig.list(B)["running"];
    assert_eq!(running.as_array().unwrap().len(), 1, "{running}");
    assert_eq!(
        (&running[0]["phase"], &running[0]["holds-port"]),
        (&"ending".into(), &false.into())
    );
}

/// The destination may run the VM, and nobody answers: a person has to look. libvirt gives the next
/// VM the same port, which is the first that is free.
#[test]
fn a_migration_in_doubt_leaves_its_door_to_the_next_one() {
    let rig = Rig::new("resume_timeout = 1\n");
    let (mut a, _b) = (rig.start(A), rig.start(B));
    let stream = rig::main_stream(300);
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
    drop(qemu);
    assert!(read_exactly(&destination, stream.len()) == stream, "the stream differs");
    writer.join().unwrap();
    let pid = rig.list(B)["running"][0]["pid"].as_u64().unwrap();
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
    assert_eq!(rig.ended(B, 1)["status"], "failed");
    drop(destination);
    a.says("the peer was lost after the end of the stream");
    let mut next = 0;
    until(|| {
        // The service learns a moment later that the door is free.
        let qemu = rig.listen_as_qemu(B, 49152);
        let second = rig.connect_as_qemu(A, 49152);
        let stream = rig::main_stream(100 + next);
        next += 1;
        let writer = rig::write_all(&second, stream.clone());
        qemu.set_nonblocking(true).unwrap();
        let arrived = loop {
            match qemu.accept() {
                Ok((destination, _)) => break Some(destination),
                Err(_) if is_closed(&second) => break None,
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        if let Some(destination) = &arrived {
            destination.set_nonblocking(false).unwrap();
            finish(&second, destination, &stream);
        }
        drop(second);
        writer.join().unwrap();
        arrived.is_some()
    });
    // The source of the first one is held all the same.
    until(|| rig.list(A)["running"].as_array().unwrap().len() == 1);
    assert!(!is_closed(&source), "a source in doubt sees its end");
}

/// The other service does not answer for seconds. Meanwhile the source QEMU is told to cancel, and
/// libvirt gives the port to the next VM.
#[test]
fn a_migration_that_was_cancelled_before_the_other_host_answered_reaches_no_qemu() {
    let rig = Rig::with_proxy("");
    let _services = (rig.start(A), rig.start(B));
    // A source that gets no CPU is silent at first, and then the first one is a question.
    rig.leave_unanswered(2);
    let stream = rig::main_stream(300);
    let cancelled = rig.connect_as_qemu(A, 49152);
    (&cancelled).write_all(&stream[..50_000]).unwrap();
    until(|| !rig.list(A)["running"].as_array().unwrap().is_empty());
    drop(cancelled);
    let qemu = rig.listen_as_qemu(B, 49152);
    let stream = rig::main_stream(200);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    until(|| status_of(&rig.status(A), "completed") == 1);
    let status = rig.status(A);
    let cause = status["history"][0]["cause"].as_str().unwrap();
    assert!(cause.contains("had left before the other host answered"), "{status}");
}

/// Whether the other end has closed this connection, from which nothing comes.
fn is_closed(socket: &TcpStream) -> bool {
    socket.set_nonblocking(true).unwrap();
    let end = rig::read_some(socket, &mut [0; 1]);
    socket.set_nonblocking(false).unwrap();
    !matches!(end, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}
