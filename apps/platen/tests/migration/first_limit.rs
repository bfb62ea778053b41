//! A source QEMU may stop its VM before anything was observed of its migration.

use super::*;
use serde_json::{json, Value};
use std::sync::mpsc::Sender;

/// A made monitor of a source QEMU with a downtime-limit of 10 s. It sends the limit that it has
/// when it is told to migrate, which it refuses.
fn monitor(path: &Path) -> Receiver<u64> {
    let listener = UnixListener::bind(path).unwrap();
    let (begins, begun) = mpsc::channel();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            // It goes away at any time.
            let _ = serve(client, &begins);
        }
    });
    begun
}

fn serve(mut client: UnixStream, begins: &Sender<u64>) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    let mut limit = 10_000;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let mut reply = json!({ "return": {}, "id": command["id"] });
        match command["execute"].as_str().unwrap() {
            "migrate" => {
                let _ = begins.send(limit);
                let error = json!({ "class": "GenericError", "desc": "not now" });
                reply = json!({ "error": error, "id": command["id"] });
            }
            "migrate-set-parameters" => {
                limit = command["arguments"]["downtime-limit"].as_u64().unwrap_or(limit);
            }
            "query-migrate-parameters" => {
                reply["return"] = json!({
                    "downtime-limit": limit,
                    "avail-switchover-bandwidth": 1_u64 << 40,
                    "max-bandwidth": 0,
                });
            }
            "query-status" => reply["return"] = json!({ "status": "running", "running": true }),
            "query-migrate-capabilities" => {
                reply["return"] = json!([
                    { "capability": "events", "state": false },
                    { "capability": "return-path", "state": false },
                ]);
            }
            "query-yank" => reply["return"] = json!([]),
            _ => {}
        }
        writeln!(client, "{reply}")?;
    }
    Ok(())
}

/// The first observation comes after 250 ms. QEMU measures its bandwidth in 100 ms.
#[test]
fn qemu_is_held_back_before_the_migration_begins() {
    // A twentieth of the longest downtime, also where that is QEMU's own.
    for (flags, held) in [(&["--max-downtime", "100"][..], 5), (&[], 500)] {
        let rig = Rig::new("");
        let begun = monitor(&rig.at("qmp"));
        let qmp = unix(&rig.at("qmp"));
        let own = ["--qmp", &qmp, "--codec", "none"];
        let common = ["migrate", "--insecure", "--peer", &rig.address];
        let migrate = Platen::start("", &[&common[..], &own, flags].concat());
        let limit = begun.recv_timeout(WATCHDOG).unwrap();
        let (status, said) = migrate.ends();
        assert_eq!(status, Some(1), "{said}");
        assert_eq!(limit, held, "{flags:?}");
    }
}
