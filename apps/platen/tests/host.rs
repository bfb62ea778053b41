//! `platen host` as processes: two services on one machine, and made QEMUs at their doors.

#[path = "host/commands.rs"]
mod commands;
#[path = "host/disks.rs"]
mod disks;
#[path = "host/ports.rs"]
mod ports;
#[path = "host/rig.rs"]
mod rig;
#[path = "host/silent.rs"]
mod silent;

use rig::{
    figures, finish, is_reset, migrates, read_all, read_exactly, status_of, under_way, until, Rig,
    A, B, SHUT_OK, UNCONFIRMED,
};
use std::io::Write;
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
    let destinations: Vec<_> = qemus.iter().map(|qemu| rig.accept(qemu).0).collect();
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
    // As QEMU does for so many channels.
    rustix::net::listen(&qemu, 3).unwrap();
    let source = rig.connect_as_qemu(A, 49153);
    let sockets: Vec<_> = channels.iter().map(|_| rig.connect_as_qemu(A, 49153)).collect();
    let mut writers = vec![rig::write_all(&source, main.clone())];
    for (socket, bytes) in sockets.iter().zip(&channels) {
        writers.push(rig::write_all(socket, bytes.clone()));
    }
    let (destination, _) = rig.accept(&qemu);
    let readers: Vec<_> = channels
        .iter()
        .map(|_| {
            let (socket, _) = rig.accept(&qemu);
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
    let (destination, _) = rig.accept(&qemu);
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
    until(|| rig.carriers_are_gone());
    rig.opens_all_doors(A);
    migrates(&rig, A, 49152);
}

/// `max_bandwidth_host` holds for the migrations of a service and of the one before it together:
/// their processes map the same memory.
#[test]
fn the_migrations_of_a_former_service_share_the_limit_of_the_host() {
    let rig = Rig::new("max_bandwidth_host = 100_000_000\n");
    let (mut a, _b) = (rig.start(A), rig.start(B));
    let first = under_way(&rig, 49152);
    a.kill();
    let _a = rig.start(A);
    let second = under_way(&rig, 49153);
    let list = rig.list(A);
    let memory: Vec<_> = list["running"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| shared_memory(record["pid"].as_u64().unwrap()))
        .collect();
    assert_eq!((memory.len(), memory[0].len()), (2, 1), "{memory:?}");
    assert_eq!(memory[0], memory[1]);
    for ends in [first, second] {
        rig::finish_under_way(ends);
    }
}

/// Device and inode of the memory that the process shares with others by writing.
fn shared_memory(pid: u64) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let shared = maps.lines().filter(|line| line.contains(" rw-s ") && line.contains("turns"));
    shared.map(|line| line.split_whitespace().skip(3).take(2).collect()).collect()
}

#[test]
fn a_service_that_is_told_to_end_ends_no_migration() {
    let rig = Rig::new("");
    let (a, b) = (rig.start(A), rig.start(B));
    let stream = rig::main_stream(500);
    let qemu = rig.listen_as_qemu(B, 49152);
    let source = rig.connect_as_qemu(A, 49152);
    let writer = rig::write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
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
/// is told within 2 s. On a busy machine this test may see that later; without the message it never
/// does.
#[test]
fn a_destination_qemu_that_dies_ends_the_source_s_write_at_once() {
    let late: Vec<_> = (0..5).map(|_| told_after_the_end()).take_while(|ms| *ms > 2000).collect();
    assert!(late.len() < 5, "QEMU was told {late:?} ms after the end");
}

/// How long after the migration's end the source QEMU has been told, ms.
fn told_after_the_end() -> u64 {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let qemu = rig.listen_as_qemu(B, 49152);
    // Made before: a connection that is silent for long is taken for a disk's.
    let (beginning, page) = (rig::main_stream(2000), vec![0xa5; 1 << 20]);
    let source = rig.connect_as_qemu(A, 49152);
    // More than all buffers take: 1 MiB pieces for ever.
    let mut writing = source.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        writing.write_all(&beginning[..1 << 20]).unwrap();
        while writing.write_all(&page).is_ok() {}
        Instant::now()
    });
    let (destination, _) = rig.accept(&qemu);
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
    failed.saturating_sub(ended)
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

