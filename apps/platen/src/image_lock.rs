//! The lock of an image that is being restored: two VMs from one image would share disks, MAC
//! addresses and UUID.
//!
//! The lock is advisory (flock) and belongs to the open file. The player gets that file as its
//! standard input, so the lock lasts until `restore` and its player have ended.

use crate::say::say;
use anyhow::{bail, Context};
use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit for a killed process, which shows no open files any more, to give up its lock.
const ENDS: Duration = Duration::from_secs(5);

/// Time limit for `platen image gc`, which locks a save of a store while it replaces the file.
const BRIEF: Duration = Duration::from_secs(1);

/// A locked image.
#[derive(Debug)]
pub(crate) struct ImageLock {
    file: File,
}

impl ImageLock {
    /// Locks the image at `path`. With `shared` other restores may hold the lock too, if all of
    /// them share it.
    ///
    /// # Errors
    ///
    /// Names the image, and the processes that hold it.
    pub(crate) fn take(path: &Path, shared: bool) -> anyhow::Result<Self> {
        match Self::lock(path, shared, BRIEF)? {
            Ok(lock) => Ok(lock),
            Err(holders) => bail!(
                "image {} is in use by {holders}: a second VM from it would have the same disks, MAC addresses and \
                 UUID. Wait for that process, or give each VM disks and a network of its own and start both by \
                 platen restore --shared",
                path.display(),
            ),
        }
    }

    /// Locks the save at `path`, which is to be removed.
    ///
    /// # Errors
    ///
    /// Names the save, and the processes that hold it.
    pub(crate) fn take_to_remove(path: &Path) -> anyhow::Result<Self> {
        match Self::lock(path, false, BRIEF)? {
            Ok(lock) => Ok(lock),
            Err(holders) => bail!(
                "save {} is in use by {holders}, which still loads its VM from it: wait for that process",
                path.display()
            ),
        }
    }

    /// Locks the file that is at `path`; the inner error names the processes that hold it longer
    /// than `brief`.
    fn lock(path: &Path, shared: bool, brief: Duration) -> anyhow::Result<Result<Self, String>> {
        loop {
            let lock = match Self::lock_open(path, shared, brief)? {
                Ok(lock) => lock,
                Err(holders) => return Ok(Err(holders)),
            };
            // The collection of a store may have put another file in its place meanwhile.
            if image::is_at(&lock.file, path) {
                return Ok(Ok(lock));
            }
        }
    }

    fn lock_open(
        path: &Path,
        shared: bool,
        brief: Duration,
    ) -> anyhow::Result<Result<Self, String>> {
        let name = || format!("image {}", path.display());
        let operation = if shared {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        let mut file = File::open(path).with_context(name)?;
        let mut locked = flock(&file, operation);
        if locked == Err(Errno::BADF) {
            // NFS locks a file exclusively only if it is open for writing.
            file = File::options().read(true).write(true).open(path).with_context(name)?;
            locked = flock(&file, operation);
        }
        let begun = Instant::now();
        while locked == Err(Errno::WOULDBLOCK) {
            let holders = holders(&file);
            let waited = begun.elapsed();
            if (!holders.is_empty() && waited > brief) || waited > ENDS {
                let unknown = holders.is_empty().then(|| "another process".into());
                return Ok(Err(unknown.unwrap_or_else(|| holders.join(", "))));
            }
            std::thread::sleep(Duration::from_millis(10));
            locked = flock(&file, operation);
        }
        if let Err(errno) = locked {
            say(&format!(
                "image {} cannot be locked ({errno}): nothing prevents a second restore of it",
                path.display()
            ));
        }
        Ok(Ok(Self { file }))
    }

    /// Another handle of the open file. The lock lasts until all of them are closed.
    pub(crate) fn handle(&self) -> anyhow::Result<File> {
        self.file.try_clone().context("cannot hand the image's lock to another process")
    }
}

/// The processes that hold a lock of this file, as far as this user may look.
fn holders(file: &File) -> Vec<String> {
    file.metadata().map(|of| processes(of.dev(), of.ino())).unwrap_or_default()
}

/// Processes with a locked descriptor of this file, by number and name.
fn processes(dev: u64, ino: u64) -> Vec<String> {
    processes_with(dev, ino, |info| info.contains("FLOCK"))
}

/// Processes with a descriptor of this file for which `is_meant` returns true, by number and name.
/// `is_meant` gets the kernel's description of the descriptor (`/proc/PID/fdinfo`).
pub(crate) fn processes_with(dev: u64, ino: u64, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
    let list = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
    let holds = |process: &Path| {
        list(&process.join("fd")).any(|descriptor| {
            let is_it = descriptor
                .path()
                .metadata()
                .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (dev, ino));
            let info = process.join("fdinfo").join(descriptor.file_name());
            is_it && std::fs::read_to_string(info).is_ok_and(|text| is_meant(&text))
        })
    };
    let name = |process: &Path| {
        let pid = process.file_name()?.to_str()?.parse::<u32>().ok()?;
        let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
        holds(process).then(|| format!("process {pid} ({})", name.trim_end()))
    };
    list(Path::new("/proc")).filter_map(|entry| name(&entry.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As by the collection of a store.
    #[test]
    fn a_lock_that_another_has_briefly_is_waited_for() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let other = File::open(image.path()).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        let holders = ImageLock::lock(image.path(), false, Duration::ZERO).unwrap().unwrap_err();
        assert!(holders.contains(&std::process::id().to_string()), "{holders}");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                drop(other);
            });
            assert!(ImageLock::lock(image.path(), false, Duration::from_secs(60)).unwrap().is_ok());
        });
    }
}
