//! Permissions of a file for some users beside its owner: POSIX access control lists.
//!
//! The owner of a file may set its list without any privilege. With modes alone, the file would
//! need QEMU's user or group as its owner or group, which a service with a user of its own cannot
//! set.

use rustix::fs::{setxattr, XattrFlags};
use std::io;
use std::path::Path;

/// The right to read and write, as in a mode.
pub(crate) const READ_WRITE: u16 = 6;
pub(crate) const ALL: u16 = 7;

/// The list to set: a file's own, or the default list of a folder, which new files in the folder
/// get.
#[derive(Debug, Clone, Copy)]
pub(crate) enum List {
    Own,
    OfNewFiles,
}

/// Gives `rights` to the owner and to each of `users`, and none to others.
pub(crate) fn grant(path: &Path, list: List, users: &[u32], rights: u16) -> io::Result<()> {
    let name = match list {
        List::Own => "system.posix_acl_access",
        List::OfNewFiles => "system.posix_acl_default",
    };
    let set = setxattr(path, name, &encoded(users, rights), XattrFlags::empty());
    set.map_err(|error| {
        let what = format!("its access control list cannot be set: {error}");
        io::Error::new(io::Error::from(error).kind(), what)
    })
}

/// Encodes the kernel's form (`posix_acl_xattr.h`): version 2, then tag, rights and user of each
/// entry.
fn encoded(users: &[u32], rights: u16) -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let (owner, user, group, mask, other) = (0x01, 0x02, 0x04, 0x10, 0x20);
    let mut users = users.to_vec();
    users.sort_unstable();
    users.dedup();
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    let mut entry = |tag: u16, rights: u16, id: u32| {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    };
    entry(owner, rights, NOBODY);
    users.into_iter().for_each(|id| entry(user, rights, id));
    entry(group, 0, NOBODY);
    entry(mask, rights, NOBODY);
    entry(other, 0, NOBODY);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_as_the_kernel_wants_it_and_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        grant(folder.path(), List::Own, &[65, 64, 65], ALL).unwrap();
        let mut bytes = [0; 256];
        let got =
            rustix::fs::getxattr(folder.path(), "system.posix_acl_access", &mut bytes[..]).unwrap();
        assert_eq!(&bytes[..got], encoded(&[64, 65], ALL));
        assert_eq!(got, 4 + 6 * 8);
        let mode = std::os::unix::fs::MetadataExt::mode(&folder.path().metadata().unwrap());
        // The group's place in the mode is the mask's.
        assert_eq!(mode & 0o777, 0o770);
        let missing = grant(&folder.path().join("none"), List::Own, &[1], ALL).unwrap_err();
        assert!(missing.to_string().contains("access control list"), "{missing}");
    }
}
