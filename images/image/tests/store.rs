//! A store returns every page of each of its saves, or names the damage.

#[path = "store/foreign.rs"]
mod foreign;
#[path = "store/packs.rs"]
mod packs;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{chown, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use codec::{Codec, Settings};
use image::{
    check_units, verify, verify_but, Content, Image, Options, RamBlock, State, Store, Summary,
    Units, WriteError, Writer,
};
use proptest::prelude::*;

const PAGE: usize = 4096;

fn options() -> Options {
    let settings = Settings::new(Codec::Zstd, None).unwrap();
    Options { settings, unit_bytes: 64 << 10, threads: 2, ..Options::default() }
}

fn state(text: &str) -> State {
    State {
        configuration: b"QEVM\0\0\0\x03\x07\0\0\0\x06pc-1.0".to_vec(),
        ram_section: 2,
        ram_version: 4,
        devices: text.as_bytes().to_vec(),
        facts: b"{}".to_vec(),
        ..State::default()
    }
}

/// A page that compresses little. Different seeds give different pages.
fn page(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
        (state >> 16).to_le_bytes()
    };
    (0..PAGE / 8).flat_map(|_| next()).collect()
}

/// The bytes of each page.
type Ram = Vec<Vec<u8>>;

fn ram(pages: u64) -> Ram {
    (0..pages).map(page).collect()
}

fn save(store: &Store, name: &str, parent: Option<&str>, ram: &Ram) -> Summary {
    finished(store, name, parent, ram).unwrap()
}

fn finished(
    store: &Store,
    name: &str,
    parent: Option<&str>,
    ram: &Ram,
) -> Result<Summary, WriteError> {
    let mut writer = Writer::create_in(store, name, parent, options())?;
    begin(&mut writer, ram);
    for (number, bytes) in ram.iter().enumerate() {
        writer.page(0, number as u64, bytes)?;
    }
    writer.finish(&state(name))?.link()
}

fn begin(writer: &mut Writer, ram: &Ram) {
    let block = RamBlock { name: "ram".into(), len: (ram.len() * PAGE) as u64, host_page: 0 };
    writer.blocks(PAGE, &[block]).unwrap();
}

/// All pages of an image, or the first defect.
fn pages(path: &Path) -> Result<Ram, image::Damage> {
    let image = Image::open(path)?;
    let mut units = Units::new();
    let mut plain = vec![0; image.shape().unit_bytes()];
    let block = &image.index().blocks[0];
    let per = image.shape().unit_pages();
    let mut decoded: HashMap<u64, Vec<u8>> = HashMap::new();
    (0..block.pages)
        .map(|page| {
            Ok(match block.content(page).unwrap() {
                Content::Zero => vec![0; PAGE],
                Content::Filled(word) => word.repeat(PAGE / 8),
                Content::Slot(slot) => {
                    if let std::collections::hash_map::Entry::Vacant(entry) =
                        decoded.entry(slot / per)
                    {
                        let len = units.read(&image, slot / per, &mut plain)?;
                        entry.insert(plain[..len].to_vec());
                    }
                    let at = usize::try_from(slot % per).unwrap() * PAGE;
                    decoded[&(slot / per)][at..at + PAGE].to_vec()
                }
            })
        })
        .collect()
}

fn is_whole(store: &Store, name: &str, ram: &Ram) {
    let path = store.path(name).unwrap();
    assert!(pages(&path).unwrap() == *ram, "{name} has other pages");
    assert_eq!(verify(&path).findings, Vec::new(), "{name}");
    assert_eq!(Image::open(&path).unwrap().state(), &state(name));
}

fn packs(store: &Store) -> Vec<PathBuf> {
    let list = fs::read_dir(store.folder().join("packs")).unwrap();
    let mut list: Vec<_> = list.map(|entry| entry.unwrap().path()).collect();
    list.sort();
    list
}

fn bytes(store: &Store) -> u64 {
    packs(store).iter().map(|path| path.metadata().unwrap().len()).sum()
}

fn new_store(folder: &tempfile::TempDir) -> Store {
    Store::create(&folder.path().join("store")).unwrap()
}

