//! Names that a disk does not make durable.

use std::fs::File;
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
