//! Names that a disk does not make durable, and saves with several names.

use std::fs::File;
use std::os::unix::fs::{symlink, MetadataExt};
use std::sync::mpsc::channel;

use rustix::fs::{flock, FlockOperation};

use super::*;

/// The disk fails at the folder, and then at the removal too.
#[test]
fn an_image_whose_name_can_neither_be_made_durable_nor_removed_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut writer = Writer::create(&path, options()).unwrap();
    writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len: 8192, host_page: 0 }]).unwrap();
    let finished = writer.finish(&State::default()).unwrap();
    steps::begin(1);
    let error = finished.link().unwrap_err();
    let log = steps::end();
    assert!(matches!(log[..], [(Step::Link, ..)]), "{log:?}");
    let WriteError::Stays { path: named, .. } = &error else { panic!("{error}") };
    assert!(*named == path && path.exists(), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
}

/// Another save may share a pack as soon as the pack has its name.
#[test]
fn a_pack_whose_name_cannot_be_made_durable_stays_until_a_collection() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let mut writer = Writer::create_in(&store, "a", None, options()).unwrap();
    writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len: 8192, host_page: 0 }]).unwrap();
    writer.page(0, 0, &page(1)).unwrap();
    let finished = writer.finish(&State::default()).unwrap();
    steps::begin_with_failure(1);
    let error = finished.link().unwrap_err();
    let log = steps::end();
    assert!(matches!(log[..], [(Step::Link, ..)]), "{log:?}");
    assert!(error.to_string().contains("packs"), "{error}");
    assert!(store.names().unwrap().is_empty() && packs(&store) == 1, "{error}");
    let ram = vec![page(1)];
    run(&store, &Op::Save("b", None, ram.clone())).unwrap();
    assert_eq!(packs(&store), 1, "b shares the pack");
    store.collect(options()).unwrap();
    is_whole(&store, "b", &ram);
    store.remove("b").unwrap();
    store.collect(options()).unwrap();
    assert_eq!(packs(&store), 0);
}

/// A process links a pack and dies, before the name is durable. Another one shares all of its pages
/// with that pack. Without the name a loss of power would take the pack from a finished save.
#[test]
fn a_save_makes_the_name_of_a_pack_durable_that_a_dead_process_has_linked() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let ram = vec![page(1), page(2)];
    let is_link = |(step, ..): &Entry| *step == Step::Link;
    // Ended after its first link, that of its pack.
    let (mut dead, mut dies) = (Vec::new(), 0);
    while !dead.iter().any(is_link) {
        dies += 1;
        steps::begin(dies);
        let ended = run(&store, &Op::Save("x", None, ram.clone()));
        dead = steps::end();
        assert!(ended.is_err(), "{dead:?}");
    }
    assert!(packs(&store) == 1 && store.names().unwrap().is_empty(), "{dead:?}");
    steps::begin(usize::MAX);
    run(&store, &Op::Save("y", None, ram.clone())).unwrap();
    let log = steps::end();
    assert_eq!(packs(&store), 1, "y shares the pack: {log:?}");
    in_the_order_that_a_disk_needs(&store, &[dead, log].concat());
    is_whole(&store, "y", &ram);
}

/// A server of files has lost the lock of a save, and another host has removed what no save names.
#[test]
fn a_save_whose_shared_pack_is_removed_before_it_has_its_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let ram = vec![page(1), page(2)];
    run(&store, &Op::Save("a", None, ram.clone())).unwrap();
    let mut writer = Writer::create_in(&store, "b", None, options()).unwrap();
    writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len: 8192, host_page: 0 }]).unwrap();
    for (number, bytes) in (0..).zip(&ram) {
        writer.page(0, number, bytes).unwrap();
    }
    let finished = writer.finish(&State::default()).unwrap();
    // This host knows the names in the folder, until it asks its server.
    steps::share_folders();
    let pack = store.info("a").unwrap().packs[0].id;
    let path = crate::pack::pack_path(store.folder(), pack);
    crate::disk::named(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let error = finished.link().unwrap_err();
    assert!(error.to_string().contains(&format!("{pack:032x}")), "{error}");
    assert_eq!(store.names().unwrap(), ["a"]);
}

/// A store with save `b`, which a collection writes again, and the pages of `b`.
fn sparse_store(folder: &Path) -> (Store, Ram) {
    let store = Store::create(&folder.join("store")).unwrap();
    let first: Ram = (0..40).map(page).collect();
    let second: Ram = (0..40).map(|at| page(if at < 5 { at } else { at + 1000 })).collect();
    run(&store, &Op::Save("a", None, first)).unwrap();
    run(&store, &Op::Save("b", Some("a"), second.clone())).unwrap();
    store.remove("a").unwrap();
    (store, second)
}