#[test]
fn a_second_save_stores_what_changed_and_outlives_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let first = ram(400);
    let one = save(&store, "one", None, &first);
    assert_eq!((one.slots, one.shared, one.differences), (400, 0, 0));
    let mut second = first.clone();
    second.swap(3, 300);
    second[7][100] ^= 1;
    second[390][4000] ^= 1;
    second[9] = page(9999);
    let two = save(&store, "two", Some("one"), &second);
    assert_eq!((two.slots, two.shared, two.differences), (3, 397, 2));
    assert!(two.file_bytes * 50 < one.file_bytes, "{} of {}", two.file_bytes, one.file_bytes);
    // A difference from a difference is one from its base page, and an equal page is shared.
    let mut third = second.clone();
    third[7][200] ^= 1;
    let three = save(&store, "three", Some("two"), &third);
    assert_eq!((three.slots, three.shared, three.differences), (1, 399, 1));
    let mut sound = HashSet::new();
    let mut units = Vec::new();
    for (name, ram) in [("one", &first), ("two", &second), ("three", &third)] {
        is_whole(&store, name, ram);
        let report = verify_but(&store.path(name).unwrap(), &mut sound);
        assert_eq!(report.findings, Vec::new(), "{name}");
        units.push(report.units);
    }
    // Each pack is read once.
    assert_eq!((units, sound.len()), (vec![25, 2, 1], 3));
    store.remove("one").unwrap();
    store.remove("two").unwrap();
    store.collect(options()).unwrap();
    is_whole(&store, "three", &third);
    assert_eq!(store.names().unwrap(), ["three"]);
    store.remove("three").unwrap();
    let end = store.collect(options()).unwrap();
    assert!(packs(&store).is_empty() && end.packs > 0, "{end:?}");
}

#[test]
fn a_save_that_is_written_again_is_the_same_vm() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let first = ram(200);
    save(&store, "one", None, &first);
    let mut second: Ram = (0..200).map(|at| page(if at < 20 { at } else { at + 5000 })).collect();
    second[3][100] ^= 1;
    save(&store, "two", Some("one"), &second);
    let path = store.path("two").unwrap();
    let identity = Image::open(&path).unwrap().identity();
    assert_ne!(identity, Image::open(&store.path("one").unwrap()).unwrap().identity());
    store.remove("one").unwrap();
    // As a restore has it: it is neither replaced nor are its packs removed.
    let lock = fs::File::open(&path).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).unwrap();
    let before = (packs(&store), fs::read(&path).unwrap());
    let done = store.collect(options()).unwrap();
    assert_eq!((done.packs, done.rewritten, done.in_use), (0, Vec::new(), vec!["two".into()]));
    assert!((packs(&store), fs::read(&path).unwrap()) == before);
    drop(lock);
    let done = store.collect(options()).unwrap();
    assert_eq!((done.packs, &done.rewritten[..]), (1, &["two".to_owned()][..]), "{done:?}");
    is_whole(&store, "two", &second);
    assert_eq!(Image::open(&path).unwrap().identity(), identity);
    // Nothing is sparse any more.
    assert_eq!(store.collect(options()).unwrap(), image::Collected::default());
}

#[test]
fn a_save_without_new_pages_or_without_any_has_no_pack() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let ram = ram(40);
    save(&store, "one", None, &ram);
    let again = save(&store, "again", None, &ram);
    assert_eq!((again.slots, again.shared, packs(&store).len()), (0, 40, 1));
    is_whole(&store, "again", &ram);
    let zero = vec![vec![0; PAGE]; 10];
    save(&store, "zero", Some("one"), &zero);
    is_whole(&store, "zero", &zero);
    assert_eq!(packs(&store).len(), 1);
}

#[test]
fn a_page_that_changes_during_a_save_counts_in_its_last_version() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let first = ram(64);
    save(&store, "one", None, &first);
    let mut writer = Writer::create_in(&store, "two", Some("one"), options()).unwrap();
    begin(&mut writer, &first);
    for (number, bytes) in first.iter().enumerate() {
        writer.page(0, number as u64, bytes).unwrap();
    }
    let mut last = first.clone();
    // Full pages, differences, zero and the old bytes again, in several orders.
    for round in 0..40_u64 {
        for at in [5_usize, 6, 7] {
            last[at] = match (round + at as u64) % 4 {
                0 => page(round * 100 + at as u64),
                1 => first[at].clone(),
                2 => vec![0; PAGE],
                _ => {
                    let mut bytes = first[at].clone();
                    bytes[usize::try_from(round).unwrap()] ^= 0x55;
                    bytes
                }
            };
            writer.page(0, at as u64, &last[at]).unwrap();
        }
    }
    writer.finish(&state("two")).unwrap().link().unwrap();
    is_whole(&store, "two", &last);
    is_whole(&store, "one", &first);
}

