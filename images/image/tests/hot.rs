//! A hot set comes back as it was written, or is ignored by name.

use std::fs;
use std::path::{Path, PathBuf};

use image::{Damage, HotPage, HotSet, Image, Options, RamBlock, State, Store, Writer};
use proptest::prelude::*;

const PAGE: usize = 4096;

fn fill(mut writer: Writer) {
    let block = |name: &str, pages: u64| RamBlock {
        name: name.into(),
        len: pages * PAGE as u64,
        host_page: 0,
    };
    writer.blocks(PAGE, &[block("ram", 200_000), block("rom", 3)]).unwrap();
    writer.finish(&State::default()).unwrap().link().unwrap();
}

fn image(folder: &Path, name: &str) -> (PathBuf, Image) {
    let path = folder.join(name);
    fill(Writer::create(&path, Options::default()).unwrap());
    let image = Image::open(&path).unwrap();
    (path, image)
}

fn page(at: u32, block: usize, page: u64) -> HotPage {
    HotPage { at, block, page }
}

#[test]
fn the_earliest_pages_of_all_restores_come_back_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let (path, image) = image(folder.path(), "vm");
    assert_eq!(HotSet::read(&path, &image), Ok(HotSet::default()));
    let mut set = HotSet::default();
    assert!(set.add(&[page(2, 0, 199_999), page(7, 1, 2), page(9, 0, 0)]));
    // A page that was requested again keeps its earliest time.
    assert!(set.add(&[page(8, 0, 5), page(1, 0, 0), page(7, 1, 2)]));
    assert!(!set.add(&[page(7, 1, 2)]));
    let expected = [page(1, 0, 0), page(2, 0, 199_999), page(7, 1, 2), page(8, 0, 5)];
    assert_eq!(set.pages(), expected);
    set.write(&path, &image).unwrap();
    assert_eq!(HotSet::read(&path, &image), Ok(set.clone()));
    // Written again, and of the largest size.
    set.add(&(0..100_000).map(|at| page(u32::MAX - at, 0, u64::from(at) * 2)).collect::<Vec<_>>());
    assert_eq!(set.pages().len(), HotSet::MAX);
    assert_eq!(set.pages()[..4], expected);
    set.write(&path, &image).unwrap();
    assert_eq!(HotSet::read(&path, &image), Ok(set));
    let there: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(there.len(), 2, "{there:?}");
}

#[test]
fn every_cut_and_every_flipped_bit_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let (path, image) = image(folder.path(), "vm");
    let mut set = HotSet::default();
    set.add(&(0..50).map(|at| page(at * 3, 0, u64::from(at) * 1000)).collect::<Vec<_>>());
    set.write(&path, &image).unwrap();
    let file = HotSet::path(&path);
    let sound = fs::read(&file).unwrap();
    for len in 0..sound.len() {
        fs::write(&file, &sound[..len]).unwrap();
        assert!(matches!(HotSet::read(&path, &image), Err(Damage::HotSet { .. })), "{len} bytes");
    }
    for bit in 0..sound.len() * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&file, bytes).unwrap();
        assert!(matches!(HotSet::read(&path, &image), Err(Damage::HotSet { .. })), "bit {bit}");
    }
}

/// A file with a right checksum that cannot be a hot set is ignored, too.
fn forged(head: &[u8], identity: u128, body: &[u8]) -> Vec<u8> {
    let mut bytes = [head, &identity.to_be_bytes(), body].concat();
    bytes.extend(codec::checksum(&bytes).to_be_bytes());
    bytes
}

const HEAD: &[u8] = b"PLATENHT\0\0\0\x01\0\0\0\0";

