//! The files of a device whose supervisor has died.

use super::super::args::ServeArgs;
use super::super::{control, requests};
use super::lock::Lock;
use super::note;
use super::place::{place, Place};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use ublk::{ControlError, Owner};

/// The supervisor's files. A server that outlives its supervisor removes them when it exits. A file
/// that was removed before this server started has no place.
#[derive(Clone, Debug, Default)]
pub(in crate::device) struct Left {
    sockets: Vec<(PathBuf, Option<Place>)>,
    lock: Option<(PathBuf, Option<Place>)>,
}

impl Left {
    /// Records the files of a device. Call this while the supervisor runs, or has just exited.
    pub(in crate::device) fn of(args: &ServeArgs, supervised: bool) -> Self {
        let Ok(folder) = control::folder(args.control.run_dir.as_deref()) else {
            return Self::default();
        };
        let nbd = args.nbd.as_ref().map(|address| address.path().to_owned());
        let control = control::address(&folder, &args.name).path().to_owned();
        let requests = supervised.then(|| requests::address(&folder, &args.name).path().to_owned());
        let with_place = |path: PathBuf| (path.clone(), place(&path));
        let sockets = [Some(control), nbd, requests].into_iter().flatten().map(with_place);
        let lock = Some(with_place(Lock::path(&folder, &args.name)));
        Self { sockets: sockets.collect(), lock }
    }

    /// Files that have been removed or replaced.
    pub(in crate::device) fn missing(&self) -> impl Iterator<Item = &Path> {
        let all = self.sockets.iter().chain(&self.lock);
        all.filter(|file| !is_there(file)).map(|(path, _)| &**path)
    }

    /// Removes the files, except those that have been replaced. The lock's file stays while its
    /// note is needed: see [`note::is_needed`].
    pub(in crate::device) fn clear(self) {
        self.clear_unless(note::remains);
    }

    fn clear_unless(self, remains: impl FnOnce(&[Owner]) -> Result<bool, ControlError>) {
        let needed = |(path, _): &(PathBuf, _)| {
            File::open(path).is_ok_and(|file| note::is_needed(&file, path, remains))
        };
        let lock = self.lock.filter(is_there).filter(|lock| !needed(lock));
        for (path, _) in self.sockets.into_iter().filter(is_there).chain(lock) {
            // Another process may have removed it.
            let _ = fs::remove_file(path);
        }
    }
}

fn is_there((path, was): &(PathBuf, Option<Place>)) -> bool {
    was.is_some() && place(path) == *was
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_another_process_has_bound_are_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let [mine, theirs] = ["mine", "theirs"].map(|name| folder.path().join(name));
        let file = |path: &Path| fs::write(path, "").unwrap();
        file(&mine);
        file(&theirs);
        let gone = folder.path().join("gone");
        let left = [&mine, &theirs, &gone].map(|path| (path.clone(), place(path)));
        // Created before the old file is removed, so that the inode differs.
        let new = folder.path().join("new");
        file(&new);
        fs::rename(&new, &theirs).unwrap();
        let left = Left { sockets: left.to_vec(), lock: None };
        assert_eq!(left.missing().collect::<Vec<_>>(), [&*theirs, &*gone]);
        // Another process's.
        file(&gone);
        assert_eq!(left.missing().collect::<Vec<_>>(), [&*theirs, &*gone]);
        left.clear();
        assert!(!mine.exists() && theirs.exists() && gone.exists());
    }

    /// Regression: the last server of a device removed the note of a ublk disk that was left, and
    /// the next device of that name did not remove the disk.
    #[test]
    fn the_note_of_a_disk_that_may_be_left_outlives_the_last_server() {
        let folder = tempfile::tempdir().unwrap();
        let [socket, lock] = ["socket", "lock"].map(|name| folder.path().join(name));
        let owner = Owner { number: 7, unmarked: false };
        let silent = || ControlError::Silent { id: 3, action: "asking about it", seconds: 5 };
        for (answer, stays) in [(Ok(true), true), (Err(silent()), true), (Ok(false), false)] {
            fs::write(&socket, "").unwrap();
            note::tests::write(File::create(&lock).unwrap(), &[owner.number]);
            let [sockets, lock] = [&socket, &lock].map(|path| (path.clone(), place(path)));
            let left = Left { sockets: vec![sockets], lock: Some(lock.clone()) };
            left.clear_unless(|owners| {
                assert_eq!(owners, [owner]);
                answer
            });
            assert!(!socket.exists());
            assert_eq!(lock.0.exists(), stays);
        }
    }
}