#[test]
fn saves_of_several_threads_into_one_store_are_all_whole() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let rams: Vec<Ram> = (0..4_u64)
        .map(|nth| {
            (0..120).map(|at| page(if at % 3 == 0 { at } else { nth * 1000 + at })).collect()
        })
        .collect();
    std::thread::scope(|scope| {
        for (nth, ram) in rams.iter().enumerate() {
            let store = &store;
            scope.spawn(move || {
                for round in 0..3 {
                    save(store, &format!("{nth}-{round}"), None, ram);
                    let _ = store.remove(&format!("{nth}-{}", round - 1));
                    store.collect(options()).unwrap();
                }
            });
        }
    });
    for (nth, ram) in rams.iter().enumerate() {
        is_whole(&store, &format!("{nth}-2"), ram);
    }
}

#[test]
fn a_flipped_bit_anywhere_is_named_and_never_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let first = ram(20);
    save(&store, "one", None, &first);
    let mut second = first.clone();
    second[3][9] ^= 1;
    second[4] = page(77);
    save(&store, "two", Some("one"), &second);
    let path = store.path("two").unwrap();
    let mut files = packs(&store);
    files.push(path.clone());
    files.push(store.folder().join(image::STORE_FILE));
    for file in files {
        let sound = fs::read(&file).unwrap();
        // Every byte of what is small; units are long, and each of their bytes is like the others.
        let step = if sound.len() > 20_000 { 97 } else { 1 };
        for at in (0..sound.len()).step_by(step).chain(sound.len().saturating_sub(400)..sound.len())
        {
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&file, bytes).unwrap();
            let report = verify(&path);
            assert!(!report.findings.is_empty(), "byte {at} of {}", file.display());
            if let Ok(read) = pages(&path) {
                assert!(read == second, "byte {at} of {}", file.display());
            }
        }
        for len in (0..sound.len()).step_by(step.max(7)) {
            fs::write(&file, &sound[..len]).unwrap();
            assert!(!verify(&path).findings.is_empty(), "{len} bytes of {}", file.display());
        }
        fs::write(&file, sound).unwrap();
    }
    is_whole(&store, "two", &second);
    let gone = packs(&store).remove(0);
    fs::remove_file(&gone).unwrap();
    let text = verify(&path).findings[0].to_string();
    assert!(text.contains(gone.file_name().unwrap().to_str().unwrap()), "{text}");
}

#[test]
fn what_the_disk_has_lost_is_stored_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = new_store(&folder);
    let first = ram(64);
    save(&store, "one", None, &first);
    let pack = packs(&store).remove(0);
    let mut bytes = fs::read(&pack).unwrap();
    bytes[100] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    let mut second = first.clone();
    second[2][2] ^= 1;
    second[40][2] ^= 1;
    let two = save(&store, "two", Some("one"), &second);
    assert_eq!((two.slots, two.shared, two.differences, two.damaged), (17, 47, 1, 1));
    let (one, path) = (store.path("one").unwrap(), store.path("two").unwrap());
    assert!(pages(&path).unwrap() == second);
    // The damaged unit is in a pack of both, and the first save alone needs it.
    let (of_one, of_two) = (verify(&one), verify(&path));
    assert!(!of_one.is_sound() && of_two.is_sound(), "{of_one:?} {of_two:?}");
    assert_eq!((of_one.findings.len(), of_two.findings.len()), (1, 1));
    assert!(of_two.findings[0].to_string().ends_with("; this save does not use it"));
    // The pack is damaged still, and `two` has nothing in the damaged unit.
    let findings = verify(&store.path("two").unwrap()).findings;
    assert!(findings.iter().all(|finding| finding.pages.is_empty()), "{findings:?}");
    assert!(findings[0].to_string().contains("unit 0"), "{findings:?}");
    // `two` can be restored, and `one` cannot.
    let check = |name| check_units(&Image::open(&store.path(name).unwrap()).unwrap(), 2);
    assert_eq!(check("two"), Ok(()));
    let damage = check("one").unwrap_err().chain();
    assert!(damage.contains("unit 0 (bytes 64 to"), "{damage}");
    // A save that cannot be read has packs that nobody knows: none is removed.
    let one = store.path("one").unwrap();
    let mut bytes = fs::read(&one).unwrap();
    bytes[70] ^= 1;
    fs::write(&one, bytes).unwrap();
    let refused = store.collect(options()).unwrap_err().to_string();
    assert!(refused.contains("save one"), "{refused}");
    store.remove("one").unwrap();
    store.collect(options()).unwrap();
    assert!(pages(&store.path("two").unwrap()).unwrap() == second);
}

