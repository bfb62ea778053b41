//! The client against the installed QEMU, if there is one.

use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use qmp::{Qmp, QmpError, Version};
use serde_json::json;

const TIMEOUT: Duration = Duration::from_secs(180);

/// Ends QEMU, whatever the outcome of the test.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only if QEMU has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(socket: &Path, extra: &[&str]) -> Option<Guest> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-machine", "none", "-display", "none", "-nodefaults", "-qmp"]);
    command.arg(format!("unix:{},server=on,wait=off", socket.display())).args(extra);
    match command.stdin(Stdio::null()).spawn() {
        Ok(child) => {
            let guest = Guest(child);
            let deadline = Instant::now() + TIMEOUT;
            while !socket.exists() {
                assert!(Instant::now() < deadline, "QEMU made no socket");
                thread::sleep(Duration::from_millis(20));
            }
            Some(guest)
        }
        Err(error) => {
            println!("skipped: qemu-system-x86_64 cannot be started: {error}");
            None
        }
    }
}

/// Connects to a QEMU that has made its socket, and may not listen on it yet.
fn connect(socket: &Path) -> Qmp {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match Qmp::connect(socket, TIMEOUT) {
            Err(QmpError::Connect { .. }) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result.unwrap(),
        }
    }
}

#[test]
fn a_real_monitor_is_driven() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("qmp.sock");
    let Some(mut guest) = start(&socket, &["-name", "platen test"]) else { return };
    let mut qmp = connect(&socket);
    assert!(qmp.version() >= Version { major: 2, minor: 0, micro: 0 }, "{}", qmp.version());

    let info = qmp.query_migrate().unwrap();
    assert!(info.status() == "none" && info.ram.is_none(), "{info:?}");
    assert!(qmp.query_status().unwrap().running);
    assert_eq!(qmp.query_name().unwrap().as_deref(), Some("platen test"));
    assert_eq!(qmp.query_uuid().unwrap().len(), 36);

    qmp.set_capabilities(&[("events", true), ("return-path", true), ("no-such", false)]).unwrap();
    let error = qmp.set_capabilities(&[("no-such", true)]).unwrap_err();
    assert!(matches!(error, QmpError::NoCapability { .. }), "{error}");
    qmp.set_parameters(json!({ "max-bandwidth": 0, "downtime-limit": 123 })).unwrap();
    let parameters = qmp.query_parameters().unwrap();
    assert_eq!(
        (&parameters["max-bandwidth"], &parameters["downtime-limit"]),
        (&json!(0), &json!(123))
    );

    let error = qmp.execute("no-such-command", None).unwrap_err();
    match error {
        QmpError::Refused { class, desc, .. } => {
            assert_eq!(class, "CommandNotFound");
            assert!(desc.contains("no-such-command"), "{desc}");
        }
        other => panic!("{other}"),
    }
    let error = qmp.set_parameters(json!({ "downtime-limit": -1 })).unwrap_err();
    assert!(matches!(error, QmpError::Refused { .. }), "{error}");

    // One client at a time: a second one is queued and gets no greeting.
    let error = Qmp::connect(&socket, Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, QmpError::NoGreeting { .. }), "{error}");

    qmp.execute("stop", None).unwrap();
    assert_eq!(qmp.poll_event(TIMEOUT).unwrap().map(|event| event.name).as_deref(), Some("STOP"));
    assert!(!qmp.query_status().unwrap().running);

    // A frozen QEMU causes an error within the given time; once it resumes, it is usable again.
    let pid = rustix::process::Pid::from_child(&guest.0);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let error = qmp.execute_within("query-status", None, Duration::from_millis(200)).unwrap_err();
    assert_eq!(error.to_string(), "QEMU did not answer query-status within 0.2 s");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert_eq!(qmp.query_status().unwrap().status, "paused");

    qmp.execute("quit", None).unwrap();
    loop {
        match qmp.poll_event(TIMEOUT) {
            Ok(event) => assert!(event.is_some(), "no end in time"),
            Err(QmpError::Closed { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(guest.0.wait().unwrap().success());
}

#[test]
fn a_migration_is_started_and_its_failure_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from.sock"), dir.path().join("to.sock"));
    let Some(_source) = start(&from, &[]) else { return };
    let Some(_destination) = start(&to, &["-incoming", "defer"]) else { return };
    let mut source = connect(&from);
    let mut destination = connect(&to);
    for qmp in [&mut source, &mut destination] {
        qmp.set_capabilities(&[("events", true)]).unwrap();
    }
    let nowhere = format!("unix:{}", dir.path().join("nowhere").display());
    // Some versions refuse at once, others fail in the background.
    if source.migrate(&nowhere).is_ok() {
        let deadline = Instant::now() + TIMEOUT;
        while source.query_migrate().unwrap().status() != "failed" {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(20));
        }
    }
    let uri = format!("unix:{}", dir.path().join("in.sock").display());
    destination.migrate_incoming(&uri).unwrap();
    source.migrate(&uri).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let info = loop {
        let info = source.query_migrate().unwrap();
        if info.is_over() {
            break info;
        }
        assert!(Instant::now() < deadline, "{info:?}");
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(info.status(), "completed", "{info:?}");
    assert!(info.total_time.is_some() && info.downtime.is_some() && info.ram.is_some(), "{info:?}");
    // QEMU may have answered a moment before it sends the event.
    let mut seen = Vec::new();
    while !seen.iter().any(|status| status == "completed") {
        let event = source.poll_event(TIMEOUT).unwrap().unwrap_or_else(|| panic!("only {seen:?}"));
        seen.extend(event.data["status"].as_str().map(str::to_owned));
    }
    source.migrate_cancel().unwrap();
}

/// The guest's memory: zeros that fill the main socket's buffer, then a packet for a channel that
/// nobody reads. Both QEMU's threads wait in a write.
fn full_of_zeros(path: &Path) {
    const PAGE: [u8; 4096] = [7; 4096];
    let file = std::fs::File::create(path).unwrap();
    file.set_len(MEMORY).unwrap();
    file.write_all_at(&PAGE.repeat(128), 22_500 * PAGE.len() as u64).unwrap();
}

const MEMORY: u64 = 512 << 20;

/// The bytes of `socket` that wait to be read, once they do not become more.
fn stalled(socket: &UnixStream) -> u64 {
    let mut before = 0;
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = rustix::io::ioctl_fionread(socket).unwrap();
        if now == before && now > 0 {
            return now;
        }
        before = now;
    }
}

/// QEMU 7.2 says `failed` when a channel has failed, and crashes at another `migrate` before it has
/// released the others.
#[test]
fn a_migration_that_has_just_failed_is_followed_by_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    full_of_zeros(&path("ram"));
    let backend = format!(
        "memory-backend-file,id=m,size={MEMORY},mem-path={},share=on",
        path("ram").display()
    );
    let machine = ["-machine", "memory-backend=m", "-m", "512", "-object", &backend];
    let Some(_guest) = start(&path("qmp"), &machine) else { return };
    let mut qmp = connect(&path("qmp"));
    qmp.set_capabilities(&[("multifd", true)]).unwrap();
    qmp.set_parameters(json!({ "max-bandwidth": 0, "multifd-channels": 2 })).unwrap();
    let listen = |name: &str| {
        let listener = UnixListener::bind(path(name)).unwrap();
        (listener, format!("unix:{}", path(name).display()))
    };
    let (first, uri) = listen("first");
    qmp.migrate(&uri).unwrap();
    let [main, one, two] = [(); 3].map(|()| first.accept().unwrap().0);
    stalled(&main);
    let (busy, idle) = if stalled(&one) > stalled(&two) { (one, two) } else { (two, one) };
    drop(busy);
    let (deadline, mut main) = (Instant::now() + TIMEOUT, Some(main));
    let mut status = String::new();
    while status != "failed" {
        assert!(Instant::now() < deadline, "{status}");
        if Instant::now() + TIMEOUT / 2 > deadline {
            // The main socket was full before the packet's turn: nothing writes to the channel.
            main = None;
        }
        status = qmp.query_migrate().unwrap().status().to_owned();
    }
    let release = thread::spawn(move || {
        thread::sleep(Duration::from_secs(1));
        // A thread of QEMU may wait in a write to each of them.
        drop((main, idle, first));
    });
    let (_second, uri) = listen("second");
    qmp.migrate(&uri).unwrap();
    release.join().unwrap();
    qmp.migrate_cancel().unwrap();
    qmp.query_status().unwrap();
}
