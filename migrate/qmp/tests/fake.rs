//! The client against a scripted monitor: the lines it sends, and its handling of every reply.

#[path = "fake/strangers.rs"]
mod strangers;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use qmp::{Qmp, QmpError, Timestamp, Version};
use serde_json::{json, Value};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "x"}, "capabilities": ["oob"]}}"#;
const LONG: Duration = Duration::from_secs(300);
const SHORT: Duration = Duration::from_millis(300);

/// A socket in its own directory, and the thread that acts as QEMU on it.
struct Fake {
    path: PathBuf,
    thread: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

/// The fake's end of a connection.
struct Peer {
    lines: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Fake {
    fn new(script: impl FnOnce(&UnixListener) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = thread::spawn(move || script(&listener));
        Self { path, thread, _dir: dir }
    }

    /// Greets and negotiates, then runs `script`.
    fn negotiated(script: impl FnOnce(Peer) + Send + 'static) -> Self {
        Self::new(move |listener| {
            let mut peer = Peer::accept(listener);
            peer.say(GREETING);
            let (command, _) = peer.hear();
            assert_eq!(command["execute"], "qmp_capabilities");
            peer.answer(&command, json!({}));
            script(peer);
        })
    }

    fn connect(&self, timeout: Duration) -> Result<Qmp, QmpError> {
        Qmp::connect(&self.path, timeout)
    }
}

impl Peer {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self { lines: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    fn say(&mut self, line: &str) {
        self.stream.write_all(line.as_bytes()).unwrap();
        self.stream.write_all(b"\r\n").unwrap();
    }

    /// The next command, and its id.
    fn hear(&mut self) -> (Value, u64) {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        let command: Value = serde_json::from_str(&line).unwrap();
        let id = command["id"].as_u64().unwrap();
        (command, id)
    }

    fn answer(&mut self, command: &Value, value: Value) {
        self.say(&json!({ "return": value, "id": command["id"] }).to_string());
    }

