//! Packs: which are rewritten, and which are removed.

use super::*;

/// Two pairs of saves. Of each pair, the first is removed, and the second uses a tenth of the pages
/// of its pack. Returns the pages of "two" and "four", which stay.
fn two_sparse_packs(store: &Store) -> (Ram, Ram) {
    let mut stay = Vec::new();
    for (first, second, seed) in [("one", "two", 0), ("three", "four", 10_000)] {
        let before: Ram = (seed..seed + 200).map(page).collect();
        save(store, first, None, &before);
        let other = |at| page(if at < seed + 20 { at } else { at + 5000 });
        let after: Ram = (seed..seed + 200).map(other).collect();
        save(store, second, None, &after);
        store.remove(first).unwrap();
        stay.push(after);
    }
    let four = stay.pop().unwrap();
    (stay.pop().unwrap(), four)
}

/// Changes one byte of a file.
fn damage(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// The pack of a store that only this save names.
fn own_pack(store: &Store, name: &str) -> PathBuf {
    let others: HashSet<u128> = store
        .names()
        .unwrap()
        .iter()
        .filter(|other| *other != name)
        .flat_map(|other| store.info(other).unwrap().packs)
        .map(|pack| pack.id)
        .collect();
    let packs = store.info(name).unwrap().packs;
    // The pack of a removed save is the larger one of the two.
    let own = packs.iter().filter(|pack| !others.contains(&pack.id));
    let own = own.max_by_key(|pack| pack.units).unwrap();
    store.folder().join("packs").join(format!("{:032x}", own.id))
}

#[test]
fn a_damaged_pack_is_named_and_left_while_the_other_saves_are_rewritten() {
    // The index of the pack, so that the save cannot be opened; a unit, so that it can be.
    for in_the_index in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let store = new_store(&folder);
        let (two, four) = two_sparse_packs(&store);
        let pack = own_pack(&store, "two");
        let at = if in_the_index { fs::read(&pack).unwrap().len() - 100 } else { 1000 };
        damage(&pack, at);
        let before = fs::read(store.path("two").unwrap()).unwrap();
        let done = store.collect(options()).unwrap();
        assert_eq!(done.rewritten, ["four"], "{done:?}");
        assert_eq!((done.packs, done.left.len()), (1, 1), "{done:?}");
        let (name, why) = &done.left[0];
        let id = pack.file_name().unwrap().to_str().unwrap();
        assert!(name == "two" && why.contains(id), "{name}: {why}");
        is_whole(&store, "four", &four);
        // Once the disk is repaired, the save is as it was.
        assert_eq!(fs::read(store.path("two").unwrap()).unwrap(), before);
        damage(&pack, at);
        is_whole(&store, "two", &two);
        let done = store.collect(options()).unwrap();
        assert_eq!((&done.rewritten[..], done.left.len()), (&["two".to_owned()][..], 0));
        is_whole(&store, "two", &two);
    }
}

