use super::*;
use stream::synth::{main_stream, Style};
use stream::{Kind, Tokeniser};

const PAGE: usize = 4096;

/// Migrates a VM away whose memory is made of `seed`.
fn departs(store: &Path, label: &str, seed: u64, limit: u64) {
    departs_by(store, Some(label), "", seed, limit);
}

/// The same by the migration of this identifier.
fn departs_by(store: &Path, label: Option<&str>, migration: &str, seed: u64, limit: u64) {
    let departure = Departure::begin(store, limit, 4096).unwrap();
    let page = |number: u64| {
        let mut state = (seed << 32 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
            (state >> 16).to_le_bytes()
        };
        (0..PAGE / 8).flat_map(|_| next()).collect::<Vec<u8>>()
    };
    let stream = main_stream(Style::Qemu72, PAGE, (0..100).map(page));
    let (mut tokeniser, mut tokens) = (Tokeniser::new(Kind::Main, PAGE), Vec::new());
    tokeniser.feed(&stream, &mut tokens);
    departure.sink().chunk(&stream, &tokens, PAGE, 0);
    departure.write(label, migration);
}

#[test]
fn a_seed_takes_the_place_of_the_former_one_and_no_vm_is_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    departs(folder.path(), "web server/1", 1, SEED_LIMIT);
    assert_eq!(store.names().unwrap(), ["seed-web_server_1"]);
    let bytes = store.pack_bytes().unwrap();
    assert!(bytes > 350_000, "{bytes}");
    departs(folder.path(), "web server/1", 1, SEED_LIMIT);
    assert_eq!(store.names().unwrap(), ["seed-web_server_1"]);
    assert!(store.pack_bytes().unwrap() < bytes + 10_000, "the same pages twice");
    let image = Image::open(&store.path("seed-web_server_1").unwrap()).unwrap();
    let refused = refuse_seed(&image).unwrap_err().to_string();
    assert!(refused.contains("it is a seed"), "{refused}");
}

/// Regression: a service that is not root knows the name of no VM. All of them had the seed
/// `seed-vm`, and each that left removed that of the one before.
#[test]
fn vms_whose_names_are_unknown_have_seeds_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    departs(folder.path(), "vm", 1, SEED_LIMIT);
    departs_by(folder.path(), None, "0000000000001-4711-000", 2, SEED_LIMIT);
    departs_by(folder.path(), None, "0000000000002-4711-001", 3, SEED_LIMIT);
    let unnamed = ["seed-unnamed-0000000000001-4711-000", "seed-unnamed-0000000000002-4711-001"];
    assert_eq!(store.names().unwrap(), [unnamed[0], unnamed[1], "seed-vm"]);
}

/// The pages of a VM that leaves again and again are in the store once, so its seeds never exceed
/// the limit of bytes.
#[test]
fn the_number_of_seeds_of_vms_without_a_name_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    departs(folder.path(), "a", 1, SEED_LIMIT);
    let id = |migration: usize| format!("{migration:013}-1-000");
    departs_by(folder.path(), None, &id(0), 1, SEED_LIMIT);
    let file = |migration| store.path(&format!("seed-unnamed-{}", id(migration))).unwrap();
    for migration in 1..UNNAMED {
        std::fs::copy(file(0), file(migration)).unwrap();
    }
    departs_by(folder.path(), None, &id(UNNAMED), 1, SEED_LIMIT);
    departs_by(folder.path(), None, &id(UNNAMED + 1), 1, SEED_LIMIT);
    let names = store.names().unwrap();
    assert_eq!(names.len(), 1 + UNNAMED, "{names:?}");
    assert_eq!(names[0], "seed-a", "another VM's stays");
    assert_eq!(names[1], "seed-unnamed-0000000000002-1-000", "the oldest are removed");
}

#[test]
fn the_oldest_seeds_are_removed_and_saved_vms_never() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let mut writer = Writer::create_in(&store, "vm", None, Options::default()).unwrap();
    let len = 10 * PAGE as u64;
    writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
    let state = State { configuration: vec![1], facts: b"{}".to_vec(), ..State::default() };
    writer.finish(&state).unwrap().link().unwrap();
    // A seed takes about 410 KB; the seconds of the names' order are those of the clock.
    departs(folder.path(), "a", 1, SEED_LIMIT);
    departs(folder.path(), "b", 2, SEED_LIMIT);
    departs(folder.path(), "c", 3, 1 << 20);
    assert_eq!(store.names().unwrap(), ["seed-b", "seed-c", "vm"]);
    departs(folder.path(), "d", 4, 1);
    assert_eq!(store.names().unwrap(), ["seed-d", "vm"], "the new seed stays");
}

#[test]
fn packs_of_former_seeds_are_removed_before_a_seed_is() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    // A seed takes about 410 KB.
    departs(folder.path(), "a", 1, 1 << 20);
    (2..8).for_each(|seed| departs(folder.path(), "b", seed, 1 << 20));
    assert_eq!(store.names().unwrap(), ["seed-a", "seed-b"]);
    assert!(store.pack_bytes().unwrap() <= 1 << 20);
}

#[test]
fn a_vm_that_is_alone_in_its_store_does_not_fill_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    (1..8).for_each(|seed| departs(folder.path(), "a", seed, 1 << 20));
    assert_eq!(store.names().unwrap(), ["seed-a"]);
    assert!(store.pack_bytes().unwrap() <= 1 << 20);
}

#[test]
fn no_seed_is_removed_in_vain_while_another_process_saves() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    departs(folder.path(), "a", 1, SEED_LIMIT);
    departs(folder.path(), "b", 2, SEED_LIMIT);
    // It has the store's lock.
    let saving = Writer::create_in(&store, "vm", None, Options::default()).unwrap();
    departs(folder.path(), "c", 3, 1);
    assert_eq!(store.names().unwrap(), ["seed-a", "seed-b", "seed-c"]);
    drop(saving);
    departs(folder.path(), "d", 4, 1);
    assert_eq!(store.names().unwrap(), ["seed-d"]);
}

#[test]
fn without_room_to_rewrite_saves_the_oldest_seed_is_removed_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    departs(folder.path(), "a", 1, SEED_LIMIT);
    departs(folder.path(), "b", 2, SEED_LIMIT);
    let departure = Departure::begin(folder.path(), 1, 4096).unwrap();
    let full = || {
        let (path, source) = (folder.path().to_owned(), ErrorKind::StorageFull.into());
        Err(WriteError::Io { what: "write", path, source })
    };
    departure.prune("seed-b", full).unwrap_err();
    assert_eq!(store.names().unwrap(), ["seed-b"]);
}

#[test]
fn another_save_with_the_name_of_a_seed_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = Store::create(folder.path()).unwrap().path("seed-a").unwrap();
    std::fs::write(&path, b"damaged").unwrap();
    departs(folder.path(), "a", 1, SEED_LIMIT);
    assert_eq!(std::fs::read(&path).unwrap(), b"damaged");
}

#[test]
fn a_folder_that_is_no_store_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let said = Departure::begin(folder.path(), 1, 4096).unwrap_err().to_string();
    assert!(said.contains("is no store: a store is a folder that platen image init"), "{said}");
}
