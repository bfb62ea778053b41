//! Sets destination QEMUs up like their sources, and restores their former settings afterwards.

use crate::monitor::{open_monitor, refuse_colo, refuse_tls};
use crate::say::say;
use crate::settings::Before;
use crate::settings_claim::{socket_of, SocketId};
use anyhow::bail;
use qmp::{Qmp, QmpError};
use relay::UnixAddress;
use serde_json::{json, Map};
use session::Setup;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time limit for an answer of a destination QEMU after its migration.
const MONITOR: Duration = Duration::from_secs(2);

/// A destination QEMU that is set up.
#[derive(Debug)]
struct SetUp {
    target: Option<String>,
    /// Its monitor's socket.
    socket: Option<SocketId>,
    before: Before,
}

/// The former settings of the destination QEMUs that are set up now.
#[derive(Debug, Default)]
pub(crate) struct FormerSettings(Mutex<Vec<SetUp>>);

impl FormerSettings {
    fn lock(&self) -> MutexGuard<'_, Vec<SetUp>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The settings of this target, if its QEMU is still the one that was set up: another one at
    /// the same path has settings of its own.
    fn take(&self, target: &Option<String>, socket: Option<SocketId>) -> Option<Before> {
        let mut all = self.lock();
        let at = all.iter().position(|one| one.target == *target)?;
        let one = all.swap_remove(at);
        drop(all);
        if one.socket == socket {
            return Some(one.before);
        }
        one.before.discard();
        None
    }

    /// Sets a destination QEMU up like the source. A QEMU that was set up before, for a migration
    /// that never began, gets its first settings back at the end.
    pub(crate) fn set_up(
        &self,
        target: &Option<String>,
        monitor: &UnixAddress,
        setup: &Setup,
    ) -> anyhow::Result<()> {
        let socket = socket_of(monitor);
        let mut before = match self.take(target, socket) {
            Some(before) => before,
            None => Before::with_keeper_at_once(monitor)?,
        };
        let set = Self::set_up_as(monitor, &mut before, setup);
        if set.is_err() && before.is_unchanged() {
            // This QEMU may run a VM, which another command is to migrate.
            before.discard();
            return set;
        }
        self.lock().push(SetUp { target: target.clone(), socket, before });
        set
    }

    fn set_up_as(monitor: &UnixAddress, before: &mut Before, setup: &Setup) -> anyhow::Result<()> {
        let mut qmp = open_monitor(monitor)?;
        let status = qmp.query_status()?.status;
        if status != "inmigrate" {
            bail!("monitor {monitor}: the destination QEMU is '{status}', not waiting: start it with -incoming defer");
        }
        refuse_colo(&qmp.execute("query-migrate-capabilities", None)?, "destination")?;
        refuse_tls(&qmp.query_parameters()?, "destination")?;
        like_the_source(&mut qmp, before, setup)
    }

    /// Restores the settings of a QEMU for which no migration has begun. One that listens already,
    /// or does not answer now, keeps them for the next source.
    pub(crate) fn put_back_unused(&self, target: &Option<String>, monitor: &UnixAddress) {
        let socket = socket_of(monitor);
        let Some(before) = self.take(target, socket) else { return };
        let idle = Qmp::connect(monitor.path(), MONITOR).ok().and_then(|mut qmp| {
            let info = qmp.query_migrate().ok()?;
            (info.is_over() || info.status() == "none").then_some(qmp)
        });
        match idle {
            Some(mut qmp) => report(monitor, before.put_back(&mut qmp)),
            None => self.lock().push(SetUp { target: target.clone(), socket, before }),
        }
    }

    /// Restores the settings after a migration. A QEMU that has ended needs no restoring.
    pub(crate) fn put_back(&self, target: &Option<String>, monitor: &UnixAddress) {
        let Some(before) = self.take(target, socket_of(monitor)) else { return };
        let result = match Qmp::connect(monitor.path(), MONITOR) {
            Ok(mut qmp) => before.put_back(&mut qmp),
            Err(QmpError::Missing { .. } | QmpError::Connect { .. }) => {
                before.discard();
                Ok(())
            }
            Err(error) => Err(error.into()),
        };
        report(monitor, result);
    }
}

