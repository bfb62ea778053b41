//! `platen host` as processes: two services on one machine, and made QEMUs at their doors.

#[path = "host/rig.rs"]
mod rig;

use rig::{
    figures, finish, is_reset, migrates, read_all, read_exactly, status_of, under_way, until, Rig,
    A, B, SHUT_OK, UNCONFIRMED, WATCHDOG,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_migration_goes_there_and_back_and_both_services_know_it() {
    let rig = Rig::new("");
    let (a, b) = (rig.start(A), rig.start(B));
    for round in 0..3 {
        migrates(&rig, A, 49152);
        for (host, role, peer) in [(A, "source", "b"), (B, "destination", "a")] {
            let record = rig.ended(host, 2 * round + 1);
            assert_eq!(record["status"], "completed", "{record}");
            assert_eq!((&record["role"], &record["peer"]), (&role.into(), &peer.into()));
            assert_eq!(record["port"], 49152);
            assert!(record["transferred"].as_u64().unwrap() > 0, "{record}");
        }
        migrates(&rig, B, 49152);
        for host in [A, B] {
            rig.ended(host, 2 * round + 2);
        }
    }
    drop((a, b));
}

#[test]
fn four_migrations_at_a_time_each_arrive_at_their_own_qemu() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let streams: Vec<_> = (0..4).map(|nth| rig::main_stream(100 + nth)).collect();
    let qemus: Vec<_> = (0..4).map(|nth| rig.listen_as_qemu(B, 49152 + nth)).collect();
    let sources: Vec<_> = (0..4).map(|nth| rig.connect_as_qemu(A, 49152 + nth)).collect();
    let writers: Vec<_> =
        sources.iter().zip(&streams).map(|(to, of)| rig::write_all(to, of.clone())).collect();
    let destinations: Vec<_> = qemus.iter().map(|qemu| qemu.accept().unwrap().0).collect();
    // All four are under way now.
    until(|| rig.list(A)["running"].as_array().unwrap().len() == 4);
    for ((source, destination), stream) in sources.iter().zip(&destinations).zip(&streams) {
        finish(source, destination, stream);
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    until(|| status_of(&rig.status(B), "completed") == 4);
}

#[test]
fn multifd_channels_belong_to_the_migration_of_their_port() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let (main, channels) = rig::multifd_streams(600, 3);
    let qemu = rig.listen_as_qemu(B, 49153);
    let source = rig.connect_as_qemu(A, 49153);
    let sockets: Vec<_> = channels.iter().map(|_| rig.connect_as_qemu(A, 49153)).collect();
    let mut writers = vec![rig::write_all(&source, main.clone())];
    for (socket, bytes) in sockets.iter().zip(&channels) {
        writers.push(rig::write_all(socket, bytes.clone()));
    }
    let (destination, _) = qemu.accept().unwrap();
    let readers: Vec<_> = channels
        .iter()
        .map(|_| {
            let (socket, _) = qemu.accept().unwrap();
            let channels = channels.clone();
            std::thread::spawn(move || {
                let first = read_exactly(&socket, 64);
                let id = usize::from(first[24]);
                let rest = read_exactly(&socket, channels[id].len() - 64);
                assert!(channels[id] == [first, rest].concat(), "channel {id}");
                socket
            })
        })
        .collect();
    let got = read_exactly(&destination, main.len());
    assert!(got == main, "the main stream differs");
    drop(readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>());
    (&destination).write_all(&SHUT_OK).unwrap();
    assert_eq!(read_exactly(&source, 8), SHUT_OK);
    drop((source, sockets, destination));
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert_eq!(rig.ended(A, 1)["status"], "completed");
}

