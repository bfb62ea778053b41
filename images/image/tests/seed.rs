//! The pages of a store by number and hash.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{Context, SHA256};
use codec::{Codec, Settings};
use image::{Damage, Options, RamBlock, SeedPacks, SeedReader, State, Store, Writer};

const PAGE: usize = 4096;
const MOST: u32 = 1 << 20;

/// A page that compresses little. Different seeds give different pages.
fn page(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
        (state >> 16).to_le_bytes()
    };
    (0..PAGE / 8).flat_map(|_| next()).collect()
}

fn save(store: &Store, name: &str, parent: Option<&str>, ram: &[Vec<u8>]) {
    let settings = Settings::new(Codec::Zstd, None).unwrap();
    let options = Options { settings, unit_bytes: 64 << 10, threads: 2, ..Options::default() };
    let mut writer = Writer::create_in(store, name, parent, options).unwrap();
    let len = (ram.len() * PAGE) as u64;
    writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
    for (number, bytes) in (0..).zip(ram) {
        writer.page(0, number, bytes).unwrap();
    }
    let state = State { facts: b"{}".to_vec(), ..State::default() };
    writer.finish(&state).unwrap().link().unwrap();
}

fn hash(key: &[u8], page: &[u8]) -> [u8; 16] {
    let mut context = Context::new(&SHA256);
    context.update(key);
    context.update(page);
    context.finish().as_ref()[..16].try_into().unwrap()
}

/// The numbers of the offered pages, by hash, in the order of the offer.
fn offered(seed: &SeedPacks) -> (HashMap<[u8; 16], u32>, Vec<u32>) {
    let (mut pages, mut firsts) = (HashMap::new(), Vec::new());
    seed.offer(&mut |first, hashes| {
        firsts.push(first);
        pages.extend(hashes.iter().copied().zip(first..));
        true
    });
    (pages, firsts)
}

/// The pages of `ram` that are offered, each of which has to be read unchanged.
fn found(path: &Path, ram: &[Vec<u8>]) -> usize {
    let seed = Arc::new(SeedPacks::open(path, PAGE, MOST).unwrap());
    let (pages, _) = offered(&seed);
    let mut reader = SeedReader::new(seed.clone());
    let mut found = 0;
    for page in ram {
        if let Some(&number) = pages.get(&hash(seed.key(), page)) {
            assert!(number < seed.pages());
            assert!(reader.read(number).unwrap() == page, "page {number}");
            found += 1;
        }
    }
    assert!(reader.read(seed.pages()).is_err());
    found
}

/// The file of the only pack.
fn pack(folder: &Path) -> std::path::PathBuf {
    let mut packs = fs::read_dir(folder.join("packs")).unwrap();
    packs.next().unwrap().unwrap().path()
}

#[test]
fn every_page_of_a_store_is_offered_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let first: Vec<_> = (0..100).map(page).collect();
    let mut second = first.clone();
    for changed in second.iter_mut().step_by(9) {
        changed[77] ^= 1;
    }
    second.extend((200..230).map(page));
    save(&store, "a", None, &first);
    save(&store, "b", Some("a"), &second);
    // Differences and pages, of both saves.
    assert_eq!(found(folder.path(), &first), 100);
    assert_eq!(found(folder.path(), &second), 130);
    assert_eq!(found(folder.path(), &[page(900)]), 0);
    assert_eq!(found(&folder.path().join("a"), &second[100..]), 0, "only the packs of a");
    assert_eq!(found(&folder.path().join("b"), &second), 130);
}

