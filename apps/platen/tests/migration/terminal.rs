//! A terminal that takes no output, as after Ctrl-S.

use super::*;
use nix::pty::openpty;
use nix::sys::termios::{tcflow, FlowArg};
use serde_json::{json, Value};
use std::sync::mpsc::Sender;

/// A made monitor of a source QEMU whose migration goes on until it is cancelled, and the commands
/// that it hears.
fn monitor(path: &Path) -> Receiver<String> {
    let listener = UnixListener::bind(path).unwrap();
    let (hears, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut status = "none";
        for client in listener.incoming().map_while(Result::ok) {
            // It goes away at any time.
            let _ = serve(client, &mut status, &hears);
        }
    });
    heard
}

fn serve(
    mut client: UnixStream,
    status: &mut &'static str,
    hears: &Sender<String>,
) -> std::io::Result<()> {
    let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
    writeln!(client, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))?;
    for line in BufReader::new(client.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?).unwrap();
        let name = command["execute"].as_str().unwrap();
        match name {
            "migrate" => *status = "active",
            "migrate_cancel" => *status = "cancelled",
            _ => {}
        }
        let answer = match name {
            "query-migrate" => json!({ "status": *status }),
            "query-status" => json!({ "status": "running", "running": true }),
            "query-migrate-parameters" => json!({ "downtime-limit": 300, "max-bandwidth": 0 }),
            "query-migrate-capabilities" => json!([
                { "capability": "events", "state": false },
                { "capability": "return-path", "state": false },
            ]),
            "query-yank" => json!([]),
            _ => json!({}),
        };
        writeln!(client, "{}", json!({ "return": answer, "id": command["id"] }))?;
        let _ = hears.send(name.to_owned());
    }
    Ok(())
}

/// Waits until the monitor hears the command.
fn hears(heard: &Receiver<String>, command: &str) {
    let until = Instant::now() + WATCHDOG;
    while heard.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap() != command {}
}

/// The migration is cancelled by a signal, although nothing can be drawn.
#[test]
fn a_terminal_that_takes_nothing_keeps_no_interrupt_from_a_migration() {
    let rig = Rig::new("");
    let heard = monitor(&rig.at("qmp"));
    let terminal = openpty(None, None).unwrap();
    tcflow(&terminal.slave, FlowArg::TCOOFF).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["migrate", "--insecure", "--peer", &rig.address, "--codec", "none"])
        .args(["--qmp", &unix(&rig.at("qmp"))])
        // Otherwise nothing is drawn.
        .env("TERM", "xterm")
        .stdout(Stdio::null())
        .stderr(Stdio::from(terminal.slave))
        .spawn()
        .unwrap();
    // Its messages are lost with the terminal.
    let migrate = Platen { child, lines: mpsc::channel().1, said: Vec::new() };
    hears(&heard, "migrate");
    // It has drawn once it asks again.
    for _ in 0..3 {
        hears(&heard, "query-migrate");
    }
    kill_process(Pid::from_child(&migrate.child), Signal::INT).unwrap();
    hears(&heard, "migrate_cancel");
    assert_eq!(migrate.ends().0, Some(1));
}