/// The services are killed and started again while a migration runs, and all links are cut after
/// that: the new service at the destination hands the new links to the process that has the
/// session.
#[test]
fn a_migration_outlives_both_services_and_its_links() {
    let rig = Rig::with_proxy("");
    let (mut a, mut b) = (rig.start(A), rig.start(B));
    let stream = rig::main_stream(2000);
    let half = stream.len() / 2;
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream[..half].to_vec());
    let (destination, _) = qemu.accept().unwrap();
    // QEMU's next connection to this port would be another migration's.
    drop(qemu);
    assert!(read_exactly(&destination, 10_000) == stream[..10_000]);
    for host in [A, B] {
        until(|| rig.list(host)["running"][0]["phase"] == "active");
    }
    a.kill();
    b.kill();
    let (mut a, mut b) = (rig.start(A), rig.start(B));
    for service in [&mut a, &mut b] {
        service.says("1 migrations of a service before this one go on");
    }
    rig.cut_links();
    let mut got = stream[..10_000].to_vec();
    got.extend(read_exactly(&destination, half - 10_000));
    writer.join().unwrap();
    // Later frames come over new links only.
    let writer = rig::write_all(&source, stream[half..].to_vec());
    got.extend(read_exactly(&destination, stream.len() - half));
    assert!(got == stream, "the stream differs");
    (&destination).write_all(&SHUT_OK).unwrap();
    assert_eq!(read_exactly(&source, 8), SHUT_OK);
    drop((source, destination));
    writer.join().unwrap();
    assert_eq!(rig.ended(A, 1)["status"], "completed");
    assert_eq!(rig.ended(B, 1)["status"], "completed");
    // The same door again, with the services of now.
    migrates(&rig, A, 49152);
}

#[test]
fn a_service_that_is_told_to_end_ends_no_migration() {
    let rig = Rig::new("");
    let (a, b) = (rig.start(A), rig.start(B));
    let stream = rig::main_stream(500);
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = qemu.accept().unwrap();
    until(|| rig.list(A)["running"][0]["phase"] == "active");
    for service in [a, b] {
        let (status, said) = service.terminates();
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains("1 migrations go on without it"), "{said}");
    }
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    drop((source, destination));
    // A service that starts later knows the outcome.
    until(|| rig.carriers_are_gone());
    let _a = rig.start(A);
    assert_eq!(rig.ended(A, 1)["status"], "completed");
}

/// The source QEMU cancels: the destination QEMU sees the end at once, and the door is free.
#[test]
fn a_cancel_ends_the_migration_at_both_and_the_next_one_works() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let (source, destination, _) = under_way(&rig, 49152);
    drop(source);
    assert_eq!(read_all(&destination), b"");
    for (host, words) in [(A, "source QEMU ended"), (B, "source QEMU ended")] {
        let record = rig.ended(host, 1);
        assert_eq!((&record["status"], &record["reached"]), (&"failed".into(), &"active".into()));
        assert!(record["cause"].as_str().unwrap().contains(words), "{record}");
    }
    migrates(&rig, A, 49152);
}

/// The destination QEMU dies while the source QEMU is in a write that nobody takes: the source QEMU
/// is told within 2 s.
#[test]
fn a_destination_qemu_that_dies_ends_the_source_s_write_at_once() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    // More than all buffers take: 1 MiB pieces for ever.
    let mut writing = source.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        writing.write_all(&rig::main_stream(2000)[..1 << 20]).unwrap();
        let page = vec![0xa5; 1 << 20];
        while writing.write_all(&page).is_ok() {}
        Instant::now()
    });
    let (destination, _) = qemu.accept().unwrap();
    drop(qemu);
    read_exactly(&destination, 1000);
    let until_stuck = || {
        let before = rig.list(A)["running"][0]["plain"].as_u64();
        std::thread::sleep(Duration::from_millis(500));
        before.is_some() && before == rig.list(A)["running"][0]["plain"].as_u64()
    };
    until(until_stuck);
    drop(destination);
    let failed = writer.join().unwrap();
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "failed", "{record}");
    // The source's own end follows from the same event.
    let ended = record["ended"].as_u64().unwrap();
    let ago = u64::try_from(failed.elapsed().as_millis()).unwrap();
    let failed = rig::now() - ago;
    assert!(failed <= ended + 2000, "QEMU was told {} ms after the end", failed - ended);
}