/// Its service accepts connections and gets no CPU for its half of TLS.
#[test]
fn a_host_that_is_too_busy_to_answer_is_asked_again_and_says_so_once() {
    let rig = Rig::with_proxy("");
    let (a, _b) = (rig.start(A), rig.start(B));
    rig.leave_unanswered(2);
    migrates(&rig, A, 49152);
    assert_eq!(rig.ended(A, 1)["status"], "completed");
    assert_eq!(rig.ended(B, 1)["status"], "completed");
    let (_, said) = a.terminates();
    assert_eq!(said.matches("waiting up to 30 s for it to answer").count(), 1, "{said}");
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
    let (destination, _) = rig.accept(&qemu);
    finish(&source, &destination, &stream);
    writer.join().unwrap();
    drop((source, destination));
    let record = rig.ended(A, 1);
    assert_eq!(record["status"], "forwarded", "{record}");
    assert!(record["cause"].as_str().unwrap().contains("cannot connect to"), "{record}");
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
    // Threads that overlap as never before take memory of their own from the allocator, once; a
    // leak costs memory in every round.
    for _ in 0..8 {
        let before = services.each_ref().map(|service| figures(service.id()));
        migrate(count);
        let mut most = 0;
        for (service, (fds, threads, memory)) in services.iter().zip(before) {
            let now = || figures(service.id());
            // A question about the status may just be ending, now as well as before.
            until(|| now().0 <= fds && now().1 <= threads);
            let grown = now().2.saturating_sub(memory);
            println!("{fds} descriptors, {threads} threads, {memory} KiB and {grown} more");
            most = most.max(grown);
        }
        if most < 1024 {
            return;
        }
    }
    panic!("{count} migrations cost 1024 KiB or more in each of eight rounds");
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
    let (destination, _) = rig.accept(&qemu);
    assert_eq!(read_exactly(&destination, UNCONFIRMED.len()), UNCONFIRMED);
    drop(destination);
    assert_eq!(read_all(&source), b"");
    assert_eq!(rig.ended(A, 1)["status"], "unconfirmed");
}

/// Any user may listen at a port of a door address that no QEMU has.
#[test]
fn a_process_of_a_user_who_may_not_migrate_gets_no_byte_of_a_vm() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to listen as another user");
        return;
    }
    let rig = Rig::new("allow_users = [\"23456\"]\n");
    let (_a, _b) = (rig.start(A), rig.start(B));
    let listen = |user: u32| {
        let listen = || {
            let user = rustix::thread::Uid::from_raw(user);
            // Of this thread only: its sockets are that user's.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            rig.listen_as_qemu(B, 49152)
        };
        std::thread::scope(|scope| scope.spawn(listen).join().unwrap())
    };
    let stranger = listen(12345);
    let source = rig.connect_as_qemu(A, 49152);
    let _ = (&source).write_all(&rig::main_stream(10));
    stranger.set_nonblocking(true).unwrap();
    until(|| {
        let mut got = Vec::new();
        if let Ok((mut socket, _)) = stranger.accept() {
            socket.set_nonblocking(false).unwrap();
            let _ = std::io::Read::read_to_end(&mut socket, &mut got);
        }
        assert!(got.is_empty(), "it has got {} bytes of the VM", got.len());
        !rig.status(B)["history"].as_array().unwrap().is_empty()
    });
    let cause = rig.ended(B, 1)["cause"].as_str().unwrap().to_owned();
    assert!(cause.contains("user 12345 listens at"), "{cause}");
    drop((source, stranger));
    let qemu = listen(23456);
    let source = rig.connect_as_qemu(A, 49152);
    (&source).write_all(UNCONFIRMED).unwrap();
    let (destination, _) = rig.accept(&qemu);
    assert_eq!(read_exactly(&destination, UNCONFIRMED.len()), UNCONFIRMED);
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

/// A connection of the destination's carrier to a QEMU that is not there.
#[test]
fn a_destination_qemu_that_does_not_listen_is_a_failure_with_its_cause() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let source = rig.connect_as_qemu(A, 49154);
    let stream = rig::main_stream(10);
    let writer = rig::write_all(&source, stream);
    let mut byte = [0; 1];
    let end = rig::read_some(&source, &mut byte);
    assert!(!matches!(end, Ok(1)), "{end:?}");
    drop(writer.join());
    let record = rig.ended(A, 1);
    let cause = record["cause"].as_str().unwrap();
    assert!(cause.contains("cannot connect to the destination QEMU"), "{cause}");
    let _ = TcpStream::shutdown(&source, Shutdown::Both);
}
