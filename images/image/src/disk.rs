//! The operations that change a store on disk, each a step at which a test can end the writer.

use std::ffi::OsString;
use std::fs::{read_dir, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{linkat, statx, AtFlags, StatxFlags, CWD};

use crate::apart;

/// A kind of step, for the tests' model of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Bytes are appended to a file.
    Write,
    /// A file is made durable.
    Sync,
    /// A file gets a name.
    Link,
    /// A file takes the name of another one.
    Rename,
    /// A name is removed.
    Unlink,
    /// The names in a folder are made durable.
    SyncFolder,
}

pub(crate) fn write(mut file: &File, bytes: &[u8]) -> io::Result<()> {
    step(Step::Write, || file.metadata(), None)?;
    file.write_all(bytes)
}

pub(crate) fn sync(file: &File) -> io::Result<()> {
    step(Step::Sync, || file.metadata(), None)?;
    apart::sync(file)
}

/// Links the open file `from`, which `open` names, to `to`.
pub(crate) fn link(from: &File, open: &Path, flags: AtFlags, to: &Path) -> io::Result<()> {
    step(Step::Link, || from.metadata(), Some(to))?;
    Ok(linkat(CWD, open, CWD, to, flags)?)
}

pub(crate) fn rename(of: &File, from: &Path, to: &Path) -> io::Result<()> {
    step(Step::Rename, || of.metadata(), Some(to))?;
    std::fs::rename(from, to)
}

pub(crate) fn unlink(path: &Path) -> io::Result<()> {
    step(Step::Unlink, || path.symlink_metadata(), Some(path))?;
    std::fs::remove_file(path)
}

pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = File::open(path)?;
    step(Step::SyncFolder, || folder.metadata(), Some(path))?;
    apart::sync(&folder)
}

/// Makes this host forget what is out of date of a folder that hosts share. An NFS client may go
/// half a minute without asking its server (`acdirmin`), also under a lock: for the names in the
/// folder, and for the file that has a name.
pub(crate) fn refresh(folder: &Path) {
    // Of a folder that is not there this fails, as what follows does.
    let _ = statx(CWD, folder, AtFlags::STATX_FORCE_SYNC, StatxFlags::MTIME | StatxFlags::CTIME);
    #[cfg(test)]
    steps::forget(folder);
}

/// The names in a folder as they are now, on whatever host it is.
pub(crate) fn names(folder: &Path) -> io::Result<Vec<OsString>> {
    refresh(folder);
    listed(folder)
}

/// The file system and the inode that `path` names, as far as this host knows.
pub(crate) fn named(path: &Path) -> io::Result<(u64, u64)> {
    #[cfg(test)]
    if let Some(named) = steps::remembered_file(path) {
        return Ok(named);
    }
    let named = path.metadata().map(|named| (named.dev(), named.ino()))?;
    #[cfg(test)]
    steps::remember_file(path, named);
    Ok(named)
}

fn listed(folder: &Path) -> io::Result<Vec<OsString>> {
    #[cfg(test)]
    if let Some(names) = steps::remembered(folder) {
        return Ok(names);
    }
    let names = read_dir(folder)?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<io::Result<Vec<_>>>()?;
    #[cfg(test)]
    steps::remember(folder, &names);
    Ok(names)
}

#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "tests make it fail")]
fn step(_: Step, _: impl FnOnce() -> io::Result<Metadata>, _: Option<&Path>) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
fn step(
    kind: Step,
    of: impl FnOnce() -> io::Result<Metadata>,
    path: Option<&Path>,
) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    steps::step(kind, of()?.ino(), path)
}

/// The tests' hook: a log of steps, and the step at which the thread's writer dies.
#[cfg(test)]
pub(crate) mod steps {
    use super::Step;
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::io;
    use std::path::{Path, PathBuf};

    /// A step, the inode that it changes, and the name that it sets or removes.
    pub(crate) type Entry = (Step, u64, Option<PathBuf>);