#[test]
fn a_host_that_cannot_be_reached_is_a_failure_at_once_with_its_cause() {
    let rig = Rig::new("");
    let mut a = rig.start(A);
    let source = rig.connect_as_qemu(A, 49152);
    (&source).write_all(b"QEVM\0\0\0\x03").unwrap();
    assert!(is_reset(&source));
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "failed");
    assert!(record["cause"].as_str().unwrap().contains("cannot connect to"), "{record}");
    assert_eq!(record["reached"], "opening");
    a.says("to b (port 49152) failed (phase opening): cannot connect to");
}

#[test]
fn a_host_that_cannot_be_reached_is_migrated_to_in_the_clear_where_that_is_configured() {
    let rig = Rig::new("unreachable = \"forward\"\n");
    let _a = rig.start(A);
    // At the host's address, not at its door.
    let qemu = TcpListener::bind((rig.address(B), 49153)).unwrap();
    let source = rig.connect_as_qemu(A, 49153);
    let stream = rig::main_stream(50);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = qemu.accept().unwrap();
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    drop((source, destination));
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "forwarded", "{record}");
    assert!(record["cause"].as_str().unwrap().contains("cannot connect to"), "{record}");
}

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
        let server = (!says.is_empty()).then(|| rig.listen_as_qemu(B, 49152));
        let silent = rig.connect_as_qemu(A, 49152);
        if let Some(server) = server {
            server.accept().unwrap().0.write_all(says).unwrap();
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
    let (there, _) = server.accept().unwrap();
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
    let theirs = rig.listen_as_qemu(B, 49152);
    let client = rig.connect_as_qemu(A, 49152);
    theirs.accept().unwrap().0.write_all(b"220 welcome").unwrap();
    let (mut there, _) = server.accept().unwrap();
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
    let (there, _) = server.accept().unwrap();
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
    // As QEMU does for a migration without multifd.
    rustix::net::listen(&qemu, 1).unwrap();
    let source = rig.connect_as_qemu(A, 49152);
    // Twice as long as a connection may be silent to a place of which nothing is known.
    std::thread::sleep(Duration::from_secs(4));
    qemu.set_nonblocking(true).unwrap();
    let looked = qemu.accept().unwrap_err();
    assert_eq!(looked.kind(), std::io::ErrorKind::WouldBlock);
    qemu.set_nonblocking(false).unwrap();
    let stream = rig::main_stream(50);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = qemu.accept().unwrap();
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    drop((source, destination));
    let record = rig.ended(A, 1);
    assert_eq!((&record["what"], &record["status"]), (&"vm".into(), &"completed".into()));
    let (_, said) = b.terminates();
    assert!(!said.contains("turned a connection away"), "a question is no stranger: {said}");
}

#[test]
fn a_disk_s_client_does_not_wait_for_its_silence_to_last() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let server = rig.listen_as_qemu(B, 49153);
    // As QEMU does for its NBD server.
    rustix::net::listen(&server, 4096).unwrap();
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if allowed.trim().parse::<u32>().unwrap() <= 512 {
        return println!("skipped: net.core.somaxconn is {}: both look alike", allowed.trim());
    }
    // On a busy machine some take longer; without the answer of the other host, all do.
    until(|| {
        let begin = Instant::now();
        let client = rig.connect_as_qemu(A, 49153);
        let (mut there, _) = server.accept().unwrap();
        let took = begin.elapsed();
        there.write_all(b"NBDMAGIC").unwrap();
        assert_eq!(read_exactly(&client, 8), b"NBDMAGIC");
        took < Duration::from_secs(2)
    });
}

