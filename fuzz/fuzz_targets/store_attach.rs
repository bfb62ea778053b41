//! Hostile files: a store whose superblock, table, group records, dictionaries or slab heads were
//! changed is refused or attached, and then serves every page or reports an error.
//!
//! Input: changes of eleven bytes: a part of the file (one byte), an offset in it (two) and the
//! eight bytes to write there.
#![no_main]

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use libfuzzer_sys::fuzz_target;
use store::{GroupBuffer, Options, Page, Seen, Store, DICTIONARY_TAG, MAX_DICTIONARY, MAX_OBJECT};

const PAGES: u64 = 128;

/// Offset and length of the parts of such a file, which has room for 16 times the pages. For the
/// regions, 2 MiB each, only the heads of the first ones.
const PARTS: [(u64, u64); 7] = [
    (0, 5120),
    (4096, 1024),
    (20_480, 4096),
    (36_864, 2 * 16_384),
    (2 << 20, 4096),
    (4 << 20, 4096),
    (6 << 20, 4096),
];

/// A page's bytes: distinguishable, and of all size classes.
fn bytes(index: u64) -> ([u8; MAX_OBJECT], usize) {
    let mut bytes = [0xa5; MAX_OBJECT];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    (bytes, 8 + usize::try_from(index * 1231 % 4089).expect("below 4089"))
}

/// Reads a page: either the bytes stored there, or an error.
fn read(store: &Store, worker: &store::Worker, index: u64) {
    let mut out = [0; MAX_OBJECT];
    match worker.get(index, &mut out) {
        Ok(Page::Object { tag, len }) => {
            let (bytes, was) = bytes(index);
            assert!(len == was && out[..len] == bytes[..len], "page {index} is another");
            // The dictionary must exist.
            assert!(usize::from(tag.saturating_sub(DICTIONARY_TAG)) <= store.dictionaries());
        }
        Ok(Page::Grouped) => {
            let mut buffer = GroupBuffer::new();
            if let Ok(Some(found)) = worker.get_group(index, &mut buffer) {
                let payload = buffer.payload();
                assert!(payload.len() == 9000 && payload.iter().all(|&byte| byte == payload[0]));
                assert!(found.position < 16 && matches!(payload[0], 1..=3));
            }
        }
        _ => {}
    }
}

fuzz_target!(|input: &[u8]| {
    let options = Options { reserve: 0, ..Options::default() };
    let store = Store::create(PAGES, options.clone()).expect("there is memory");
    let mut worker = store.worker().expect("the first");
    for number in 0..2 {
        store.install_dictionary(&[number; 900], 1).expect("there is room");
    }
    for index in 0..PAGES {
        let (bytes, len) = bytes(index);
        let tag = if index % 5 == 0 { DICTIONARY_TAG + u8::from(index % 2 == 0) } else { 1 };
        worker.put(index, tag, &bytes[..len]).expect("there is no limit");
    }
    let mut buffer = GroupBuffer::new();
    for number in 1..=3 {
        let from = u64::from(number) * 20;
        let pages: Vec<_> = (from..from + 16)
            .filter(|index| index % 5 > 0)
            .map(|index| (index, bytes(index)))
            .collect();
        let seen: Vec<_> = pages
            .iter()
            .map(|(index, (bytes, len))| Seen { index: *index, tag: 1, bytes: &bytes[..*len] })
            .collect();
        buffer.room()[..9000].fill(number);
        let joined = worker.put_group(&seen, 2, 9000, &mut buffer).expect("there is no limit");
        assert_eq!(joined.count_ones() as usize, seen.len());
    }
    let file = File::from(store.fd().try_clone_to_owned().expect("one more descriptor"));
    drop((worker, store));
    for change in input.chunks_exact(11) {
        let (part, len) = PARTS[usize::from(change[0]) % PARTS.len()];
        let at = u64::from(u16::from_le_bytes([change[1], change[2]]));
        file.write_all_at(&change[3..], part + at % (len - 7))
            .expect("it has no seal against writing");
    }
    let store = match Store::attach(file.as_fd(), options) {
        Ok(store) => store,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut worker = store.worker().expect("the first");
    for place in 0..store.dictionaries() {
        let mut out = [0; MAX_DICTIONARY];
        if let Ok(found) = store.dictionary(place, &mut out) {
            assert!(place < 2 && out[..found.len] == [place as u8; 900]);
        }
    }
    (0..PAGES).for_each(|index| read(&store, &worker, index));
    let checked = worker.check(0..PAGES);
    assert!(checked.damaged >= store.lost_pages());
    store.compact();
    assert_eq!(worker.check(0..PAGES).sound, checked.sound, "compaction changes no page");
    for index in 0..PAGES {
        worker.put(index, 2, &[0xa5; 2000]).expect("there is no limit");
    }
    assert_eq!(worker.check(0..PAGES).sound, PAGES);
    worker.discard(0..PAGES);
    worker.rest();
    store.trim();
    assert_eq!(store.stats().mem_used_total, store.resident().expect("a file of ours"));
});
