//! Migration over QMP: capabilities, parameters, start, cancel, and the status.

mod info;

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{json, Value};

use crate::{Qmp, QmpError};

pub use info::{MigrationInfo, RamStats, RunStatus};

/// Time limit for QEMU to release the channels of a migration that is over. On a busy host it has
/// taken more than 10 s.
const RELEASE: Duration = Duration::from_secs(60);
/// The pause between two queries whether QEMU has released them.
const ASK: Duration = Duration::from_millis(10);

impl Qmp {
    /// Switches migration capabilities on and off, all in one command, as soon as QEMU has released
    /// the previous migration: see [`Qmp::wait_released`].
    ///
    /// A capability that this QEMU lacks counts as off: switching it off is skipped.
    ///
    /// # Errors
    ///
    /// [`QmpError::NoCapability`] if QEMU lacks a capability that is to be switched on; then
    /// nothing is set. Errors of [`Qmp::wait_released`].
    pub fn set_capabilities(&mut self, wanted: &[(&str, bool)]) -> Result<(), QmpError> {
        const QUERY: &str = "query-migrate-capabilities";
        let known: Vec<Capability> = read(QUERY, self.execute(QUERY, None)?)?;
        let mut list = Vec::with_capacity(wanted.len());
        for &(name, state) in wanted {
            if known.iter().any(|capability| capability.capability == name) {
                list.push(json!({ "capability": name, "state": state }));
            } else if state {
                return Err(QmpError::NoCapability {
                    version: self.version(),
                    capability: name.to_owned(),
                });
            }
        }
        if list.is_empty() {
            return Ok(());
        }
        self.wait_released()?;
        let arguments = json!({ "capabilities": list });
        self.execute("migrate-set-capabilities", Some(arguments)).map(drop)
    }

    /// Waits until QEMU has released the channels of a migration that is over. A QEMU that awaits a
    /// migration has nothing to release.
    ///
    /// A migration counts as failed as soon as one channel has failed; the others are released
    /// later. QEMU 7.2 releases what the settings of that moment say: with multifd switched off by
    /// then, or with another number of channels than it began with, it aborts (assertions in
    /// `yank_unregister_instance` and `qemu_mutex_lock_impl`). Another `migrate` before the release
    /// resets the state that the release needs: QEMU 7.2 refuses it ("duplicate yank instance") and
    /// crashes. The VM is lost with it.
    ///
    /// # Errors
    ///
    /// [`QmpError::InProgress`] if the migration is not over; [`QmpError::Unreleased`] after 60 s.
    pub fn wait_released(&mut self) -> Result<(), QmpError> {
        let until = Instant::now() + RELEASE;
        while let Some(status) = self.unreleased()? {
            if Instant::now() >= until {
                return Err(QmpError::Unreleased { status, seconds: RELEASE.as_secs() });
            }
            std::thread::sleep(ASK);
        }
        Ok(())
    }

    /// The status of a migration that is over and whose channels QEMU has not released; see
    /// [`Qmp::wait_released`].
    ///
    /// # Errors
    ///
    /// [`QmpError::InProgress`] if the migration is not over.
    pub fn unreleased(&mut self) -> Result<Option<String>, QmpError> {
        if !self.is_registered()? {
            return Ok(None);
        }
        let info = self.query_migrate()?;
        let status = info.status().to_owned();
        if info.is_over() {
            return Ok(Some(status));
        }
        match self.query_status()?.status.as_str() {
            "inmigrate" => Ok(None),
            _ => Err(QmpError::InProgress { status }),
        }
    }

    /// Whether QEMU has a migration registered with `yank`: from its start to its release.
    fn is_registered(&mut self) -> Result<bool, QmpError> {
        const QUERY: &str = "query-yank";
        let instances: Vec<YankInstance> = read(QUERY, self.execute(QUERY, None)?)?;
        Ok(instances.iter().any(|instance| instance.kind == "migration"))
    }