/// Another socket may listen there since the question, and an older source does not ask.
#[test]
fn a_qemu_that_awaits_a_vm_gets_no_silent_connection() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    std::thread::sleep(Duration::from_secs(1));
    rustix::net::listen(&qemu, 1).unwrap();
    assert!(is_reset(&source));
    let record = rig.ended(A, 1);
    assert!(record["cause"].as_str().unwrap().contains("a QEMU awaits a VM at"), "{record}");
    qemu.set_nonblocking(true).unwrap();
    assert_eq!(qemu.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

/// The bytes that a disk's connection carries in this test: blocks with something and zeros.
fn blocks() -> Vec<u8> {
    let byte = |at: u32| if at % 5000 < 2500 { (at / 7).to_le_bytes()[0] } else { 0 };
    (0..8 << 20).map(byte).collect()
}

#[test]
fn a_disk_s_connection_goes_beside_its_migration_and_outlives_services_and_links() {
    let rig = Rig::with_proxy("codec = \"zstd\"\n");
    let (mut a, mut b) = (rig.start(A), rig.start(B));
    let server = rig.listen_as_qemu(B, 49153);
    let client = rig.connect_as_qemu(A, 49153);
    let (mut there, _) = server.accept().unwrap();
    there.write_all(b"NBDMAGICIHAVEOPT").unwrap();
    assert_eq!(read_exactly(&client, 16), b"NBDMAGICIHAVEOPT");
    // A second disk at the same port, and the VM.
    let second = rig.connect_as_qemu(A, 49153);
    let (mut second_there, _) = server.accept().unwrap();
    second_there.write_all(b"NBDMAGIC").unwrap();
    assert_eq!(read_exactly(&second, 8), b"NBDMAGIC");
    migrates(&rig, A, 49152);
    let blocks = blocks();
    let (half, rest) = blocks.split_at(blocks.len() / 2);
    let writer = rig::write_all(&client, half.to_vec());
    assert!(read_exactly(&there, half.len()) == half, "a wrong byte");
    writer.join().unwrap();
    a.kill();
    b.kill();
    rig.cut_links();
    let (_a, _b) = (rig.start(A), rig.start(B));
    let writer = rig::write_all(&client, rest.to_vec());
    assert!(read_exactly(&there, rest.len()) == rest, "a wrong byte");
    writer.join().unwrap();
    there.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&client, 6), b"answer");
    drop((client, second));
    assert_eq!((read_all(&there), read_all(&second_there)), (Vec::new(), Vec::new()));
    drop((there, second_there));
    for host in [A, B] {
        rig.ended(host, 3);
        let status = rig.status(host);
        let disks: Vec<_> = status["history"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|record| record["what"] == "disk")
            .collect();
        assert_eq!(disks.len(), 2, "{status}");
        for record in &disks {
            assert_eq!(record["status"], "completed", "{record}");
            assert_eq!((&record["port"], &record["holds-port"]), (&49153.into(), &false.into()));
        }
        let sent = |record: &&&serde_json::Value| record["plain"].as_u64().unwrap();
        let record = disks.iter().max_by_key(sent).unwrap();
        let (plain, network) = (sent(&record), record["transferred"].as_u64().unwrap());
        assert!(plain >= blocks.len() as u64 && network * 2 < plain, "{record}");
    }
}

#[test]
fn a_killed_carrier_of_a_disk_ends_its_connection_at_both() {
    for victim in [A, B] {
        let rig = Rig::new("resume_timeout = 1\n");
        let _services = (rig.start(A), rig.start(B));
        let server = rig.listen_as_qemu(B, 49153);
        let client = rig.connect_as_qemu(A, 49153);
        let (mut there, _) = server.accept().unwrap();
        there.write_all(b"NBDMAGIC").unwrap();
        assert_eq!(read_exactly(&client, 8), b"NBDMAGIC");
        let pid = rig.list(victim)["running"][0]["pid"].as_u64().unwrap();
        let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
        assert!(killed.success());
        assert_eq!((read_all(&client), read_all(&there)), (Vec::new(), Vec::new()));
        drop((client, there));
        for host in [A, B] {
            let record = rig.ended(host, 1);
            assert_eq!((&record["what"], &record["status"]), (&"disk".into(), &"failed".into()));
        }
    }
}

