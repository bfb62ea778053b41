//! A file that appears at its path only when it is complete.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{linkat, open, renameat_with, AtFlags, Mode, OFlags, RenameFlags, CWD};
use rustix::io::Errno;

/// A file that is being written and will be linked to `path`; rule I1.
#[derive(Debug)]
pub(crate) struct NewFile {
    file: File,
    path: PathBuf,
    folder: File,
    /// Temporary name, on a file system without `O_TMPFILE`.
    partial: Option<PathBuf>,
}

impl NewFile {
    /// Creates the file. Nothing may exist at `path`.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let there = path.symlink_metadata();
        if !matches!(&there, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            there?;
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file of this name exists"));
        }
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let folder = File::open(parent)?;
        let mode = Mode::RUSR | Mode::WUSR;
        let (fd, partial) = match open(parent, OFlags::TMPFILE | FLAGS, mode) {
            Ok(fd) => (fd, None),
            // A file system without O_TMPFILE, such as NFS, returns one of these.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let mut hidden = OsString::from(".");
                hidden.push(name);
                hidden.push(format!(".partial-{}", std::process::id()));
                let partial = parent.join(hidden);
                (open(&partial, OFlags::CREATE | OFlags::EXCL | FLAGS, mode)?, Some(partial))
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(Self { file: File::from(fd), path: path.to_owned(), folder, partial })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes the written bytes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Links the file to its path, durably.
    pub(crate) fn link(mut self) -> io::Result<()> {
        self.sync()?;
        match self.partial.take() {
            None => {
                let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                linkat(CWD, open, CWD, &self.path, AtFlags::SYMLINK_FOLLOW)?;
            }
            Some(partial) => {
                let named = renameat_with(CWD, &partial, CWD, &self.path, RenameFlags::NOREPLACE)
                    .or_else(|errno| match errno {
                        // NFS has no RENAME_NOREPLACE. A link fails if the name exists.
                        Errno::INVAL | Errno::NOSYS => {
                            linkat(CWD, &partial, CWD, &self.path, AtFlags::empty())
                        }
                        errno => Err(errno),
                    });
                let _ = std::fs::remove_file(&partial);
                named?;
            }
        }
        self.folder.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            let _ = std::fs::remove_file(partial);
        }
    }
}

const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC);
