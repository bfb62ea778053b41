//! COLO is refused by the monitor, which is the only place that shows it since QEMU 11.1. A made
//! monitor answers as QEMU 11.1 does.

use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Nothing here takes this long unless it hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The commands that a monitor has heard.
type Heard = Arc<Mutex<Vec<String>>>;

/// A monitor of a QEMU with x-colo on, whose VM has this status.
fn monitor(path: &Path, status: &'static str) -> Heard {
    let listener = UnixListener::bind(path).unwrap();
    let heard = Heard::default();
    let hears = heard.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // It goes away at any time.
            let _ = serve(client, status, &hears);
        }
    });
    heard
}

fn serve(mut client: UnixStream, status: &str, heard: &Heard) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 11, "minor": 1, "micro": 3 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": ["oob"] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let name = command["execute"].as_str().unwrap().to_string();
        let answer = match &name[..] {
            "query-status" => json!({ "status": status, "running": status == "running" }),
            "query-migrate-parameters" => json!({ "downtime-limit": 300, "max-bandwidth": 0 }),
            // 11.1 allows x-colo with return-path only.
            "query-migrate-capabilities" => json!([
                { "state": false, "capability": "events" },
                { "state": false, "capability": "postcopy-ram" },
                { "state": true, "capability": "x-colo" },
                { "state": true, "capability": "return-path" },
                { "state": false, "capability": "multifd" },
            ]),
            "query-yank" | "query-qmp-schema" => json!([]),
            _ => json!({}),
        };
        heard.lock().unwrap().push(name);
        writeln!(client, "{}", json!({ "return": answer, "id": command["id"] }))?;
    }
    Ok(())
}

fn platen(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    let mut child = command.args(args).stderr(Stdio::piped()).spawn().unwrap();
    // A relay that is not refused would wait for its QEMU.
    let until = Instant::now() + WATCHDOG;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= until {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// It was refused with these words, and nothing of QEMU was changed.
fn is_refused(output: &Output, words: &str, heard: &Heard) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(words), "{said}");
    let heard = heard.lock().unwrap();
    let changes = |name: &&String| *name != "qmp_capabilities" && !name.starts_with("query-");
    assert_eq!(heard.iter().find(changes), None, "{heard:?}");
    assert!(heard.iter().any(|name| name == "query-migrate-capabilities"), "{heard:?}");
}

#[test]
fn a_source_qemu_with_colo_is_refused_by_its_monitor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let heard = monitor(&path, "running");
    let qmp = format!("unix:{}", path.display());
    // Nothing listens at the peer's port, to which no connection is made.
    for args in
        [&["migrate", "--insecure", "--peer", "127.0.0.1:9"][..], &["rehearse", "--insecure"]]
    {
        let output = platen(&[args, &["--qmp", &qmp]].concat());
        is_refused(&output, "the source QEMU has x-colo on", &heard);
        heard.lock().unwrap().clear();
    }
}

/// A process that ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_destination_qemu_with_colo_is_refused_and_the_source_gets_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let heard = monitor(&folder.path().join("qmp"), "inmigrate");
    let mut receive = Command::new(env!("CARGO_BIN_EXE_platen"));
    receive.args(["receive", "--insecure", "--listen", "127.0.0.1:0"]);
    receive.args(["--deliver", &at("dst"), "--qmp", &at("qmp")]).stderr(Stdio::piped());
    let mut receive = Ends(receive.spawn().unwrap());
    let mut lines = BufReader::new(receive.0.stderr.take().unwrap()).lines();
    let listening = lines.find_map(|line| {
        let line = line.unwrap();
        line.contains("listening on").then(|| line.split(' ').next_back().unwrap().to_string())
    });
    let peer = listening.expect("an address");
    let output = platen(&["relay", "--insecure", "--peer", &peer, "--listen", &at("src")]);
    is_refused(&output, "the destination QEMU has x-colo on", &heard);
}
