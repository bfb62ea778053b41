//! Another client's migration that begins between the end of the command's own and the restored
//! settings: it has platen's settings.
//!
//! QEMU takes parameters during a migration, so they are restored at once. It takes no capabilities
//! then. A client that did not expect `pause-before-switchover` leaves its VM stopped for ever, so
//! the operator gets the command that lets QEMU go on.

use crate::say::say;
use crate::settings_former::{capabilities, Former};
use anyhow::anyhow;
use qmp::{Qmp, QmpError};
use relay::UnixAddress;
use serde_json::json;

/// The capability with which QEMU stops the VM, and waits.
const PAUSE: &str = "pause-before-switchover";
/// The capability with which QEMU does not stop the VM before the destination allows it.
const ACK: &str = "switchover-ack";
/// The status of a QEMU that has stopped the VM and waits.
const HELD: &str = "pre-switchover";

impl Former {
    /// Restores the parameters of QEMU's migration, which another client has begun. Returns what
    /// that client has to know of the capabilities that stay.
    fn relieve(&self, qmp: &mut Qmp) -> anyhow::Result<String> {
        // QEMU accepts another number of channels at any time, and aborts at the migration's end.
        self.restore_parameters(qmp, |name| !name.starts_with("multifd-"))?;
        let now = capabilities(qmp)?;
        let is_ours = |name: &str| {
            now.get(name) == Some(&true) && self.capabilities.contains(&(name.to_owned(), false))
        };
        let mut text = "another client has begun this migration".to_owned();
        if is_ours(PAUSE) {
            let go_on = json!({ "execute": "migrate-continue", "arguments": { "state": HELD } });
            text += &format!(
                ". platen has switched {PAUSE} on: when the migration is '{HELD}' and its client does \
                 not go on, the VM stays stopped until this command comes at a monitor: {go_on}"
            );
        }
        if is_ours(ACK) {
            text += &format!(
                ". platen has switched {ACK} on: a migration to a QEMU without it does not end; cancel \
                 it (migrate_cancel), and migrate again"
            );
        }
        Ok(text)
    }

    /// Adds to an error of restoring what [`Former::relieve`] returns, if another client's
    /// migration is in progress.
    pub(crate) fn relieve_after(&self, qmp: &mut Qmp, error: anyhow::Error) -> anyhow::Error {
        let is_silent = error.downcast_ref().is_some_and(|error: &QmpError| !error.is_refusal());
        if !self.over || is_silent {
            return error;
        }
        match qmp.query_migrate() {
            Ok(info) if info.is_in_progress() => match self.relieve(qmp) {
                Ok(text) => anyhow!("{error:#}; {text}"),
                Err(second) => anyhow!("{error:#}; {second:#}"),
            },
            _ => error,
        }
    }
}

/// Another client's migration, as the helper process sees it.
#[derive(Debug, Default)]
pub(crate) struct Inherited {
    /// The text that [`Former::relieve`] has returned.
    relieved: Option<String>,
    told: bool,
}

impl Inherited {
    /// Restores the parameters once; prints, once, what makes a VM continue that waits. Returns why
    /// the other settings are not restored yet.
    pub(crate) fn look(
        &mut self,
        (qmp, monitor): (&mut Qmp, &UnixAddress),
        former: &Former,
        status: &str,
    ) -> anyhow::Result<String> {
        let relieved = match self.relieved.take() {
            Some(relieved) => relieved,
            None => former.relieve(qmp)?,
        };
        let reason = format!("QEMU's migration stays '{status}'; {relieved}");
        self.relieved = Some(relieved);
        if status == HELD && !std::mem::replace(&mut self.told, true) {
            say(&format!("monitor {monitor}: {reason}"));
        }
        Ok(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Before;
    use crate::settings_former::Parameter;
    use serde_json::Value;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// A QEMU whose migration is `active`; returns the commands that came.
    fn monitor(mut stream: UnixStream) -> Vec<Value> {
        let version = json!({ "qemu": { "major": 8, "minor": 2, "micro": 0 } });
        let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
        writeln!(stream, "{greeting}").unwrap();
        let mut heard = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let answer = match command["execute"].as_str().unwrap() {
                "query-migrate" => json!({ "status": "active", "total-time": 20 }),
                "query-migrate-capabilities" => json!([
                    { "capability": PAUSE, "state": true },
                    { "capability": ACK, "state": true },
                ]),
                "query-migrate-parameters" => {
                    json!({ "downtime-limit": 1, "max-bandwidth": 0, "multifd-channels": 8 })
                }
                _ => json!({}),
            };
            writeln!(stream, "{}", json!({ "return": answer, "id": command["id"] })).unwrap();
            heard.push(command);
        }
        heard
    }

    /// Puts the settings of a rehearsal back; returns the error and the commands.
    fn put_back(over: bool) -> (String, Vec<Value>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let monitor = std::thread::spawn(|| monitor(theirs));
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut former = Former { over, ..Former::default() };
        former.capabilities = vec![(PAUSE.into(), false), (ACK.into(), false)];
        for (name, before, ours) in
            [("downtime-limit", 300, 1), ("max-bandwidth", 1 << 27, 0), ("multifd-channels", 2, 8)]
        {
            let parameter = Parameter { former: json!(before), ours: vec![json!(ours)] };
            former.parameters.insert(name.into(), parameter);
        }
        let error = Before::from(former).put_back(&mut qmp).unwrap_err();
        drop(qmp);
        (format!("{error:#}"), monitor.join().unwrap())
    }

    /// Another client migrates as soon as QEMU has cancelled a rehearsal.
    #[test]
    fn a_migration_that_begins_behind_a_rehearsal_gets_its_parameters_and_the_command() {
        let (error, heard) = put_back(true);
        assert!(error.contains(PAUSE) && error.contains(ACK), "{error}");
        let command = r#"{"arguments":{"state":"pre-switchover"},"execute":"migrate-continue"}"#;
        assert!(error.contains(command), "{error}");
        let is_set = |command: &&Value| command["execute"] == "migrate-set-parameters";
        let set: Vec<_> = heard.iter().filter(is_set).collect();
        assert_eq!(set.len(), 1, "{heard:?}");
        let former = json!({ "downtime-limit": 300, "max-bandwidth": 1 << 27 });
        assert_eq!(set[0]["arguments"], former);
    }

    /// The command's own migration is not over.
    #[test]
    fn a_migration_of_the_command_keeps_its_parameters() {
        let (error, heard) = put_back(false);
        assert!(error.contains("'active'"), "{error}");
        assert_eq!(heard.last().unwrap()["execute"], "query-migrate");
    }
}