/// Prints why settings could not be restored.
fn report(monitor: &UnixAddress, result: anyhow::Result<()>) {
    if let Err(error) = result {
        say(&format!(
            "monitor {monitor}: the settings of the destination QEMU are not as before: {error:#}; a helper process tries again until QEMU takes them"
        ));
    }
}

fn like_the_source(qmp: &mut Qmp, before: &mut Before, setup: &Setup) -> anyhow::Result<()> {
    before.set(
        qmp,
        &[
            ("events", true),
            ("return-path", setup.return_path),
            ("multifd", setup.channels > 0),
            ("compress", false),
            ("zero-copy-send", false),
        ],
    )?;
    if setup.postcopy {
        before.set(qmp, &[("postcopy-ram", true)])?;
    }
    let mut parameters = Map::from_iter([("max-bandwidth".to_owned(), json!(0))]);
    if setup.channels > 0 {
        parameters.insert("multifd-channels".to_owned(), json!(setup.channels));
        parameters.insert("multifd-compression".to_owned(), json!("none"));
    }
    before.set_parameters(qmp, parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::thread::JoinHandle;

    #[test]
    fn another_qemu_at_the_same_path_gets_no_settings_of_the_former_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor: UnixAddress = format!("unix:{}", path.display()).parse().unwrap();
        let settings = FormerSettings::default();
        let set_up = || {
            let (target, before) = (None, Before::default());
            settings.lock().push(SetUp { target, socket: socket_of(&monitor), before });
        };
        let first = UnixListener::bind(&path).unwrap();
        set_up();
        assert!(settings.take(&None, socket_of(&monitor)).is_some());
        set_up();
        std::fs::remove_file(&path).unwrap();
        let _second = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(settings.take(&None, socket_of(&monitor)).is_none());
        assert!(settings.lock().is_empty());
    }
    /// A monitor whose QEMU reports this status of its migration. Returns the commands that came.
    fn monitor_at(path: &Path, status: &'static str) -> JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let version = json!({ "qemu": { "major": 10, "minor": 0, "micro": 2 } });
            let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
            writeln!(stream, "{greeting}").unwrap();
            let mut heard = Vec::new();
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
                heard.push(command["execute"].as_str().unwrap().to_owned());
                let answer = match heard.last().unwrap().as_str() {
                    "query-migrate" => json!({ "status": status }),
                    "query-yank" => json!([]),
                    "query-migrate-capabilities" => {
                        json!([{ "capability": "multifd", "state": true }])
                    }
                    _ => json!({}),
                };
                writeln!(stream, "{}", json!({ "return": answer, "id": command["id"] })).unwrap();
            }
            heard
        })
    }

    /// A QEMU that listens accepts no multifd any more: the next source needs what it has.
    #[test]
    fn a_source_that_leaves_before_its_migration_begins_costs_no_settings_of_a_qemu_that_listens() {
        for (status, is_kept) in [("none", false), ("setup", true)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("qmp");
            let monitor: UnixAddress = format!("unix:{}", path.display()).parse().unwrap();
            let qemu = monitor_at(&path, status);
            let settings = FormerSettings::default();
            let mut before = Before::default();
            before.note_capability("multifd", false);
            settings.lock().push(SetUp { target: None, socket: socket_of(&monitor), before });
            settings.put_back_unused(&None, &monitor);
            assert_eq!(settings.lock().len(), usize::from(is_kept), "{status}");
            let heard = qemu.join().unwrap();
            let is_set = heard.iter().any(|command| command == "migrate-set-capabilities");
            assert_eq!(is_set, !is_kept, "{status}: {heard:?}");
        }
    }
}
