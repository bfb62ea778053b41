use super::*;
use std::os::unix::fs::PermissionsExt;

#[test]
fn only_unix_paths_that_fit_are_accepted() {
    assert!("unix:/run/x.sock".parse::<UnixAddress>().is_ok());
    assert!("/run/x.sock".parse::<UnixAddress>().unwrap_err().contains("unix:PATH"));
    assert!("unix:".parse::<UnixAddress>().is_err());
    assert!(format!("unix:/{}", "x".repeat(107))
        .parse::<UnixAddress>()
        .unwrap_err()
        .contains("108"));
}

#[test]
fn a_file_is_refused_a_stale_socket_replaced_and_a_live_one_preserved() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let file = UnixAddress::from(file);
    let said = file.listen().unwrap_err().to_string();
    assert!(said.contains("give a path that does not exist yet"), "{said}");
    assert!(!said.contains("QEMU"), "{said}");
    assert!(matches!(file.connect(Duration::ZERO, || false), Err(RelayError::NotASocket { .. })));

    let path = dir.path().join("sock");
    drop(UnixListener::bind(&path).unwrap());
    let address = UnixAddress::from(path.clone());
    let live = address.listen().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(address.listen().unwrap_err().to_string().contains("listen"));
    drop(live);
    assert!(!path.exists());
}

/// As a service that ran as another user has left it, in a folder in which each user removes only
/// the own files.
#[test]
fn a_dead_socket_of_another_user_is_named_with_its_owner_and_what_to_do() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root, to act as another user");
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let path = dir.path().join("sock");
    drop(UnixListener::bind(&path).unwrap());
    // The other user may connect, or may not.
    for mode in [0o777, 0o600] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let address = UnixAddress::from(path.clone());
        let listen = move || {
            let user = rustix::thread::Uid::from_raw(12345);
            // Of this thread only.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            format!("{:?}", address.listen().unwrap_err())
        };
        let said = std::thread::spawn(listen).join().unwrap();
        assert!(said.contains("user 0 has made") && said.contains("is user 12345"), "{said}");
        assert!(said.contains(&format!("rm {}", path.display())), "{said}");
    }
    assert!(path.exists());
}

/// A stopped server with a full backlog.
#[test]
fn a_listener_with_a_full_backlog_is_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let hung = address.listen().unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        match address.connect_now() {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 10_000, "a queue without an end");
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let said = format!("{:?}", address.listen().unwrap_err());
    assert!(said.contains("takes no connections"), "{said}");
    drop((hung, waiting));
    assert!(!address.path().exists());
}

#[test]
fn a_full_backlog_is_awaited_until_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let _hung = address.listen().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = address.connect_now() {
        waiting.push(stream);
    }
    let error = address.connect(Duration::from_millis(100), || false).unwrap_err();
    let said = format!("{error:?}");
    assert!(said.contains("nobody accepts them"), "{said}");
}

/// A destination QEMU that comes up after the session has ended must not get a connection.
#[test]
fn no_connection_is_made_after_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let there = address.listen().unwrap();
    there.listener.set_nonblocking(true).unwrap();
    address.connect(Duration::from_secs(60), || true).unwrap_err();
    assert_eq!(there.listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_socket_file_that_was_replaced_is_not_ours() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let first = address.listen().unwrap();
    assert!(first.is_ours());
    fs::remove_file(address.path()).unwrap();
    assert!(!first.is_ours());
    let _second = address.listen().unwrap();
    assert!(!first.is_ours());
}

#[test]
fn the_socket_of_another_process_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let first = address.listen().unwrap();
    fs::remove_file(address.path()).unwrap();
    let second = address.listen().unwrap();
    drop(first);
    assert!(address.path().exists(), "the second one's");
    address.connect_now().unwrap();
    drop(second);
    assert!(!address.path().exists());
}

#[test]
fn of_many_concurrent_binds_of_a_dead_socket_one_listens() {
    let dir = tempfile::tempdir().unwrap();
    let address = UnixAddress::from(dir.path().join("sock"));
    let together = std::sync::Barrier::new(4);
    for _ in 0..500 {
        drop(UnixListener::bind(address.path()).unwrap());
        let listen = || {
            together.wait();
            address.listen()
        };
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(listen)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all.iter().filter(|one| one.is_ok()).count(), 1, "{all:?}");
        address.connect_now().unwrap();
    }
}

#[test]
fn a_path_that_is_too_long_is_reported_with_its_length() {
    let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
    let error = UnixAddress::from(long).listen().unwrap_err();
    let RelayError::Listen { source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source.to_string(), "its path has 205 bytes, allowed are 107");
}
