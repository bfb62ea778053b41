//! Makes a QEMU whose player has died listen for the next player.

use anyhow::Context;
use qmp::{Qmp, QmpError};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// QEMU's migration status for a postcopy that has lost its source.
const PAUSED: &str = "postcopy-paused";
/// Time limit for QEMU to reach [`PAUSED`] after a player has died.
pub(crate) const PAUSES: Duration = Duration::from_secs(60);
/// Time for QEMU to reach [`PAUSED`] before it is asked whether it has completed instead.
const COMPLETES: Duration = Duration::from_millis(100);
/// Time limit for a QEMU to end that is told to.
pub(crate) const ENDS: Duration = Duration::from_secs(10);
/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(20);
/// Time limit for one question about the VM's state. A vCPU that waits for a page may keep QEMU
/// from answering.
pub(crate) const ANSWERS: Duration = Duration::from_millis(250);
/// Questions that QEMU may leave unanswered at a time. It stops to read its monitor at 8.
pub(crate) const UNANSWERED: usize = 4;

/// State of a QEMU whose player has gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Without {
    /// QEMU listens for the next player.
    Listens,
    /// QEMU has all pages: the player had sent everything, and died before it read QEMU's answer.
    Completed,
}

/// Makes QEMU listen at `uri`. QEMU accepts that once it has noticed that the last player is gone;
/// `patience` limits the wait for that.
pub(crate) fn recover(qmp: &mut Qmp, uri: &str, patience: Duration) -> anyhow::Result<Without> {
    let begin = Instant::now();
    loop {
        let refused = match qmp.execute_out_of_band("migrate-recover", Some(json!({ "uri": uri })))
        {
            Ok(_) => return Ok(Without::Listens),
            // A QEMU that gets no CPU answers late. It accepts the command again while it is
            // paused.
            Err(error @ (QmpError::Refused { .. } | QmpError::TimedOut { .. })) => error,
            Err(error) => return Err(error.into()),
        };
        if begin.elapsed() > COMPLETES && has_completed(qmp) {
            return Ok(Without::Completed);
        }
        if begin.elapsed() > patience {
            let text = match refused {
                QmpError::TimedOut { .. } => "QEMU does not answer its monitor".into(),
                _ => format!("QEMU does not come to {PAUSED}: is a player at work still?"),
            };
            return Err(refused).context(text);
        }
        thread::sleep(AGAIN);
    }
}

/// Ends a QEMU that may have been sent everything before the run of the VM; whether the VM has not
/// run, and will not. QEMU sends RESUME before the guest's CPUs run, and all events before the end
/// of the connection.
pub(crate) fn ends_unrun(qmp: &mut Qmp, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    // A QEMU that gets no CPU reads it later.
    let _ = qmp.execute_within("quit", None, limit);
    let mut has_run = false;
    loop {
        match qmp.poll_event(until.saturating_duration_since(Instant::now())) {
            Ok(Some(event)) => has_run |= event.name == "RESUME",
            // RESUME may be among those that were dropped.
            Err(_) => return !has_run && qmp.events_dropped() == 0,
            Ok(None) => return false,
        }
        if Instant::now() > until {
            return false;
        }
    }
}

