//! The folder whose images a server serves.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{openat2, Mode, OFlags, ResolveFlags};
use twox_hash::XxHash3_128;

use crate::wire::{Lock, Status, MAX_NAME};

/// Takes the lock of the image at a path, shared if the flag is set, and returns the locked file.
/// The error is a text that names the holder of the lock.
pub type TakeLock = Box<dyn Fn(&Path, bool) -> Result<File, String> + Send + Sync>;

/// The folder whose images a server serves.
pub struct Folder {
    path: PathBuf,
    folder: File,
    take_lock: TakeLock,
}

impl std::fmt::Debug for Folder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Folder").field(&self.path).finish()
    }
}

/// A file that a session has opened.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) name: String,
    pub(crate) file: File,
    /// The stamp that identifies the file's bytes.
    pub(crate) stamp: u128,
    pub(crate) len: u64,
    pub(crate) lock: Lock,
    /// Its descriptor holds the lock.
    _locked: Option<File>,
}

/// A served file begins with one of these.
const MAGICS: [&[u8; 8]; 3] = [b"PLATENVM", b"PLATENPK", b"PLATENHT"];

/// Attempts to lock a file that may be replaced meanwhile.
const ATTEMPTS: usize = 10;

impl Folder {
    /// Serves the folder at `path`. `take_lock` locks an image.
    ///
    /// # Errors
    ///
    /// The folder cannot be opened.
    pub fn open(path: &Path, take_lock: TakeLock) -> io::Result<Self> {
        let folder = File::open(path)?;
        if !folder.metadata()?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { path: path.to_owned(), folder, take_lock })
    }

    /// Opens a file by its name in the folder, and locks it.
    pub(crate) fn file(&self, name: &str, lock: Lock) -> Result<OpenFile, (Status, String)> {
        if !is_name(name) {
            return Err((Status::NotFound, "this is no name of an image in the folder".into()));
        }
        for _ in 0..ATTEMPTS {
            let (file, metadata) = self.plain(name)?;
            let locked = match lock {
                Lock::None => None,
                _ => Some(
                    (self.take_lock)(&self.path.join(name), lock == Lock::Shared)
                        .map_err(|text| (Status::InUse, text))?,
                ),
            };
            let io = |error: io::Error| (Status::Io, error.to_string());
            if let Some(locked) = &locked {
                let of = locked.metadata().map_err(io)?;
                // The file was replaced between the two calls, or the name is a symbolic link.
                if (of.dev(), of.ino()) != (metadata.dev(), metadata.ino()) {
                    continue;
                }
            }
            let stamp = stamp(&metadata);
            let name = name.to_owned();
            return Ok(OpenFile { name, file, stamp, len: metadata.len(), lock, _locked: locked });
        }
        Err((Status::Io, "it is replaced again and again".into()))
    }

    /// Opens a file that is served.
    fn plain(&self, name: &str) -> Result<(File, std::fs::Metadata), (Status, String)> {
        let io = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => (Status::NotFound, "there is no such image".into()),
            _ => (Status::Io, error.to_string()),
        };
        // The open does not block, since the file may be a pipe. It follows no symbolic link, which
        // could lead to a file that the link's owner may not read.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file = openat2(&self.folder, name, flags, Mode::empty(), resolve)
            .map_err(|errno| io(errno.into()))?;
        let file = File::from(file);
        let metadata = file.metadata().map_err(io)?;
        let mut magic = [0; 8];
        let is_served = metadata.is_file()
            && file.read_exact_at(&mut magic, 0).is_ok()
            && MAGICS.contains(&&magic);
        if !is_served {
            return Err((Status::NotFound, "it is no image".into()));
        }
        Ok((file, metadata))
    }
}

/// Whether a client may ask for this name: `NAME`, `STORE/NAME`, a pack or a hot set.
fn is_name(name: &str) -> bool {
    let mut parts = name.split('/').rev();
    let last = parts.next().unwrap_or_default();
    let plain = last.strip_prefix('.').and_then(|name| name.strip_suffix(".hot")).unwrap_or(last);
    let is_part = |part: &str| !part.is_empty() && !part.starts_with('.');
    name.len() <= MAX_NAME
        && !name.contains(char::is_control)
        && is_part(plain)
        && parts.all(is_part)
}

/// Identifies the bytes of a file that is never written again once it has its name. The number of
/// its device is left out: it may be another one after the host has started again.
fn stamp(of: &std::fs::Metadata) -> u128 {
    let numbers = [of.ino(), of.len(), of.mtime().cast_unsigned(), of.mtime_nsec().cast_unsigned()];
    XxHash3_128::oneshot(&numbers.map(u64::to_be_bytes).concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_packs_and_hot_sets_are_names() {
        let long = "x".repeat(MAX_NAME);
        for name in ["vm", "store/vm", "store/packs/0a", ".vm.hot", "a/.vm.hot", &long] {
            assert!(is_name(name), "{name}");
        }
        let long = format!("{long}x");
        let others =
            ["", "/etc/passwd", "../vm", "a/../b", "a//b", ".key", ".vm.hot/x", ".", ".hot"];
        for name in others.into_iter().chain(["..hot", "a/", "a\nb", &long]) {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn only_images_below_the_folder_are_served() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join("served").join(name);
        std::fs::create_dir(path("")).unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::fs::write(path("vm"), b"PLATENVM and more").unwrap();
        std::fs::write(path("key"), b"secret, and long enough").unwrap();
        std::fs::write(path("short"), b"PLAT").unwrap();
        std::fs::write(dir.path().join("outside"), b"PLATENVM outside").unwrap();
        std::os::unix::fs::symlink("vm", path("link")).unwrap();
        std::os::unix::fs::symlink("..", path("up")).unwrap();
        let folder = Folder::open(
            &path(""),
            Box::new(|path, _| File::open(path).map_err(|error| error.to_string())),
        )
        .unwrap();
        let vm = folder.file("vm", Lock::Exclusive).unwrap();
        assert_eq!((vm.len, vm.name.as_str()), (17, "vm"));
        let no = ["key", "short", "folder", "link", "up/outside", "../outside", "none"];
        for name in no {
            assert!(folder.file(name, Lock::None).is_err(), "{name}");
        }
        // Other bytes have another stamp.
        std::fs::write(path("new"), b"PLATENVM and more").unwrap();
        std::fs::rename(path("new"), path("vm")).unwrap();
        assert_ne!(folder.file("vm", Lock::None).unwrap().stamp, vm.stamp);
        assert!(Folder::open(&path("vm"), Box::new(|_, _| Err(String::new()))).is_err());
    }
}
