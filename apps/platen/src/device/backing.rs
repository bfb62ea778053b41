//! The backing device: a file or block device for writeback. The supervisor opens it, and each
//! server takes it over.

use super::inherited::Inherited;
use crate::say::say;
use anyhow::{bail, Context};
use policy::Settings;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;
use store::{BackingError, Disk, DiskError, FileDisk, Store};

/// Opens, locks and formats the backing device that the settings name; returns `None` if they name
/// none. `swap` tells whether the device will hold swapped-out pages. A file created here is
/// removed again unless [`NewFile::keep`] is called.
pub(super) fn make(
    settings: &Settings,
    store: &Store,
    swap: bool,
) -> anyhow::Result<Option<(FileDisk, NewFile)>> {
    let Some(path) = &settings.backing_dev else { return Ok(None) };
    let name = path.display().to_string();
    let named = |error| match error {
        DiskError::InUse => anyhow::anyhow!("backing device {name} is in use by another server"),
        other => anyhow::Error::from(other).context(format!("backing device {name}")),
    };
    let disk = FileDisk::open(path, settings.backing_size).map_err(named)?;
    let new = NewFile::of(path, &disk);
    if swap {
        disk.check_for_swap().map_err(named)?;
    }
    if !disk.is_direct() {
        say(&format!(
            "{name}: no direct I/O there; what is written back takes memory of the page cache on its way"
        ));
    }
    if !disk.is_killable() {
        say(&format!(
            "{name}: no io_uring here; a server that waits for it is replaced only when it answers"
        ));
    }
    let size = settings.backing_size;
    store::format_backing(&disk, &name, store).map_err(|error| match &error {
        BackingError::Small { .. } => anyhow::Error::from(error)
            .context(format!("backing_size = {size}: say how many bytes the file is to have")),
        BackingError::Io { .. } if size > 0 => {
            anyhow::Error::from(error).context(format!("backing_size = {size}"))
        }
        _ => anyhow::Error::from(error),
    })?;
    Ok(Some((disk, new)))
}

/// A backing file created for a device that does not serve yet. Dropping it removes the file,
/// unless it is kept.
#[derive(Debug)]
pub(super) struct NewFile(Option<(PathBuf, (u64, u64))>);

impl NewFile {
    fn of(path: &Path, disk: &FileDisk) -> Self {
        let found = disk.was_made().then(|| path.symlink_metadata().ok()).flatten();
        Self(found.map(|found| (path.to_owned(), (found.dev(), found.ino()))))
    }

    /// Keeps the file, because it holds pages or soon will.
    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        let Some((path, made)) = self.0.take() else { return };
        if path.symlink_metadata().is_ok_and(|found| (found.dev(), found.ino()) == made) {
            // Another process may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Takes over the backing device inherited from the supervisor, whatever the settings say now,
/// because it holds pages. A stand-by server does so before it is needed, since this allocates
/// memory.
pub(super) fn inherit(inherited: &Inherited) -> Option<anyhow::Result<FileDisk>> {
    let number = inherited.backing?;
    // Not by its path: opening that would wait for a disk that does not answer, and would lose
    // direct I/O.
    let fd = swap::supervisor::descriptor(number)
        .with_context(|| format!("the supervisor has not left descriptor {number}"));
    let taken = fd.and_then(|fd| Ok(FileDisk::inherit(fd.as_fd())?));
    Some(taken.context("cannot take over the backing device"))
}

/// Size in bytes of a server's table of the device's blocks.
pub(super) fn table(disk: &anyhow::Result<FileDisk>) -> usize {
    let blocks = disk.as_ref().ok().and_then(|disk| disk.blocks().ok());
    blocks.map_or(0, |blocks| usize::try_from(blocks.min(1 << 27)).expect("below 2^28"))
}

/// The reason why there is no backing device, once known.
pub(super) type Refused = Arc<OnceLock<String>>;

/// Attaches the backing device to the store: the supervisor's, or a new one without a supervisor. A
/// device that cannot be used is an error for a new store. A store that has had servers continues
/// without it and logs the reason. This does not wait for the device, which may not answer: the
/// host waits for the pages in memory. Also returns a file created for the device.
pub(super) fn attach(
    settings: &Settings,
    store: &Arc<Store>,
    inherited: Option<Option<anyhow::Result<FileDisk>>>,
    swap: bool,
) -> anyhow::Result<(Refused, Option<NewFile>)> {
    let refused = Refused::default();
    let (disk, new) = match inherited {
        None => {
            let made = make(settings, store, swap)?;
            made.map_or((None, None), |(disk, new)| (Some(Ok(disk)), Some(new)))
        }
        Some(inherited) => (inherited, None),
    };
    let Some(disk) = disk else {
        let pages = store.stats().bd_count;
        if pages > 0 {
            let reason = format!("{pages} pages are on a backing device that is not there");
            refuse(&refused, reason, UNREAD);
        }
        return Ok((refused, new));
    };
    let name = settings.backing_dev.as_ref();
    let name = name.map_or_else(|| "it".to_owned(), |path| path.display().to_string());
    // Creating the store is generation 1, so the first server of a supervised store is generation
    // 2.
    if store.generation() <= 2 {
        store.set_backing(Box::new(disk?), &name)?;
        if let Some(stopped) = store.backing_stats().and_then(|stats| stats.stopped) {
            bail!("{name}: {stopped}");
        }
        return Ok((refused, new));
    }
    match disk.and_then(|disk| Ok(store.take_backing(Box::new(disk), &name)?)) {
        Ok(()) => look_at(store, &refused, &name).context("cannot start a thread")?,
        Err(error) => refuse(&refused, format!("{error:#}"), UNREAD),
    }
    Ok((refused, new))
}

/// Starts a thread that checks the device, attached without a check, until it answers.
fn look_at(store: &Arc<Store>, refused: &Refused, name: &str) -> std::io::Result<()> {
    let (store, refused, name) = (Arc::downgrade(store), Arc::clone(refused), name.to_owned());
    let look = move || {
        let mut told = false;
        while let Some(store) = store.upgrade() {
            match store.retry_backing() {
                Ok(()) => return,
                Err(error @ BackingError::Io { .. }) => {
                    if !std::mem::replace(&mut told, true) {
                        say(&format!(
                            "{name}: {:#}; nothing is written to it until that works",
                            anyhow::Error::from(error)
                        ));
                    }
                }
                Err(error) => return refuse(&refused, error.to_string(), READ_ON),
            }
            drop(store);
            thread::sleep(AGAIN);
        }
    };
    thread::Builder::new().name("backing".into()).spawn(look).map(drop)
}

/// Interval between these checks.
const AGAIN: Duration = Duration::from_secs(1);

/// The consequence for pages on a backing device that is missing or has changed.
const UNREAD: &str = "pages that are on it cannot be read";
const READ_ON: &str =
    "nothing more is written to it, and pages that are on it are read as far as it still has them";

fn refuse(refused: &Refused, reason: String, rest: &str) {
    // A server has only one reason. First the status: a reader of the log may ask for it at once.
    let _ = refused.set(reason.clone());
    say(&format!("no backing device: {reason}; {rest}"));
}
