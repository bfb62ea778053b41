//! The answers of a QEMU's monitor.

use super::error::{nonsense, VmError};
use qmp::Qmp;
use serde::Serialize;
use serde_json::Value;

/// The most RAM of a VM that is credible, bytes: 16 TiB, as an image may have.
const MOST_RAM: u64 = 16 << 40;
/// The most vCPUs.
const MOST_CPUS: usize = 8192;

/// The answers of a QEMU's monitor.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Vm {
    /// QEMU's version.
    pub qemu: String,
    /// Major and minor version.
    #[serde(skip)]
    pub version: (u32, u32),
    /// The run state.
    pub state: String,
    /// Bytes of RAM.
    pub ram: u64,
    /// vCPUs.
    pub cpus: u64,
    /// Whether KVM runs the VM.
    pub kvm: bool,
    /// Migration capabilities that are on.
    pub capabilities: Vec<String>,
    /// QEMU's multifd compressors; empty if QEMU does not report them.
    pub compressors: Vec<String>,
    /// QEMU's downtime-limit, milliseconds.
    pub downtime_limit: u64,
    /// QEMU's max-bandwidth, bytes per second; null if there is no limit.
    pub max_bandwidth: Option<u64>,
    /// QEMU's multifd-channels.
    pub channels: u64,
}

impl Vm {
    /// Queries a monitor.
    ///
    /// # Errors
    /// The monitor fails, or gives an impossible answer.
    pub fn look(qmp: &mut Qmp) -> Result<Self, VmError> {
        let state = qmp.query_status()?.status;
        let memory = qmp.execute("query-memory-size-summary", None)?;
        let cpus = qmp.execute("query-cpus-fast", None)?;
        let cpus = cpus.as_array().map_or(0, Vec::len);
        if cpus == 0 || cpus > MOST_CPUS {
            return Err(nonsense("query-cpus-fast", &format!("{cpus} vCPUs")));
        }
        let parameters = qmp.query_parameters()?;
        let known = qmp.execute("query-migrate-capabilities", None)?;
        // Not every QEMU is built with KVM, or with a schema that can be queried.
        let kvm = qmp.execute("query-kvm", None).is_ok_and(|answer| answer["enabled"] == true);
        let schema = qmp.execute("query-qmp-schema", None).unwrap_or_default();
        let version = qmp.version();
        Ok(Self {
            qemu: version.to_string(),
            version: (version.major, version.minor),
            state,
            ram: ram(&memory)?,
            cpus: cpus as u64,
            kvm,
            capabilities: switched_on(&known),
            compressors: compressors(&schema),
            downtime_limit: parameters["downtime-limit"].as_u64().unwrap_or(300),
            max_bandwidth: parameters["max-bandwidth"].as_u64().filter(|rate| *rate > 0),
            channels: parameters["multifd-channels"].as_u64().unwrap_or(2).clamp(1, 255),
        })
    }

    /// Checks that QEMU may be asked to read the guest's memory. QEMU reads in its main loop, which
    /// waits for ever for a page that a migration has yet to bring.
    ///
    /// # Errors
    /// The VM is being migrated to or from this QEMU, or has left; the monitor fails.
    pub fn may_be_read(&self, qmp: &mut Qmp) -> Result<(), VmError> {
        let migration = qmp.execute("query-migrate", None)?;
        let migration = migration["status"].as_str().unwrap_or("none").to_owned();
        let is_here = ["running", "paused", "suspended"].contains(&self.state.as_str());
        let is_over = ["none", "completed", "failed", "cancelled"].contains(&migration.as_str());
        if is_here && is_over {
            return Ok(());
        }
        Err(VmError::Moving { state: self.state.clone(), migration })
    }
}

/// Bytes of RAM, including hot-plugged RAM.
fn ram(answer: &Value) -> Result<u64, VmError> {
    let base = answer["base-memory"].as_u64();
    let all =
        base.and_then(|base| base.checked_add(answer["plugged-memory"].as_u64().unwrap_or(0)));
    let is_possible = |ram: &u64| (1..=MOST_RAM).contains(ram);
    all.filter(is_possible)
        .ok_or_else(|| nonsense("query-memory-size-summary", &answer.to_string()))
}

fn switched_on(answer: &Value) -> Vec<String> {
    let all = answer.as_array().into_iter().flatten();
    let on = all.filter(|one| one["state"] == true).filter_map(|one| one["capability"].as_str());
    on.take(256).map(|name| name.chars().take(64).collect()).collect()
}

/// The values of the schema's enumeration with both "none" and "zlib": that of multifd-compression.
fn compressors(schema: &Value) -> Vec<String> {
    let all = schema.as_array().into_iter().flatten();
    let values = |one: &Value| -> Vec<String> {
        let values = one["values"].as_array().into_iter().flatten().take(64);
        values.filter_map(|value| Some(value.as_str()?.chars().take(64).collect())).collect()
    };
    let is_it =
        |values: &Vec<String>| ["none", "zlib"].iter().all(|name| values.iter().any(|v| v == name));
    all.filter(|one| one["meta-type"] == "enum").map(values).find(is_it).unwrap_or_default()
}

#[cfg(test)]
mod tests;
