//! `platen evacuate` with made monitors: what it refuses, interrupts, and its own death.

use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use rustix::process::{kill_process, test_kill_process, Pid, Signal};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "evacuate/domains.rs"]
mod domains;
#[path = "evacuate/silent.rs"]
mod silent;

/// Nothing here takes this long unless it hangs.
const WATCHDOG: Duration = Duration::from_secs(300);

/// A monitor whose QEMU runs a VM of 1 GiB that writes `dirty` MiB a second.
fn monitor(path: &Path, migration: &'static str, dirty: u64) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let migration = |command: &str| {
                (command == "query-migrate").then(|| json!({ "status": migration }))
            };
            // It goes away at any time.
            let _ = serve(client, dirty, migration);
        }
    });
}

/// A monitor of a QEMU that hands no VM over by itself.
fn monitor_that_holds(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let _ = serve(client, 0, |command| match command {
                "query-migrate" => Some(json!({ "status": "none" })),
                "query-migrate-capabilities" => {
                    Some(json!([{ "capability": "pause-before-switchover", "state": true }]))
                }
                _ => None,
            });
        }
    });
}

/// Answers a client's commands; `migration` answers those of a migration.
fn serve(
    mut client: UnixStream,
    dirty: u64,
    mut migration: impl FnMut(&str) -> Option<Value>,
) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let name = command["execute"].as_str().unwrap();
        let answer = migration(name).unwrap_or_else(|| match name {
            "query-status" => json!({ "status": "running", "running": true }),
            "query-memory-size-summary" => json!({ "base-memory": 1_u64 << 30 }),
            "query-cpus-fast" => json!([{}]),
            "query-migrate-parameters" => json!({ "downtime-limit": 300, "max-bandwidth": 0 }),
            "query-dirty-rate" => json!({ "status": "measured", "dirty-rate": dirty }),
            "query-migrate-capabilities" => json!([
                { "capability": "events", "state": false },
                { "capability": "return-path", "state": false },
                { "capability": "postcopy-ram", "state": false },
            ]),
            "query-yank" | "query-qmp-schema" => json!([]),
            _ => json!({}),
        });
        let is_old = command["arguments"].get("calc-time-unit").is_some();
        let reply = if is_old {
            let desc = "Parameter 'calc-time-unit' is unexpected";
            json!({ "error": { "class": "GenericError", "desc": desc }, "id": command["id"] })
        } else {
            json!({ "return": answer, "id": command["id"] })
        };
        writeln!(client, "{reply}")?;
    }
    Ok(())
}

struct Rig {
    folder: tempfile::TempDir,
    /// A port on which nothing listens, and a socket that no other process may have it for that.
    peer: String,
    _bound: OwnedFd,
}

