//! Connections that are silent at first, and those that are no migration.

use super::*;

#[test]
fn what_is_no_migration_is_reset_or_goes_on_as_configured() {
    let rig = Rig::new("");
    let mut a = rig.start(A);
    let stranger = rig.connect_as_qemu(A, 49152);
    (&stranger).write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    assert!(is_reset(&stranger));
    a.says("is no migration");
    assert_eq!(rig.status(A)["strangers"], 1);
    // Silent, as an NBD client is, and the other host's service does not run.
    let silent = rig.connect_as_qemu(A, 49152);
    assert!(is_reset(&silent));
    let record = rig.ended(A, 1);
    assert_eq!((&record["what"], &record["status"]), (&"disk".into(), &"failed".into()));
    assert!(record["cause"].as_str().unwrap().contains("cannot connect to"), "{record}");
    // It runs, and no NBD server listens there.
    let _b = rig.start(B);
    for (says, words) in [(&b"SSH-2.0"[..], "listens no NBD server"), (b"", "cannot connect to")] {
        let server = (!says.is_empty()).then(|| rig.listen_as_server(B, 49152));
        let silent = rig.connect_as_qemu(A, 49152);
        if let Some(server) = server {
            rig.accept(&server).0.write_all(says).unwrap();
        }
        assert!(is_reset(&silent));
        let cause = rig.ended(A, if says.is_empty() { 3 } else { 2 })["cause"].clone();
        assert!(cause.as_str().unwrap().contains(words), "{cause}");
    }
    a.kill();

    let rig = Rig::new("stranger = \"forward\"\n");
    let _a = rig.start(A);
    let server = TcpListener::bind((rig.address(B), 49152)).unwrap();
    let client = rig.connect_as_qemu(A, 49152);
    (&client).write_all(b"hello").unwrap();
    let (there, _) = rig.accept(&server);
    assert_eq!(read_exactly(&there, 5), b"hello");
    (&there).write_all(b"NBDMAGIC").unwrap();
    assert_eq!(read_exactly(&client, 8), b"NBDMAGIC");
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&there), b"");
    drop(there);
    assert_eq!(read_all(&client), b"");
    assert_eq!(rig.ended(A, 1)["status"], "forwarded");
    // A silent client of a server that is not NBD's goes the same way, when both are known.
    let _b = rig.start(B);
    let theirs = rig.listen_as_server(B, 49152);
    let client = rig.connect_as_qemu(A, 49152);
    rig.accept(&theirs).0.write_all(b"220 welcome").unwrap();
    let (mut there, _) = rig.accept(&server);
    there.write_all(b"220 welcome").unwrap();
    assert_eq!(read_exactly(&client, 11), b"220 welcome");
    drop((there, client));
    let record = rig.ended(A, 2);
    assert_eq!(record["status"], "forwarded", "{record}");
    assert!(record["cause"].as_str().unwrap().contains("no migration"), "{record}");
}

#[test]
fn a_migration_that_was_silent_at_first_does_not_go_in_the_clear() {
    let rig = Rig::new("stranger = \"forward\"\nunreachable = \"forward\"\n");
    let _a = rig.start(A);
    let server = TcpListener::bind((rig.address(B), 49152)).unwrap();
    let source = rig.connect_as_qemu(A, 49152);
    let (there, _) = rig.accept(&server);
    (&source).write_all(UNCONFIRMED).unwrap();
    assert_eq!((read_all(&there), read_all(&source)), (Vec::new(), Vec::new()));
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "failed", "{record}");
    assert!(record["cause"].as_str().unwrap().contains("migrate again"), "{record}");
}

/// The other host's QEMU awaits a VM, and gets no connection before the source has written: it
/// would take that for the VM's.
#[test]
fn a_source_that_is_silent_for_seconds_migrates_all_the_same() {
    let rig = Rig::new("");
    let (_a, b) = (rig.start(A), rig.start(B));
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    // Twice as long as a connection may be silent to a place of which nothing is known.
    std::thread::sleep(Duration::from_secs(4));
    qemu.set_nonblocking(true).unwrap();
    let looked = qemu.accept().unwrap_err();
    assert_eq!(looked.kind(), std::io::ErrorKind::WouldBlock);
    qemu.set_nonblocking(false).unwrap();
    let stream = rig::main_stream(50);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    drop((source, destination));
    let record = rig.ended(A, 1);
    assert_eq!((&record["what"], &record["status"]), (&"vm".into(), &"completed".into()));
    let (_, said) = b.terminates();
    assert!(!said.contains("turned a connection away"), "a question is no stranger: {said}");
}

/// Another socket may listen there since the question, and an older source does not ask.
#[test]
fn a_qemu_that_awaits_a_vm_gets_no_silent_connection() {
    let (rig, _services, qemu, source) = loop {
        let rig = Rig::new("");
        let services = (rig.start(A), rig.start(B));
        let qemu = rig.listen_as_server(B, 49152);
        let begun = Instant::now();
        let source = rig.connect_as_qemu(A, 49152);
        std::thread::sleep(Duration::from_secs(1));
        rustix::net::listen(&qemu, 1).unwrap();
        // After 2 s it counts as a client's, and goes to what listens there then.
        if begun.elapsed() < Duration::from_secs(2) {
            break (rig, services, qemu, source);
        }
    };
    assert!(is_reset(&source));
    let record = rig.ended(A, 1);
    assert!(record["cause"].as_str().unwrap().contains("a QEMU awaits a VM at"), "{record}");
    qemu.set_nonblocking(true).unwrap();
    assert_eq!(qemu.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}
