//! A store: a folder of saves that share their pages.
//!
//! ```text
//!  STORE/platen-store   the key of the page hashes; the lock (flock)
//!  STORE/NAME           a save: device state, and the place of each page in the packs
//!  STORE/packs/HASH     units; written once, named by the hash over the file
//! ```
//!
//! Any number of processes may save into a store at once. Each holds the lock shared until its save
//! is linked, so that no other process removes the packs that the save refers to. Only the removal
//! of packs holds the lock exclusively, and only for that time.

#[cfg(test)]
mod tests;

use std::fs::{create_dir, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use aws_lc_rs::rand;
use codec::checksum;
use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;

use crate::disk;
use crate::file::{parent_of, NewFile};
use crate::layout::STORE_VERSION;
use crate::pack::{PackRef, PACKS};
use crate::part::short;
use crate::save::Parts;
use crate::{Damage, HotSet, Shape, WriteError};

/// Name of the file that makes a folder a store.
pub const STORE_FILE: &str = "platen-store";
const MAGIC: &[u8; 8] = b"PLATENST";
const FILE_LEN: usize = 64;
/// The longest wait for another process that is removing packs.
const LOCKED: Duration = Duration::from_secs(120);

/// An open store.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) folder: PathBuf,
    pub(crate) key: [u8; 32],
}

/// Contents of the file of a save, without its pages and its device state, which may be long.
#[derive(Clone, Debug)]
pub struct SaveInfo {
    /// The machine type, if the device state names it.
    pub machine: Option<String>,
    /// The facts: one JSON object.
    pub facts: Vec<u8>,
    /// Page size and unit size.
    pub shape: Shape,
    /// Guest RAM, bytes.
    pub ram_bytes: u64,
    /// Length of the save's file, bytes.
    pub file_len: u64,
    /// The packs that hold the save's pages. An image in one file, which may lie in a store, has
    /// none.
    pub packs: Vec<PackRef>,
    /// Time of the file's last change.
    pub modified: SystemTime,
}

