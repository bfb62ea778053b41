//! Names that a disk does not make durable.

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
