//! Hosts that share a store by NFS.

use std::fs::File;

use crate::file::is_at;

use super::*;

/// This host knows names of the store that it has read before another host's save had its own. A
/// collection that believed them would remove the packs of that save: the VM would be lost.
#[test]
fn a_collection_sees_what_another_host_has_saved_since_this_one_looked() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let ram = |seed: u64| -> Ram { (0..40).map(|at| page(seed + at)).collect() };
    run(&store, &Op::Save("here", None, ram(0))).unwrap();
    steps::share_folders();
    assert_eq!(store.names().unwrap(), ["here"]);
    let save = || run(&store, &Op::Save("there", None, ram(1000))).unwrap();
    std::thread::scope(|scope| scope.spawn(save).join().unwrap());
    let done = store.collect(options()).unwrap();
    assert_eq!(done.packs, 0, "{done:?}");
    is_whole(&store, "here", &ram(0));
    is_whole(&store, "there", &ram(1000));
}

/// A collection gives a save that it has written again the name of the old one. A new save of that
/// name, by another host, would be lost.
#[test]
fn a_file_that_another_host_has_replaced_is_not_taken_for_that_of_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("save"), folder.path().join("other"));
    let [file, later] = [&path, &other].map(|path| File::create(path).unwrap());
    steps::share_folders();
    assert!(is_at(&file, &path));
    std::thread::scope(|scope| scope.spawn(|| std::fs::rename(&other, &path)).join().unwrap())
        .unwrap();
    assert!(!is_at(&file, &path) && is_at(&later, &path));
    assert!(!is_at(&file, &other));
}
