//! Removes packs that no save names. Rewrites saves that lie largely in packs of which much is
//! unused.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::path::Path;

use rustix::fs::FlockOperation;

use crate::disk;
use crate::file::PARTIAL;
use crate::hot::image_name;
use crate::pack::PACKS;
use crate::rewrite::Rewrite;
use crate::sharing::pack_id;
use crate::sparse::Sparse;
use crate::store::Store;
use crate::{Damage, Options, WriteError};

/// Result of [`Store::collect`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Packs that were removed.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Saves that were rewritten.
    pub rewritten: Vec<String>,
    /// Saves that were not rewritten, because they are being restored.
    pub in_use: Vec<String>,
    /// Saves that were not rewritten, each with the reason: damage, an owner that this process
    /// cannot give to a file, or another name of the same file.
    pub left: Vec<(String, String)>,
    /// Another process saves into the store, so that unused packs stay until the next collection.
    pub busy: bool,
}

impl Store {
    /// Removes packs that no save names. If many bytes of the others are unused, rewrites the saves
    /// that lie in such packs, and removes these packs too.
    ///
    /// Each save is whole at any moment. A process that dies in here leaves unused packs, which the
    /// next collection removes.
    ///
    /// # Errors
    ///
    /// A save cannot be read. Its packs are then not known, and nothing is removed. Errors of the
    /// file system.
    pub fn collect(&self, options: Options) -> Result<Collected, WriteError> {
        let mut done = Collected::default();
        if !self.remove_unused(&mut done)? {
            return Ok(done);
        }
        let Sparse { packs: mut sparse, unreadable } = self.sparse()?;
        done.left = unreadable;
        for name in self.names()? {
            let packs = self.read(&name)?;
            if !packs.iter().any(|id| sparse.contains(id)) {
                continue;
            }
            let parent = done.rewritten.last().cloned();
            match self.rewrite(&name, &sparse, parent.as_deref(), options.clone())? {
                Rewrite::Done => done.rewritten.push(name),
                Rewrite::InUse => done.in_use.push(name),
                Rewrite::Link => {}
                Rewrite::Left(why) => {
                    // The save goes on naming its packs, so rewriting others gains nothing.
                    packs.iter().for_each(|id| {
                        sparse.remove(id);
                    });
                    done.left.push((name, why));
                }
            }
        }
        self.remove_unused(&mut done)?;
        Ok(done)
    }

    /// Removes packs that no save names, hot sets of saves that do not exist, and the temporary
    /// files of processes that have died; false if the store is in use.
    fn remove_unused(&self, done: &mut Collected) -> Result<bool, WriteError> {
        let Some(_lock) = self.try_lock(FlockOperation::NonBlockingLockExclusive)? else {
            done.busy = true;
            return Ok(false);
        };
        // A save that is renamed meanwhile may be missed under both of its names.
        let named = loop {
            let names = self.names()?;
            let mut named = HashSet::new();
            for name in &names {
                named.extend(self.read(name)?);
            }
            if self.names()? == names {
                break named;
            }
        };
        let packs = self.folder.join(PACKS);
        let error =
            |path: &Path, source| WriteError::Io { what: "remove", path: path.into(), source };
        // A save that was removed must not come back after its packs are gone.
        disk::sync_folder(&self.folder).map_err(|source| error(&self.folder, source))?;
        if fs::symlink_metadata(&packs).is_ok_and(|packs| packs.is_symlink()) {
            // The link leads to the packs of another store, whose saves name them.
            return Err(error(&packs, io::Error::other("it is a symbolic link, not a folder")));
        }
        for folder in [&self.folder, &packs] {
            let read = |source| self.error(Damage::io("the folder", source));
            for name in disk::names(folder).map_err(read)? {
                let path = folder.join(&name);
                let metadata = path.symlink_metadata();
                if metadata.as_ref().is_ok_and(Metadata::is_dir) {
                    continue;
                }
                let pack = pack_id(&name).filter(|_| folder == &packs);
                let is_left = match image_name(&name.to_string_lossy()) {
                    Some(save) if folder == &self.folder => self.is_gone(save),
                    _ => is_partial(&name),
                };
                let is_unused = pack.is_some_and(|id| !named.contains(&id));
                if !is_left && !is_unused {
                    continue;
                }
                match disk::unlink(&path) {
                    Ok(()) if is_unused => {
                        done.packs += 1;
                        done.bytes += metadata.map_or(0, |metadata| metadata.len());
                    }
                    Ok(()) => {}
                    // A player has given its hot set the later name, or another host was faster.
                    Err(gone) if gone.kind() == io::ErrorKind::NotFound => {}
                    Err(source) => return Err(error(&path, source)),
                }
            }
        }
        disk::sync_folder(&packs).map_err(|source| error(&packs, source))?;
        Ok(true)
    }
}

fn is_partial(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with('.') && name.contains(PARTIAL)
}