#[test]
fn foreign_future_and_forged_files_are_ignored_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (path, image) = image(folder.path(), "vm");
    let said = |bytes: &[u8]| {
        fs::write(HotSet::path(&path), bytes).unwrap();
        HotSet::read(&path, &image).unwrap_err().to_string()
    };
    let of = image.identity();
    let entry = "an entry is not";
    for (bytes, expected) in [
        (forged(HEAD, of ^ 1, &[0]), "another image"),
        (forged(b"PLATENHT\0\0\0\x02\0\0\0\0", of, &[0]), "version 1"),
        (forged(b"PLATENHT\0\0\0\x01\0\0\0\x01", of, &[0]), "version 1"),
        (forged(b"PLATENVM\0\0\0\x01\0\0\0\0", of, &[0]), "PLATENHT"),
        // More bytes than entries, and fewer.
        (forged(HEAD, of, &[0, 0]), entry),
        (forged(HEAD, of, &[2, 0, 0, 0]), entry),
        // 2^63 entries; a block and pages that do not exist; a page twice; a time beyond 32 bits.
        (forged(HEAD, of, &[128, 128, 128, 128, 128, 128, 128, 128, 128, 1]), entry),
        (forged(HEAD, of, &[1, 0, 2, 0]), entry),
        (forged(HEAD, of, &[1, 0, 1, 6]), entry),
        (forged(HEAD, of, &[1, 0, 1, 1]), entry),
        (forged(HEAD, of, &[2, 0, 1, 0, 0, 1, 1]), entry),
        (forged(HEAD, of, &[1, 255, 255, 255, 255, 31, 1, 0]), entry),
        (vec![0; (512 << 10) + 1], "more than 524288 bytes"),
    ] {
        let text = said(&bytes);
        assert!(text.contains(expected), "{text}, not {expected}");
    }
    // A pipe without a writer, and a folder.
    fs::remove_file(HotSet::path(&path)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, HotSet::path(&path), 0o600.into()).unwrap();
    assert!(HotSet::read(&path, &image).unwrap_err().to_string().contains("no regular file"));
    fs::remove_file(HotSet::path(&path)).unwrap();
    fs::create_dir(HotSet::path(&path)).unwrap();
    assert!(HotSet::read(&path, &image).is_err());
}

#[test]
fn none_is_written_for_an_image_that_is_gone_or_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (path, old) = image(folder.path(), "vm");
    let mut set = HotSet::default();
    set.add(&[page(0, 0, 1)]);
    fs::remove_file(&path).unwrap();
    assert!(set.write(&path, &old).is_err());
    let (path, new) = image(folder.path(), "vm");
    assert!(set.write(&path, &old).is_err());
    assert!(!HotSet::path(&path).exists());
    set.write(&path, &new).unwrap();
}

#[test]
fn a_store_removes_the_hot_set_of_a_save_that_it_removes_and_keeps_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let mut set = HotSet::default();
    set.add(&[page(0, 0, 1)]);
    // Names like those of files that `collect` removes.
    let names = ["one", "two", "a.partial-1", "b.hot"];
    for name in names {
        fill(Writer::create_in(&store, name, None, Options::default()).unwrap());
        let path = store.path(name).unwrap();
        set.write(&path, &Image::open(&path).unwrap()).unwrap();
    }
    let has = |name: &str| HotSet::path(&store.path(name).unwrap()).exists();
    assert_eq!(store.names().unwrap(), ["a.partial-1", "b.hot", "one", "two"]);
    store.remove("one").unwrap();
    assert!(!has("one"));
    // As `rm` removes it.
    fs::remove_file(store.path("two").unwrap()).unwrap();
    store.collect(Options::default()).unwrap();
    assert!(!has("two") && has("a.partial-1") && has("b.hot"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn hostile_entries_never_panic_and_name_only_pages_that_exist(
        count in any::<u16>(),
        body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (path, image) = image(folder.path(), "vm");
        let count = [(count & 0x7f) as u8];
        fs::write(HotSet::path(&path), forged(HEAD, image.identity(), &[&count[..], &body].concat()))
            .unwrap();
        if let Ok(set) = HotSet::read(&path, &image) {
            for of in set.pages() {
                prop_assert!(of.page < image.index().blocks[of.block].pages);
            }
        }
    }
}