#[test]
fn a_hundred_migrations_leave_the_services_as_they_were() {
    let rig = Rig::new("");
    let services = [rig.start(A), rig.start(B)];
    let mut done = 0;
    let mut migrate = |count: usize| {
        for _ in 0..count {
            migrates(&rig, A, 49152 + u16::try_from(done % 4).unwrap());
            done += 1;
        }
        // The last threads and descriptors go with the last carriers.
        until(|| rig.carriers_are_gone());
        let busiest = done.min(100);
        for host in [A, B] {
            rig.ended(host, busiest);
            assert_eq!(status_of(&rig.status(host), "completed"), busiest);
        }
    };
    // `make test` has fewer.
    let count = if std::env::var_os("PLATEN_QUICK").is_some() { 25 } else { 100 };
    migrate(20);
    let before = services.each_ref().map(|service| figures(service.id()));
    migrate(count);
    for (service, (fds, threads, memory)) in services.iter().zip(before) {
        let now = || figures(service.id());
        // A question about the status may just be ending, now as well as before.
        until(|| now().0 <= fds && now().1 <= threads);
        let grown = now().2.saturating_sub(memory);
        println!("{fds} descriptors, {threads} threads, {memory} KiB and {grown} more");
        assert!(grown < 1024, "{count} migrations cost {grown} KiB: {memory} KiB before");
    }
}

#[test]
fn users_who_may_not_migrate_are_reset() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to connect as another user");
        return;
    }
    let rig = Rig::new("allow_users = [\"23456\"]\n");
    let (mut a, _b) = (rig.start(A), rig.start(B));
    let connect = |user: u32| {
        let connect = || {
            let user = rustix::thread::Uid::from_raw(user);
            // Of this thread only: its sockets are that user's.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            rig.connect_as_qemu(A, 49152)
        };
        std::thread::scope(|scope| scope.spawn(connect).join().unwrap())
    };
    let stranger = connect(12345);
    // The socket reports the reset once: to the write if it comes before that.
    let reset = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    assert!((&stranger).write_all(UNCONFIRMED).is_err_and(reset) || is_reset(&stranger));
    a.says("user 12345 may not migrate");
    assert_eq!(rig.status(A)["refused"], 1);
    // One who may: the migration begins, without a return path, and its end comes by itself.
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = connect(23456);
    (&source).write_all(UNCONFIRMED).unwrap();
    source.shutdown(Shutdown::Write).unwrap();
    let (destination, _) = qemu.accept().unwrap();
    assert_eq!(read_exactly(&destination, UNCONFIRMED.len()), UNCONFIRMED);
    drop(destination);
    assert_eq!(read_all(&source), b"");
    assert_eq!(rig.ended(A, 1)["status"], "unconfirmed");
}

/// `platen relay` of this version speaks to a service by the name of a door, and to no other
/// target.
#[test]
fn only_the_ports_of_the_doors_can_be_asked_for() {
    let rig = Rig::new("");
    let _b = rig.start(B);
    for (name, words) in [
        ("door:80", "no door of this host"),
        ("door:49160", "door:49152 to door:49155"),
        ("vm", "no door of this host"),
    ] {
        let (status, said) = rig.relay_to(B, name).ends();
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains(words), "{name}: {said}");
    }
    assert_eq!(rig.status(B)["running"].as_array().unwrap().len(), 0);
    let mut relay = rig.relay_to(B, "door:49152");
    relay.says("listening on");
    // One session for a port.
    let (status, said) = rig.relay_to(B, "door:49152").ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("port 49152 of this host is in progress"), "{said}");
}

#[test]
fn a_host_with_another_ca_opens_nothing() {
    let rig = Rig::new("");
    rig.make_another_ca(A);
    let _services = (rig.start(A), rig.start(B));
    let source = rig.connect_as_qemu(A, 49152);
    (&source).write_all(b"QEVM\0\0\0\x03").unwrap();
    assert!(is_reset(&source));
    let record = rig.ended(A, 1);
    assert!(record["cause"].as_str().unwrap().contains("certificate"), "{record}");
    assert_eq!(rig.status(B)["running"].as_array().unwrap().len(), 0);
    assert_eq!(rig.status(B)["history"].as_array().unwrap().len(), 0);
}