/// Two guests of one system have pages in common, so that a save names packs of the other.
#[test]
fn of_a_save_no_page_of_another_one_is_offered_or_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let other: Vec<_> = (0..64).map(page).collect();
    let mut ram: Vec<_> = (200..220).map(page).collect();
    ram.extend_from_slice(&other[20..22]);
    ram.push(other[40].clone());
    save(&store, "other", None, &other);
    save(&store, "one", None, &ram);
    let path = folder.path().join("one");
    assert_eq!(found(&path, &ram), 23);
    assert_eq!(found(&path, &other), 3, "pages of another guest");
    assert_eq!(found(&folder.path().join("other"), &ram), 3);
    assert_eq!(found(folder.path(), &other), 64);
    // Nor is any read by its number.
    let seed = Arc::new(SeedPacks::open(&path, PAGE, MOST).unwrap());
    let (pages, _) = offered(&seed);
    let mut reader = SeedReader::new(seed.clone());
    let (own, others): (Vec<u32>, Vec<u32>) =
        (0..seed.pages()).partition(|number| pages.values().any(|offered| offered == number));
    assert_eq!((own.len(), others.len()), (23, 61));
    assert!(own.into_iter().all(|number| reader.read(number).is_ok()));
    for number in others {
        let damage = reader.read(number).unwrap_err();
        assert_eq!(damage, Damage::OfAnotherSave, "page {number}");
    }
}

#[test]
fn the_newest_packs_come_first_and_none_above_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    save(&store, "old", None, &(0..32).map(page).collect::<Vec<_>>());
    let old = pack(folder.path());
    let long_ago = SystemTime::now() - Duration::from_secs(1000);
    fs::File::options().write(true).open(old).unwrap().set_modified(long_ago).unwrap();
    let new: Vec<_> = (100..132).map(page).collect();
    save(&store, "new", None, &new);
    let seed = SeedPacks::open(folder.path(), PAGE, MOST).unwrap();
    let (pages, firsts) = offered(&seed);
    assert_eq!((pages.len(), firsts.len(), seed.pages()), (64, 4, 64));
    assert_eq!(pages[&hash(seed.key(), &new[0])], firsts[0]);
    let seed = SeedPacks::open(folder.path(), PAGE, 32).unwrap();
    let (pages, _) = offered(&seed);
    assert!(pages.len() == 32 && pages.contains_key(&hash(seed.key(), &new[31])));
    let seed = SeedPacks::open(folder.path(), PAGE, 33).unwrap();
    assert_eq!(seed.pages(), 64, "the last pack has more");
    let mut units = 0;
    seed.offer(&mut |_, _| {
        units += 1;
        false
    });
    assert_eq!(units, 1, "no further unit");
}

#[test]
fn damaged_units_are_not_offered_and_a_later_damage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let ram: Vec<_> = (0..64).map(page).collect();
    save(&store, "a", None, &ram);
    let seed = Arc::new(SeedPacks::open(folder.path(), PAGE, MOST).unwrap());
    let flip = || {
        let file = fs::File::options().read(true).write(true).open(pack(folder.path())).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 500).unwrap();
        file.write_all_at(&[byte[0] ^ 4], 500).unwrap();
    };
    let (pages, _) = offered(&seed);
    assert_eq!(pages.len(), 64);
    flip();
    let mut reader = SeedReader::new(seed.clone());
    let number = pages[&hash(seed.key(), &ram[3])];
    let damage = reader.read(number).unwrap_err().chain();
    assert!(damage.contains("unit 0"), "{damage}");
    // The first unit, of 16 pages.
    assert_eq!(found(folder.path(), &ram), 48);
    flip();
    assert_eq!(found(folder.path(), &ram), 64);
}

#[test]
fn other_places_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let said = |path: &Path, size| {
        let error = chain(&SeedPacks::open(path, size, MOST).unwrap_err());
        assert!(error.contains(&path.display().to_string()), "{error}");
        error
    };
    assert!(said(folder.path(), PAGE).contains("platen-store"));
    assert!(said(&folder.path().join("nothing"), PAGE).contains("platen-store"));
    let store = Store::create(folder.path()).unwrap();
    assert!(said(&folder.path().join("absent"), PAGE).contains("No such file"));
    assert!(said(folder.path(), 1 << 20).contains("page"), "no such page size");
    assert_eq!(SeedPacks::open(folder.path(), PAGE, MOST).unwrap().pages(), 0);
    save(&store, "a", None, &[page(1)]);
    assert_eq!(SeedPacks::open(folder.path(), 65536, MOST).unwrap().pages(), 0, "other pages");
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
