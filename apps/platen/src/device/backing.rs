//! The file or block device that pages are written back to: made by the supervisor, taken by each server.

use super::args::Inherited;
use super::say::say;
use super::serve::descriptor;
use anyhow::{bail, Context};
use policy::Settings;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use store::{Disk, FileDisk, Store};

/// Opens and locks the device that the settings name, and says on it that it is this store's. `None` if they name none.
pub(super) fn make(settings: &Settings, store: &Store) -> anyhow::Result<Option<FileDisk>> {
    let Some(path) = &settings.backing_dev else { return Ok(None) };
    let name = path.display().to_string();
    let disk = open(path, settings.backing_size)?;
    if !disk.is_direct() {
        say(&format!(
            "{name}: no direct I/O there; what is written back takes memory of the page cache on its way"
        ));
    }
    store::format_backing(&disk, &name, store)?;
    Ok(Some(disk))
}

fn open(path: &Path, size: u64) -> anyhow::Result<FileDisk> {
    FileDisk::open(path, size).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            anyhow::anyhow!("backing device {} is in use by another server", path.display())
        }
        _ => anyhow::Error::from(error).context(format!("backing device {}", path.display())),
    })
}

/// Gives the store its device: the one that the supervisor has made, or without one a new one. One that cannot be used
/// is an error of a new store; one that has had servers does what can be done without: says why, which it gives.
pub(super) fn attach(
    settings: &Settings,
    store: &Arc<Store>,
    inherited: Option<&Inherited>,
) -> anyhow::Result<Option<String>> {
    let Some(path) = &settings.backing_dev else {
        return match store.stats().bd_count {
            0 => Ok(None),
            pages => Ok(refuse(format!(
                "{pages} pages are on a backing device that is not named any more"
            ))),
        };
    };
    let name = path.display().to_string();
    let taken = (|| {
        let disk = match inherited {
            None => make(settings, store)?.context("it is named")?,
            Some(inherited) => {
                let Some(number) = inherited.backing else {
                    bail!("{name} was not there when the device was made")
                };
                let fd = descriptor(number)?;
                FileDisk::inherit(fd.as_fd()).with_context(|| format!("cannot open {name}"))?
            }
        };
        Ok(store.set_backing(Box::new(disk), &name)?)
    })();
    match taken {
        Ok(()) => Ok(None),
        // The first server of a store that a supervisor has made is the second that has had it.
        Err(error) if store.generation() <= 2 => Err(error),
        Err(error) => Ok(refuse(format!("{error:#}"))),
    }
}

fn refuse(reason: String) -> Option<String> {
    say(&format!("no backing device: {reason}; pages that are on it cannot be read"));
    Some(reason)
}
