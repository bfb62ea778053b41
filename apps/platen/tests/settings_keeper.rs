//! The helper process that restores QEMU's migration settings, with a made monitor.

use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Nothing here takes this long unless it hangs.
const WATCHDOG: Duration = Duration::from_secs(240);
const FORMER: &str = concat!(
    r#"{"capabilities":[["multifd",true]],"parameters":{"#,
    r#""downtime-limit":{"former":300,"ours":[300,150]},"#,
    r#""multifd-channels":{"former":2,"ours":[2,8]}}}"#
);

/// The settings before a migration or a rehearsal that QEMU may hold.
const HELD: &str = r#"{"capabilities":[],"parameters":{"downtime-limit":{"former":300,"ours":[1]}},"cancel_held":true}"#;

/// The settings before a save by multifd channels.
const BY_CHANNELS: &str = r#"{"capabilities":[],"parameters":{"downtime-limit":{"former":300,"ours":[1]}},"cancel":true}"#;

/// Commands that a person has to give at the monitor instead.
const COMMANDS: &str = concat!(
    r#"{"arguments":{"capabilities":[{"capability":"multifd","state":true}]},"execute":"migrate-set-capabilities"}"#,
    " and ",
    r#"{"arguments":{"downtime-limit":300,"multifd-channels":2},"execute":"migrate-set-parameters"}"#
);

/// A folder, and in it the socket of a made monitor.
fn made_monitor() -> (tempfile::TempDir, PathBuf, UnixListener) {
    let folder = tempfile::tempdir().unwrap();
    let monitor = folder.path().join("qmp");
    let listener = UnixListener::bind(&monitor).unwrap();
    (folder, monitor, listener)
}

/// The helper, whose command has sent it the former settings and died.
fn orphan(monitor: &Path) -> Child {
    orphan_with(monitor, FORMER, &[])
}

fn orphan_with(monitor: &Path, former: &str, options: &[&str]) -> Child {
    let mut helper = Command::new(env!("CARGO_BIN_EXE_platen"))
        .arg("keep-settings")
        .arg(format!("unix:{}", monitor.display()))
        // The made monitor may get no CPU for longer than a QEMU.
        .args(["--answer", &WATCHDOG.as_secs().to_string()])
        .args(options)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = helper.stdin.take().unwrap();
    pipe.write_all(format!("{former}\n").as_bytes()).unwrap();
    helper
}

/// A client of the made monitor, negotiated.
struct Client {
    lines: BufReader<UnixStream>,
    stream: UnixStream,
}

impl Client {
    fn accept(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let mut client = Self { lines: BufReader::new(stream.try_clone().unwrap()), stream };
        let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
        client.say(&json!({ "QMP": { "version": version, "capabilities": [] } }));
        client.hear("qmp_capabilities", json!({}));
        client
    }

    fn say(&mut self, message: &Value) {
        writeln!(self.stream, "{message}").unwrap();
    }

    /// Expects a command, answers it, and returns its arguments.
    fn hear(&mut self, expected: &str, answer: Value) -> Value {
        let command = self.hear_only(expected);
        self.answer(&command, answer);
        command["arguments"].clone()
    }

    /// Expects a command, and returns it.
    fn hear_only(&mut self, expected: &str) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        let command: Value = serde_json::from_str(&line).unwrap_or(Value::Null);
        assert_eq!(command["execute"], expected, "{line}");
        command
    }

    fn answer(&mut self, command: &Value, answer: Value) {
        self.say(&json!({ "return": answer, "id": command["id"] }));
    }

    fn hangs_up(mut self) {
        let mut line = String::new();
        assert_eq!(self.lines.read_line(&mut line).unwrap(), 0, "it said {line}");
    }
}

#[test]
fn settings_are_restored_after_the_migration_and_until_then_the_monitor_is_free() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    for status in ["active", "cancelling"] {
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": status }));
        client.hangs_up();
    }
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "cancelled" }));
    // QEMU has not released the migration's channels yet: it would abort.
    client.hear("query-yank", json!([{ "type": "migration" }]));
    client.hear("query-migrate", json!({ "status": "cancelled" }));
    client.hangs_up();
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "cancelled" }));
    released(&mut client);
    let known = json!([{ "capability": "multifd", "state": false }]);
    client.hear("query-migrate-capabilities", known);
    released(&mut client);
    let set = client.hear("migrate-set-capabilities", json!({}));
    assert_eq!(set["capabilities"], json!([{ "capability": "multifd", "state": true }]));
    client
        .hear("query-migrate-parameters", json!({ "downtime-limit": 150, "multifd-channels": 8 }));
    released(&mut client);
    let set = client.hear("migrate-set-parameters", json!({}));
    assert_eq!(set, json!({ "downtime-limit": 300, "multifd-channels": 2 }));
    client.hangs_up();
    let output = helper.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("as they were before"), "{said}");
}

