//! Hosts that share a store by NFS.

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
