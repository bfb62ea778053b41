//! Files of a store that this process cannot have, and that are sound.

use std::fs::Permissions;

use super::*;

/// A save names its parent before it has the store's lock.
#[test]
fn a_parent_that_was_removed_meanwhile_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let ram = vec![page(1)];
    run(&store, &Op::Save("a", None, ram.clone())).unwrap();
    let writer = Writer::create_in(&store, "b", Some("gone"), options()).unwrap();
    assert_eq!(writer.summary().damaged, 0);
    // A parent that is there and cannot be read is damage.
    std::fs::write(store.path("broken").unwrap(), b"no save").unwrap();
    let writer = Writer::create_in(&store, "b", Some("broken"), options()).unwrap();
    assert_eq!(writer.summary().damaged, 1);
}

/// Users of one store: the save and the pack of root, which the other user may not read.
#[test]
fn what_another_user_may_not_read_is_no_damage_and_keeps_every_pack() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let store = as_user(4711, || Store::create(&folder.path().join("store")).unwrap());
    run(&store, &Op::Save("theirs", None, vec![page(1)])).unwrap();
    let (damaged, error) = as_user(4711, || {
        let writer = Writer::create_in(&store, "ours", Some("theirs"), options()).unwrap();
        let damaged = writer.summary().damaged;
        drop(writer);
        (damaged, store.collect(options()).unwrap_err())
    });
    assert_eq!(damaged, 0);
    assert!(matches!(&error, WriteError::Foreign { name, .. } if name == "theirs"), "{error}");
    // root must not collect the store of another user, who could replace a folder of it by a link.
    let text = error.to_string();
    assert!(text.contains("platen image gc") && !text.contains("root"), "{text}");
    is_whole(&store, "theirs", &vec![page(1)]);
}