/// QEMU has released its migration.
fn released(client: &mut Client) {
    client.hear("query-yank", json!([{ "type": "chardev", "id": "monitor" }]));
}

/// The helper restores the settings before a rehearsal, which has changed a parameter only.
fn restores_parameters(mut client: Client) {
    released(&mut client);
    client.hear("query-migrate-parameters", json!({ "downtime-limit": 1 }));
    let set = client.hear("migrate-set-parameters", json!({}));
    assert_eq!(set, json!({ "downtime-limit": 300 }));
    client.hangs_up();
}

/// The helper restores [`FORMER`].
fn restores_all(mut client: Client) {
    released(&mut client);
    client.hear("query-migrate-capabilities", json!([{ "capability": "multifd", "state": false }]));
    released(&mut client);
    client.hear("migrate-set-capabilities", json!({}));
    client
        .hear("query-migrate-parameters", json!({ "downtime-limit": 150, "multifd-channels": 8 }));
    released(&mut client);
    client.hear("migrate-set-parameters", json!({}));
    client.hangs_up();
}

/// The command has died between its report to the helper and its command to QEMU, or behind that.
/// Another client has set one parameter to a value of its own, and the other back.
#[test]
fn a_parameter_that_another_client_has_set_stays() {
    for (downtime, set) in [(300, None), (2000, None), (150, Some(300)), (301, None)] {
        let (_folder, monitor, listener) = made_monitor();
        let helper = orphan(&monitor);
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": "completed" }));
        released(&mut client);
        let known = json!([{ "capability": "multifd", "state": false }]);
        client.hear("query-migrate-capabilities", known);
        released(&mut client);
        client.hear("migrate-set-capabilities", json!({}));
        let now = json!({ "downtime-limit": downtime, "multifd-channels": 2 });
        client.hear("query-migrate-parameters", now);
        if let Some(downtime) = set {
            let set = client.hear("migrate-set-parameters", json!({}));
            assert_eq!(set, json!({ "downtime-limit": downtime }));
        }
        client.hangs_up();
        let output = helper.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let of_another = format!("set downtime-limit to {downtime}, from 300: it stays so");
        assert_eq!(said.contains(&of_another), ![300, 150].contains(&downtime), "{said}");
        assert!(output.status.success(), "{said}");
    }
}

/// Somebody gives a group access to the monitor meanwhile.
#[test]
fn a_monitor_whose_mode_changes_is_still_that_qemus() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    let mut client = Client::accept(&listener);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o660);
    std::fs::set_permissions(&monitor, mode).unwrap();
    client.hear("query-migrate", json!({ "status": "active" }));
    client.hangs_up();
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "completed" }));
    restores_all(client);
    assert!(helper.wait_with_output().unwrap().status.success());
}

/// It has settings of its own, which are left alone.
#[test]
fn another_qemu_at_the_same_path_is_not_touched() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "active" }));
    drop(listener);
    std::fs::remove_file(&monitor).unwrap();
    let listener = UnixListener::bind(&monitor).unwrap();
    client.hangs_up();
    assert!(helper.wait_with_output().unwrap().status.success());
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "it has connected");
}

/// QEMU accepts another number of channels during a migration, and aborts at its end.
#[test]
fn a_migration_that_begins_meanwhile_keeps_its_settings_and_they_are_restored_behind_it() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "failed" }));
    client.hear("query-yank", json!([{ "type": "migration" }]));
    client.hear("query-migrate", json!({ "status": "active" }));
    client.hear("query-status", json!({ "status": "running", "running": true }));
    client.hangs_up();
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "completed" }));
    restores_all(client);
    assert!(helper.wait_with_output().unwrap().status.success());
}

/// QEMU may hold the channels of a migration by multifd that has failed until it ends. Its monitor,
/// which serves one client at a time, is free for others.
#[test]
fn a_qemu_that_holds_the_channels_of_its_migration_is_asked_once_at_a_time() {
    let (_folder, monitor, listener) = made_monitor();
    let mut helper = orphan_with(&monitor, FORMER, &["--patience", "0"]);
    let mut said = BufReader::new(helper.stderr.take().unwrap()).lines();
    for _ in 0..2 {
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": "failed" }));
        client.hear("query-yank", json!([{ "type": "migration" }]));
        client.hear("query-migrate", json!({ "status": "failed" }));
        client.hangs_up();
    }
    let line = said.next().unwrap().unwrap();
    assert!(line.contains("holds the channels of the migration that has failed"), "{line}");
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "failed" }));
    restores_all(client);
    assert!(helper.wait().unwrap().success());
}