    /// Waits until the client hangs up.
    fn rest(mut self) {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap_or(0) > 0 {}
    }
}

#[test]
fn a_command_gets_its_reply_and_events_wait() {
    let fake = Fake::negotiated(|mut peer| {
        let (command, _) = peer.hear();
        assert_eq!(command["execute"], "query-thing");
        assert_eq!(command["arguments"], json!({ "a": [1, "zwei"] }));
        peer.say(
            r#"{"timestamp": {"seconds": 1}, "event": "MIGRATION", "data": {"status": "setup"}}"#,
        );
        peer.say("");
        peer.say(r#"{"event": "STOP"}"#);
        peer.answer(&command, Value::Null);
        peer.say(r#"{"event": "RESUME"}"#);
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    assert_eq!(qmp.version(), Version { major: 7, minor: 2, micro: 22 });
    assert!(qmp.version() < Version { major: 8, minor: 0, micro: 0 });
    let reply = qmp.execute("query-thing", Some(json!({ "a": [1, "zwei"] }))).unwrap();
    assert_eq!(reply, Value::Null);
    let event = qmp.poll_event(Duration::ZERO).unwrap().unwrap();
    assert_eq!((event.name.as_str(), &event.data["status"]), ("MIGRATION", &json!("setup")));
    let whole = Timestamp { seconds: 3, microseconds: 500 };
    assert_eq!(whole.since(event.timestamp), Duration::from_micros(2_000_500));
    assert_eq!(event.timestamp.since(whole), Duration::ZERO);
    assert_eq!(qmp.poll_event(Duration::ZERO).unwrap().unwrap().data, Value::Null);
    assert_eq!(qmp.poll_event(LONG).unwrap().unwrap().name, "RESUME");
    assert_eq!(qmp.poll_event(SHORT).unwrap(), None);
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn a_line_may_come_in_any_pieces() {
    let fake = Fake::negotiated(|mut peer| {
        let (command, _) = peer.hear();
        let reply = json!({ "return": "käse", "id": command["id"] }).to_string() + "\n";
        for byte in reply.bytes() {
            peer.stream.write_all(&[byte]).unwrap();
        }
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    assert_eq!(qmp.execute("x", None).unwrap(), "käse");
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn a_refusal_carries_qemu_s_message() {
    let fake = Fake::negotiated(|mut peer| {
        let (_, id) = peer.hear();
        peer.say(
            &json!({"id": id, "error": {"class": "GenericError", "desc": "There's \"one\""}})
                .to_string(),
        );
        peer.hear();
        peer.say(r#"{"error": {"class": "GenericError", "desc": "Invalid JSON syntax"}}"#);
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    let error = qmp.execute("x", None).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused x: There's \"one\" (GenericError)");
    let error = qmp.execute("y", None).unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused y: Invalid JSON syntax (GenericError)");
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn a_frozen_monitor_is_an_error_and_its_late_reply_is_discarded() {
    let fake = Fake::negotiated(|mut peer| {
        let (slow, _) = peer.hear();
        let (quick, _) = peer.hear();
        peer.answer(&slow, json!("late"));
        peer.answer(&quick, json!("mine"));
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    let start = Instant::now();
    let error = qmp.execute_within("query-migrate", None, SHORT).unwrap_err();
    assert_eq!(error.to_string(), "QEMU did not answer query-migrate within 0.3 s");
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG);
    assert_eq!(qmp.execute("query-status", None).unwrap(), "mine");
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn a_flood_of_events_neither_holds_a_command_nor_fills_memory() {
    let fake = Fake::negotiated(|mut peer| {
        peer.hear();
        let flood = "{\"event\": \"BLOCK_IO_ERROR\"}\n".repeat(1000);
        while peer.stream.write_all(flood.as_bytes()).is_ok() {}
    });
    let mut qmp = fake.connect(LONG).unwrap();
    let start = Instant::now();
    // On a busy machine the flood may be late.
    while qmp.events_dropped() == 0 {
        let error = qmp.execute_within("stop", None, SHORT).unwrap_err();
        assert!(matches!(error, QmpError::TimedOut { .. }), "{error}");
        assert!(start.elapsed() < LONG, "no event is dropped");
    }
    let mut waiting = 0;
    // Only the queue: at most 1024 can be returned without reading on.
    while waiting < 1024 && qmp.poll_event(Duration::ZERO).unwrap().is_some() {
        waiting += 1;
    }
    assert_eq!(waiting, 1024);
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn big_events_are_bounded_in_bytes() {
    let fake = Fake::negotiated(|mut peer| {
        let (command, _) = peer.hear();
        let big = json!({ "event": "BIG", "data": "x".repeat(5 << 20) }).to_string();
        for _ in 0..5 {
            peer.say(&big);
        }
        peer.answer(&command, json!({}));
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    qmp.execute("x", None).unwrap();
    assert_eq!(qmp.events_dropped(), 2);
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn end_of_file_is_closed_whenever_it_comes() {
    let fake = Fake::new(|listener| drop(Peer::accept(listener)));
    let error = fake.connect(LONG).unwrap_err();
    assert!(matches!(error, QmpError::ClosedAtOnce { .. }), "{error}");

    let fake = Fake::negotiated(|mut peer| {
        peer.hear();
        peer.stream.write_all(b"{\"return\"").unwrap();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    let error = qmp.execute("migrate_cancel", None).unwrap_err();
    assert_eq!(error.to_string(), "QEMU closed its monitor during migrate_cancel");
    assert!(matches!(qmp.execute("again", None).unwrap_err(), QmpError::Closed { .. }));
    assert!(matches!(qmp.poll_event(LONG).unwrap_err(), QmpError::Closed { .. }));
}

#[test]
fn events_before_the_end_are_still_delivered() {
    let fake = Fake::negotiated(|mut peer| {
        peer.say(r#"{"event": "SHUTDOWN"}"#);
    });
    let mut qmp = fake.connect(LONG).unwrap();
    assert_eq!(qmp.poll_event(LONG).unwrap().unwrap().name, "SHUTDOWN");
    assert!(matches!(qmp.poll_event(LONG).unwrap_err(), QmpError::Closed { .. }));
}

/// QEMU sends what a client that was killed did not read to the next client, before its greeting.
#[test]
fn messages_for_a_former_client_are_skipped() {
    let fake = Fake::new(|listener| {
        let mut peer = Peer::accept(listener);
        peer.say(r#"{"return": {}, "id": 10}"#);
        peer.say(r#"{"event": "STOP"}"#);
        peer.say(GREETING);
        let (command, _) = peer.hear();
        peer.answer(&command, serde_json::json!({}));
        peer.rest();
    });
    fake.connect(LONG).unwrap();

    let fake = Fake::new(|listener| {
        let mut peer = Peer::accept(listener);
        for _ in 0..1000 {
            peer.say(r#"{"return": {}, "id": 10}"#);
        }
        peer.rest();
    });
    assert!(matches!(fake.connect(LONG).unwrap_err(), QmpError::NotQmp { .. }));
}

#[test]
fn capabilities_are_checked_before_any_is_set() {
    let known = json!([
        { "capability": "multifd", "state": true }, { "capability": "events", "state": false }
    ]);
    let fake = Fake::negotiated(move |mut peer| {
        let (query, _) = peer.hear();
        assert_eq!(query["execute"], "query-migrate-capabilities");
        peer.answer(&query, known.clone());
        // QEMU would abort if multifd were switched off before it has released its channels.
        let replies = [
            ("query-yank", json!([{ "type": "migration" }])),
            ("query-migrate", json!({ "status": "failed" })),
            ("query-yank", json!([{ "type": "chardev", "id": "monitor" }])),
        ];
        for (command, reply) in replies {
            let (query, _) = peer.hear();
            assert_eq!(query["execute"], command);
            peer.answer(&query, reply);
        }
        let (set, _) = peer.hear();
        assert_eq!(set["execute"], "migrate-set-capabilities");
        let expected = json!([
            { "capability": "events", "state": true }, { "capability": "multifd", "state": false }
        ]);
        assert_eq!(set["arguments"]["capabilities"], expected);
        peer.answer(&set, json!({}));
        // A missing capability to be switched on, and one to be switched off: nothing is set.
        for _ in 0..2 {
            let (query, _) = peer.hear();
            assert_eq!(query["execute"], "query-migrate-capabilities");
            peer.answer(&query, known.clone());
        }
        let (status, _) = peer.hear();
        assert_eq!(status["execute"], "query-status");
        peer.answer(&status, json!({ "status": "running", "running": true, "singlestep": false }));
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    qmp.set_capabilities(&[("events", true), ("multifd", false), ("compress", false)]).unwrap();
    let error = qmp.set_capabilities(&[("events", true), ("switchover-ack", true)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "QEMU 7.2.22 has no migration capability \"switchover-ack\"; use a newer QEMU, or leave out \
         what needs it"
    );
    qmp.set_capabilities(&[("compress", false)]).unwrap();
    assert!(qmp.query_status().unwrap().running);
    drop(qmp);
    fake.thread.join().unwrap();
}

/// QEMU 7.2 crashes at a `migrate` before it has released the migration that failed, and at the end
/// of a migration whose number of channels has changed.
#[test]
fn nothing_starts_and_no_number_of_channels_changes_before_the_release() {
    let fake = Fake::negotiated(move |mut peer| {
        let mut hear = |command: &str, reply: Value| {
            let (query, _) = peer.hear();
            assert_eq!(query["execute"], command);
            peer.answer(&query, reply);
        };
        let registered = || json!([{ "type": "migration" }]);
        hear("query-yank", registered());
        hear("query-migrate", json!({ "status": "failed" }));
        hear("query-yank", json!([]));
        hear("migrate", json!({}));
        for _ in 0..2 {
            hear("query-yank", registered());
            hear("query-migrate", json!({ "status": "cancelling" }));
            hear("query-status", json!({ "status": "running", "running": true }));
        }
        hear("migrate-set-parameters", json!({}));
        // Of a QEMU that awaits a migration.
        hear("query-yank", registered());
        hear("query-migrate", json!({}));
        hear("query-status", json!({ "status": "inmigrate", "running": false }));
        hear("migrate-set-parameters", json!({}));
        peer.rest();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    qmp.migrate("unix:/x").unwrap();
    let error = qmp.migrate("unix:/x").unwrap_err();
    assert!(error.to_string().contains("in progress ('cancelling')"), "{error}");
    let error = qmp.set_parameters(json!({ "multifd-channels": 2 })).unwrap_err();
    assert!(matches!(error, QmpError::InProgress { .. }), "{error}");
    qmp.set_parameters(json!({ "max-bandwidth": 0 })).unwrap();
    qmp.set_parameters(json!({ "multifd-channels": 2 })).unwrap();
    drop(qmp);
    fake.thread.join().unwrap();
}

#[test]
fn a_command_that_does_not_fit_the_socket_times_out_and_is_not_continued() {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let fake = Fake::negotiated(move |_peer| {
        // Reads nothing, and stays connected until the client has timed out.
        wait.recv().unwrap_err();
    });
    let mut qmp = fake.connect(LONG).unwrap();
    // Several times what the socket holds. The time is for a busy machine: the line has to be
    // made, and a part of it sent, before it is over.
    let big = json!({ "x": "y".repeat(1 << 20) });
    let error = qmp.execute_within("big", Some(big), Duration::from_secs(5)).unwrap_err();
    assert!(matches!(error, QmpError::TimedOut { .. }), "{error}");
    let error = qmp.execute("next", None).unwrap_err();
    assert!(error.to_string().contains("sent in part only"), "{error}");
    drop(done);
    fake.thread.join().unwrap();
}

#[test]
fn out_of_band_is_negotiated_and_its_commands_use_exec_oob() {
    let fake = Fake::new(|listener| {
        let mut peer = Peer::accept(listener);
        peer.say(GREETING);
        let (command, _) = peer.hear();
        assert_eq!(command["arguments"], json!({ "enable": ["oob"] }));
        peer.answer(&command, json!({}));
        let (command, _) = peer.hear();
        assert_eq!(command["exec-oob"], "migrate-recover");
        assert!(command.get("execute").is_none(), "{command}");
        assert_eq!(command["arguments"]["uri"], "unix:/x");
        peer.answer(&command, json!({}));
        peer.rest();
    });
    let mut qmp = Qmp::connect_out_of_band(&fake.path, LONG).unwrap();
    qmp.execute_out_of_band("migrate-recover", Some(json!({ "uri": "unix:/x" }))).unwrap();
    drop(qmp);
    fake.thread.join().unwrap();
}
