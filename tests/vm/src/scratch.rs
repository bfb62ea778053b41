//! Folders for what a run writes. The tests run as root, in a folder that everybody may write to.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cleanup::{register, Leftover, Ticket};
use crate::net;

/// Makes an empty folder for this user alone in the system's folder of temporary files. Its path is
/// short, because unix socket paths are limited to 107 bytes, and no other user can guess it.
///
/// # Errors
/// If there is no room for temporary files.
pub fn folder() -> Result<(PathBuf, Ticket)> {
    folder_in(&std::env::temp_dir())
}

fn folder_in(parent: &Path) -> Result<(PathBuf, Ticket)> {
    // The number of the process tells later runs whether the folder is in use.
    let prefix = format!("platen-{}-", std::process::id());
    let mine = Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix(&prefix).permissions(mine).tempdir_in(parent);
    let made = made.with_context(|| format!("cannot create a folder in {}", parent.display()))?;
    // Its user removes it; the ticket if that is too late.
    let folder = made.keep();
    let ticket = register(Leftover::Folder(folder.clone()));
    Ok((folder, ticket))
}

/// Removes folders of earlier runs whose process is gone (it was killed).
pub(crate) fn remove_stale() {
    remove_stale_in(&std::env::temp_dir());
}

fn remove_stale_in(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
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
    use std::collections::BTreeSet;

    #[test]
    fn a_folder_is_this_user_s_and_its_name_cannot_be_guessed() {
        let (parent, _ticket) = folder().unwrap();
        let prefix = format!("platen-{}-", std::process::id());
        let mut suffixes = BTreeSet::new();
        for _ in 0..8 {
            let (made, _ticket) = folder_in(&parent).unwrap();
            let found = std::fs::symlink_metadata(&made).unwrap();
            assert!(found.is_dir());
            assert_eq!(found.permissions().mode() & 0o777, 0o700);
            let name = made.file_name().unwrap().to_str().unwrap().to_owned();
            let suffix = name.strip_prefix(&prefix).unwrap();
            assert!(suffix.len() >= 6, "{name}");
            suffixes.insert(suffix[..3].to_owned());
        }
        // Counted names would begin alike.
        assert!(suffixes.len() > 4, "{suffixes:?}");
        // The kernel gives no process such a number.
        let stale = parent.join("platen-4194305-abcdef");
        std::fs::create_dir(&stale).unwrap();
        remove_stale_in(&parent);
        assert!(!stale.exists());
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 8);
        std::fs::remove_dir_all(parent).unwrap();
    }
}