/// Each link of a pack waits for the disk.
#[test]
fn a_restore_can_begin_while_a_collection_links_packs() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ram) = sparse_store(folder.path());
    let (save, packs_of) = (store.path("b").unwrap(), store.folder().join("packs"));
    let (sender, tried) = channel();
    steps::at_names(Some(Box::new(move |kind, path| {
        if kind == Step::Link && path.parent() == Some(&packs_of) {
            let file = File::open(&save).unwrap();
            sender.send(flock(&file, FlockOperation::NonBlockingLockShared)).unwrap();
        }
    })));
    let done = store.collect(options());
    steps::at_names(None);
    assert_eq!(done.unwrap().rewritten, ["b"]);
    let tried: Vec<_> = tried.iter().collect();
    assert!(!tried.is_empty() && tried.iter().all(Result::is_ok), "{tried:?}");
    is_whole(&store, "b", &ram);
}

#[test]
fn a_save_that_is_removed_while_a_collection_links_packs_stays_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = sparse_store(folder.path());
    let (save, packs_of) = (store.path("b").unwrap(), store.folder().join("packs"));
    steps::at_names(Some(Box::new(move |kind, path| {
        if kind == Step::Link && path.parent() == Some(&packs_of) && save.exists() {
            std::fs::remove_file(&save).unwrap();
        }
    })));
    let done = store.collect(options());
    steps::at_names(None);
    let done = done.unwrap();
    assert!(done.in_use == ["b"] && done.rewritten.is_empty(), "{done:?}");
    assert!(store.names().unwrap().is_empty() && packs(&store) == 0, "{done:?}");
}

/// Regression: the rewritten save took the place of a symbolic link to it, and a second one that of
/// the save. Each had its own lock, so one VM could be restored twice at once.
#[test]
fn a_symbolic_link_to_a_save_leads_to_the_save_after_a_collection() {
    // A link that comes before the save in the order of names, and one that comes after it.
    for name in ["a-link", "the-link"] {
        let folder = tempfile::tempdir().unwrap();
        let (store, ram) = sparse_store(folder.path());
        let link = store.path(name).unwrap();
        symlink("b", &link).unwrap();
        let done = store.collect(options()).unwrap();
        assert!(done.rewritten == ["b"] && done.left.is_empty(), "{name}: {done:?}");
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("b"), "{name}");
        is_whole(&store, name, &ram);
    }
}

/// Regression: as above, with a link that is made while the collection copies the save.
#[test]
fn a_save_that_becomes_a_symbolic_link_during_its_collection_stays_one_save() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ram) = sparse_store(folder.path());
    let [save, moved] = ["b", "moved"].map(|name| store.path(name).unwrap());
    let (link, packs_of) = (save.clone(), store.folder().join("packs"));
    steps::at_names(Some(Box::new(move |kind, path| {
        if kind == Step::Link && path.parent() == Some(&packs_of) && !moved.exists() {
            std::fs::rename(&link, &moved).unwrap();
            symlink("moved", &link).unwrap();
        }
    })));
    let done = store.collect(options());
    steps::at_names(None);
    assert!(done.as_ref().unwrap().rewritten.is_empty(), "{done:?}");
    assert_eq!(std::fs::read_link(&save).unwrap(), Path::new("moved"));
    is_whole(&store, "b", &ram);
}

/// A save that lies elsewhere, and names packs of the store through a symbolic link.
#[test]
fn a_symbolic_link_to_a_save_outside_the_store_is_left_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ram) = sparse_store(folder.path());
    let (save, outside) = (store.path("b").unwrap(), folder.path().join("outside"));
    std::fs::rename(&save, &outside).unwrap();
    symlink(&outside, &save).unwrap();
    let done = store.collect(options()).unwrap();
    assert!(done.rewritten.is_empty() && done.left.len() == 1, "{done:?}");
    assert!(done.left[0].1.contains("symbolic link"), "{done:?}");
    assert_eq!(std::fs::read_link(&save).unwrap(), outside);
    is_whole(&store, "b", &ram);
}

/// Regression: each name of the file got a rewritten save with its own lock, so one VM could be
/// restored twice at once. A name that comes while the collection copies the save counts, too.
#[test]
fn a_save_with_a_second_name_stays_one_file_in_a_collection() {
    for is_late in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (store, ram) = sparse_store(folder.path());
        let [save, other] = ["b", "c"].map(|name| store.path(name).unwrap());
        let (from, to, packs_of) = (save.clone(), other.clone(), store.folder().join("packs"));
        let link = move || std::fs::hard_link(&from, &to).unwrap();
        if is_late {
            steps::at_names(Some(Box::new(move |kind, path| {
                if kind == Step::Link && path.parent() == Some(&packs_of) && !other.exists() {
                    link();
                }
            })));
        } else {
            link();
        }
        let done = store.collect(options());
        steps::at_names(None);
        let done = done.unwrap();
        assert!(done.rewritten.is_empty() && !done.left.is_empty(), "{done:?}");
        assert!(done.left.iter().all(|(_, why)| why.contains("2 names")), "{done:?}");
        let inode = |name: &str| store.path(name).unwrap().metadata().unwrap().ino();
        assert_eq!(inode("b"), inode("c"), "{done:?}");
        is_whole(&store, "b", &ram);
        is_whole(&store, "c", &ram);
    }
}
