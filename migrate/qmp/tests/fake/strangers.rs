//! Sockets behind which there is no monitor.

use super::*;

#[test]
fn an_answer_that_is_not_qmp_is_named() {
    let fake = Fake::new(|listener| {
        let mut peer = Peer::accept(listener);
        peer.say("QEMU 7.2.22 monitor - type 'help' for more information");
        peer.rest();
    });
    let error = fake.connect(LONG).unwrap_err().to_string();
    assert!(error.contains("does not speak QMP (it says \"QEMU 7.2.22 monitor"), "{error}");
    assert!(error.contains("not that of -monitor"), "{error}");

    for garbage in ["\0\x1b[31mno", "[]", "{\"neither\": 1}", "{\"error\": 5}", "{\"event\": {}}"] {
        let fake = Fake::negotiated(move |mut peer| {
            peer.hear();
            peer.say(garbage);
            peer.rest();
        });
        let mut qmp = fake.connect(LONG).unwrap();
        let error = qmp.execute("cont", None).unwrap_err();
        assert!(matches!(error, QmpError::Garbage { .. }), "{garbage:?}: {error}");
        assert!(error.to_string().bytes().all(|byte| (32..127).contains(&byte)), "{error:?}");
        drop(qmp);
        fake.thread.join().unwrap();
    }
}

#[test]
fn a_line_without_end_is_cut_off() {
    let fake = Fake::negotiated(|mut peer| {
        peer.hear();
        let piece = vec![b'['; 1 << 20];
        while peer.stream.write_all(&piece).is_ok() {}
    });
    let mut qmp = fake.connect(LONG).unwrap();
    let error = qmp.execute("x", None).unwrap_err();
    assert!(matches!(error, QmpError::LineTooLong { limit: 16_777_216, .. }), "{error}");
    drop(qmp);
    fake.thread.join().unwrap();

    // The JSON reader refuses deep nesting within the limit, before it exhausts the stack.
    let fake = Fake::negotiated(|mut peer| {
        peer.hear();
        peer.say(&"[".repeat(1 << 20));
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    assert!(matches!(qmp.execute("x", None).unwrap_err(), QmpError::Garbage { .. }));
}

#[test]
fn a_silent_peer_differs_from_a_missing_one() {
    let fake = Fake::new(|listener| Peer::accept(listener).rest());
    let error = fake.connect(SHORT).unwrap_err().to_string();
    assert!(error.contains("no QMP greeting") && error.contains("one client at a time"), "{error}");
    fake.thread.join().unwrap();

    // No process accepts, and the socket's backlog fills: connecting must not hang either.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("full.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let start = Instant::now();
    let filler = thread::spawn({
        let path = path.clone();
        move || {
            let socket = || {
                rustix::net::socket_with(
                    rustix::net::AddressFamily::UNIX,
                    rustix::net::SocketType::STREAM,
                    rustix::net::SocketFlags::NONBLOCK,
                    None,
                )
                .unwrap()
            };
            let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
            let mut held = Vec::new();
            loop {
                let next = socket();
                if rustix::net::connect(&next, &address).is_err() || held.len() == 10_000 {
                    return held;
                }
                held.push(next);
            }
        }
    });
    let held = filler.join().unwrap();
    assert!(held.len() < 10_000, "the queue never filled");
    let error = Qmp::connect(&path, SHORT).unwrap_err();
    assert!(matches!(error, QmpError::NoGreeting { .. }), "{error}");
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_path_that_is_no_socket_is_an_error_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = Qmp::connect(&missing, SHORT).unwrap_err().to_string();
    assert!(error.contains("no monitor socket at") && error.contains("-qmp unix:"), "{error}");

    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [&file, &dir.path().to_owned()] {
        let error = Qmp::connect(path, SHORT).unwrap_err();
        assert!(matches!(error, QmpError::NotASocket { .. }), "{error}");
    }

    let dead = dir.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    let error = Qmp::connect(&dead, SHORT).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error}");
    assert!(error.to_string().contains("is that QEMU still running"), "{error}");
}
