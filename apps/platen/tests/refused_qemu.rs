//! A QEMU that platen cannot carry is refused by its monitor before anything is changed: one with
//! COLO (since 11.1 only the monitor shows it), one that is too old, one that encrypts its stream.
//! A made monitor answers as QEMU does.

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

/// A QEMU as its monitor describes it.
#[derive(Clone, Copy)]
struct Qemu {
    /// The status of its VM.
    status: &'static str,
    /// Major and minor.
    version: (u32, u32),
    /// Whether x-colo is on.
    colo: bool,
    /// The parameter tls-creds.
    tls: &'static str,
    /// The parameter mode, of QEMU 8.2 and later.
    mode: &'static str,
}

const QEMU: Qemu =
    Qemu { status: "running", version: (11, 1), colo: false, tls: "", mode: "normal" };

/// One that waits for a migration.
const INCOMING: Qemu = Qemu { status: "inmigrate", ..QEMU };

/// Answers on this socket as `qemu` would.
fn monitor(path: &Path, qemu: Qemu) -> Heard {
    let listener = UnixListener::bind(path).unwrap();
    let heard = Heard::default();
    let hears = heard.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // It goes away at any time.
            let _ = serve(client, qemu, &hears);
        }
    });
    heard
}

fn serve(mut client: UnixStream, qemu: Qemu, heard: &Heard) -> std::io::Result<()> {
    let (status, (major, minor)) = (qemu.status, qemu.version);
    let version = json!({ "qemu": { "major": major, "minor": minor, "micro": 3 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": ["oob"] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let name = command["execute"].as_str().unwrap().to_string();
        let answer = match &name[..] {
            "query-status" => json!({ "status": status, "running": status == "running" }),
            "query-migrate-parameters" => json!({
                "downtime-limit": 300,
                "max-bandwidth": 0,
                "tls-creds": qemu.tls,
                "mode": qemu.mode,
            }),
            // 11.1 allows x-colo with return-path only.
            "query-migrate-capabilities" => json!([
                { "state": false, "capability": "events" },
                { "state": false, "capability": "postcopy-ram" },
                { "state": qemu.colo, "capability": "x-colo" },
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
    assert!(heard.iter().any(|name| name == "qmp_capabilities"), "{heard:?}");
}

/// `migrate` and `rehearse` refuse this source with these words.
fn a_source_is_refused(qemu: Qemu, words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let heard = monitor(&path, qemu);
    let qmp = format!("unix:{}", path.display());
    // Nothing listens at the peer's port, to which no connection is made.
    for args in
        [&["migrate", "--insecure", "--peer", "127.0.0.1:9"][..], &["rehearse", "--insecure"]]
    {
        let output = platen(&[args, &["--qmp", &qmp]].concat());
        is_refused(&output, words, &heard);
        heard.lock().unwrap().clear();
    }
}

#[test]
fn a_source_qemu_with_colo_is_refused_by_its_monitor() {
    a_source_is_refused(Qemu { colo: true, ..QEMU }, "the source QEMU has x-colo on");
}

#[test]
fn a_source_qemu_older_than_7_2_is_refused_by_its_monitor() {
    let words = "this is QEMU 7.1.3; platen knows the stream of QEMU 7.2 and later";
    a_source_is_refused(Qemu { version: (7, 1), ..QEMU }, words);
}

#[test]
fn a_source_qemu_that_encrypts_its_stream_is_refused_by_its_monitor() {
    a_source_is_refused(Qemu { tls: "tls0", ..QEMU }, "the source QEMU has tls-creds set");
}

/// Regression: `migrate` and `save` took a mode for granted. In this one QEMU stops the VM at the
/// beginning, so that its downtime is the whole migration.
#[test]
fn a_source_qemu_in_a_mode_that_stops_its_vm_is_refused_by_its_monitor() {
    let qemu = Qemu { mode: "cpr-reboot", ..QEMU };
    let words = "migration mode is 'cpr-reboot', which stops the VM at the beginning: set it to \
                 normal (migrate-set-parameters mode normal)";
    a_source_is_refused(qemu, words);
    let folder = tempfile::tempdir().unwrap();
    let heard = monitor(&folder.path().join("qmp"), qemu);
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (image, qmp, json) = (at("image"), format!("unix:{}", at("qmp")), at("report"));
    let output = platen(&["save", &image, "--qmp", &qmp]);
    is_refused(&output, words, &heard);
    assert!(!Path::new(&image).exists());
    heard.lock().unwrap().clear();
    let vm = format!("--vm=one={qmp}");
    let to = ["evacuate", "--insecure", "--to", "127.0.0.1:9", "--json", &json];
    let output = platen(&[&to[..], &[&vm]].concat());
    is_refused(&output, words, &heard);
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
    a_destination_is_refused(Qemu { colo: true, ..INCOMING }, "the destination QEMU has x-colo on");
}

#[test]
fn a_destination_qemu_that_expects_tls_is_refused_and_the_source_gets_the_reason() {
    let words = "the destination QEMU has tls-creds set";
    a_destination_is_refused(Qemu { tls: "tls0", ..INCOMING }, words);
}

/// `receive` refuses this destination, and the source's relay says these words.
fn a_destination_is_refused(qemu: Qemu, words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let heard = monitor(&folder.path().join("qmp"), qemu);
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
    is_refused(&output, words, &heard);
}

#[test]
fn a_destination_qemu_older_than_7_2_is_refused_by_its_monitor() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let qemu = Qemu { version: (7, 1), ..INCOMING };
    let heard = monitor(&folder.path().join("qmp"), qemu);
    let listen = ["receive", "--insecure", "--listen", "127.0.0.1:0"];
    let output = platen(&[&listen[..], &["--deliver", &at("dst"), "--qmp", &at("qmp")]].concat());
    is_refused(&output, "this is QEMU 7.1.3", &heard);
}