#[test]
fn names_and_folders_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Store::open(folder.path()).unwrap().is_none());
    let store = new_store(&folder);
    for name in ["", ".", "..", ".a", "a/b", "packs", "platen-store", &"n".repeat(201)] {
        assert!(matches!(store.path(name), Err(WriteError::Name { .. })), "{name}");
    }
    assert!(Store::create(store.folder()).is_err(), "a store twice");
    let ram = ram(2);
    save(&store, "one", None, &ram);
    let twice = finished(&store, "one", None, &ram).unwrap_err();
    assert!(matches!(twice, WriteError::Io { what: "create", .. }), "{twice}");
    assert!(store.remove("two").is_err());
}

/// One operation on a store.
#[derive(Clone, Debug)]
enum Op {
    /// Change page `.0` in `.1` bytes.
    Change(u64, usize),
    /// Make page `.0` another one: of a few seeds, so that pages are equal.
    New(u64, u64),
    /// Save, with the nth save as the parent.
    Save(usize),
    /// Remove the nth save.
    Remove(usize),
    Collect,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..PAGES, 1..2000_usize).prop_map(|(page, bytes)| Op::Change(page, bytes)),
        3 => (0..PAGES, 0..200_u64).prop_map(|(page, seed)| Op::New(page, seed)),
        4 => any::<usize>().prop_map(Op::Save),
        2 => any::<usize>().prop_map(Op::Remove),
        1 => Just(Op::Collect),
    ]
}

/// Pages of the VM in the list of operations.
const PAGES: u64 = 50;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn every_save_is_whole_after_any_operations(ops in prop::collection::vec(op(), 1..40)) {
        let folder = tempfile::tempdir().unwrap();
        let store = new_store(&folder);
        let mut now = ram(PAGES);
        let mut saves: BTreeMap<String, Ram> = BTreeMap::new();
        for (nth, op) in ops.iter().enumerate() {
            let chosen = |at: usize| saves.keys().nth(at % saves.len().max(1)).cloned();
            match *op {
                Op::Change(page, bytes) => {
                    for at in 0..bytes {
                        now[usize::try_from(page).unwrap()][(at * 7919) % PAGE] ^= 0x3c;
                    }
                }
                Op::New(at, seed) => now[usize::try_from(at).unwrap()] = page(seed),
                Op::Save(at) => {
                    let name = format!("save{nth}");
                    save(&store, &name, chosen(at).as_deref(), &now);
                    saves.insert(name, now.clone());
                }
                Op::Remove(at) => {
                    if let Some(name) = chosen(at) {
                        store.remove(&name).unwrap();
                        saves.remove(&name);
                    }
                }
                Op::Collect => {
                    let done = store.collect(options()).unwrap();
                    prop_assert!(!done.busy && done.in_use.is_empty());
                }
            }
            prop_assert_eq!(store.names().unwrap(), saves.keys().cloned().collect::<Vec<_>>());
        }
        for (name, ram) in &saves {
            is_whole(&store, name, ram);
        }
        store.collect(options()).unwrap();
        // At most a quarter of the packs' units is unused; hashes and indexes are a hundredth.
        let most = saves.len() as u64 * PAGES * PAGE as u64 * 4 / 3;
        prop_assert!(bytes(&store) <= most + most / 10, "{} bytes", bytes(&store));
        for (name, ram) in &saves {
            is_whole(&store, name, ram);
        }
    }
}