impl Rig {
    fn new() -> Self {
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let bound = net::socket_with(AddressFamily::INET, kind, flags, None).unwrap();
        net::bind(&bound, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = SocketAddrV4::try_from(net::getsockname(&bound).unwrap()).unwrap().to_string();
        Self { folder: tempfile::tempdir().unwrap(), peer, _bound: bound }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn vm(&self, name: &str) -> String {
        format!("--vm={name}=unix:{}", self.at(name).display())
    }

    /// A domain's name: an evacuation claims it on the whole host, and other tests run there.
    fn domain(&self, name: &str) -> String {
        format!("{}-{name}", self.peer.rsplit(':').next().unwrap())
    }

    /// Its output goes to `log`.
    fn start(&self, log: &str, words: &[&str]) -> Evacuate {
        let log = self.at(log);
        let errors = std::fs::File::create(&log).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["evacuate", "--insecure", "--to", &self.peer])
            .args(words)
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .unwrap();
        Evacuate { child, log }
    }

    fn json(&self) -> String {
        format!("--json={}", self.at("report").display())
    }

    /// Outcome and cause of each VM, in the order of the report.
    fn outcomes(&self) -> Vec<(String, String, String)> {
        let report: Value =
            serde_json::from_slice(&std::fs::read(self.at("report")).unwrap()).unwrap();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let vms = report["vms"].as_array().unwrap();
        vms.iter().map(|vm| (text(&vm["name"]), text(&vm["outcome"]), text(&vm["error"]))).collect()
    }
}

struct Evacuate {
    child: Child,
    log: PathBuf,
}

impl Evacuate {
    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until it has said these words, and gives the rest of their line.
    fn says(&self, words: &str) -> String {
        let until = Instant::now() + WATCHDOG;
        loop {
            let said = self.said();
            let found = said.split_once(words).and_then(|(_, rest)| rest.split_once('\n'));
            if let Some((rest, _)) = found {
                return rest.to_owned();
            }
            assert!(Instant::now() < until, "'{words}' is not said: {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn ends(&mut self) -> Option<i32> {
        let until = Instant::now() + WATCHDOG;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it does not end: {}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Evacuate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn mistakes_are_refused_before_any_monitor_is_asked() {
    let rig = Rig::new();
    let (a, b) = (rig.vm("a"), rig.vm("b"));
    let long = format!("--vm={}=unix:/q", "x".repeat(300));
    for (words, says) in [
        (&[a.as_str(), &a][..], "the VM a is given twice"),
        (&[&a, "--codec", "gif"], "gif"),
        (&[&a, "--codec", "zstd", "--level", "77"], "77"),
        (&[&a, "--postcopy", "soon"], "--postcopy soon"),
        (&[&a, &b, "--at-once", "8", "--max-bandwidth", "2mbit"], "too little for --at-once 8"),
        (
            &[&a, "--domain=web", "--libvirt=b", "--at-once=2", "--max-bandwidth=2000000"],
            "leaves a --domain 1000000 bytes per second",
        ),
        (&[&long], "has 300 bytes"),
        (&["--vm=a"], "NAME=unix:PATH"),
        (&[], "--vm"),
    ] {
        let mut evacuate = rig.start("log", words);
        let status = evacuate.ends();
        let said = evacuate.said();
        assert!(matches!(status, Some(1 | 2)), "{words:?}: {status:?} {said}");
        assert!(said.contains(says), "{words:?}: {said}");
        assert!(!said.contains("looking at"), "{words:?}: {said}");
    }
}

/// Regression: `--priority` without `--max-bandwidth` did nothing, and nothing was said.
#[test]
fn a_share_without_a_limit_to_share_is_named() {
    let rig = Rig::new();
    let (gone, words) = (rig.vm("gone"), "--priority has no effect without a limit to share");
    for (options, is_named) in [
        (&["--priority=gone=8"][..], true),
        (&["--priority=gone=8", "--max-bandwidth=100mbit"], false),
        (&[], false),
    ] {
        let mut evacuate = rig.start("log", &[&[gone.as_str()][..], options].concat());
        assert_eq!(evacuate.ends(), Some(1), "{}", evacuate.said());
        assert_eq!(evacuate.said().contains(words), is_named, "{}", evacuate.said());
    }
}

#[test]
fn the_failure_of_one_stops_no_other_and_the_exit_status_counts_them() {
    let rig = Rig::new();
    monitor(&rig.at("busy"), "active", 0);
    monitor(&rig.at("loaded"), "none", 90);
    monitor(&rig.at("calm"), "none", 1);
    monitor_that_holds(&rig.at("held"));
    let vms = ["gone", "busy", "held", "loaded", "calm"].map(|name| rig.vm(name));
    let vms: Vec<&str> = vms.iter().map(String::as_str).collect();
    let json = rig.json();
    let mut evacuate = rig.start("log", &[&vms[..], &[&json, "--connect-timeout=0"]].concat());
    assert_eq!(evacuate.ends(), Some(5), "{}", evacuate.said());
    let found = rig.outcomes();
    let shape: Vec<_> = found.iter().map(|(name, outcome, _)| (&name[..], &outcome[..])).collect();
    let stayed = ["calm", "loaded"].map(|name| (name, "stayed"));
    let refused = ["gone", "busy", "held"].map(|name| (name, "refused"));
    assert_eq!(shape, [&stayed[..], &refused].concat(), "{found:?}");
    for ((.., error), words) in found.iter().zip([
        "cannot connect to",
        "cannot connect to",
        "No such file",
        "has a migration in progress ('active')",
        "its capability pause-before-switchover is on",
    ]) {
        assert!(error.contains(words), "{found:?}");
    }
    let said = evacuate.said();
    assert!(said.contains("turn 1: calm, RAM 1024 MiB, written to 1.5 MiB/s"), "{said}");
}

#[test]
fn an_interrupt_cancels_what_runs_and_starts_nothing_more() {
    let rig = Rig::new();
    monitor(&rig.at("one"), "none", 0);
    monitor(&rig.at("two"), "none", 50);
    let (one, two, json) = (rig.vm("one"), rig.vm("two"), rig.json());
    let wait = "--connect-timeout=3600";
    let mut evacuate = rig.start("log", &[&one, &two, &json, "--at-once=1", wait]);
    evacuate.says("one: starts");
    evacuate.says("waiting up to");
    // A second one that is given the same VM.
    let mut second = rig.start("second", &[&one, wait]);
    assert_eq!(second.ends(), Some(1));
    let said = second.said();
    assert!(said.contains("one: refused: another platen evacuate has this VM"), "{said}");

    evacuate.signal(Signal::INT);
    assert_eq!(evacuate.ends(), Some(2), "{}", evacuate.said());
    let found = rig.outcomes();
    assert_eq!((&found[0].0[..], &found[0].1[..]), ("one", "stayed"), "{found:?}");
    assert_eq!((&found[1].0[..], &found[1].1[..]), ("two", "not-started"), "{found:?}");
    assert!(!evacuate.said().contains("two: starts"));
}

#[test]
fn a_migration_that_is_killed_stops_no_other() {
    let rig = Rig::new();
    monitor(&rig.at("one"), "none", 0);
    monitor(&rig.at("two"), "none", 50);
    let (one, two, json) = (rig.vm("one"), rig.vm("two"), rig.json());
    let wait = "--connect-timeout=3600";
    let mut evacuate = rig.start("log", &[&one, &two, &json, "--at-once=1", wait]);
    for name in ["one", "two"] {
        let id = process(&evacuate, name);
        evacuate.says(&format!("{name}: cannot connect to"));
        kill_process(id, Signal::KILL).unwrap();
    }
    assert_eq!(evacuate.ends(), Some(2), "{}", evacuate.said());
    for (name, outcome, error) in rig.outcomes() {
        assert_eq!(outcome, "stayed", "{name}: {error}");
        assert_eq!(error, "its platen migrate was ended by signal 9", "{name}");
    }
}

/// The process of a VM's migration.
fn process(evacuate: &Evacuate, name: &str) -> Pid {
    let id = evacuate.says(&format!("{name}: starts (process "));
    Pid::from_raw(id.trim_end_matches(')').parse().unwrap()).unwrap()
}

#[test]
fn a_migration_outlives_the_evacuation_that_is_killed() {
    let rig = Rig::new();
    monitor(&rig.at("one"), "none", 0);
    let one = rig.vm("one");
    let mut evacuate = rig.start("log", &[&one, "--connect-timeout=3600"]);
    let id = process(&evacuate, "one");
    evacuate.says("waiting up to");
    evacuate.signal(Signal::KILL);
    evacuate.ends();
    // It would have ended with its terminal, its pipes or its parent.
    std::thread::sleep(Duration::from_secs(2));
    test_kill_process(id).unwrap();
    kill_process(id, Signal::INT).unwrap();
    wait_for_end(id);
}

/// Waits for the end of a process that is no child of this one.
fn wait_for_end(id: Pid) {
    let until = Instant::now() + WATCHDOG;
    while test_kill_process(id).is_ok() && !is_zombie(id) {
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether it has ended, and nobody has waited for it yet.
fn is_zombie(id: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/stat", id.as_raw_nonzero()));
    status.is_ok_and(|status| status.contains(") Z"))
}
