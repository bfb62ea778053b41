//! QEMU's migration settings before platen changed them, and how they are restored.

use crate::save_leave::Leave;
use crate::say::say;
use anyhow::Context;
use qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;

/// Queries the capabilities and their states, by name.
pub(crate) fn capabilities(qmp: &mut Qmp) -> anyhow::Result<BTreeMap<String, bool>> {
    let all = qmp.execute("query-migrate-capabilities", None)?;
    let one = |one: &Value| Some((one["capability"].as_str()?.to_owned(), one["state"].as_bool()?));
    let all = all.as_array().context("query-migrate-capabilities: no list")?;
    Ok(all.iter().filter_map(one).collect())
}

/// A migration parameter that platen has changed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Parameter {
    /// Its value for the time afterwards.
    pub(crate) former: Value,
    /// The two values that platen has set last: QEMU may not have carried out the last command. Any
    /// other value is another client's.
    pub(crate) ours: Vec<Value>,
}

impl Parameter {
    /// Whether another client has set the parameter to `now`.
    pub(crate) fn is_of_another(&self, now: &Value) -> bool {
        *now != self.former && !self.ours.contains(now)
    }
}

/// Migration settings of a QEMU before platen changed them.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Former {
    pub(crate) capabilities: Vec<(String, bool)>,
    pub(crate) parameters: BTreeMap<String, Parameter>,
    /// Whether QEMU's migration is cancelled if it waits to hand the VM over: nobody else can
    /// complete it.
    #[serde(default)]
    pub(crate) cancel_held: bool,
    /// Whether QEMU does not notice the death of the command, so that its migration is cancelled.
    #[serde(default)]
    pub(crate) cancel: bool,
    /// Whether the command's migration is over: one in progress is another client's.
    #[serde(default)]
    pub(crate) over: bool,
    /// The save at whose end the VM stays stopped.
    #[serde(default)]
    pub(crate) leave: Option<Leave>,
}

impl Former {
    pub(crate) fn is_empty(&self) -> bool {
        self.capabilities.is_empty() && self.parameters.is_empty()
    }

    /// The commands that restore the settings, for a person at the monitor.
    pub(crate) fn commands(&self) -> String {
        let mut commands = Vec::new();
        if !self.capabilities.is_empty() {
            let list = self.capabilities.iter();
            let list = list.map(|(name, on)| json!({ "capability": name, "state": on }));
            let list = json!({ "capabilities": list.collect::<Vec<_>>() });
            commands.push(json!({ "execute": "migrate-set-capabilities", "arguments": list }));
        }
        if !self.parameters.is_empty() {
            let list = self.parameters.iter().map(|(name, one)| (name.clone(), one.former.clone()));
            let list = Value::Object(list.collect());
            commands.push(json!({ "execute": "migrate-set-parameters", "arguments": list }));
        }
        let commands: Vec<_> = commands.iter().map(Value::to_string).collect();
        commands.join(" and ")
    }

    /// Restores the settings, but none while a migration may use them, and no parameter that
    /// another client has set meanwhile. An error names those that could not be restored.
    pub(crate) fn restore(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        qmp.wait_released().context("QEMU's migration settings are not as they were before")?;
        self.restore_released(qmp)
    }

    /// The same, once QEMU has released the migration before.
    pub(crate) fn restore_released(&self, qmp: &mut Qmp) -> anyhow::Result<()> {
        let list: Vec<_> =
            self.capabilities.iter().map(|(name, on)| (name.as_str(), *on)).collect();
        let mut capabilities = Ok(());
        if !list.is_empty() {
            capabilities = qmp.set_capabilities(&list);
        }
        if !self.parameters.is_empty() {
            self.restore_parameters(qmp, |_| true)
                .context("QEMU's migration parameters are not as they were before")?;
        }
        capabilities.context("QEMU's migration capabilities are not as they were before")
    }

    /// The parameters alone, those that `may_change`.
    pub(crate) fn restore_parameters(
        &self,
        qmp: &mut Qmp,
        may_change: fn(&str) -> bool,
    ) -> Result<(), QmpError> {
        let now = qmp.query_parameters()?;
        let mut changed = Map::new();
        for (name, one) in self.parameters.iter().filter(|(name, _)| may_change(name)) {
            if one.is_of_another(&now[name]) {
                say(&format!(
                    "another monitor has set {name} to {}, from {}: it stays so",
                    now[name], one.former
                ));
            } else if now[name] != one.former {
                changed.insert(name.clone(), one.former.clone());
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        qmp.set_parameters(Value::Object(changed))
    }
}
