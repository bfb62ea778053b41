//! Changes QEMU's migration settings and restores them afterwards.

use crate::save_leave::Leave;
use crate::settings_keeper::{Former, SettingsKeeper};
use anyhow::{ensure, Context};
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::UnixAddress;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Changes settings, and restores the former ones at the end.
#[derive(Debug, Default)]
pub(crate) struct Before {
    former: Former,
    /// The process that restores them if this one is killed.
    keeper: Option<SettingsKeeper>,
}

/// Whether the error means that QEMU has set nothing.
fn is_refusal(error: &QmpError) -> bool {
    matches!(
        error,
        QmpError::Refused { .. }
            | QmpError::NoCapability { .. }
            | QmpError::InProgress { .. }
            | QmpError::Unreleased { .. }
    )
}

/// Queries the capabilities and their states, by name.
pub(crate) fn capabilities(qmp: &mut Qmp) -> anyhow::Result<BTreeMap<String, bool>> {
    let all = qmp.execute("query-migrate-capabilities", None)?;
    let one = |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
    let all = all.as_array().context("query-migrate-capabilities: no list")?;
    Ok(all.iter().filter_map(one).collect())
}

impl Before {
    /// Starts the process that restores the settings if this one is killed.
    pub(crate) fn with_keeper(qmp: &UnixAddress) -> anyhow::Result<Self> {
        Ok(Self { keeper: Some(SettingsKeeper::start(qmp)?), ..Self::default() })
    }

    /// Sets capabilities, all or none, and records those that change.
    pub(crate) fn set(&mut self, qmp: &mut Qmp, wanted: &[(&str, bool)]) -> anyhow::Result<()> {
        let now = capabilities(qmp)?;
        let change: Vec<_> =
            wanted.iter().copied().filter(|&(name, on)| now.get(name) != Some(&on)).collect();
        let noted = &mut self.former.capabilities;
        let before = noted.len();
        for &(name, on) in &change {
            if now.contains_key(name) && !noted.iter().any(|(noted, _)| noted == name) {
                noted.push((name.to_owned(), !on));
            }
        }
        self.tell()?;
        let set = qmp.set_capabilities(&change);
        if set.as_ref().is_err_and(is_refusal) {
            // A setting that was not changed is not restored: others may have set it later.
            self.former.capabilities.truncate(before);
            self.tell()?;
        }
        Ok(set?)
    }

    /// Sets a parameter, and records its previous value.
    pub(crate) fn set_parameter(
        &mut self,
        qmp: &mut Qmp,
        name: &str,
        value: Value,
    ) -> anyhow::Result<()> {
        self.set_parameters(qmp, Map::from_iter([(name.to_owned(), value)]))
    }

    /// Sets parameters, all or none, and records their previous values.
    pub(crate) fn set_parameters(
        &mut self,
        qmp: &mut Qmp,
        wanted: Map<String, Value>,
    ) -> anyhow::Result<()> {
        let noted = &mut self.former.parameters;
        if wanted.keys().any(|name| !noted.contains_key(name)) {
            let now = qmp.query_parameters()?;
            for name in wanted.keys() {
                let was = now.get(name).with_context(|| format!("QEMU has no parameter {name}"))?;
                noted.entry(name.clone()).or_insert_with(|| was.clone());
            }
            self.tell()?;
        }
        Ok(qmp.set_parameters(Value::Object(wanted))?)
    }

    /// Records that another client has set a parameter: its value stays after the end.
    pub(crate) fn adopt(&mut self, name: &str, value: Value) -> anyhow::Result<()> {
        self.former.parameters.insert(name.to_owned(), value);
        self.tell()
    }

    /// Tells the keeper whether QEMU's migration is a rehearsal, which it has to cancel if QEMU
    /// waits to hand the VM over.
    pub(crate) fn rehearse(&mut self, rehearsal: bool) -> anyhow::Result<()> {
        self.former.rehearsal = rehearsal;
        self.tell()
    }

    /// Tells the keeper that it has to cancel QEMU's migration if this process dies.
    pub(crate) fn cancel_at_death(&mut self) -> anyhow::Result<()> {
        self.former.cancel = true;
        self.tell()
    }

    /// Tells the keeper that QEMU's migration, which waits for its end, is a save into `image`. If
    /// this process dies before the image has its name, the keeper lets the VM continue.
    pub(crate) fn resume_at_death(
        &mut self,
        image: &Path,
        migration: &MigrationInfo,
    ) -> anyhow::Result<()> {
        self.former.leave = Some(Leave::new(image, migration)?);
        self.tell()
    }

    /// Sends the keeper the former settings. It has to have them before they change.
    fn tell(&mut self) -> anyhow::Result<()> {
        self.keeper.as_mut().map_or(Ok(()), |keeper| keeper.tell(&self.former))
    }

    /// Restores all settings. If that fails, the keeper tries it again once this process has ended.
    ///
    /// A destination may still load the VM. QEMU 7.2 aborts at the end of that if multifd or the
    /// number of channels has changed.
    pub(crate) fn put_back(self, qmp: &mut Qmp) -> anyhow::Result<()> {
        if !self.former.is_empty() {
            let info = qmp.query_migrate()?;
            let status = info.status();
            ensure!(
                info.is_over() || status == "none",
                "QEMU's migration is '{status}': its settings are not as they were before yet"
            );
        }
        self.former.restore(qmp)?;
        self.discard();
        Ok(())
    }

    /// Restores nothing, because QEMU ends.
    pub(crate) fn discard(self) {
        if let Some(keeper) = self.keeper {
            keeper.dismiss();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// Answers each command, and returns those that came.
    fn monitor(mut stream: UnixStream) -> Vec<String> {
        let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
        let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
        writeln!(stream, "{greeting}").unwrap();
        let mut heard = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let name = command["execute"].as_str().unwrap().to_owned();
            let answer = match &name[..] {
                "query-migrate-capabilities" => {
                    json!([{ "capability": "multifd", "state": false }])
                }
                "query-yank" => json!([{ "type": "migration" }]),
                "query-migrate" => json!({ "status": "active" }),
                "query-status" => json!({ "status": "running", "running": true }),
                _ => json!({}),
            };
            writeln!(stream, "{}", json!({ "return": answer, "id": command["id"] })).unwrap();
            heard.push(name);
        }
        heard
    }

    /// A destination that loads the VM keeps the settings that it loads it with.
    #[test]
    fn nothing_is_restored_while_a_migration_is_in_progress() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let monitor = std::thread::spawn(|| monitor(theirs));
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut settings = Before::default();
        settings.former.capabilities.push(("multifd".to_owned(), false));
        let error = settings.put_back(&mut qmp).unwrap_err();
        assert!(error.to_string().contains("'active'"), "{error:#}");
        drop(qmp);
        assert_eq!(monitor.join().unwrap().last().unwrap(), "query-migrate");
    }

    /// Another client has started a migration meanwhile, and sets capabilities of its own.
    #[test]
    fn capabilities_that_were_never_changed_are_not_restored() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let monitor = std::thread::spawn(|| monitor(theirs));
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut settings = Before::default();
        let error = settings.set(&mut qmp, &[("multifd", true)]).unwrap_err();
        assert!(format!("{error:#}").contains("in progress"), "{error:#}");
        settings.put_back(&mut qmp).unwrap();
        drop(qmp);
        assert_eq!(monitor.join().unwrap().last().unwrap(), "query-status");
    }
}
