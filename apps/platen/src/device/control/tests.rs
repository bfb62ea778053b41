use super::*;
use std::os::unix::net::UnixListener;

#[test]
fn a_folder_that_another_user_owns_or_may_write_to_is_refused_with_the_reason() {
    let check = |owner, mode| {
        let checked = check_owner(Path::new("/x"), (owner, mode), 1000);
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(check(1001, 0o40700).contains("belongs to user 1001, and this is user 1000"));
    assert!(check(1000, 0o40777).contains("(mode 777)"));
    assert!(check(1000, 0o40770).contains("chmod go-w"));
    for (owner, mode) in [(1000, 0o40700), (1000, 0o40755), (0, 0o40755), (0, 0o41777)] {
        assert_eq!(check(owner, mode), "");
    }
}

/// `platen host` runs as a user of its own, and has its folders in root's.
#[test]
fn all_may_pass_through_a_shared_folder_whoever_has_made_it() {
    let above = tempfile::tempdir().unwrap();
    let mode = |folder: &Path| std::fs::metadata(folder).unwrap().mode() & 0o777;
    let folder = above.path().join("platen");
    make(&folder, false).unwrap();
    assert_eq!(mode(&folder), 0o700);
    make(&folder, true).unwrap();
    assert_eq!(mode(&folder), 0o711);
    // A mode that an administrator has set stays.
    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    make(&folder, true).unwrap();
    assert_eq!(mode(&folder), 0o755);
}

#[test]
fn a_client_that_sends_slowly_has_no_more_time_than_others() {
    let folder = tempfile::tempdir().unwrap();
    let listening = listen(folder.path(), "slow").unwrap();
    let listener = listening.listener.try_clone().unwrap();
    let control = start(listener, |_| Some("{}".to_owned())).unwrap();
    let path = address(folder.path(), "slow").path().to_owned();
    let trickle = UnixStream::connect(&path).unwrap();
    let (begun, mut sent) = (Instant::now(), 0);
    // More often than the timeout, and for so long that a busy machine gives the server a CPU.
    while (&trickle).write_all(b"x").is_ok() && sent < 600 {
        thread::sleep(PATIENCE / 2);
        sent += 1;
    }
    assert!(sent < 600, "it was read for {:?}", begun.elapsed());
    // The other one's end is no reason to wait; a machine that stands still is.
    let answers = std::iter::repeat_with(|| ask(&path, "stat")).take(20);
    assert_eq!(answers.flatten().next().unwrap(), "{}\n");
    drop((control, listening));
    let said = ask(&path, "stat").unwrap_err().to_string();
    assert!(said.starts_with("it is not served: there is no "), "{said}");
    drop(UnixListener::bind(&path).unwrap());
    let said = ask(&path, "stat").unwrap_err().to_string();
    assert!(said.starts_with("it is not served: no process listens on "), "{said}");
}

/// The thread that reads gets no CPU until the deadline is over.
#[test]
fn a_line_that_came_in_time_is_read_late_and_half_a_line_is_not_waited_for() {
    for (sent, read) in [("stat\n", Ok("stat\n")), ("sta", Err(ErrorKind::TimedOut))] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(sent.as_bytes()).unwrap();
        let line = read_line(&ours, QUESTION, Instant::now());
        assert_eq!(line.as_deref().map_err(|error| error.kind()), read);
    }
}

/// A server ends the connection of a client that got no CPU between its connection and its
/// request.
#[test]
fn a_server_that_ends_the_connection_is_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("impatient.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        for _ in 1..ATTEMPTS {
            drop(listener.accept().unwrap());
        }
        let mut question = [0; 5];
        // The thread may get no CPU for as long as a client waits.
        loop {
            let stream = listener.accept().unwrap().0;
            (&stream).read_exact(&mut question).unwrap();
            if (&stream).write_all(b"{}\n").is_ok() {
                break;
            }
        }
        (listener, question)
    });
    let answers = std::iter::repeat_with(|| ask(&path, "stat")).take(20);
    assert_eq!(answers.flatten().next().unwrap(), "{}\n");
    let (listener, question) = server.join().unwrap();
    assert_eq!(&question, b"stat\n");
    let server = thread::spawn(move || {
        (0..ATTEMPTS).for_each(|_| drop(listener.accept().unwrap()));
        listener
    });
    let said = ask(&path, "stat").unwrap_err().to_string();
    assert!(said.contains("has not answered") || said.contains("within 5 s"), "{said}");
    drop(UnixStream::connect(&path));
    drop(server);
}

#[test]
fn a_silent_or_incomplete_answer_ends_by_a_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hung.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let silent = ask(&path, "stat").unwrap_err();
    assert_eq!(silent.to_string(), "it does not answer within 5 s");
    assert!(silent.context("as its callers say").is::<Silent>());
    // A server that sends a byte now and then.
    let trickles = thread::spawn(move || {
        let _first = listener.accept().unwrap();
        let (stream, _) = listener.accept().unwrap();
        // Until it is heard no more, which takes a busy machine longer.
        for _ in 0..3000 {
            if (&stream).write_all(b"x").is_err() {
                return true;
            }
            thread::sleep(ANSWERED / 50);
        }
        false
    });
    let said = ask(&path, "stat").unwrap_err().to_string();
    assert_eq!(said, "it does not answer within 5 s");
    assert!(trickles.join().unwrap(), "it was heard out");
}

#[test]
fn each_reason_for_a_missing_control_socket_has_its_own_message() {
    let folder = tempfile::tempdir().unwrap();
    let first = listen(folder.path(), "one").unwrap();
    let said = format!("{:#}", listen(folder.path(), "one").unwrap_err());
    assert!(said.starts_with("device one is served already: "), "{said}");
    drop(first);
    let long = folder.path().join("x".repeat(100));
    let said = format!("{:#}", listen(&long, "one").unwrap_err());
    assert!(said.starts_with("device one cannot have its control socket: "), "{said}");
    assert!(said.contains("bytes, allowed are 107"), "{said}");
}
