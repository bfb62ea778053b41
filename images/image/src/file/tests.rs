use super::*;
use rustix::fs::{getxattr, setxattr};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

/// A folder whose new files all give user 4711 access; `None` where lists do not exist.
fn folder_with_default_list() -> Option<tempfile::TempDir> {
    const NOBODY: u32 = u32::MAX;
    // As setfacl -d -m u:4711:rwx writes it: tag, permissions and id of each entry.
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, NOBODY), (2, 7, 4711), (4, 5, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    let folder = tempfile::tempdir().unwrap();
    match setxattr(folder.path(), "system.posix_acl_default", &list, XattrFlags::empty()) {
        Ok(()) => Some(folder),
        Err(Errno::NOTSUP) => {
            println!("skipped: {} has no access control lists", folder.path().display());
            None
        }
        Err(errno) => panic!("{errno}"),
    }
}

fn list_of(path: &Path) -> Result<Vec<u8>, Errno> {
    let mut list = vec![0; MAX_ACL];
    let len = getxattr(path, ACL, &mut list)?;
    list.truncate(len);
    Ok(list)
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_new_file_has_no_list_of_its_folder() {
    let Some(folder) = folder_with_default_list() else { return };
    let path = folder.path().join("image");
    // The folder does give lists to files.
    let other = folder.path().join("other");
    std::fs::write(&other, b"").unwrap();
    list_of(&other).unwrap();
    NewFile::create(&path).unwrap().link(&path).unwrap();
    assert_eq!((mode(&path), list_of(&path)), (0o600, Err(Errno::NODATA)));
    // With a list, this would let user 4711 read it.
    std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    assert_eq!((mode(&path), list_of(&path)), (0o640, Err(Errno::NODATA)));
}

#[test]
fn a_file_that_takes_the_access_of_another_gets_no_list_of_its_folder() {
    let Some(folder) = folder_with_default_list() else { return };
    let (former, later) = (folder.path().join("former"), folder.path().join("later"));
    NewFile::create(&former).unwrap().link(&former).unwrap();
    std::fs::set_permissions(&former, Permissions::from_mode(0o640)).unwrap();
    let take = |path: &Path, from: &Path| {
        let new = NewFile::create(path).unwrap();
        new.take_access(&File::open(from).unwrap()).unwrap();
        new.link(path).unwrap();
    };
    take(&later, &former);
    assert_eq!((mode(&later), list_of(&later)), (0o640, Err(Errno::NODATA)));
    // A list that the other has is taken, and its mask with it.
    let (listed, last) = (folder.path().join("listed"), folder.path().join("last"));
    std::fs::write(&listed, b"").unwrap();
    std::fs::set_permissions(&listed, Permissions::from_mode(0o650)).unwrap();
    take(&last, &listed);
    assert_eq!((mode(&last), list_of(&last)), (0o650, list_of(&listed)));
}

/// In a container the next process often has the number of the one that was killed.
#[test]
fn files_of_a_process_that_has_died_do_not_stop_one_with_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let left = |nth| folder.path().join(format!(".image{PARTIAL}{}-{nth}", std::process::id()));
    let litter = || {
        let next = PARTIALS.load(Ordering::Relaxed);
        (next..next + 100).for_each(|nth| std::fs::write(left(nth), b"left").unwrap());
    };
    litter();
    let (file, partial) = create_partial(folder.path(), "image").unwrap();
    assert_eq!(std::fs::read(&partial).unwrap(), b"");
    drop(file);
    litter();
    let path = folder.path().join("image");
    std::fs::write(&path, b"former").unwrap();
    let new = NewFile::create_in(folder.path(), "image").unwrap();
    new.write(b"later").unwrap();
    new.replace(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"later");
}

/// As a server of NFS answers a link that it has made already.
#[test]
fn a_name_that_the_file_has_already_is_no_error_and_that_of_another_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let (partial, path) = (folder.path().join(".partial"), folder.path().join("image"));
    let new = || {
        let file = File::create(&partial).unwrap();
        NewFile { file, folder: folder.path().to_owned(), partial: Some(partial.clone()) }
    };
    let new_without = |partial: &Path| {
        let new = new();
        std::fs::remove_file(partial).unwrap();
        new
    };
    let first = new();
    std::fs::hard_link(&partial, &path).unwrap();
    first.link(&path).unwrap();
    assert!(path.exists() && !partial.exists());
    let error = io::Error::from(new().link(&path).unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert!(path.exists() && !partial.exists());
    // As it answers a rename: the former name is not there any more.
    let (renamed, path) = (new(), folder.path().join("renamed"));
    std::fs::rename(&partial, &path).unwrap();
    renamed.link(&path).unwrap();
    let none = folder.path().join("none");
    let error = io::Error::from(new_without(&partial).link(&none).unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}
