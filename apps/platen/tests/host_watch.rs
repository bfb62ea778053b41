//! `platen host` as its administrators see it: a configuration that changes, events, and metrics.

#[path = "host/rig.rs"]
mod rig;

use rig::{
    finish_under_way, is_reset, migrates, read_exactly, under_way, until, Rig, A, B, WATCHDOG,
};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

/// A stranger at the door of B's port 49152.
fn stranger(rig: &Rig) -> TcpStream {
    let client = rig.connect_as_qemu(A, 49152);
    (&client).write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    client
}

/// A service manager at `path`; gives the messages that are no heartbeats. It reads at once, as a
/// real one does: a socket has room for eleven, and a service does not wait for more.
fn manager(path: &Path) -> Receiver<String> {
    let socket = UnixDatagram::bind(path).unwrap();
    let (sender, messages) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 200];
        // Without a timeout: with one it ends with EINTR if this process was stopped meanwhile.
        while let Ok(got) = socket.recv(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..got]).into_owned();
            if text != "WATCHDOG=1" && sender.send(text).is_err() {
                return;
            }
        }
    });
    messages
}

#[test]
fn a_new_configuration_is_for_new_migrations_and_a_bad_one_changes_nothing() {
    let rig = Rig::new("");
    rig.configure(A, |text| text);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let messages = manager(&path);
    let heard = || messages.recv_timeout(WATCHDOG).expect("a message to the service manager");
    let mut a = rig.start_with(A, &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let _b = rig.start(B);
    assert_eq!(heard(), "READY=1");
    let running = under_way(&rig, 49153);
    assert!(is_reset(&stranger(&rig)));

    rig.configure(A, |text| {
        let third = "[[host]]\nname = \"c\"\ndoor = \"127.80.99.3\"\nports = \"49190-49191\"\n";
        format!("stranger = \"forward\"\nport = 4445\nlinks = 2\n{text}{third}")
    });
    a.hang_up();
    a.says("changed for new migrations: links, stranger, host c; changed from the next start");
    a.says("port; 6 doors to b");
    let reloading = heard();
    let (first, usec) = reloading.split_once("\nMONOTONIC_USEC=").unwrap();
    assert_eq!((first, heard().as_str()), ("RELOADING=1", "READY=1"));
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    let then = usec.parse::<i64>().unwrap() / 1_000_000;
    assert!((0..WATCHDOG.as_secs().cast_signed()).contains(&(now - then)), "{reloading}");
    // A new connection gets the new policy, and the migration goes on.
    let server = TcpListener::bind((rig.address(B), 49152)).unwrap();
    let client = stranger(&rig);
    let (there, _) = rig.accept(&server);
    assert_eq!(read_exactly(&there, 3), b"GET");
    drop((there, client));
    until(|| rig.list(A)["running"].as_array().unwrap().len() == 1);

    rig.configure(A, |text| format!("stranger = \"refuse\"\nlinks = 65\n{text}"));
    a.hang_up();
    a.says("the configuration stays as it was");
    let said = a.last();
    assert!(said.contains("links: 65 is not a number from 1 to 64"), "{said}");
    assert!(heard().starts_with("RELOADING=1\n"));
    assert_eq!(heard(), "READY=1");
    let client = stranger(&rig);
    let (there, _) = rig.accept(&server);
    assert_eq!(read_exactly(&there, 3), b"GET");
    drop((there, client));

    finish_under_way(running);
    until(|| rig.list(A)["running"].as_array().unwrap().is_empty());
    migrates(&rig, A, 49153);
    until(|| rig::status_of(&rig.status(A), "completed") == 2);
}

#[test]
fn certificates_are_read_again() {
    let rig = Rig::new("");
    rig.make_another_ca(B);
    let (_a, b) = (rig.start(A), rig.start(B));
    let source = rig.connect_as_qemu(A, 49152);
    (&source).write_all(b"QEVM\0\0\0\x03").unwrap();
    assert!(is_reset(&source));
    assert!(rig.ended(A, 1)["cause"].as_str().unwrap().contains("certificate"));
    rig.configure(B, |text| text);
    let mut b = b;
    b.hang_up();
    b.says("again: changed for new migrations: tls_dir");
    migrates(&rig, A, 49152);
    until(|| rig::status_of(&rig.status(A), "completed") == 1);
    // A key that everybody may read is refused, and the old one goes on.
    let key = rig.at("ca/a/key.pem");
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    b.hang_up();
    b.says("the configuration stays as it was");
    assert!(b.last().contains("everybody may read this key"), "{}", b.last());
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    migrates(&rig, A, 49152);
}

/// A certificate of the CA alone opens nothing: it has to name a host of the configuration, and not
/// to be revoked.
#[test]
fn a_stolen_certificate_is_shut_out_by_its_name_or_its_fingerprint() {
    let rig = Rig::new("");
    rig.configure(B, |text| text);
    let (_a, mut b) = (rig.start(A), rig.start(B));
    let issue = |name: &str| {
        let ca = rig.at("ca");
        let (code, said) = rig::run(&["cert", "issue", name, "--dir", ca.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{said}");
        said
    };
    issue("former.example");
    let (code, said) = rig.relay_with(B, "door:49153", "ca/former.example").ends();
    assert_eq!(
        (code, said.contains("none of the names that it allows")),
        (Some(1), true),
        "{said}"
    );
    b.says("is for former.example; allowed here: a, ");

    // A's certificate, stolen; A has another, which goes on.
    let stolen = rig.address(A).to_string();
    let issued = issue(&stolen);
    let mut thief = rig.relay_with(B, "door:49153", &format!("ca/{stolen}"));
    thief.says("listening on");
    drop(thief);
    let list = std::fs::read_to_string(rig.at("ca/issued")).unwrap();
    let number = list.lines().last().unwrap().split(' ').nth(1).unwrap().to_owned();
    assert!(issued.contains(&number), "{issued}");
    rig.configure(B, |text| format!("revoked = [\"{number}\"]\n{text}"));
    b.hang_up();
    b.says("again: changed for new migrations: revoked");
    let (code, said) = rig.relay_with(B, "door:49154", &format!("ca/{stolen}")).ends();
    assert_eq!((code, said.contains("on its list of revoked ones")), (Some(1), true), "{said}");
    b.says(&format!("for {stolen}, {number}, is revoked"));
    migrates(&rig, A, 49152);
}

/// `platen events --json` that runs.
struct Follower {
    child: Child,
    lines: Receiver<Value>,
}

impl Follower {
    fn of(rig: &Rig, host: usize) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["events", "--json"])
            .args(rig.arguments(host))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).expect("a line of JSON"));
            }
        });
        Self { child, lines }
    }

    /// One that has told an event. A service that gets no CPU does not answer a new one.
    fn that_tells(rig: &Rig, host: usize) -> (Self, Value) {
        let limit = Instant::now() + WATCHDOG;
        loop {
            let this = Self::of(rig, host);
            match this.lines.recv_timeout(WATCHDOG) {
                Ok(event) => return (this, event),
                Err(error) => assert!(Instant::now() < limit, "no event: {error}"),
            }
        }
    }

    /// The events of the next migration up to its end.
    fn of_one(&self) -> Vec<Value> {
        let mut events: Vec<Value> = Vec::new();
        while events.last().is_none_or(|event| event["phase"] != "ended") {
            events.push(self.lines.recv_timeout(WATCHDOG).expect("an event"));
            assert_eq!(events[0]["id"], events.last().unwrap()["id"]);
        }
        events
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn events_tell_each_change_once_with_its_cause_also_when_the_service_is_replaced() {
    let rig = Rig::new("");
    let (code, said) = rig.command(A, &["events"]);
    assert_eq!((code, said.contains("it is not served")), (Some(1), true), "{said}");
    let (mut a, mut b) = (rig.start(A), rig.start(B));
    migrates(&rig, A, 49152);
    rig.ended(A, 1);
    // A migration that was over before is not reported; one that runs is.
    let running = under_way(&rig, 49153);
    until(|| rig.list(A)["running"][0]["phase"] == "active");
    let (follower, first) = Follower::that_tells(&rig, A);
    assert_eq!((&first["phase"], &first["port"]), (&"active".into(), &49153.into()));
    assert_eq!((&first["role"], &first["peer"]), (&"source".into(), &"b".into()));
    // Its end happens while no service runs.
    a.kill();
    finish_under_way(running);
    until(|| rig.carriers_are_gone());
    let a = rig.start(A);
    let end = follower.of_one().pop().unwrap();
    assert_eq!((&end["id"], &end["status"]), (&first["id"], &"completed".into()));
    assert!(end["time"].as_u64() >= first["time"].as_u64());

    migrates(&rig, A, 49152);
    let events = follower.of_one();
    let phases: Vec<_> = events.iter().map(|event| event["phase"].as_str().unwrap()).collect();
    assert_eq!(phases[0], "opening");
    assert!(phases.contains(&"active"), "{phases:?}");
    assert!(events.last().unwrap()["plain"].as_u64().unwrap() > 1_000_000, "{events:?}");
    // A failure, with its cause.
    b.kill();
    let source = rig.connect_as_qemu(A, 49152);
    (&source).write_all(b"QEVM\0\0\0\x03").unwrap();
    assert!(is_reset(&source));
    let end = follower.of_one().pop().unwrap();
    assert_eq!(end["status"], "failed");
    assert!(end["cause"].as_str().unwrap().contains("cannot connect to"), "{end}");
    // The history says so, too, and survives the service.
    drop(a);
    let _a = rig.start(A);
    assert_eq!(rig.ended(A, 4)["cause"], end["cause"]);
}

/// The body of a page of metrics. A scraper that gets no CPU for 2 s between its connection and its
/// request gets no answer.
fn scrape<S: Read + Write>(connect: impl Fn() -> S) -> String {
    let mut text = String::new();
    until(|| {
        let mut stream = connect();
        text.clear();
        let asked = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        asked.and_then(|()| stream.read_to_string(&mut text)).is_ok_and(|got| got > 0)
    });
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    body.to_owned()
}

#[test]
fn metrics_are_served_where_the_configuration_says_and_count_migrations() {
    let rig = Rig::new("");
    let tcp = format!("{}:9464", rig.address(A));
    rig.configure(A, |text| format!("metrics = \"{tcp}\"\n{text}"));
    let unix = rig.at("metrics.sock");
    rig.configure(B, |text| format!("metrics = \"unix:{}\"\n{text}", unix.display()));
    let (_a, b) = (rig.start(A), rig.start(B));
    migrates(&rig, A, 49152);
    rig.ended(A, 1);
    rig.ended(B, 1);
    let sample = |text: &str, name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name}: {text}")).parse().unwrap()
    };
    let of = |what: &str| format!("platen_host_migrations_ended_total{{{what}}}");
    // A migration is counted when it is in the history.
    let completed = of("role=\"source\",status=\"completed\"");
    let scraped = || scrape(|| TcpStream::connect(&tcp).unwrap());
    until(|| sample(&scraped(), &completed) > 0.0);
    let a = scraped();
    assert_eq!(sample(&a, &completed), 1.0);
    assert_eq!(sample(&a, "platen_host_doors_open"), 4.0);
    assert!(sample(&a, "platen_host_stream_bytes_total{role=\"source\"}") > 1_000_000.0);
    let left = sample(&a, "platen_host_certificate_end_seconds") - rig::now() as f64 / 1e3;
    assert!((800.0..830.0).contains(&(left / 86_400.0)), "{left}");
    let completed = of("role=\"destination\",status=\"completed\"");
    let scraped = || scrape(|| UnixStream::connect(&unix).unwrap());
    until(|| sample(&scraped(), &completed) > 0.0);
    assert_eq!(sample(&scraped(), &completed), 1.0);
    let mode = std::fs::metadata(&unix).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    // Its socket goes with the service.
    let (status, said) = b.terminates();
    assert_eq!(status, Some(0), "{said}");
    assert!(!unix.exists());
}

