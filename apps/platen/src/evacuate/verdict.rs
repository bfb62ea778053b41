//! Finds where a VM is whose migration has not succeeded, from the state of its source QEMU.

use super::report::Outcome;
use qmp::Qmp;
use relay::UnixAddress;
use std::time::{Duration, Instant};

/// Longest time in which a source QEMU continues its VM when the migration has failed.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time limit of one answer.
const MONITOR: Duration = Duration::from_secs(5);
const ASK: Duration = Duration::from_millis(200);

/// Finds where a VM is whose `platen migrate` has ended without success: still here as it was, or
/// in doubt. `before` is its run state before the migration.
pub(super) fn verdict(monitor: &UnixAddress, before: &str) -> (Outcome, String) {
    let until = Instant::now() + PATIENCE;
    loop {
        let seen = ask(monitor);
        let text = match &seen {
            Ok(Seen { vm, migration, .. }) => {
                format!("the source QEMU's VM is '{vm:.64}', its migration '{migration:.64}'")
            }
            Err(error) => format!("the source QEMU's monitor does not answer: {error:.300}"),
        };
        match judge(seen.as_ref().ok(), before) {
            Some(outcome) => return (outcome, text),
            None if Instant::now() >= until => return (Outcome::InDoubt, text),
            None => std::thread::sleep(ASK),
        }
    }
}

/// The state of a source QEMU.
struct Seen {
    vm: String,
    runs: bool,
    migration: String,
}

fn ask(monitor: &UnixAddress) -> Result<Seen, qmp::QmpError> {
    let mut qmp = Qmp::connect(monitor.path(), MONITOR)?;
    // The migration first: a VM that runs after the end of its migration stays.
    let migration = qmp.query_migrate()?.status().to_owned();
    let vm = qmp.query_status()?;
    Ok(Seen { vm: vm.status, runs: vm.running, migration })
}

/// Returns the outcome; `None` while it may still change.
fn judge(seen: Option<&Seen>, before: &str) -> Option<Outcome> {
    let seen = seen?;
    let is_over = matches!(seen.migration.as_str(), "none" | "failed" | "cancelled" | "completed");
    let is_as_before = seen.runs || (seen.vm == before && before != "postmigrate");
    if is_over && is_as_before {
        Some(Outcome::Stayed)
    } else if seen.vm == "postmigrate" || seen.migration == "postcopy-paused" {
        Some(Outcome::InDoubt)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_stays_only_if_it_is_as_before_and_its_migration_is_over() {
        let of = |vm: &str, migration: &str, before: &str| {
            let seen = Seen { vm: vm.into(), runs: vm == "running", migration: migration.into() };
            judge(Some(&seen), before)
        };
        for over in ["none", "failed", "cancelled"] {
            assert_eq!(of("running", over, "running"), Some(Outcome::Stayed), "{over}");
            assert_eq!(of("paused", over, "paused"), Some(Outcome::Stayed), "{over}");
            assert_eq!(of("finish-migrate", over, "running"), None, "{over}");
            assert_eq!(of("paused", over, "running"), None, "{over}");
        }
        for on_its_way in ["active", "device", "cancelling", "pre-switchover"] {
            assert_eq!(of("running", on_its_way, "running"), None, "{on_its_way}");
            assert_eq!(of("finish-migrate", on_its_way, "running"), None, "{on_its_way}");
        }
        assert_eq!(of("postmigrate", "completed", "running"), Some(Outcome::InDoubt));
        assert_eq!(of("paused", "postcopy-paused", "running"), Some(Outcome::InDoubt));
        assert_eq!(judge(None, "running"), None);
    }
}