    /// Sets migration parameters, by QEMU's names, all in one command. Sets `multifd-channels` only
    /// when QEMU has released the previous migration: QEMU accepts another number at any time, and
    /// aborts at the end of a migration that began with fewer or more.
    ///
    /// # Errors
    ///
    /// [`QmpError::Refused`] for a parameter that QEMU lacks or a value that it refuses. Errors of
    /// [`Qmp::wait_released`].
    pub fn set_parameters(&mut self, parameters: Value) -> Result<(), QmpError> {
        if parameters.get("multifd-channels").is_some() {
            self.wait_released()?;
        }
        self.execute("migrate-set-parameters", Some(parameters)).map(drop)
    }

    /// The migration parameters, by QEMU's names.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_parameters(&mut self) -> Result<Value, QmpError> {
        self.execute("query-migrate-parameters", None)
    }

    /// The migration's status and counters.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_migrate(&mut self) -> Result<MigrationInfo, QmpError> {
        self.query_migrate_within(self.timeout)
    }

    /// As [`Qmp::query_migrate`], with its own timeout: during the switchover QEMU answers late.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_migrate_within(&mut self, timeout: Duration) -> Result<MigrationInfo, QmpError> {
        const QUERY: &str = "query-migrate";
        read(QUERY, self.execute_within(QUERY, None, timeout)?)
    }

    /// Starts the outgoing migration to `uri`, such as `unix:/run/platen.sock`. Returns when QEMU
    /// has started, not when it has finished. First waits until QEMU has released the previous
    /// migration.
    ///
    /// # Errors
    ///
    /// [`QmpError::Refused`] if the migration does not start. Errors of [`Qmp::wait_released`].
    pub fn migrate(&mut self, uri: &str) -> Result<(), QmpError> {
        self.wait_released()?;
        self.execute("migrate", Some(json!({ "uri": uri }))).map(drop)
    }

    /// Makes a QEMU started with `-incoming defer` listen at `uri`.
    ///
    /// # Errors
    ///
    /// [`QmpError::Refused`] if QEMU was not started with it, or cannot listen.
    pub fn migrate_incoming(&mut self, uri: &str) -> Result<(), QmpError> {
        self.execute("migrate-incoming", Some(json!({ "uri": uri }))).map(drop)
    }

    /// Asks QEMU to cancel the migration. The status shows when QEMU has done so.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`]. Without a migration QEMU reports success.
    pub fn migrate_cancel(&mut self) -> Result<(), QmpError> {
        self.execute("migrate_cancel", None).map(drop)
    }

    /// Turns the running migration to postcopy.
    ///
    /// # Errors
    ///
    /// [`QmpError::Refused`] without a migration, or without the capability postcopy-ram.
    pub fn migrate_start_postcopy(&mut self) -> Result<(), QmpError> {
        self.execute("migrate-start-postcopy", None).map(drop)
    }

    /// Whether the guest runs.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_status(&mut self) -> Result<RunStatus, QmpError> {
        const QUERY: &str = "query-status";
        read(QUERY, self.execute(QUERY, None)?)
    }

    /// The guest's name (`-name`), if it has one.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_name(&mut self) -> Result<Option<String>, QmpError> {
        let reply = self.execute("query-name", None)?;
        Ok(reply.get("name").and_then(Value::as_str).map(str::to_owned))
    }

    /// The guest's UUID; all zeros if it has none.
    ///
    /// # Errors
    ///
    /// As for [`Qmp::execute`].
    pub fn query_uuid(&mut self) -> Result<String, QmpError> {
        const QUERY: &str = "query-uuid";
        let Uuid { uuid } = read(QUERY, self.execute(QUERY, None)?)?;
        Ok(uuid)
    }
}

/// An element of the reply to `query-yank`.
#[derive(Deserialize)]
struct YankInstance {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Capability {
    capability: String,
}

#[derive(Deserialize)]
struct Uuid {
    #[serde(rename = "UUID")]
    uuid: String,
}

fn read<T: for<'de> Deserialize<'de>>(command: &'static str, value: Value) -> Result<T, QmpError> {
    serde_json::from_value(value)
        .map_err(|error| QmpError::Reply { command, reason: error.to_string() })
}