/// The results of `platen doctor --json` on A: check and verdict, and all of their text.
fn examine(rig: &Rig) -> (Option<i32>, Vec<(String, String)>, String) {
    let conf = rig.at("qemu.conf");
    let words = ["doctor", "--json", "--qemu-conf", conf.to_str().unwrap()];
    let (code, said) = rig.command(A, &words);
    let word = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let findings = said.lines().map(|line| {
        let finding: Value = serde_json::from_str(line).expect("a line of JSON");
        let has_advice = finding["advice"].is_string();
        assert_eq!(has_advice, finding["verdict"] != "ok", "{finding}");
        (word(&finding, "check"), word(&finding, "verdict"))
    });
    (code, findings.collect(), said)
}

/// As `examine`, again and again until `is` holds of the results: another host's service that gets
/// no CPU does not answer.
fn examine_until(
    rig: &Rig,
    is: impl Fn(Option<i32>, &[(String, String)], &str) -> bool,
) -> (Option<i32>, Vec<(String, String)>, String) {
    let limit = Instant::now() + WATCHDOG;
    loop {
        let (code, found, said) = examine(rig);
        if is(code, &found, &said) || Instant::now() >= limit {
            return (code, found, said);
        }
    }
}

/// Regression: the status was 1 on each such host, as libvirt's configuration named no door.
#[test]
fn the_doctor_is_content_with_a_host_whose_vms_come_by_unix_sockets() {
    let rig = Rig::new("allow_users = [\"root\"]\nsockets = 2\n");
    for host in [A, B] {
        let line = format!("socket_dir = \"{}\"\n", rig.at(&format!("doors-{host}")).display());
        rig.configure(host, |text| line + &text);
    }
    // QEMU has to pass to the sockets.
    std::fs::set_permissions(rig.at(""), std::fs::Permissions::from_mode(0o711)).unwrap();
    let mut services = [A, B].map(|host| rig.spawn(host, &[]));
    services.iter_mut().for_each(|service| service.says("for other hosts; 6 doors to"));
    let (code, found, said) = examine_until(&rig, |code, _, _| code == Some(0));
    assert_eq!(code, Some(0), "{said}");
    assert!(found.iter().any(|one| one.0 == "qemu.conf" && one.1 == "ok"), "{said}");
}

