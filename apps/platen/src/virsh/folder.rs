//! The folder of the sockets at which QEMU waits for a VM. For `--recover` its name tells which
//! domain is restored, and from which image.

use anyhow::{bail, ensure, Context};
use image::Image;
use libvirt::{Domain, Owner};
use rustix::fs::{chown, Gid, Uid};
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The longest path of a socket, bytes.
const MAX_PATH: usize = 107;
/// Sockets in one folder: a player that dies needs a new one.
const MOST: u32 = 100_000;

/// A folder that only QEMU's user and root can search.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, and replaces the folders of former restores of this domain.
    pub(super) fn make(
        base: &Path,
        domain: &Domain,
        image: &Image,
        owner: Owner,
    ) -> anyhow::Result<Self> {
        let name = || format!("folder {}", base.display());
        match DirBuilder::new().mode(0o711).create(base) {
            // The mode is set whatever this process's umask is: QEMU's user has to pass through.
            Ok(()) => {
                fs::set_permissions(base, fs::Permissions::from_mode(0o711)).with_context(name)?
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(name),
        }
        let found = fs::symlink_metadata(base).with_context(name)?;
        let own = rustix::process::geteuid().as_raw();
        ensure!(
            found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0,
            "{} is no folder that only root may write to: name another one with --socket-dir",
            base.display()
        );
        for old in of_domain(base, domain)? {
            fs::remove_dir_all(&old).with_context(|| format!("folder {}", old.display()))?;
        }
        let folder = Self(base.join(format!("{}-{}", domain.uuid(), identity(image))));
        DirBuilder::new().mode(0o700).create(&folder.0).with_context(name)?;
        let (user, group) = (Uid::from_raw(owner.user), Gid::from_raw(owner.group));
        chown(&folder.0, Some(user), Some(group))
            .context("cannot give QEMU's user the folder of its sockets")?;
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o700)).with_context(name)?;
        Ok(folder)
    }

    /// Finds the folder of a restore that is to continue. Another image would send wrong pages.
    pub(super) fn find(base: &Path, domain: &Domain, image: &Image) -> anyhow::Result<Self> {
        let expected = base.join(format!("{}-{}", domain.uuid(), identity(image)));
        if expected.is_dir() {
            return Ok(Self(expected));
        }
        let others = of_domain(base, domain).unwrap_or_default();
        match others.first() {
            Some(_) => bail!(
                "domain {} was restored from another image: give that image, or a copy",
                domain.name()
            ),
            None => bail!(
                "domain {} was not restored by this command, or {} is not the folder of its sockets",
                domain.name(),
                base.display()
            ),
        }
    }

    /// Path of a socket that does not exist yet.
    pub(super) fn next_socket(&self) -> anyhow::Result<String> {
        let path = (0..MOST)
            .map(|nth| self.0.join(format!("{nth}.sock")))
            .find(|path| fs::symlink_metadata(path).is_err())
            .context("too many sockets")?;
        let path = path.to_str().context("the folder of the sockets is not in UTF-8")?;
        ensure!(path.len() <= MAX_PATH, "{path} is too long for a socket: shorten --socket-dir");
        // The path is a part of a URI.
        let plain = |sign: char| sign.is_ascii_alphanumeric() || "/._-".contains(sign);
        ensure!(
            path.starts_with('/') && path.chars().all(plain),
            "{path} is not absolute, or has other signs than letters, digits and ._-: change --socket-dir"
        );
        Ok(path.to_owned())
    }

    /// Removes the folder of a restore that has ended.
    pub(super) fn remove(&self) {
        // The next restore of the domain removes what is left.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Finds the folders of a domain.
fn of_domain(base: &Path, domain: &Domain) -> anyhow::Result<Vec<PathBuf>> {
    let prefix = format!("{}-", domain.uuid());
    let entries = fs::read_dir(base).with_context(|| format!("folder {}", base.display()))?;
    let is_its = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_its).collect())
}

/// A part of the image's identity, for the folder's name.
fn identity(image: &Image) -> String {
    format!("{:016x}", image.identity() >> 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "592ef32c-27a5-4f79-ba49-16196c787853";

    fn domain() -> Domain {
        Domain::parse(&format!("<domain><name>g1</name><uuid>{UUID}</uuid></domain>")).unwrap()
    }

    /// A folder as `make` leaves it.
    fn folder(base: &Path, name: &str) -> PathBuf {
        let folder = base.join(name);
        fs::create_dir(&folder).unwrap();
        folder
    }

    #[test]
    fn folders_are_those_of_one_domain() {
        let base = tempfile::tempdir().unwrap();
        let own = folder(base.path(), &format!("{UUID}-0011223344556677"));
        folder(base.path(), "692ef32c-27a5-4f79-ba49-16196c787853-0011223344556677");
        assert_eq!(of_domain(base.path(), &domain()).unwrap(), [own]);
        assert!(of_domain(&base.path().join("none"), &domain()).is_err());
    }

    #[test]
    fn a_socket_has_a_new_path_that_fits_into_a_uri() {
        let base = tempfile::tempdir().unwrap();
        let own = Folder(folder(base.path(), "a"));
        assert!(own.next_socket().unwrap().ends_with("/a/0.sock"));
        fs::write(own.0.join("0.sock"), "").unwrap();
        assert!(own.next_socket().unwrap().ends_with("/a/1.sock"));
        for bad in ["a b", "a?b", "a%20", "ä", &"a".repeat(100)] {
            let folder = Folder(folder(base.path(), bad));
            assert!(folder.next_socket().is_err(), "{bad}");
        }
        assert!(Folder("relative".into()).next_socket().is_err());
        own.remove();
        assert!(!own.0.exists());
    }
}
