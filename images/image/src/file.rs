//! A file that appears at its path only when it is complete.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{fchown, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    fgetxattr, fremovexattr, fsetxattr, open, renameat_with, AtFlags, Mode, OFlags, RenameFlags,
    XattrFlags, CWD,
};
use rustix::io::Errno;

use crate::disk;

/// A file that is being written and has no name yet; rule I1. Only its owner may read and write it.
/// A file that is dropped, and one whose process dies, is gone. On a file system without
/// `O_TMPFILE` (NFS, FAT) it has a temporary name, which stays if the process dies.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    folder: PathBuf,
    /// Temporary name, on a file system without `O_TMPFILE`.
    partial: Option<PathBuf>,
}

/// The reason why a file has not got its name durably.
#[derive(Debug)]
pub enum LinkError {
    /// The file has no name.
    Nameless(io::Error),
    /// The file has its name, which could not be made durable, and could not be removed either.
    Stays(io::Error),
}

impl From<LinkError> for io::Error {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Nameless(source) | LinkError::Stays(source) => source,
        }
    }
}

/// Part of the temporary name of an incomplete file, after a dot and its later name.
pub(crate) const PARTIAL: &str = ".partial-";

/// Counts this process's temporary names.
static PARTIALS: AtomicU64 = AtomicU64::new(0);

impl NewFile {
    /// Creates a file that will be linked to `path`.
    ///
    /// # Errors
    ///
    /// Something exists at `path`, or it names no file; errors of the file system.
    pub fn create(path: &Path) -> io::Result<Self> {
        // `file_name` ignores a slash at the end, which a link does not.
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let there = path.symlink_metadata();
        if !matches!(&there, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            there?;
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file of this name exists"));
        }
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        Self::create_in(parent_of(path), &name.to_string_lossy())
    }

    /// Creates a file in `folder`. `name` helps to recognise its temporary name.
    pub(crate) fn create_in(folder: &Path, name: &str) -> io::Result<Self> {
        let (fd, partial) = match open(folder, OFlags::TMPFILE | FLAGS, MODE) {
            Ok(fd) => (fd, None),
            // A file system without O_TMPFILE, such as NFS, returns one of these.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let (fd, partial) = create_partial(folder, name)?;
                (fd, Some(partial))
            }
            Err(errno) => return Err(errno.into()),
        };
        // Created before anything that can fail: a file that is dropped takes its temporary name
        // with it.
        let new = Self { file: File::from(fd), folder: folder.to_owned(), partial };
        make_private(&new.file)?;
        Ok(new)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Appends bytes.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        disk::write(&self.file, bytes)
    }

    /// Makes the written bytes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        disk::sync(&self.file)
    }

    /// Gives the file owner, group, mode and access control list of `former`, durably.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` if this process may not give the file that owner.
    pub(crate) fn take_access(&self, former: &File) -> io::Result<()> {
        let (is, was) = (self.file.metadata()?, former.metadata()?);
        if (is.uid(), is.gid()) != (was.uid(), was.gid()) {
            fchown(&self.file, Some(was.uid()), Some(was.gid()))?;
        }
        // The list is set first: without it, the mode's bits for the list's mask would be the
        // group's.
        let mut list = vec![0; MAX_ACL];
        match fgetxattr(former, ACL, &mut list) {
            Ok(len) => fsetxattr(&self.file, ACL, &list[..len], XattrFlags::empty())?,
            // The file, or its file system, has no list. This file has none either: `create_in`
            // has removed what the folder gave it.
            Err(Errno::NODATA | Errno::NOTSUP) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.file.set_permissions(was.permissions())?;
        self.sync()
    }

    /// Gives the file, which is durable, the name `path` in its folder, durably.
    ///
    /// # Errors
    ///
    /// The name exists; errors of the file system.
    pub fn link(self, path: &Path) -> Result<(), LinkError> {
        let folder = self.folder.clone();
        self.name(path).map_err(LinkError::Nameless)?;
        disk::sync_folder(&folder).map_err(|source| match disk::unlink(path) {
            // The caller lets the VM run on: an image at this name would be out of date.
            Ok(()) => LinkError::Nameless(source),
            Err(error) if error.kind() == io::ErrorKind::NotFound => LinkError::Nameless(source),
            Err(_) => LinkError::Stays(source),
        })
    }

    /// As [`link`](Self::link), for a file that others use as soon as it has its name. After an
    /// error the file may have its name.
    pub(crate) fn link_shared(self, path: &Path) -> io::Result<()> {
        let folder = self.folder.clone();
        self.name(path)?;
        disk::sync_folder(&folder)
    }

    /// Gives the file the name `path`. Fails if the name exists.
    fn name(mut self, path: &Path) -> io::Result<()> {
        match self.partial.take() {
            None => self.link_open(path),
            Some(partial) => {
                let named = renameat_with(CWD, &partial, CWD, path, RenameFlags::NOREPLACE)
                    .map_err(io::Error::from)
                    .or_else(|error| match Errno::from_io_error(&error) {
                        // NFS has no RENAME_NOREPLACE. A link fails if the name exists.
                        Some(Errno::INVAL | Errno::NOSYS) => {
                            disk::link(&self.file, &partial, AtFlags::empty(), path)
                        }
                        _ => Err(error),
                    })
                    // The answer to the first request was lost: to the second one, a server of NFS
                    // says of a link that it exists, and of a rename that there is no such file.
                    // The caller lets the VM run on after an error: no image may have the name
                    // then.
                    .or_else(|error| if is_at(&self.file, path) { Ok(()) } else { Err(error) });
                let _ = std::fs::remove_file(&partial);
                named
            }
        }
    }

    /// Gives the file, which is durable, the name `path` in its folder, durably, in the place of
    /// the file that has the name now.
    pub(crate) fn replace(mut self, path: &Path) -> io::Result<()> {
        let partial = match self.partial.take() {
            Some(partial) => partial,
            None => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                at_free_name(&self.folder, &name, |partial| self.link_open(partial))?.1
            }
        };
        disk::rename(&self.file, &partial, path).inspect_err(|_| {
            let _ = disk::unlink(&partial);
        })?;
        disk::sync_folder(&self.folder)
    }

    /// Links the file without a name to `path`.
    fn link_open(&self, path: &Path) -> io::Result<()> {
        let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        disk::link(&self.file, Path::new(&open), AtFlags::SYMLINK_FOLLOW, path)
    }
}