#[test]
fn the_doctor_finds_what_is_missing_and_then_nothing() {
    let rig = Rig::new("allow_users = [\"root\"]\n");
    std::fs::write(rig.at("qemu.conf"), "").unwrap();
    let is = |found: &[(String, String)], check: &str, verdict: &str| {
        found.iter().any(|one| (one.0.as_str(), one.1.as_str()) == (check, verdict))
    };
    let (code, found, said) = examine(&rig);
    assert_eq!(code, Some(1), "{said}");
    for (check, verdict) in [
        ("qemu.conf", "fail"),
        ("service", "warn"),
        ("peer b", "fail"),
        ("doors", "ok"),
        ("certificate", "ok"),
    ] {
        assert!(is(&found, check, verdict), "{check}: {said}");
    }
    assert!(said.contains("cannot connect to"), "{said}");
    // Its commands are carried out.
    let conf = rig.at("qemu.conf");
    let words = ["host", "doors", "on", "--qemu-conf", conf.to_str().unwrap()];
    assert_eq!(rig.command(A, &words).0, Some(0));
    let (_a, mut b) = (rig.start(A), rig.start(B));
    let (code, found, said) =
        examine_until(&rig, |code, found, _| code == Some(0) && is(found, "service", "ok"));
    assert!(found.iter().all(|one| one.1 != "fail"), "{said}");
    assert_eq!(code, Some(0), "{said}");
    assert!(is(&found, "service", "ok") && is(&found, "doors", "ok"), "{said}");
    assert_eq!(found.iter().filter(|one| one.0 == "peer b" && one.1 == "ok").count(), 3, "{said}");
    assert!(said.contains(&format!("platen {}", env!("CARGO_PKG_VERSION"))), "{said}");
    // The question opens nothing there.
    assert_eq!(rig.status(B)["begun"], 0);
    // A host with another CA.
    b.kill();
    rig.make_another_ca(B);
    let _b = rig.start(B);
    let (code, found, said) =
        examine_until(&rig, |_, _, said| said.contains("certificates of the same CA"));
    assert_eq!((code, is(&found, "peer b", "fail")), (Some(1), true), "{said}");
    assert!(said.contains("certificates of the same CA"), "{said}");
}
