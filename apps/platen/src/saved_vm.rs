//! Shared by `save` and `restore`: changes QEMU's migration settings and restores them afterwards.

use crate::settings_keeper::{Former, SettingsKeeper};
use anyhow::{bail, Context};
use qmp::Qmp;
use relay::UnixAddress;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Migration states in which QEMU accepts no other migration.
const IN_PROGRESS: [&str; 8] =
    ["setup", "active", "cancelling", "failing", "pre-switchover", "device", "colo", "wait-unplug"];

/// Time limit for a VM that is loaded to leave `inmigrate`.
const STARTS: Duration = Duration::from_secs(60);

/// Capability settings that a plain stream requires, where QEMU has the capability.
pub(crate) const PLAIN: [(&str, bool); 14] = [
    ("events", true),
    ("return-path", true),
    ("multifd", false),
    ("postcopy-ram", false),
    ("postcopy-preempt", false),
    ("xbzrle", false),
    ("compress", false),
    ("zero-copy-send", false),
    ("mapped-ram", false),
    ("background-snapshot", false),
    ("pause-before-switchover", false),
    ("switchover-ack", false),
    // `save` refuses these two. A destination with one of them on reads another block table, or
    // waits for a second VM.
    ("x-ignore-shared", false),
    ("x-colo", false),
];

/// Refuses a QEMU that has a migration in progress.
pub(crate) fn refuse_in_progress(qmp: &mut Qmp) -> anyhow::Result<()> {
    let status = qmp.query_migrate()?.status.unwrap_or_default();
    if IN_PROGRESS.contains(&status.as_str()) || status.starts_with("postcopy") {
        bail!("this QEMU has a migration in progress ('{status}'): wait for it or cancel it (migrate_cancel)");
    }
    Ok(())
}

/// Changes settings, and restores the former ones at the end.
#[derive(Debug, Default)]
pub(crate) struct Before {
    former: Former,
    /// The process that restores them if this one is killed.
    keeper: Option<SettingsKeeper>,
}

/// Queries the capabilities, by name.
pub(crate) fn capabilities(qmp: &mut Qmp) -> anyhow::Result<BTreeMap<String, bool>> {
    let all = qmp.execute("query-migrate-capabilities", None)?;
    let one = |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
    let all = all.as_array().context("query-migrate-capabilities: no list")?;
    Ok(all.iter().filter_map(one).collect())
}

impl Before {
    /// Starts the process that restores the settings if this one is killed.
    pub(crate) fn kept(qmp: &UnixAddress) -> anyhow::Result<Self> {
        Ok(Self { keeper: Some(SettingsKeeper::start(qmp)?), ..Self::default() })
    }

    /// Sets capabilities, all or none, and records those that change.
    pub(crate) fn set(&mut self, qmp: &mut Qmp, wanted: &[(&str, bool)]) -> anyhow::Result<()> {
        let now = capabilities(qmp)?;
        let change: Vec<_> =
            wanted.iter().copied().filter(|&(name, on)| now.get(name) != Some(&on)).collect();
        let noted = &mut self.former.capabilities;
        for &(name, on) in &change {
            if now.contains_key(name) && !noted.iter().any(|(noted, _)| noted == name) {
                noted.push((name.to_owned(), !on));
            }
        }
        self.tell()?;
        Ok(qmp.set_capabilities(&change)?)
    }

    /// Sets a parameter, and records its previous value.
    pub(crate) fn set_parameter(
        &mut self,
        qmp: &mut Qmp,
        name: &str,
        value: Value,
    ) -> anyhow::Result<()> {
        if !self.former.parameters.contains_key(name) {
            let now = qmp.query_parameters()?;
            let was = now.get(name).with_context(|| format!("QEMU has no parameter {name}"))?;
            self.former.parameters.insert(name.to_owned(), was.clone());
        }
        self.tell()?;
        Ok(qmp.set_parameters(json!({ name: value }))?)
    }

    /// Tells the keeper the former settings. It has to have them before they change.
    fn tell(&mut self) -> anyhow::Result<()> {
        self.keeper.as_mut().map_or(Ok(()), |keeper| keeper.tell(&self.former))
    }

    /// Restores all settings. If that fails, the keeper tries it again once this process has ended.
    pub(crate) fn put_back(self, qmp: &mut Qmp) -> anyhow::Result<()> {
        self.former.restore(qmp)?;
        self.forget();
        Ok(())
    }

    /// Restores nothing: QEMU ends.
    pub(crate) fn forget(self) {
        if let Some(keeper) = self.keeper {
            keeper.dismiss();
        }
    }
}

/// Waits until the VM leaves `inmigrate`; returns its run state.
pub(crate) fn wait_started(qmp: &mut Qmp) -> anyhow::Result<String> {
    let until = Instant::now() + STARTS;
    loop {
        let vm = qmp.query_status()?.status;
        if vm != "inmigrate" || Instant::now() > until {
            return Ok(vm);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Formats a number of bytes with its unit.
pub(crate) fn bytes(count: u64) -> String {
    match count {
        0..1_048_576 => format!("{} KiB", count.div_ceil(1024)),
        _ => format!("{:.1} MiB", count as f64 / f64::from(1 << 20)),
    }
}

/// Writes a report as one line of JSON.
pub(crate) fn write_json(path: Option<&std::path::Path>, report: &Value) {
    let Some(path) = path else { return };
    if let Err(error) = std::fs::write(path, format!("{report}\n")) {
        crate::say::say(&format!("cannot write the report {}: {error}", path.display()));
    }
}
