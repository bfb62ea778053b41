//! Throttles of QEMU's own that its user has left on.

use super::*;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Capabilities of a made source QEMU, and whether each is on.
type Capabilities = BTreeMap<String, bool>;

/// Parameters of QEMU's auto-converge.
const PARAMETERS: [&str; 4] = [
    "throttle-trigger-threshold",
    "cpu-throttle-initial",
    "cpu-throttle-increment",
    "max-cpu-throttle",
];

/// A made monitor of a source QEMU. It sends the capabilities with which it is told to migrate,
/// which it refuses.
fn monitor(path: &Path, now: Arc<Mutex<Capabilities>>) -> Receiver<Capabilities> {
    let listener = UnixListener::bind(path).unwrap();
    let (begins, begun) = mpsc::channel();
    std::thread::spawn(move || {
        let mut parameters: Map<_, _> =
            PARAMETERS.map(|name| (name.to_owned(), json!(10))).into_iter().collect();
        parameters.extend([
            ("downtime-limit".to_owned(), json!(300)),
            ("max-bandwidth".to_owned(), json!(0)),
        ]);
        for client in listener.incoming().map_while(Result::ok) {
            let migrate = || {
                let _ = begins.send(now.lock().unwrap().clone());
            };
            // It goes away at any time.
            let _ = serve(client, &now, &mut parameters, migrate);
        }
    });
    begun
}

fn serve(
    mut client: UnixStream,
    now: &Mutex<Capabilities>,
    parameters: &mut Map<String, Value>,
    migrate: impl Fn(),
) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let mut reply = json!({ "return": {}, "id": command["id"] });
        match command["execute"].as_str().unwrap() {
            "migrate" => {
                migrate();
                let error = json!({ "class": "GenericError", "desc": "not now" });
                reply = json!({ "error": error, "id": command["id"] });
            }
            "migrate-set-capabilities" => {
                let mut now = now.lock().unwrap();
                for one in command["arguments"]["capabilities"].as_array().unwrap() {
                    let known = now.get_mut(one["capability"].as_str().unwrap());
                    *known.expect("no QEMU accepts another") = one["state"].as_bool().unwrap();
                }
            }
            "query-migrate-capabilities" => {
                let now = now.lock().unwrap();
                let one = |(name, on)| json!({ "capability": name, "state": on });
                reply["return"] = now.iter().map(one).collect();
            }
            "migrate-set-parameters" => {
                parameters.extend(command["arguments"].as_object().unwrap().clone());
            }
            "query-migrate-parameters" => reply["return"] = Value::Object(parameters.clone()),
            "query-status" => reply["return"] = json!({ "status": "running", "running": true }),
            "query-yank" => reply["return"] = json!([]),
            _ => {}
        }
        writeln!(client, "{reply}")?;
    }
    Ok(())
}

/// The capabilities before, during and after a migration with `--throttle` so.
fn capabilities(throttle: &str, before: &[(&str, bool)]) -> [Capabilities; 3] {
    let rig = Rig::new("");
    let all = [("events", true), ("return-path", false)].into_iter().chain(before.iter().copied());
    let before: Capabilities = all.map(|(name, on)| (name.to_owned(), on)).collect();
    let now = Arc::new(Mutex::new(before.clone()));
    let begun = monitor(&rig.at("qmp"), now.clone());
    let qmp = unix(&rig.at("qmp"));
    let own = ["--qmp", &qmp, "--codec", "none", "--throttle", throttle];
    let common = ["migrate", "--insecure", "--peer", &rig.address];
    let migrate = Platen::start("", &[&common[..], &own].concat());
    let during = begun.recv_timeout(WATCHDOG).unwrap();
    let (status, said) = migrate.ends();
    assert_eq!(status, Some(1), "{said}");
    let after = now.lock().unwrap().clone();
    [before, during, after]
}

/// Regression: `migrate` left auto-converge and dirty-limit as they were, and QEMU slowed the guest
/// although `--throttle off` is the default.
#[test]
fn without_a_throttle_qemu_s_own_are_off_during_the_migration() {
    // QEMU has one of them on at most.
    for throttle in ["auto-converge", "dirty-limit"] {
        let all = ["auto-converge", "dirty-limit"].map(|name| (name, name == throttle));
        let [before, during, after] = capabilities("off", &all);
        assert!(!during["auto-converge"] && !during["dirty-limit"], "{throttle}: {during:?}");
        assert_eq!(after, before);
    }
    // QEMU has dirty-limit from 8.1 on.
    let [before, during, after] = capabilities("off", &[("auto-converge", true)]);
    assert!(!during["auto-converge"] && during["return-path"], "{during:?}");
    assert_eq!(after, before);
}

#[test]
fn a_throttle_that_is_asked_for_is_qemu_s_auto_converge() {
    let off = [("auto-converge", false), ("dirty-limit", false)];
    let [before, during, after] = capabilities("auto", &off);
    assert!(during["auto-converge"] && !during["dirty-limit"], "{during:?}");
    assert_eq!(after, before);
}
