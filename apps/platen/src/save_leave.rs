//! The end of a save at which the VM stays stopped, for the helper that acts if the command dies.

use anyhow::{ensure, Context};
use qmp::{MigrationInfo, Qmp};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A save whose VM QEMU keeps stopped at its end (`postmigrate`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leave {
    /// Path at which the image appears when it is complete.
    image: PathBuf,
    /// The migration that saves the VM.
    migration: Counters,
}

/// Counters that stay as they are once QEMU has sent all pages. Those of another migration of a VM
/// that has run meanwhile differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counters {
    setup: Option<u64>,
    normal: Option<u64>,
    duplicate: Option<u64>,
    passes: Option<u64>,
}

impl Counters {
    fn of(info: &MigrationInfo) -> Self {
        let ram = info.ram.clone().unwrap_or_default();
        Self {
            setup: info.setup_time,
            normal: ram.normal,
            duplicate: ram.duplicate,
            passes: ram.dirty_sync_count,
        }
    }
}

impl Leave {
    /// The save of the migration `info`, whose pages are all sent, into `image`.
    pub(crate) fn new(image: &Path, info: &MigrationInfo) -> anyhow::Result<Self> {
        let image = std::path::absolute(image).context("the image's path")?;
        Ok(Self { image, migration: Counters::of(info) })
    }

    /// Whether QEMU has stopped the VM for this save.
    ///
    /// # Errors
    /// The monitor's, or QEMU has completed the migration and not stopped the VM for good yet.
    pub(crate) fn has_stopped(&self, qmp: &mut Qmp, info: &MigrationInfo) -> anyhow::Result<bool> {
        if info.status() != "completed" || Counters::of(info) != self.migration {
            return Ok(false);
        }
        let vm = qmp.query_status()?.status;
        ensure!(vm != "finish-migrate", "QEMU has not stopped the VM for good yet ('{vm}')");
        Ok(vm == "postmigrate")
    }

    /// Lets a VM continue that this save has stopped, and of which there is no image. The command
    /// must have died: only then the image stays without a name.
    pub(crate) fn resume(qmp: &mut Qmp) -> anyhow::Result<()> {
        qmp.execute("cont", None).context("the VM is paused, and there is no image of it")?;
        Ok(())
    }

    /// Whether nothing is at the image's path. The look may wait for a server of files: call this
    /// without a monitor, by which others can let the VM continue.
    pub(crate) fn is_missing(&self) -> anyhow::Result<bool> {
        match self.image.symlink_metadata() {
            Ok(_) => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            Err(error) => Err(error).with_context(|| {
                format!("the VM is paused until {} can be looked for", self.image.display())
            }),
        }
    }
}