    /// Work at a step that gives or removes a name.
    type Work = Box<dyn FnMut(Step, &Path)>;

    thread_local! {
        static WORK: RefCell<Option<Work>> = const { RefCell::new(None) };
        static LOG: RefCell<Option<(usize, Vec<Entry>)>> = const { RefCell::new(None) };
        static FAILS_ONCE: Cell<bool> = const { Cell::new(false) };
        static KNOWN: RefCell<Option<Known>> = const { RefCell::new(None) };
    }

    /// The knowledge of a kernel: the names in folders, and the file that has a name.
    #[derive(Default)]
    struct Known {
        names: HashMap<PathBuf, Vec<OsString>>,
        files: HashMap<PathBuf, (u64, u64)>,
    }

    /// From now on this thread knows of folders what it has looked up first, until [`forget`], as a
    /// host that shares them by NFS.
    pub(crate) fn share_folders() {
        KNOWN.set(Some(Known::default()));
    }

    pub(super) fn remembered(folder: &Path) -> Option<Vec<OsString>> {
        KNOWN.with_borrow(|known| known.as_ref()?.names.get(folder).cloned())
    }

    pub(super) fn remember(folder: &Path, names: &[OsString]) {
        KNOWN.with_borrow_mut(|known| {
            known.as_mut().map(|known| known.names.insert(folder.to_owned(), names.to_vec()))
        });
    }

    pub(super) fn remembered_file(path: &Path) -> Option<(u64, u64)> {
        KNOWN.with_borrow(|known| known.as_ref()?.files.get(path).copied())
    }

    pub(super) fn remember_file(path: &Path, named: (u64, u64)) {
        KNOWN.with_borrow_mut(|known| {
            known.as_mut().map(|known| known.files.insert(path.to_owned(), named))
        });
    }

    /// The server is asked about a folder.
    pub(super) fn forget(folder: &Path) {
        KNOWN.with_borrow_mut(|known| {
            let Some(known) = known else { return };
            known.names.remove(folder);
            known.files.retain(|path, _| path.parent() != Some(folder));
        });
    }

    /// Calls `work` at each of this thread's steps with a name, before it, until it is replaced.
    pub(crate) fn at_names(work: Option<Work>) {
        WORK.set(work);
    }

    /// Logs this thread's steps from now on. From step `dies` on, each of them fails.
    pub(crate) fn begin(dies: usize) {
        LOG.with(|log| *log.borrow_mut() = Some((dies, Vec::new())));
        FAILS_ONCE.set(false);
    }

    /// Logs this thread's steps from now on. Step `fails` fails, and no other.
    pub(crate) fn begin_with_failure(fails: usize) {
        begin(fails);
        FAILS_ONCE.set(true);
    }

    /// Ends the log and returns it: the steps that were done.
    pub(crate) fn end() -> Vec<Entry> {
        LOG.with(|log| log.borrow_mut().take()).map_or_else(Vec::new, |(_, entries)| entries)
    }

    /// Whether the writer has died.
    pub(crate) fn is_dead() -> bool {
        LOG.with(|log| log.borrow().as_ref().is_some_and(|(left, _)| *left == 0))
    }

    pub(super) fn step(kind: Step, inode: u64, path: Option<&Path>) -> io::Result<()> {
        if let Some(path) = path {
            WORK.with_borrow_mut(|work| work.as_mut().map(|work| work(kind, path)));
        }
        LOG.with(|log| {
            let mut log = log.borrow_mut();
            let Some((left, entries)) = &mut *log else { return Ok(()) };
            if *left == 0 {
                if FAILS_ONCE.get() {
                    *left = usize::MAX;
                }
                return Err(io::Error::other("made to fail by the test"));
            }
            *left -= 1;
            entries.push((kind, inode, path.map(Path::to_owned)));
            Ok(())
        })
    }
}
