//! Changes QEMU's migration settings and restores them afterwards.

use crate::save_leave::Leave;
use crate::settings_claim::SettingsClaim;
use crate::settings_former::{capabilities, Former, Parameter};
use crate::settings_helper::SettingsKeeper;
use anyhow::{ensure, Context};
use qmp::{MigrationInfo, Qmp};
use relay::UnixAddress;
use serde_json::{Map, Value};
use std::path::Path;

/// Changes settings, and restores the former ones at the end.
#[derive(Debug, Default)]
pub(crate) struct Before {
    former: Former,
    /// The process that restores them if this one is killed.
    keeper: Option<SettingsKeeper>,
}

impl Before {
    /// Claims the settings, and starts the process that restores them if this one is killed. Call
    /// this before the monitor is opened: the helper of a command that was killed may need it.
    ///
    /// # Errors
    /// Another command has the settings for longer than 10 s, or no process can be started.
    pub(crate) fn with_keeper(qmp: &UnixAddress) -> anyhow::Result<Self> {
        Self::with_claim(qmp, SettingsClaim::new(qmp)?)
    }

    /// The same for a destination, whose peer does not wait for another command to end: without the
    /// claim if that is taken.
    pub(crate) fn with_keeper_at_once(qmp: &UnixAddress) -> anyhow::Result<Self> {
        Self::with_claim(qmp, SettingsClaim::if_free(qmp))
    }

    fn with_claim(qmp: &UnixAddress, claim: Option<SettingsClaim>) -> anyhow::Result<Self> {
        Ok(Self { keeper: Some(SettingsKeeper::start(qmp, claim)?), ..Self::default() })
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
        if set.as_ref().is_err_and(|error| error.is_refusal()) {
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

    /// Sets parameters, all or none, and records their previous values. The value that another
    /// client has set meanwhile is the previous one.
    pub(crate) fn set_parameters(
        &mut self,
        qmp: &mut Qmp,
        wanted: Map<String, Value>,
    ) -> anyhow::Result<()> {
        let now = qmp.query_parameters()?;
        let is_known = |name: &String| self.former.parameters.contains_key(name);
        let are_known = wanted.keys().all(is_known);
        for (name, value) in &wanted {
            let now = now.get(name).with_context(|| format!("QEMU has no parameter {name}"))?;
            let noted = self.former.parameters.entry(name.clone());
            let noted = noted.or_insert_with(|| Parameter { former: now.clone(), ours: vec![] });
            if noted.is_of_another(now) {
                noted.former = now.clone();
            }
            noted.ours = vec![now.clone(), value.clone()];
        }
        match &mut self.keeper {
            // A keeper that is dead or stopped must not hold up a migration: this process restores
            // the parameters at its end.
            Some(keeper) if are_known => keeper.tell_if_it_reads(&self.former),
            _ => self.tell()?,
        }
        Ok(qmp.set_parameters(Value::Object(wanted))?)
    }

    /// Tells the keeper that it has to cancel QEMU's migration if this process dies and QEMU waits
    /// to hand the VM over (`pre-switchover`). QEMU does not notice that death.
    pub(crate) fn cancel_held_at_death(&mut self) -> anyhow::Result<()> {
        self.former.cancel_held = true;
        self.tell()
    }

    /// Tells the keeper that the command's own migration is over, or has not begun: one that is in
    /// progress is another client's.
    pub(crate) fn migration_is_over(&mut self) -> anyhow::Result<()> {
        (self.former.cancel_held, self.former.over) = (false, true);
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

    #[cfg(test)]
    pub(crate) fn note_capability(&mut self, name: &str, former: bool) {
        self.former.capabilities.push((name.to_owned(), former));
    }

    /// Whether nothing was changed, or is to be restored.
    pub(crate) fn is_unchanged(&self) -> bool {
        self.former.is_empty()
    }

    /// Restores all settings. If that fails, the keeper tries it again once this process has ended.
    ///
    /// A destination may still load the VM. QEMU 7.2 aborts at the end of that if multifd or the
    /// number of channels has changed.
    pub(crate) fn put_back(self, qmp: &mut Qmp) -> anyhow::Result<()> {
        if let Err(error) = self.restore(qmp) {
            return Err(self.former.relieve_after(qmp, error));
        }
        self.discard();
        Ok(())
    }

    fn restore(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        if self.former.is_empty() {
            return Ok(());
        }
        let info = qmp.query_migrate()?;
        ensure!(
            !info.is_in_progress(),
            "QEMU's migration is '{}': its settings are not as they were before yet",
            info.status()
        );
        self.former.restore(qmp)
    }

    /// Restores nothing, because QEMU ends.
    pub(crate) fn discard(self) {
        if let Some(keeper) = self.keeper {
            keeper.dismiss();
        }
    }
}

#[cfg(test)]
impl From<Former> for Before {
    fn from(former: Former) -> Self {
        Self { former, keeper: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    /// Parameters of the made monitor.
    type Parameters = Arc<Mutex<Map<String, Value>>>;

    /// Answers each command, and returns those that came.
    fn monitor(mut stream: UnixStream, parameters: &Parameters) -> Vec<String> {
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
                "query-migrate-parameters" => Value::Object(parameters.lock().unwrap().clone()),
                "migrate-set-parameters" => {
                    let wanted = command["arguments"].as_object().unwrap().clone();
                    parameters.lock().unwrap().extend(wanted);
                    json!({})
                }
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
        let monitor = std::thread::spawn(|| monitor(theirs, &Parameters::default()));
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
        let monitor = std::thread::spawn(|| monitor(theirs, &Parameters::default()));
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut settings = Before::default();
        let error = settings.set(&mut qmp, &[("multifd", true)]).unwrap_err();
        assert!(format!("{error:#}").contains("in progress"), "{error:#}");
        settings.put_back(&mut qmp).unwrap();
        drop(qmp);
        assert_eq!(monitor.join().unwrap().last().unwrap(), "query-status");
    }
    /// Another client sets a limit while platen changes it, and a bandwidth that platen changes no
    /// more.
    #[test]
    fn a_parameter_that_another_client_sets_meanwhile_is_its_former_value() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let parameters = Parameters::default();
        let of_monitor = parameters.clone();
        let monitor = std::thread::spawn(move || monitor(theirs, &of_monitor));
        let set = |name: &str, value: u64| {
            parameters.lock().unwrap().insert(name.into(), json!(value));
        };
        let (limit, bandwidth, throttle) = ("downtime-limit", "max-bandwidth", "max-cpu-throttle");
        set(limit, 300);
        set(bandwidth, 1 << 27);
        set(throttle, 99);
        let mut qmp = Qmp::over(ours, Duration::from_secs(120)).unwrap();
        let mut settings = Before::default();
        for (name, value) in [(limit, 150), (bandwidth, 0), (throttle, 1), (limit, 200)] {
            settings.set_parameter(&mut qmp, name, json!(value)).unwrap();
        }
        set(limit, 2000);
        settings.set_parameter(&mut qmp, limit, json!(1000)).unwrap();
        settings.set_parameter(&mut qmp, limit, json!(1500)).unwrap();
        set(bandwidth, 1 << 20);
        settings.former.restore_parameters(&mut qmp, |_| true).unwrap();
        let now = Value::Object(parameters.lock().unwrap().clone());
        assert_eq!(now, json!({ limit: 2000, bandwidth: 1 << 20, throttle: 99 }));
        drop(qmp);
        monitor.join().unwrap();
    }
}