impl Store {
    /// Makes `folder`, which may exist, a store.
    ///
    /// # Errors
    ///
    /// The folder is a store already; errors of the file system.
    pub fn create(folder: &Path) -> Result<Self, WriteError> {
        let error = |source| WriteError::Io { what: "create", path: folder.to_owned(), source };
        let make = |path: &Path| match create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        };
        let existed = folder.is_dir();
        make(folder).map_err(error)?;
        // An existing folder may lie in one that this user cannot read, and is durable as it is.
        match disk::sync_folder(parent_of(folder)) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied && existed => {}
            synced => synced.map_err(error)?,
        }
        let path = folder.join(STORE_FILE);
        let new = NewFile::create(&path).map_err(error)?;
        make(&folder.join(PACKS)).map_err(error)?;
        disk::sync_folder(folder).map_err(error)?;
        let mut key = [0; 32];
        rand::fill(&mut key).map_err(|_| error(io::Error::other("no randomness")))?;
        let mut bytes = Vec::from(*MAGIC);
        bytes.extend(STORE_VERSION.to_be_bytes());
        bytes.extend([0; 12]);
        bytes.extend(key);
        bytes.extend(checksum(&bytes).to_be_bytes());
        new.write(&bytes).and_then(|()| new.sync()).map_err(error)?;
        new.link(&path).map_err(|failed| error(failed.into()))?;
        Ok(Self { folder: folder.to_owned(), key })
    }

    /// Opens the store in `folder`; `None` if the folder is no store.
    ///
    /// # Errors
    ///
    /// The store's file is damaged, of another version, or cannot be read.
    pub fn open(folder: &Path) -> Result<Option<Self>, WriteError> {
        let error = |source| WriteError::Store { path: folder.to_owned(), source };
        let bytes = match short(&folder.join(STORE_FILE), FILE_LEN) {
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return Ok(None);
            }
            read => read.map_err(|source| error(Damage::io(STORE_FILE, source)))?,
        };
        let Some(bytes) = <&[u8; FILE_LEN]>::try_from(&bytes[..]).ok() else {
            return Err(error(Damage::Store));
        };
        let version = u32::from_be_bytes(bytes[8..12].try_into().expect("4 bytes"));
        if &bytes[..8] == MAGIC && version != STORE_VERSION {
            return Err(error(Damage::Version { version }));
        }
        let sum = u64::from_be_bytes(bytes[56..].try_into().expect("8 bytes"));
        if &bytes[..8] != MAGIC || bytes[12..24] != [0; 12] || checksum(&bytes[..56]) != sum {
            return Err(error(Damage::Store));
        }
        let key = bytes[24..56].try_into().expect("32 bytes");
        Ok(Some(Self { folder: folder.to_owned(), key }))
    }

    /// The store of which `path` is or would be a save, and the save's name.
    ///
    /// # Errors
    ///
    /// The errors of [`Store::open`].
    pub fn of(path: &Path) -> Result<Option<(Self, String)>, WriteError> {
        let Some(store) = Self::open(parent_of(path))? else { return Ok(None) };
        let name = path.file_name().unwrap_or_default();
        let Some(plain) = name.to_str() else {
            return Err(WriteError::Name { name: name.to_string_lossy().into_owned() });
        };
        Ok(Some((store, plain.to_owned())))
    }

    /// The store to whose folder of packs `path` leads, or in which it lies: no image can be there.
    ///
    /// # Errors
    ///
    /// The errors of [`Store::open`].
    pub fn with_packs_at(path: &Path) -> Result<Option<Self>, WriteError> {
        let folder = || parent_of(path).canonicalize();
        // Symbolic links may lead to it.
        let Ok(place) = path.canonicalize().or_else(|_| folder()) else { return Ok(None) };
        for packs in place.ancestors().filter(|folder| folder.ends_with(PACKS)) {
            if let Some(store) = Self::open(parent_of(packs))? {
                return Ok(Some(store));
            }
        }
        Ok(None)
    }

    /// Folder of the store.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// Path of the save `name`.
    ///
    /// # Errors
    ///
    /// No save may have this name.
    pub fn path(&self, name: &str) -> Result<PathBuf, WriteError> {
        let path = self.folder.join(name);
        let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if is_plain && !name.starts_with('.') && name.len() <= 200 && !is_reserved(name) {
            return Ok(path);
        }
        Err(WriteError::Name { name: name.to_owned() })
    }

    /// Names of the saves, in order.
    ///
    /// # Errors
    ///
    /// Errors of the file system.
    pub fn names(&self) -> Result<Vec<String>, WriteError> {
        let error = |source| self.error(Damage::io("the folder", source));
        let mut names = Vec::new();
        for name in disk::names(&self.folder).map_err(error)? {
            // Neither a folder nor a socket is a save. An entry that cannot be read may be one.
            let metadata = self.folder.join(&name).metadata();
            let is_other = metadata.is_ok_and(|metadata| !metadata.is_file());
            let name = name.to_string_lossy().into_owned();
            if !name.starts_with('.') && !is_reserved(&name) && !is_other {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Length of all packs, bytes.
    ///
    /// # Errors
    ///
    /// Errors of the file system.
    pub fn pack_bytes(&self) -> Result<u64, WriteError> {
        let error = |source| self.error(Damage::io("the folder of packs", source));
        let mut bytes = 0;
        for entry in std::fs::read_dir(self.folder.join(PACKS)).map_err(error)? {
            // Another process may remove a pack meanwhile.
            bytes += entry.and_then(|entry| entry.metadata()).map_or(0, |pack| pack.len());
        }
        Ok(bytes)
    }

    /// Reads the file of the save `name`.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file.
    pub fn info(&self, name: &str) -> Result<SaveInfo, Damage> {
        let io = |error| Damage::io("the save", error);
        let file = File::open(self.folder.join(name)).map_err(io)?;
        let modified = file.metadata().and_then(|metadata| metadata.modified()).map_err(io)?;
        let parts = Parts::read(&file.into())?;
        let pages: u64 = parts.index.blocks.iter().map(|block| block.pages).sum();
        Ok(SaveInfo {
            machine: parts.state.machine().map(Into::into),
            facts: parts.state.facts,
            shape: parts.shape,
            ram_bytes: pages * parts.shape.page_size() as u64,
            file_len: parts.trailer.file_len,
            packs: parts.packs,
            modified,
        })
    }

    /// Removes the save `name` durably, and its hot set. Its packs stay until [`Store::collect`].
    ///
    /// # Errors
    ///
    /// There is no such save; errors of the file system.
    pub fn remove(&self, name: &str) -> Result<(), WriteError> {
        let path = self.path(name)?;
        remove_image(&path)
    }

    /// The packs that a save names.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u128>, WriteError> {
        match self.info(name) {
            Ok(info) => Ok(info.packs.iter().map(|pack| pack.id).collect()),
            Err(_) if self.is_gone(name) => Ok(Vec::new()),
            Err(source) if source.is_forbidden() => {
                Err(WriteError::Foreign { name: name.to_owned(), source })
            }
            Err(source) => Err(WriteError::Save { name: name.to_owned(), source }),
        }
    }

    /// Whether another process has removed the save. If the file is not found for any other reason
    /// (the disk's, a name that is not UTF-8, or a store that is not there), the save may exist.
    pub fn is_gone(&self, name: &str) -> bool {
        let found = self.folder.join(name).symlink_metadata();
        !name.contains(char::REPLACEMENT_CHARACTER)
            && matches!(found, Err(error) if error.kind() == io::ErrorKind::NotFound)
            && self.is_there()
    }

    /// Whether the store's file is there. It is not if the folder was renamed or unmounted.
    pub fn is_there(&self) -> bool {
        self.folder.join(STORE_FILE).symlink_metadata().is_ok()
    }

    pub(crate) fn error(&self, source: Damage) -> WriteError {
        WriteError::Store { path: self.folder.clone(), source }
    }

    /// Locks the store's packs against removal. Waits for a removal that is under way.
    pub(crate) fn lock_for_saving(&self) -> Result<File, WriteError> {
        let until = Instant::now() + LOCKED;
        loop {
            match self.try_lock(FlockOperation::NonBlockingLockShared)? {
                Some(lock) => return Ok(lock),
                None if Instant::now() > until => {
                    let text = format!("another process removes packs for {} s", LOCKED.as_secs());
                    let error = io::Error::new(ErrorKind::WouldBlock, text);
                    return Err(self.error(Damage::io("its lock", error)));
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Locks the store; `None` if another process holds it.
    pub(crate) fn try_lock(&self, operation: FlockOperation) -> Result<Option<File>, WriteError> {
        let error = |source| self.error(Damage::io("its lock", source));
        // NFS locks a file exclusively only if it is open for writing.
        let path = self.folder.join(STORE_FILE);
        let file = File::options().read(true).write(true).open(path).map_err(error)?;
        match flock(&file, operation) {
            Ok(()) => Ok(Some(file)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(error(errno.into())),
        }
    }
}

/// Removes the image at `path` durably, and its hot set.
///
/// # Errors
///
/// There is no such file; errors of the file system.
pub fn remove_image(path: &Path) -> Result<(), WriteError> {
    let removed = disk::unlink(path).and_then(|()| {
        // A hot set that stays costs nothing: no other image uses it.
        let _ = disk::unlink(&HotSet::path(path));
        disk::sync_folder(parent_of(path))
    });
    removed.map_err(|source| WriteError::Io { what: "remove", path: path.to_owned(), source })
}

fn is_reserved(name: &str) -> bool {
    name == STORE_FILE || name == PACKS
}