/// QEMU would wait for ever: nothing shows it that the other end of its socket has gone.
#[test]
fn a_migration_that_waits_to_hand_the_vm_over_is_cancelled() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan_with(&monitor, HELD, &[]);
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "pre-switchover", "total-time": 3_600_000 }));
    client.hear("migrate_cancel", json!({}));
    client.hangs_up();
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "cancelled" }));
    restores_parameters(client);
    assert!(helper.wait_with_output().unwrap().status.success());
}

/// Another helper keeps the channels of this migration open, so QEMU does not notice that the
/// command has died. The migration of another client, which began later, is left alone.
#[test]
fn a_save_by_channels_is_cancelled_and_no_later_migration() {
    for info in [
        json!({ "status": "setup" }),
        json!({ "status": "active", "total-time": 3_600_000 }),
        json!({ "status": "device", "total-time": 3_600_000 }),
    ] {
        let (_folder, monitor, listener) = made_monitor();
        let helper = orphan_with(&monitor, BY_CHANNELS, &[]);
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", info);
        client.hear("migrate_cancel", json!({}));
        client.hangs_up();
        for info in [
            json!({ "status": "cancelling", "total-time": 3_600_000 }),
            json!({ "status": "active", "total-time": 0 }),
        ] {
            let is_anothers = info["total-time"] == 0;
            let mut client = Client::accept(&listener);
            client.hear("query-migrate", info);
            if is_anothers {
                relieves(&mut client, &json!([]));
            }
            client.hangs_up();
        }
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": "cancelled" }));
        released(&mut client);
        client.hear("query-migrate-parameters", json!({ "downtime-limit": 300 }));
        client.hangs_up();
        assert!(helper.wait_with_output().unwrap().status.success());
    }
}

/// A VM that was stopped for an image, which the dead command has not named, continues. One whose
/// image is there stays stopped, and so does one that another client has saved meanwhile.
#[test]
fn a_vm_stopped_for_an_image_that_is_missing_continues() {
    let ram = |normal: u64| json!({ "normal": normal, "duplicate": 7, "dirty-sync-count": 3 });
    for (normal, has_image, resumes) in [(5, false, true), (6, false, false), (5, true, false)] {
        let (folder, monitor, listener) = made_monitor();
        let image = folder.path().join("image");
        if has_image {
            std::fs::write(&image, "").unwrap();
        }
        let migration = json!({ "setup": 2, "normal": 5, "duplicate": 7, "passes": 3 });
        let former = json!({
            "capabilities": [],
            "parameters": { "downtime-limit": { "former": 300, "ours": [1] } },
            "leave": { "image": image, "migration": migration },
        });
        let helper = orphan_with(&monitor, &former.to_string(), &[]);
        // QEMU has not read its answer yet.
        let mut client = Client::accept(&listener);
        let info = |status: &str| json!({ "status": status, "setup-time": 2, "ram": ram(normal) });
        client.hear("query-migrate", info("active"));
        client.hangs_up();
        let stopped = |client: &mut Client| {
            client.hear("query-migrate", info("completed"));
            if normal == 5 {
                client.hear("query-status", json!({ "status": "postmigrate", "running": false }));
            }
        };
        if normal == 5 {
            // QEMU completes the migration first, and then stops the VM for good.
            let mut client = Client::accept(&listener);
            client.hear("query-migrate", info("completed"));
            client.hear("query-status", json!({ "status": "finish-migrate", "running": false }));
            client.hangs_up();
        }
        let mut client = Client::accept(&listener);
        stopped(&mut client);
        if normal == 5 {
            // The monitor is free while the image is looked for.
            client.hangs_up();
            client = Client::accept(&listener);
            stopped(&mut client);
        }
        if resumes {
            client.hear("cont", json!({}));
        }
        restores_parameters(client);
        let output = helper.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("the VM continues"), resumes, "{said}");
    }
}

/// QEMU 7.2 loses a cancel between STOP and pre-switchover, and would wait for ever.
#[test]
fn a_qemu_that_has_lost_the_cancel_of_a_rehearsal_is_woken() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan_with(&monitor, HELD, &[]);
    // A cancel takes a moment: the helper does not ask at once.
    loop {
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": "cancelling" }));
        let mut line = String::new();
        if client.lines.read_line(&mut line).unwrap() == 0 {
            continue;
        }
        let command: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(command["execute"], "query-status", "{line}");
        let stopped = json!({ "status": "finish-migrate", "running": false });
        client.say(&json!({ "return": stopped, "id": command["id"] }));
        let arguments = client.hear("migrate-continue", json!({}));
        assert_eq!(arguments, json!({ "state": "cancelling" }));
        client.hangs_up();
        break;
    }
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "cancelled" }));
    restores_parameters(client);
    assert!(helper.wait_with_output().unwrap().status.success());
}

