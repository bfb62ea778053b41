//! QEMU's monitors, as both ends open them, and the QEMUs that both ends refuse.

use anyhow::{bail, Context};
use qmp::Qmp;
use relay::UnixAddress;
use std::time::Duration;

/// The time limit of a monitor's answer.
const MONITOR: Duration = Duration::from_secs(10);

/// The oldest QEMU whose stream format is known completely.
pub(crate) const OLDEST: (u32, u32) = (7, 2);

/// Migration states in which QEMU accepts no other migration.
const IN_PROGRESS: [&str; 8] =
    ["setup", "active", "cancelling", "failing", "pre-switchover", "device", "colo", "wait-unplug"];

/// Refuses a QEMU that has a migration in progress. `which`: "the source QEMU".
pub(crate) fn refuse_in_progress(qmp: &mut Qmp, which: &str) -> anyhow::Result<()> {
    let status = qmp.query_migrate()?.status.unwrap_or_default();
    let Some(remedy) = remedy(&status) else { return Ok(()) };
    bail!("{which} has a migration in progress ('{status}'): {remedy}")
}

/// The way to the end of a migration with this status; `None` if none is in progress.
fn remedy(status: &str) -> Option<&'static str> {
    if IN_PROGRESS.contains(&status) {
        return Some("wait for it or cancel it (migrate_cancel)");
    }
    match status {
        "postcopy-paused" => Some(
            "its VM waits for pages, so do not end this QEMU; recover the migration \
             (`platen restore --recover` if it is a restore)",
        ),
        // In postcopy migrate_cancel succeeds and has no effect.
        _ if status.starts_with("postcopy") => Some("wait for it"),
        _ => None,
    }
}

/// Refuses TLS of QEMU's own: a source's stream cannot be compressed, and a destination waits for a
/// handshake that a source without TLS never begins.
pub(crate) fn refuse_tls(parameters: &serde_json::Value, end: &str) -> anyhow::Result<()> {
    if parameters["tls-creds"].as_str().is_some_and(|creds| !creds.is_empty()) {
        bail!(
            "the {end} QEMU has tls-creds set, which hides the stream from compression: clear it \
             (migrate-set-parameters tls-creds \"\"); the socket to platen is local"
        );
    }
    Ok(())
}

/// Refuses COLO: both VMs run at once, and since QEMU 11.1 the stream does not show it.
pub(crate) fn refuse_colo(capabilities: &serde_json::Value, end: &str) -> anyhow::Result<()> {
    if is_on(capabilities, "x-colo") {
        bail!("the {end} QEMU has x-colo on, which platen does not carry: turn it off (migrate-set-capabilities)");
    }
    Ok(())
}

/// Refuses a mode of QEMU's in which it migrates no running VM to another host: its cpr modes stop
/// the VM at the beginning.
pub(crate) fn refuse_mode(parameters: &serde_json::Value, which: &str) -> anyhow::Result<()> {
    if let Some(mode) = parameters["mode"].as_str().filter(|mode| *mode != "normal") {
        bail!(
            "{which}'s migration mode is '{mode}', which stops the VM at the beginning: set it to \
             normal (migrate-set-parameters mode normal)"
        );
    }
    Ok(())
}

/// Whether `name` is on in an answer to `query-migrate-capabilities`.
pub(crate) fn is_on(capabilities: &serde_json::Value, name: &str) -> bool {
    let all = capabilities.as_array();
    all.is_some_and(|all| all.iter().any(|one| one["capability"] == name && one["state"] == true))
}

/// Opens a monitor and refuses a QEMU older than [`OLDEST`].
pub(crate) fn open_monitor(address: &UnixAddress) -> anyhow::Result<Qmp> {
    let qmp =
        Qmp::connect(address.path(), MONITOR).with_context(|| format!("monitor {address}"))?;
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        bail!("monitor {address}: this is QEMU {version}; platen knows the stream of QEMU 7.2 and later: upgrade QEMU");
    }
    Ok(qmp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_migration_in_progress_has_a_remedy() {
        for status in ["none", "completed", "failed", "cancelled"] {
            assert_eq!(remedy(status), None, "{status}");
        }
        assert!(remedy("active").unwrap().contains("migrate_cancel"));
        assert_eq!(remedy("postcopy-active"), Some("wait for it"));
        assert!(remedy("postcopy-paused").unwrap().contains("--recover"));
    }

    #[test]
    fn a_qemu_with_colo_is_refused() {
        let capabilities = |colo| {
            json!([
                {"capability": "multifd", "state": true},
                {"capability": "x-colo", "state": colo}
            ])
        };
        refuse_colo(&capabilities(false), "source").unwrap();
        refuse_colo(&json!([]), "source").unwrap();
        let error = refuse_colo(&capabilities(true), "destination").unwrap_err().to_string();
        assert!(error.contains("the destination QEMU has x-colo on"), "{error}");
    }
}