#[test]
fn a_killed_carrier_is_in_the_history_and_frees_the_door() {
    let rig = Rig::new("resume_timeout = 2\n");
    let _services = (rig.start(A), rig.start(B));
    let (source, destination, _) = under_way(&rig, 49152);
    let pid = rig.list(A)["running"][0]["pid"].as_u64().unwrap();
    let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
    // The source QEMU sees its socket close and goes on; nothing was committed.
    assert_eq!(read_all(&source), b"");
    let record = rig.ended(A, 1);
    assert!(record["cause"].as_str().unwrap().contains("killed"), "{record}");
    drop(source);
    // The destination waits for links, and asks nobody.
    until(|| rig.list(B)["running"].as_array().unwrap().is_empty());
    drop(destination);
    migrates(&rig, A, 49152);
}

#[test]
fn a_second_service_is_refused_and_a_service_manager_hears() {
    let rig = Rig::new("");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(WATCHDOG)).unwrap();
    let _a = rig.start_with(A, &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let mut heard = Vec::new();
    while !heard.contains(&"WATCHDOG=1".to_owned()) {
        let mut bytes = [0; 100];
        let got = manager.recv(&mut bytes).unwrap();
        heard.push(String::from_utf8_lossy(&bytes[..got]).into_owned());
    }
    assert_eq!(heard[0], "READY=1");
    let (status, said) = rig.spawn(A, &[]).ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("another process listens there"), "{said}");
}

#[test]
fn commands_about_a_service_that_does_not_run_say_so() {
    let rig = Rig::new("");
    let (code, said) = rig.command(A, &["list"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("it is not served"), "{said}");
    let (code, said) = rig.command(A, &["host", "status"]);
    assert_eq!((code, said.contains("it is not served")), (Some(1), true), "{said}");
    let _a = rig.start(A);
    let (code, said) = rig.command(A, &["host", "status"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("host a: 4 doors"), "{said}");
}

#[test]
fn configurations_are_checked_and_qemu_conf_is_written() {
    let rig = Rig::new("");
    let config = rig.config();
    let run = |args: &[&str]| rig::run(args);
    let (code, said) = run(&["config", "check", &config]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("in order"), "{said}");
    std::fs::write(rig.at("bad.toml"), "speed = 1\n").unwrap();
    let (code, said) = run(&["config", "check", rig.at("bad.toml").to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(said.contains("bad.toml") && said.contains("speed"), "{said}");

    let conf = rig.at("qemu.conf");
    std::fs::write(&conf, "user = \"root\"\n").unwrap();
    let conf_path = conf.to_str().unwrap().to_owned();
    let doors = |what: &str| {
        let name = ["--config", &config, "--name", "b", "--qemu-conf", &conf_path];
        run(&[&["host", "doors", what][..], &name].concat())
    };
    let (code, said) = doors("on");
    assert_eq!((code, said.contains("Restart libvirtd")), (Some(0), true), "{said}");
    let text = std::fs::read_to_string(&conf).unwrap();
    assert!(text.contains(&format!("migration_address = \"{}\"\n", rig.door(B))), "{text}");
    assert!(doors("on").1.contains("as it should be"));
    assert!(doors("off").1.contains("Restart libvirtd"));
    assert_eq!(std::fs::read_to_string(&conf).unwrap(), "user = \"root\"\n");
}

/// A connection of the destination's carrier to a QEMU that is not there.
#[test]
fn a_destination_qemu_that_does_not_listen_is_a_failure_with_its_cause() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let source = rig.connect_as_qemu(A, 49154);
    let stream = rig::main_stream(10);
    let writer = rig::write_all(&source, stream);
    let mut byte = [0; 1];
    let end = { &source }.read(&mut byte);
    assert!(!matches!(end, Ok(1)), "{end:?}");
    drop(writer.join());
    let record = rig.ended(A, 1);
    let cause = record["cause"].as_str().unwrap();
    assert!(cause.contains("cannot connect to the destination QEMU"), "{cause}");
    let _ = TcpStream::shutdown(&source, Shutdown::Both);
}