#[test]
fn a_rewritten_save_keeps_owner_and_mode_and_so_do_its_packs() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let (two, four) = two_sparse_packs(&store);
    // Equal pages of two owners: a rewritten save must not refer to a pack of the other's.
    let mut equal = two.clone();
    equal.truncate(20);
    save(&store, "five", None, &equal);
    let is_root = rustix::process::geteuid().is_root();
    let owners = [("two", 1001, 0o640), ("four", 1002, 0o600), ("five", 1003, 0o604)];
    for (name, id, mode) in owners {
        let path = store.path(name).unwrap();
        if is_root {
            chown(&path, Some(id), Some(id + 1)).unwrap();
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let of = |path: &Path| {
        let metadata = path.metadata().unwrap();
        (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    };
    let before = packs(&store);
    let done = store.collect(options()).unwrap();
    assert_eq!(done.rewritten, ["five", "four", "two"], "{done:?}");
    let me = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for (name, id, mode) in owners {
        let path = store.path(name).unwrap();
        let (uid, gid) = if is_root { (id, id + 1) } else { me };
        assert_eq!(of(&path), (uid, gid, mode), "{name}");
        // The packs that the rewritten saves got, and no other save's.
        let info = store.info(name).unwrap();
        let paths = info
            .packs
            .iter()
            .map(|pack| store.folder().join("packs").join(format!("{:032x}", pack.id)));
        let new: Vec<_> = paths.filter(|path| !before.contains(path)).collect();
        assert!(!new.is_empty(), "{name}");
        for path in new {
            assert_eq!(of(&path), (uid, gid, mode), "a pack of {name}");
        }
    }
    for (name, ram) in [("two", &two), ("four", &four), ("five", &equal)] {
        is_whole(&store, name, ram);
    }
}

#[test]
fn a_leftover_that_cannot_be_opened_is_removed_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let ram = ram(2);
    save(&store, "one", None, &ram);
    let left = store.folder().join(".one.partial-1-1");
    std::os::unix::fs::symlink("nothing", &left).unwrap();
    store.collect(options()).unwrap();
    assert!(left.symlink_metadata().is_err());
    is_whole(&store, "one", &ram);
}

#[test]
fn a_pack_is_not_removed_before_a_save_that_shares_it_is_linked() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let ram = ram(40);
    save(&store, "one", None, &ram);
    let mut writer = Writer::create_in(&store, "two", None, options()).unwrap();
    begin(&mut writer, &ram);
    for (number, bytes) in ram.iter().enumerate() {
        writer.page(0, number as u64, bytes).unwrap();
    }
    store.remove("one").unwrap();
    assert!(store.collect(options()).unwrap().busy);
    let finished = writer.finish(&state("two")).unwrap();
    assert!(store.collect(options()).unwrap().busy);
    finished.link().unwrap();
    assert!(!store.collect(options()).unwrap().busy);
    is_whole(&store, "two", &ram);
}

/// A save that the disk or its name hides may exist: its packs stay.
#[test]
fn packs_of_a_save_that_cannot_be_read_are_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let ram = ram(40);
    save(&store, "a", None, &ram);
    // Opening a FIFO would wait.
    fs::create_dir(store.folder().join("lost+found")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        store.folder().join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert_eq!(store.names().unwrap(), ["a"]);
    let (path, before) = (store.folder().join("a"), packs(&store));
    let hidden = OsStr::from_bytes(b"a\xff");
    fs::rename(&path, store.folder().join(hidden)).unwrap();
    assert!(store.collect(options()).is_err());
    fs::rename(store.folder().join(hidden), folder.path().join("away")).unwrap();
    std::os::unix::fs::symlink("/nowhere/away", &path).unwrap();
    assert!(store.collect(options()).is_err());
    assert_eq!(packs(&store), before);
    fs::remove_file(&path).unwrap();
    fs::rename(folder.path().join("away"), &path).unwrap();
    store.collect(options()).unwrap();
    is_whole(&store, "a", &ram);
}

/// Differences whose base pages go with the save that was removed.
#[test]
fn a_removal_makes_no_store_larger_whose_saves_are_differences() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let base = ram(200);
    save(&store, "base", None, &base);
    let mut saves = Vec::new();
    for nth in 0..8 {
        let name = format!("save{nth}");
        // Of a quarter of the pages, each save has a version of its own.
        let mut changed: Ram = base[..50].to_vec();
        changed.iter_mut().for_each(|page| page[100 + nth] ^= 1);
        let of = save(&store, &name, Some("base"), &changed);
        assert_eq!((of.slots, of.differences), (50, 50), "{name}");
        saves.push((name, changed));
    }
    let before = bytes(&store);
    store.remove("base").unwrap();
    let done = store.collect(options()).unwrap();
    assert_eq!(done.rewritten.len(), saves.len(), "{done:?}");
    assert!(bytes(&store) < before, "{} bytes, {before} with the save", bytes(&store));
    for (name, ram) in &saves {
        is_whole(&store, name, ram);
    }
}
