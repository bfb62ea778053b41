//! Sets destination QEMUs up like their sources, and restores their former settings afterwards.

use crate::monitor::{open_monitor, refuse_colo};
use crate::say::say;
use crate::settings::Before;
use anyhow::bail;
use qmp::{Qmp, QmpError};
use relay::UnixAddress;
use serde_json::{json, Map};
use session::Setup;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time limit for an answer of a destination QEMU after its migration.
const MONITOR: Duration = Duration::from_secs(2);

/// The former settings of the destination QEMUs that are set up now, by target.
#[derive(Debug, Default)]
pub(crate) struct FormerSettings(Mutex<Vec<(Option<String>, Before)>>);

impl FormerSettings {
    fn lock(&self) -> MutexGuard<'_, Vec<(Option<String>, Before)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, target: &Option<String>) -> Option<Before> {
        let mut all = self.lock();
        let at = all.iter().position(|(name, _)| name == target)?;
        Some(all.swap_remove(at).1)
    }

    /// Sets a destination QEMU up like the source. A QEMU that was set up before, for a migration
    /// that never began, gets its first settings back at the end.
    pub(crate) fn set_up(
        &self,
        target: &Option<String>,
        monitor: &UnixAddress,
        setup: &Setup,
    ) -> anyhow::Result<()> {
        let mut qmp = open_monitor(monitor)?;
        let status = qmp.query_status()?.status;
        if status != "inmigrate" {
            bail!("monitor {monitor}: the destination QEMU is '{status}', not waiting: start it with -incoming defer");
        }
        refuse_colo(&qmp.execute("query-migrate-capabilities", None)?, "destination")?;
        let mut before = match self.take(target) {
            Some(before) => before,
            None => Before::with_keeper(monitor)?,
        };
        let set = like_the_source(&mut qmp, &mut before, setup);
        self.lock().push((target.clone(), before));
        set
    }

    /// Restores the settings after a migration. A QEMU that has ended needs no restoring.
    pub(crate) fn put_back(&self, target: &Option<String>, monitor: &UnixAddress) {
        let Some(before) = self.take(target) else { return };
        let result = match Qmp::connect(monitor.path(), MONITOR) {
            Ok(mut qmp) => before.put_back(&mut qmp),
            Err(QmpError::Missing { .. } | QmpError::Connect { .. }) => {
                before.discard();
                Ok(())
            }
            Err(error) => Err(error.into()),
        };
        if let Err(error) = result {
            say(&format!(
                "monitor {monitor}: the settings of the destination QEMU are not as before: {error:#}; a helper process tries again for some minutes"
            ));
        }
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