/// Removes the access control list that `file`, which was created with mode 0600, has from the
/// default list of its folder. Such a list gives no user access at first. But a later `chmod` that
/// permits the group to read would permit it to every user on the list.
///
/// # Errors
///
/// Errors of the file system. A file system without POSIX lists is no error.
fn make_private(file: &File) -> io::Result<()> {
    match fremovexattr(file, ACL) {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether `path` still names the open file, whatever other hosts have done in its folder.
pub fn is_at(file: &File, path: &Path) -> bool {
    disk::refresh(parent_of(path));
    let (Ok(open), Ok(named)) = (file.metadata(), disk::named(path)) else { return false };
    (open.dev(), open.ino()) == named
}

/// The folder that `path` lies in.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Creates a file with a temporary name.
fn create_partial(folder: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OFlags::CREATE | OFlags::EXCL | FLAGS;
    at_free_name(folder, name, |partial| Ok(open(partial, flags, MODE)?))
}

/// Calls `make` with temporary names in `folder` up to one that no file has, and returns the name.
/// A process with the number of this one may have died there: in a container many have one number.
fn at_free_name<T>(
    folder: &Path,
    name: &str,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(T, PathBuf)> {
    loop {
        // Relaxed: only the number counts.
        let nth = PARTIALS.fetch_add(1, Ordering::Relaxed);
        let partial = folder.join(format!(".{name}{PARTIAL}{}-{nth}", std::process::id()));
        match make(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((made?, partial)),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            let _ = std::fs::remove_file(partial);
        }
    }
}

/// Name of the extended attribute that holds the access control list.
const ACL: &str = "system.posix_acl_access";
/// Maximum length of an extended attribute, bytes (`XATTR_SIZE_MAX`).
const MAX_ACL: usize = 64 << 10;

const MODE: Mode = Mode::RUSR.union(Mode::WUSR);
const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests;
