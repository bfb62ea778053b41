//! Access to files that hold a guest's memory.

use super::*;

/// A folder with a default access control list gives nobody access to an exported stream or an
/// image, now or after a `chmod` for the group.
#[test]
fn an_exported_stream_and_an_image_have_no_list_of_their_folder() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    // As setfacl -d -m u:4711:rwx writes it: tag, permissions and id of each entry.
    const NOBODY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, NOBODY), (2, 7, 4711), (4, 5, NOBODY), (16, 7, NOBODY), (32, 0, NOBODY)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    let none = rustix::fs::XattrFlags::empty();
    match rustix::fs::setxattr(folder, "system.posix_acl_default", &list, none) {
        Err(rustix::io::Errno::NOTSUP) => {
            println!("skipped: {} has no access control lists", folder.display());
            return;
        }
        set => set.unwrap(),
    }
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let stream = folder.join("stream").display().to_string();
    works(folder, &["image", "export", &image, &stream]);
    let listed = |path: &str| {
        rustix::fs::getxattr(path, "system.posix_acl_access", &mut [0_u8; 256]).map(|_| ())
    };
    let other = folder.join("other").display().to_string();
    fs::write(&other, b"").unwrap();
    assert_eq!(listed(&other), Ok(()), "the folder gives no lists");
    for path in [&image, &stream] {
        assert_eq!(listed(path), Err(rustix::io::Errno::NODATA), "{path}");
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
