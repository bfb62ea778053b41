//! The lock on a device's name, and its file.

use super::note;
use super::place::place;
use anyhow::{bail, Context};
use rustix::fs::{flock, fstat, open, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use ublk::{ControlError, Owner};

/// The lock on a device's name. Its holder may replace the socket file of a server that has died;
/// without the lock, two processes that check at the same time would both replace it.
#[derive(Debug)]
pub(super) struct Lock {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
}

impl Lock {
    pub(super) fn path(folder: &Path, name: &str) -> PathBuf {
        folder.join(format!("{name}.lock"))
    }

    pub(super) fn take(folder: &Path, name: &str) -> anyhow::Result<Self> {
        let path = Self::path(folder, name);
        let failed = || format!("cannot lock {}", path.display());
        loop {
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = open(&path, flags, Mode::RUSR | Mode::WUSR).with_context(failed)?;
            match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => bail!("device {name} is served already"),
                Err(error) => return Err(error).with_context(failed),
            }
            let had = fstat(&fd).with_context(failed)?;
            // The former holder may have removed the file after it was opened here.
            if place(&path) == Some((had.st_dev, had.st_ino)) {
                return Ok(Self { fd, path });
            }
        }
    }

    /// Removes the file, unless its note is needed: see [`note::is_needed`].
    fn release(&self, remains: impl FnOnce(&[Owner]) -> Result<bool, ControlError>) {
        let ours =
            fstat(&self.fd).is_ok_and(|own| place(&self.path) == Some((own.st_dev, own.st_ino)));
        if ours && !note::is_needed(&self.fd, &self.path, remains) {
            // Removed while the lock is held. If this fails, the next holder locks the old file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.release(note::remains);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_one_device_until_it_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let first = Lock::take(folder.path(), "one").unwrap();
        let other = Lock::take(folder.path(), "other").unwrap();
        let refused = Lock::take(folder.path(), "one").unwrap_err().to_string();
        assert_eq!(refused, "device one is served already");
        drop(first);
        drop(Lock::take(folder.path(), "one").unwrap());
        drop(other);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        // The file was removed, and another process has taken the name.
        let first = Lock::take(folder.path(), "one").unwrap();
        std::fs::remove_file(Lock::path(folder.path(), "one")).unwrap();
        let second = Lock::take(folder.path(), "one").unwrap();
        drop(first);
        Lock::take(folder.path(), "one").unwrap_err();
        drop(second);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// Regression: a device that could not remove its ublk disk removed the note of the disk's
    /// owner at its end. The next device of its name left the disk, with all who waited for it.
    #[test]
    fn the_note_of_a_disk_that_may_be_left_outlives_the_device() {
        let folder = tempfile::tempdir().unwrap();
        let path = Lock::path(folder.path(), "one");
        let silent = || ControlError::Silent { id: 3, action: "asking about it", seconds: 5 };
        let owner = Owner { number: 7, unmarked: false };
        let lock = Lock::take(folder.path(), "one").unwrap();
        note::tests::write(lock.fd.try_clone().unwrap(), &[owner.number]);
        for answer in [Ok(true), Err(silent())] {
            lock.release(|owners| {
                assert_eq!(owners, [owner]);
                answer
            });
            assert!(path.exists());
        }
        lock.release(|_| Ok(false));
        assert!(!path.exists());
    }
}