/// Whether QEMU reports that it has received everything. A QEMU whose main loop waits for a page
/// answers nothing, and still lacks that page.
fn has_completed(qmp: &mut Qmp) -> bool {
    qmp.unanswered() < UNANSWERED
        && qmp
            .execute_within("query-migrate", None, ANSWERS)
            .is_ok_and(|answer| answer["status"] == "completed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;

    /// Recovers a made QEMU whose migration has these statuses, one after the other, and stays in
    /// the last. It answers the first questions so late that they count as unanswered.
    fn recovered(statuses: &'static [&'static str], late: usize) -> anyhow::Result<Without> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
            let greeting = json!({ "QMP": { "version": version, "capabilities": ["oob"] } });
            writeln!(stream, "{greeting}").unwrap();
            let (mut asked, mut kept) = (0, Vec::new());
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
                let status = statuses[asked.min(statuses.len() - 1)];
                let name = command["execute"].as_str().or(command["exec-oob"].as_str());
                let answer = match name.unwrap() {
                    "query-migrate" => {
                        asked += 1;
                        json!({ "return": { "status": status }, "id": command["id"] })
                    }
                    "migrate-recover" if status != PAUSED => {
                        let error = json!({ "class": "GenericError", "desc": "not paused" });
                        json!({ "error": error, "id": command["id"] })
                    }
                    _ => json!({ "return": {}, "id": command["id"] }),
                };
                if name == Some("query-migrate") && asked <= late {
                    // Its main loop waits. It answers when it has been asked as often as it may be.
                    kept.push(answer);
                    if asked < late {
                        continue;
                    }
                    thread::sleep(2 * ANSWERS);
                    for answer in kept.drain(..) {
                        writeln!(stream, "{answer}").unwrap();
                    }
                    continue;
                }
                writeln!(stream, "{answer}").unwrap();
            }
        });
        let mut qmp = Qmp::connect_out_of_band(&path, Duration::from_secs(300)).unwrap();
        let result = recover(&mut qmp, "unix:/none", PAUSES);
        drop(qmp);
        qemu.join().unwrap();
        result
    }

    #[test]
    fn a_vm_that_had_everything_when_its_player_died_needs_no_other() {
        let completes = &["postcopy-active", "completed"];
        assert_eq!(recovered(completes, 0).unwrap(), Without::Completed);
        assert_eq!(recovered(&["postcopy-active", PAUSED], 0).unwrap(), Without::Listens);
    }

    /// A QEMU that gets no CPU for a while is asked again when it has answered.
    #[test]
    fn a_qemu_that_answers_late_is_asked_again() {
        let late = ["postcopy-active"; UNANSWERED];
        let statuses = [&late[..], &["completed"]].concat().leak();
        assert_eq!(recovered(statuses, UNANSWERED).unwrap(), Without::Completed);
    }

    /// A QEMU that answers no command out of band until the next one has come, so that the first
    /// one times out.
    #[test]
    fn a_command_out_of_band_that_is_answered_late_is_given_again() {
        const LIMIT: Duration = Duration::from_secs(1);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        // It ends with the test.
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
                let greeting = json!({ "QMP": { "version": version, "capabilities": ["oob"] } });
                writeln!(stream, "{greeting}").unwrap();
                let mut kept = None;
                for line in
                    BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok)
                {
                    let command: Value = serde_json::from_str(&line).unwrap();
                    let answer = json!({ "return": {}, "id": command["id"] });
                    if command["exec-oob"] == "migrate-recover" {
                        count.fetch_add(1, Ordering::SeqCst);
                        let Some(former) = kept.replace(answer.clone()) else { continue };
                        writeln!(stream, "{former}").unwrap();
                    }
                    writeln!(stream, "{answer}").unwrap();
                }
            }
        });
        // On a slow machine the greeting may take longer than the limit.
        let mut qmp = loop {
            if let Ok(qmp) = Qmp::connect_out_of_band(&path, LIMIT) {
                break qmp;
            }
        };
        let without = recover(&mut qmp, "unix:/none", Duration::from_secs(300)).unwrap();
        assert_eq!(without, Without::Listens);
        assert!(asked.load(Ordering::SeqCst) > 1);
    }

    /// A QEMU that is told to end runs its VM before, ends at once, or does not read its monitor.
    #[test]
    fn a_vm_has_not_run_only_if_its_qemu_has_ended_without_resume() {
        const LONG: Duration = Duration::from_secs(300);
        let resume = json!({ "event": "RESUME", "timestamp": { "seconds": 1, "microseconds": 0 } });
        for (answers, event, limit, expected) in [
            (true, None, LONG, true),
            (true, Some(&resume), LONG, false),
            (false, None, Duration::from_millis(100), false),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("qmp");
            let listener = UnixListener::bind(&path).unwrap();
            let qemu = thread::spawn({
                let event = event.cloned();
                move || {
                    let mut stream = listener.accept().unwrap().0;
                    let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
                    let greeting =
                        json!({ "QMP": { "version": version, "capabilities": ["oob"] } });
                    writeln!(stream, "{greeting}").unwrap();
                    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                        let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
                        let quits = command["execute"] == "quit";
                        if quits && !answers {
                            continue;
                        }
                        if let (true, Some(event)) = (quits, &event) {
                            writeln!(stream, "{event}").unwrap();
                        }
                        writeln!(stream, "{}", json!({ "return": {}, "id": command["id"] }))
                            .unwrap();
                        if quits {
                            break;
                        }
                    }
                }
            });
            let mut qmp = Qmp::connect_out_of_band(&path, LONG).unwrap();
            let ended = ends_unrun(&mut qmp, limit);
            drop(qmp);
            qemu.join().unwrap();
            assert_eq!(ended, expected, "answers: {answers}, {event:?}");
        }
    }
}
