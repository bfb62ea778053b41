//! Shared by `save` and `restore`: changes QEMU's migration settings and restores them afterwards.

use anyhow::{bail, Context};
use qmp::Qmp;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;

/// Migration states in which QEMU accepts no other migration.
const IN_PROGRESS: [&str; 8] =
    ["setup", "active", "cancelling", "failing", "pre-switchover", "device", "colo", "wait-unplug"];

/// Capability settings that a plain stream requires, where QEMU has the capability.
pub(crate) const PLAIN: [(&str, bool); 12] = [
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
];

/// Refuses a QEMU that has a migration in progress.
pub(crate) fn refuse_in_progress(qmp: &mut Qmp) -> anyhow::Result<()> {
    let status = qmp.query_migrate()?.status.unwrap_or_default();
    if IN_PROGRESS.contains(&status.as_str()) || status.starts_with("postcopy") {
        bail!("this QEMU has a migration in progress ('{status}'): wait for it or cancel it (migrate_cancel)");
    }
    Ok(())
}

/// The settings before platen changed them.
#[derive(Debug, Default)]
pub(crate) struct Before {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

/// Queries the capabilities, by name.
pub(crate) fn capabilities(qmp: &mut Qmp) -> anyhow::Result<BTreeMap<String, bool>> {
    let all = qmp.execute("query-migrate-capabilities", None)?;
    let one = |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
    let all = all.as_array().context("query-migrate-capabilities: no list")?;
    Ok(all.iter().filter_map(one).collect())
}

impl Before {
    /// Sets capabilities, all or none, and records those that change.
    pub(crate) fn set(&mut self, qmp: &mut Qmp, wanted: &[(&str, bool)]) -> anyhow::Result<()> {
        let now = capabilities(qmp)?;
        let change: Vec<_> =
            wanted.iter().copied().filter(|&(name, on)| now.get(name) != Some(&on)).collect();
        qmp.set_capabilities(&change)?;
        for (name, on) in change {
            if now.contains_key(name) && !self.capabilities.iter().any(|(noted, _)| noted == name) {
                self.capabilities.push((name.to_owned(), !on));
            }
        }
        Ok(())
    }

    /// Sets a parameter, and records its previous value.
    pub(crate) fn set_parameter(
        &mut self,
        qmp: &mut Qmp,
        name: &str,
        value: Value,
    ) -> anyhow::Result<()> {
        if !self.parameters.contains_key(name) {
            let now = qmp.query_parameters()?;
            let was = now.get(name).with_context(|| format!("QEMU has no parameter {name}"))?;
            self.parameters.insert(name.to_owned(), was.clone());
        }
        qmp.set_parameters(json!({ name: value }))?;
        Ok(())
    }

    /// Restores all settings. An error names the settings that could not be restored.
    pub(crate) fn put_back(self, qmp: &mut Qmp) -> anyhow::Result<()> {
        let list: Vec<_> =
            self.capabilities.iter().map(|(name, on)| (name.as_str(), *on)).collect();
        let capabilities = qmp.set_capabilities(&list);
        if !self.parameters.is_empty() {
            qmp.set_parameters(Value::Object(self.parameters))
                .context("QEMU's migration parameters are not as they were before")?;
        }
        capabilities.context("QEMU's migration capabilities are not as they were before")
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
