//! `platen host` at unix sockets: two services on one machine, each with sockets of its own, and
//! made QEMUs there.

#[path = "host/rig.rs"]
mod rig;

use rig::{main_stream, read_some, until, Platen, Rig, A, B, SHUT_OK, WATCHDOG};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A host's path of a socket of `of`.
fn path(rig: &Rig, host: usize, of: &str, number: u16) -> PathBuf {
    rig.at(&format!("doors-{host}/{of}/{number}"))
}

fn rig() -> Rig {
    let rig = Rig::new("sockets = 2\n");
    for host in [A, B] {
        // On two machines it is one path.
        let folder = rig.at(&format!("doors-{host}"));
        let line = format!("socket_dir = \"{}\"\n", folder.display());
        rig.configure(host, |text| line + &text);
    }
    rig
}

fn start(rig: &Rig, host: usize) -> Platen {
    let mut service = rig.spawn(host, &[]);
    service.says("for other hosts; 6 doors to");
    service
}

fn connect(rig: &Rig, number: u16) -> UnixStream {
    let socket = UnixStream::connect(path(rig, A, "b", number)).unwrap();
    socket.set_read_timeout(Some(WATCHDOG)).unwrap();
    socket
}

/// Whether a socket listens at this path: flag `__SO_ACCEPTCON` in the kernel's list.
fn listens(at: &Path) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let at = at.to_str().unwrap();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some("00010000") && fields.last() == Some(at)
    })
}

/// A migration from A to B by a socket, to a QEMU that listens there.
fn migrates(rig: &Rig, number: u16) {
    let stream = main_stream(300);
    let at = path(rig, B, "b", number);
    // As QEMU does.
    let _ = std::fs::remove_file(&at);
    // A process that another test is starting has a copy of the last listener until its exec.
    until(|| !listens(&at));
    let qemu = UnixListener::bind(&at).unwrap();
    let mut source = connect(rig, number);
    // At once: the thread may get no CPU for so long that a silent connection is a disk's.
    source.write_all(&stream[..64]).unwrap();
    let writing = (source.try_clone().unwrap(), stream[64..].to_vec());
    let writer = std::thread::spawn(move || { &writing.0 }.write_all(&writing.1).unwrap());
    rig.awaits(&qemu);
    let (mut destination, _) = qemu.accept().unwrap();
    let mut got = vec![0; stream.len()];
    destination.read_exact(&mut got).unwrap();
    assert!(got == stream, "the stream differs");
    destination.write_all(&SHUT_OK).unwrap();
    let mut answer = [0; 8];
    source.read_exact(&mut answer).unwrap();
    assert_eq!(answer, SHUT_OK);
    writer.join().unwrap();
}

#[test]
fn a_migration_goes_by_unix_sockets_and_again_after_the_service_was_killed() {
    let rig = rig();
    let (mut a, _b) = (start(&rig, A), start(&rig, B));
    for round in 0..3 {
        migrates(&rig, 1);
        for (host, role) in [(A, "source"), (B, "destination")] {
            let record = rig.ended(host, round + 1);
            assert_eq!(record["status"], "completed", "{record}");
            assert_eq!((&record["place"], &record["role"]), (&"socket:1".into(), &role.into()));
        }
        a.kill();
        if round == 0 {
            // Its path leads to nobody, as soon as its carriers have ended, too.
            let until = Instant::now() + WATCHDOG;
            let error = loop {
                match UnixStream::connect(path(&rig, A, "b", 1)) {
                    Ok(_) => assert!(Instant::now() < until, "a killed service listens"),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
        }
        a = start(&rig, A);
    }
}

#[test]
fn sockets_and_folders_are_for_the_users_of_the_configuration_alone() {
    let rig = rig();
    let _services = (start(&rig, A), start(&rig, B));
    let mode = |path: PathBuf| path.metadata().unwrap().mode() & 0o777;
    // With a list of users the group's place in a mode is the list's mask; others have no right.
    assert_eq!(mode(path(&rig, A, "b", 2)), 0o660);
    assert_eq!(mode(rig.at("doors-0")), 0o711);
    assert_eq!(mode(rig.at("doors-0/b")), 0o711);
    assert_eq!(mode(rig.at("doors-1/b")), 0o770);
    // The service may connect to sockets that QEMU makes there.
    let at = path(&rig, B, "b", 1);
    let _qemu = UnixListener::bind(&at).unwrap();
    assert_eq!(mode(at) & 0o7, 0);
}

#[test]
fn two_qemus_at_one_path_are_a_failure_and_neither_gets_a_byte() {
    let rig = rig();
    let _services = (start(&rig, A), start(&rig, B));
    let at = path(&rig, B, "b", 2);
    let first = UnixListener::bind(&at).unwrap();
    std::fs::remove_file(&at).unwrap();
    let second = UnixListener::bind(&at).unwrap();
    let mut source = connect(&rig, 2);
    source.write_all(&main_stream(300)[..50_000]).unwrap();
    assert!(matches!(read_some(&source, &mut [0; 1]), Ok(0) | Err(_)));
    let record = rig.ended(A, 1);
    let cause = record["cause"].as_str().unwrap();
    assert!(cause.contains("2 QEMUs wait at"), "{cause}");
    for qemu in [first, second] {
        qemu.set_nonblocking(true).unwrap();
        assert_eq!(qemu.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    // With one of them gone the next one works.
    until(|| rig.carriers_are_gone());
    migrates(&rig, 2);
}

#[test]
fn what_is_no_migration_and_what_has_no_host_is_closed_at_once() {
    let rig = Rig::new("sockets = 1\nunreachable = \"forward\"\nstranger = \"forward\"\n");
    let folder = rig.at("doors-0");
    rig.configure(A, |text| format!("socket_dir = \"{}\"\n{text}", folder.display()));
    let mut a = rig.spawn(A, &[]);
    a.says("for other hosts; 5 doors to");
    // There is no address that a unix socket could be forwarded to.
    let mut stranger = connect(&rig, 1);
    stranger.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert!(matches!(read_some(&stranger, &mut [0; 1]), Ok(0) | Err(_)));
    until(|| rig.status(A)["strangers"] == 1);
    let mut source = connect(&rig, 1);
    source.write_all(&main_stream(3)).unwrap();
    assert!(matches!(read_some(&source, &mut [0; 1]), Ok(0) | Err(_)));
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "failed", "{record}");
    assert!(record["cause"].as_str().unwrap().contains("cannot connect"), "{record}");
}
