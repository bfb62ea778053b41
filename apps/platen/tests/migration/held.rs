//! A source QEMU that stops its VM and waits for leave to hand it over.

use super::*;
use serde_json::{json, Value};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A made monitor of a source QEMU with pause-before-switchover on, which converges at once.
/// While it is `deaf`, an order to cancel has no effect.
fn monitor(path: &Path, deaf: Arc<AtomicBool>) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut status = "none";
        for client in listener.incoming().map_while(Result::ok) {
            // It goes away at any time.
            let _ = serve(client, &mut status, &deaf);
        }
    });
}

fn serve(
    mut client: UnixStream,
    status: &mut &'static str,
    deaf: &AtomicBool,
) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let answer = match command["execute"].as_str().unwrap() {
            "migrate" => {
                *status = "pre-switchover";
                json!({})
            }
            "migrate_cancel" => {
                if !deaf.load(Ordering::Acquire) {
                    *status = "cancelled";
                }
                json!({})
            }
            "query-migrate" => json!({ "status": *status, "total-time": 3_600_000 }),
            "query-status" => {
                let running = *status != "pre-switchover";
                let state = if running { "running" } else { "finish-migrate" };
                json!({ "status": state, "running": running })
            }
            "query-migrate-parameters" => json!({ "downtime-limit": 300, "max-bandwidth": 0 }),
            "query-migrate-capabilities" => json!([
                { "capability": "events", "state": false },
                { "capability": "return-path", "state": false },
                { "capability": "pause-before-switchover", "state": true },
            ]),
            "query-yank" => json!([]),
            _ => json!({}),
        };
        writeln!(client, "{}", json!({ "return": answer, "id": command["id"] }))?;
    }
    Ok(())
}

/// The VM is stopped, and nobody but the user can say that it may go.
#[test]
fn a_source_that_waits_for_leave_to_hand_its_vm_over_is_reported() {
    let rig = Rig::new("");
    monitor(&rig.at("qmp"), Arc::default());
    let qmp = unix(&rig.at("qmp"));
    let mut migrate = Platen::start(
        "",
        &["migrate", "--insecure", "--peer", &rig.address, "--qmp", &qmp, "--codec", "none"],
    );
    let said = migrate.says("the VM is stopped");
    for words in ["pause-before-switchover", "migrate-continue"] {
        assert!(said.contains(words), "{said}");
    }
    kill_process(Pid::from_child(&migrate.child), Signal::INT).unwrap();
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("cancelled; the source QEMU's VM is 'running'"), "{said}");
}

/// A second interrupt forces the relay to end, which a QEMU that writes nothing does not notice.
#[test]
fn a_source_that_waits_goes_on_when_its_relay_is_forced_to_end() {
    let rig = Rig::new("");
    let deaf = Arc::new(AtomicBool::new(true));
    monitor(&rig.at("qmp"), deaf.clone());
    let qmp = unix(&rig.at("qmp"));
    let mut migrate = Platen::start(
        "",
        &["migrate", "--insecure", "--peer", &rig.address, "--qmp", &qmp, "--codec", "none"],
    );
    migrate.says("the VM is stopped");
    let id = Pid::from_child(&migrate.child);
    kill_process(id, Signal::INT).unwrap();
    migrate.says("cancelling (interrupt again to force)");
    deaf.store(false, Ordering::Release);
    kill_process(id, Signal::TERM).unwrap();
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("the source QEMU's VM is 'running'"), "{said}");
}

/// QEMU notices no death of a relay to which it writes nothing, and its VM stands still. A second
/// migration must not take the settings of the first one for its user's.
#[test]
fn a_source_that_waits_goes_on_when_migrate_is_killed() {
    let rig = Rig::new("");
    let deaf = Arc::new(AtomicBool::new(true));
    monitor(&rig.at("qmp"), deaf.clone());
    let qmp = unix(&rig.at("qmp"));
    let start = || {
        let peer = ["migrate", "--insecure", "--peer", &rig.address];
        Platen::start("", &[&peer[..], &["--qmp", &qmp, "--codec", "none"]].concat())
    };
    let mut first = start();
    first.says("the VM is stopped");
    kill_process(Pid::from_child(&first.child), Signal::KILL).unwrap();
    // The helper writes to the same terminal.
    first.says("QEMU waits to hand the VM over: cancelling its migration");
    let (status, said) = start().ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("still restores QEMU's settings"), "{said}");
    deaf.store(false, Ordering::Release);
    first.says("QEMU's migration settings are as they were before");
}