/// A save leaves a migration to those who continue it.
#[test]
fn no_other_migration_is_cancelled() {
    let (_folder, monitor, listener) = made_monitor();
    let mut helper = orphan_with(&monitor, FORMER, &[]);
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "pre-switchover", "total-time": 3_600_000 }));
    client.hangs_up();
    helper.kill().unwrap();
    helper.wait().unwrap();
}

/// The rehearsal's migration is over, and another client migrates. QEMU takes parameters meanwhile,
/// and stops that VM for `migrate-continue`, which the other client may not know of.
#[test]
fn another_migration_gets_its_parameters_and_the_helper_says_what_lets_it_go_on() {
    let former = |member: &str| {
        let list = r#""capabilities":[["pause-before-switchover",false]]"#;
        HELD.replace(r#""capabilities":[]"#, list).replace(r#""cancel_held":true"#, member)
    };
    for (former, age) in
        [(former(r#""over":true"#), 3_600_000), (former(r#""cancel_held":true"#), 0)]
    {
        let (_folder, monitor, listener) = made_monitor();
        let mut helper = orphan_with(&monitor, &former, &[]);
        let mut said = BufReader::new(helper.stderr.take().unwrap()).lines();
        let info = |status: &str| json!({ "status": status, "total-time": age });
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", info("active"));
        relieves(&mut client, &json!([{ "capability": "pause-before-switchover", "state": true }]));
        client.hangs_up();
        for _ in 0..2 {
            let mut client = Client::accept(&listener);
            client.hear("query-migrate", info("pre-switchover"));
            client.hangs_up();
        }
        let line = said.next().unwrap().unwrap();
        let go_on = r#"{"arguments":{"state":"pre-switchover"},"execute":"migrate-continue"}"#;
        assert!(line.contains(go_on) && line.contains("another client"), "{line}");
        let mut client = Client::accept(&listener);
        client.hear("query-migrate", json!({ "status": "completed" }));
        released(&mut client);
        let known = json!([{ "capability": "pause-before-switchover", "state": true }]);
        client.hear("query-migrate-capabilities", known);
        released(&mut client);
        client.hear("migrate-set-capabilities", json!({}));
        client.hear("query-migrate-parameters", json!({ "downtime-limit": 300 }));
        client.hangs_up();
        assert!(helper.wait().unwrap().success());
        let line = said.next().unwrap().unwrap();
        assert!(line.contains("as they were before"), "it is said once: {line}");
    }
}

/// The helper restores the parameter that [`HELD`] names, for a migration in progress.
fn relieves(client: &mut Client, known: &Value) {
    client.hear("query-migrate-parameters", json!({ "downtime-limit": 1 }));
    let set = client.hear("migrate-set-parameters", json!({}));
    assert_eq!(set, json!({ "downtime-limit": 300 }));
    client.hear("query-migrate-capabilities", known.clone());
}

#[test]
fn a_qemu_that_has_ended_needs_no_settings() {
    let folder = tempfile::tempdir().unwrap();
    let output = orphan(&folder.path().join("qmp")).wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_migration_that_is_paused_in_postcopy_is_reported_with_the_settings() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "postcopy-paused" }));
    client.hangs_up();
    let output = helper.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("paused in postcopy"), "{said}");
    assert!(said.contains(COMMANDS), "{said}");
}

/// A monitor that stays busy: the helper says what can be done by hand, and does it later.
#[test]
fn a_helper_that_waits_long_says_the_commands_and_goes_on() {
    let (_folder, monitor, listener) = made_monitor();
    let mut helper = orphan_with(&monitor, FORMER, &["--patience", "0"]);
    let mut said = BufReader::new(helper.stderr.take().unwrap()).lines();
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "active" }));
    client.hangs_up();
    let line = said.next().unwrap().unwrap();
    assert!(line.contains("stays 'active'") && line.contains(COMMANDS), "{line}");
    let mut client = Client::accept(&listener);
    client.hear("query-migrate", json!({ "status": "completed" }));
    restores_all(client);
    assert!(helper.wait().unwrap().success());
    assert!(said.next().unwrap().unwrap().contains("as they were before"));
}

/// The VM was started again: its QEMU has settings of its own.
#[test]
fn another_qemu_at_the_same_path_is_left_alone() {
    let (_folder, monitor, listener) = made_monitor();
    let helper = orphan(&monitor);
    let mut client = Client::accept(&listener);
    let command = client.hear_only("query-migrate");
    // Before the answer, behind which the helper comes again.
    let other = monitor.with_extension("other");
    let another = UnixListener::bind(&other).unwrap();
    std::fs::rename(&other, &monitor).unwrap();
    client.answer(&command, json!({ "status": "active" }));
    client.hangs_up();
    let output = helper.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    another.set_nonblocking(true).unwrap();
    assert!(another.accept().is_err(), "it is not asked");
}
