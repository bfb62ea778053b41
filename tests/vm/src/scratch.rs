//! Folders for what a run writes. The tests run as root, in a folder that everybody may write to.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use crate::cleanup::{register, Leftover, Ticket};
use crate::net;

/// Makes an empty folder for this user alone in the system's folder of temporary files. Its path is
/// short, because unix socket paths are limited to 107 bytes.
///
/// # Errors
/// If there is no room for temporary files.
pub fn folder() -> Result<(PathBuf, Ticket)> {
    folder_in(&std::env::temp_dir())
}

fn folder_in(parent: &Path) -> Result<(PathBuf, Ticket)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = parent.join(format!("platen-{}-{nth}", std::process::id()));
        // An existing folder or link belongs to another user.
        match DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => {
                let ticket = register(Leftover::Folder(folder.clone()));
                return Ok((folder, ticket));
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot create {}", folder.display()))
            }
        }
    }
}

/// Removes folders of earlier runs whose process is gone (it was killed).
pub(crate) fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        if net::owner_is_gone(&entry.file_name().to_string_lossy()) {
            // Perhaps another user's: no error.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    #[test]
    fn a_folder_is_new_whatever_somebody_has_put_in_its_place() {
        let (parent, _ticket) = folder().unwrap();
        let nth = |folder: &Path| -> u32 {
            folder
                .file_name()
                .unwrap()
                .to_string_lossy()
                .rsplit_once('-')
                .unwrap()
                .1
                .parse()
                .unwrap()
        };
        let next = nth(&parent) + 1;
        let somebodys = parent.join("elsewhere");
        std::fs::create_dir(&somebodys).unwrap();
        // Other tests of this process may take numbers meanwhile: enough of them.
        for nth in next..next + 100 {
            let name = parent.join(format!("platen-{}-{nth}", std::process::id()));
            match nth % 3 {
                0 => symlink(&somebodys, name).unwrap(),
                1 => symlink("/nowhere", name).unwrap(),
                _ => std::fs::create_dir(name).unwrap(),
            }
        }
        let (made, _ticket) = folder_in(&parent).unwrap();
        assert!(nth(&made) >= next + 100, "{}", made.display());
        let found = std::fs::symlink_metadata(&made).unwrap();
        assert!(found.is_dir());
        assert_eq!(found.permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(&somebodys).unwrap().count(), 0);
        std::fs::remove_dir_all(parent).unwrap();
    }
}
