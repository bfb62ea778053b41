//! Hostile files: a store whose superblock and table were written to is refused or taken over, and then serves every
//! page or says that it cannot.
//!
//! Input: changes of ten bytes, each an offset (two bytes) among superblock and table and the eight bytes to go there.
#![no_main]

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use libfuzzer_sys::fuzz_target;
use store::{Options, Store, MAX_OBJECT};

const PAGES: u64 = 128;

fuzz_target!(|input: &[u8]| {
    let options = Options { reserve: 0, ..Options::default() };
    let store = Store::create(PAGES, options.clone()).expect("there is memory");
    let mut worker = store.worker().expect("the first");
    let bytes = [0xa5; MAX_OBJECT];
    for index in 0..PAGES {
        let len = 1 + usize::try_from(index * 1231 % 4096).expect("below 4096");
        worker.put(index, 1, &bytes[..len]).expect("there is no limit");
    }
    let file = File::from(store.fd().try_clone_to_owned().expect("one more descriptor"));
    drop((worker, store));
    for change in input.chunks_exact(10) {
        let at = u64::from(u16::from_le_bytes([change[0], change[1]]));
        // Superblock and table lie in the first 5120 bytes.
        file.write_all_at(&change[2..], at % 5112).expect("it has no seal against writing");
    }
    let store = match Store::attach(file.as_fd(), options) {
        Ok(store) => store,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let mut worker = store.worker().expect("the first");
    let checked = worker.check(0..PAGES);
    assert!(checked.damaged >= store.lost_pages());
    store.compact();
    assert_eq!(worker.check(0..PAGES).sound, checked.sound, "compaction changes no page");
    for index in 0..PAGES {
        worker.put(index, 2, &bytes[..2000]).expect("there is no limit");
    }
    assert_eq!(worker.check(0..PAGES).sound, PAGES);
    worker.discard(0..PAGES);
    worker.rest();
    store.trim();
    assert_eq!(store.stats().mem_used_total, store.resident().expect("a file of ours"));
});
