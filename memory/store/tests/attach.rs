//! Refused files and damaged files.
#![cfg(not(loom))]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{fcntl_add_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
use store::{Foreign, GetError, GroupBuffer, Options, Page, Seen, Store, StoreError, MAX_OBJECT};

const PAGES: u64 = 2000;

fn options() -> Options {
    Options { reserve: 0, ..Options::default() }
}

fn bytes(index: u64) -> Vec<u8> {
    let len = 100 + usize::try_from(index * 37 % 3500).unwrap();
    (0..len).map(|at| (at as u64 + index).to_le_bytes()[0]).collect()
}

/// A store full of objects whose server is gone, and its file for a test to damage.
fn left_behind() -> (OwnedFd, File) {
    let store = Store::create(PAGES, options()).unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index)).unwrap();
    }
    let fd = store.fd().try_clone_to_owned().unwrap();
    let file = File::from(fd.try_clone().unwrap());
    (fd, file)
}

/// A copy of the first page of a store in a file of this length, sealed or not.
fn copied(len: u64, sealed: bool, change: impl FnOnce(&mut [u8; 4096])) -> OwnedFd {
    let (_, file) = left_behind();
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, 0).unwrap();
    change(&mut page);
    let fd = memfd_create("copy", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    if sealed {
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    }
    let copy = File::from(fd);
    copy.write_all_at(&page[..usize::try_from(len.min(4096)).unwrap()], 0).unwrap();
    copy.into()
}

fn file_len() -> u64 {
    left_behind().1.metadata().unwrap().len()
}

fn refusal(fd: &OwnedFd) -> StoreError {
    Store::attach(fd.as_fd(), options()).expect_err("it is not to be served")
}

#[test]
fn two_servers_on_one_store_are_refused() {
    let store = Store::create(PAGES, options()).unwrap();
    let fd = store.fd().try_clone_to_owned().unwrap();
    let error = refusal(&fd);
    assert!(matches!(error, StoreError::InUse));
    assert_eq!(error.to_string(), "store is in use by another server");
    drop(store);
    let second = Store::attach(fd.as_fd(), options()).unwrap();
    assert_eq!(second.generation(), 2);
    assert!(matches!(refusal(&fd), StoreError::InUse));
    // Refused takeovers do not count as servers.
    let id = second.id();
    drop(second);
    let third = Store::attach(fd.as_fd(), options()).unwrap();
    assert_eq!((third.generation(), third.id()), (3, id));
}

#[test]
fn foreign_files_are_refused_with_a_reason() {
    let len = file_len();
    let put = |at: usize, value: u64| {
        move |page: &mut [u8; 4096]| page[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes())
    };
    for (fd, message) in [
        (copied(0, true, |_| {}), "not a store: its first word is 0000000000000000"),
        (copied(len, true, put(0, 7)), "not a store: its first word is 0000000000000007"),
        (
            copied(len, true, put(1, 9)),
            "store of format version 9, this program serves versions 5 to 6",
        ),
        (copied(len, true, put(14, 3)), "store of 0 pages with room for 32000 is none"),
        (copied(len, true, put(14, 32_001 | (!32_001 << 32))), "store of 32001 pages with room"),
        (copied(len, true, put(3, 3)), "superblock checksum is"),
        (copied(len, true, |page| page[8 * 8] ^= 1), "superblock checksum is"),
        (copied(4096, true, |_| {}), "store file of 4096 bytes, its superblock says"),
        (copied(len - 4096, true, |_| {}), "bytes, its superblock says"),
        (copied(len + 4096, true, |_| {}), "bytes, its superblock says"),
        (copied(len, false, |_| {}), "store file is not sealed against shrinking"),
    ] {
        let error = refusal(&fd);
        assert!(matches!(error, StoreError::Foreign(_)), "{error:?}");
        assert!(error.to_string().contains(message), "{error}, expected {message}");
    }
    let fd = copied(len, true, put(1, 9));
    assert!(matches!(
        refusal(&fd),
        StoreError::Foreign(Foreign::Version { got: 9, oldest: 5, expected: 6 })
    ));
    // Unchanged it is accepted, although all its objects are missing: no page was stored.
    let store = Store::attach(copied(len, true, |_| {}).as_fd(), options()).unwrap();
    assert_eq!(store.stats().orig_data_size, 0);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for pages in [0, 1 << 40, u64::MAX] {
        let error = Store::create(pages, options()).unwrap_err();
        assert!(matches!(error, StoreError::Pages { .. }), "{error}");
    }
    let limit = Options { mem_limit: 16 * 1024, ..options() };
    let error = Store::create(PAGES, limit).unwrap_err();
    assert_eq!(
        error.to_string(),
        "memory limit of 16384 bytes, superblock and slot table alone need 20480: raise the limit \
         (--mem-limit), or make the device smaller"
    );
}

/// Where a page's entry is in the file.
fn entry(index: u64) -> u64 {
    4096 + index * 8
}

#[test]
fn a_damaged_entry_loses_its_own_page_only() {
    // Also the first entry, which decides the slab length of a region.
    let every = if std::env::var_os("PLATEN_QUICK").is_some() { 2 } else { 1 };
    for victim in [0, 777] {
        // In make test the two pages share out the bits.
        for bit in (0..64_u64).filter(|bit| bit % every == victim % every) {
            let (fd, file) = left_behind();
            let mut word = [0; 8];
            file.read_exact_at(&mut word, entry(victim)).unwrap();
            let damaged = u64::from_le_bytes(word) ^ 1 << bit;
            file.write_all_at(&damaged.to_le_bytes(), entry(victim)).unwrap();
            let store = Store::attach(fd.as_fd(), options()).unwrap();
            let mut worker = store.worker().unwrap();
            let mut page = [0; MAX_OBJECT];
            for index in 0..PAGES {
                let found = worker.get(index, &mut page);
                // Pins and age say nothing about the object.
                if index == victim && !(51..58).contains(&bit) && !(60..63).contains(&bit) {
                    let wrong = matches!(
                        found,
                        Err(GetError::Lost { .. }
                            | GetError::Checksum { .. }
                            | GetError::Index { .. })
                    );
                    // Without its top bit it names no object.
                    assert!(wrong || bit == 63, "page {index} bit {bit}: {found:?}");
                } else {
                    let len = bytes(index).len();
                    assert_eq!(found, Ok(Page::Object { tag: 1, len }), "page {index} bit {bit}");
                    assert!(page[..len] == bytes(index), "page {index} bit {bit}");
                }
            }
            // A write repairs it, and frees no other page's object.
            for index in [victim, victim ^ 1] {
                worker.put(index, 2, &bytes(index + 5)).unwrap();
                worker.put(index, 1, &bytes(index)).unwrap();
            }
            assert_eq!(worker.check(0..PAGES).sound, PAGES, "page {victim} bit {bit}");
        }
    }
}

#[test]
fn an_entry_that_names_the_object_of_another_page_is_lost() {
    for (from, to) in [(5, 900), (900, 5)] {
        let (fd, file) = left_behind();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, entry(from)).unwrap();
        file.write_all_at(&word, entry(to)).unwrap();
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        assert_eq!(store.lost_pages(), 1);
        let mut worker = store.worker().unwrap();
        let checked = worker.check(0..PAGES);
        assert_eq!((checked.sound, checked.damaged), (PAGES - 1, 1));
        let lost = worker.get(to, &mut [0; MAX_OBJECT]).unwrap_err();
        assert_eq!(lost, GetError::Lost { index: to });
        assert_eq!(lost.to_string(), format!("page {to}: its entry in the slot table is damaged"));
        // Discarding the impostor does not free the object.
        worker.discard(to..to + 1);
        for index in 0..PAGES {
            worker.put(index, 1, &bytes(index)).unwrap();
        }
        assert_eq!(worker.check(0..PAGES).sound, PAGES);
    }
}

#[test]
fn a_damaged_object_fails_its_page_and_compaction_does_not_hide_it() {
    let (fd, file) = left_behind();
    // Objects are in the regions, at multiples of 2 MiB; of some pages each byte is changed.
    let store_len = file.metadata().unwrap().len();
    let mut hit = 0;
    let mut at = 2 << 20;
    while at < store_len && hit < 40 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at + 8192 + 700).unwrap();
        if byte[0] != 0 {
            file.write_all_at(&[byte[0] ^ 0x10], at + 8192 + 700).unwrap();
            hit += 1;
        }
        at += 2 << 20;
    }
    assert!(hit > 0);
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    let mut worker = store.worker().unwrap();
    let damaged = worker.check(0..PAGES).damaged;
    assert!((1..=hit).contains(&damaged), "{damaged} of {hit}");
    let mut page = [0; MAX_OBJECT];
    let bad: Vec<u64> = (0..PAGES).filter(|&index| worker.get(index, &mut page).is_err()).collect();
    for index in (0..PAGES).filter(|index| index % 4 != 0 && !bad.contains(index)) {
        worker.discard(index..index + 1);
    }
    assert!(store.compact() > 0);
    for &index in &bad {
        assert!(worker.get(index, &mut page).is_err(), "page {index} was damaged");
        worker.put(index, 1, &bytes(index)).unwrap();
        assert!(worker.get(index, &mut page).is_ok());
    }
    assert_eq!(worker.check(0..PAGES).damaged, 0);
}

/// Where records of groups begin, behind a table with room for 16 times the pages, and bytes of
/// one.
const RECORDS: u64 = (4096 + 16 * PAGES * 8).next_multiple_of(4096);
const RECORD: u64 = 64;

/// Pages of a store that has groups.
const SOME: u64 = 50;

/// A store with two groups, of pages 10 to 19 and 30 to 39, and few others, its server gone; where
/// a test may write.
fn left_behind_with_groups() -> (OwnedFd, File) {
    let store = Store::create(PAGES, options()).unwrap();
    let fd = store.fd().try_clone_to_owned().unwrap();
    let file = File::from(fd.try_clone().unwrap());
    let mut worker = store.worker().unwrap();
    for index in 0..SOME {
        worker.put(index, 1, &bytes(index)).unwrap();
    }
    for from in [10, 30] {
        let pages: Vec<_> = (from..from + 10).map(|index| (index, bytes(index))).collect();
        let seen: Vec<_> =
            pages.iter().map(|(index, bytes)| Seen { index: *index, tag: 1, bytes }).collect();
        let mut buffer = GroupBuffer::new();
        buffer.room()[..9000].fill(from.to_le_bytes()[0]);
        assert_eq!(worker.put_group(&seen, 2, 9000, &mut buffer), Ok(0x3ff));
    }
    (fd, file)
}

#[test]
fn a_damaged_record_loses_its_own_group_only() {
    let records: Vec<u64> = {
        let (_fd, file) = left_behind_with_groups();
        let taken = |number: &u64| {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, RECORDS + number * RECORD).unwrap();
            u64::from_le_bytes(word) != 0
        };
        (0..PAGES / 8).filter(taken).collect()
    };
    assert_eq!(records.len(), 2, "two groups have a record each");
    let (mut lost, mut whole) = (0, 0);
    // Its state; the first entries, that of its third and last object, and an absent one: each with
    // a bit changed, or made absent.
    for (word, bit) in (0..5).flat_map(|word| (0..65).map(move |bit| (word, bit))) {
        let (fd, file) = left_behind_with_groups();
        let at = RECORDS + records[0] * RECORD + word * 8;
        let mut bytes_of = [0; 8];
        file.read_exact_at(&mut bytes_of, at).unwrap();
        let damaged = match bit {
            64 => 0,
            bit => u64::from_le_bytes(bytes_of) ^ 1 << bit,
        };
        file.write_all_at(&damaged.to_le_bytes(), at).unwrap();
        let what = format!("word {word} bit {bit}");

        let store = Store::attach(fd.as_fd(), options()).unwrap();
        let mut worker = store.worker().unwrap();
        let mut page = [0; MAX_OBJECT];
        let mut buffer = GroupBuffer::new();
        for index in 0..SOME {
            let of = [10, 30].into_iter().find(|from| (*from..from + 10).contains(&index));
            let found = worker.get(index, &mut page);
            let Some(from) = of else {
                let len = bytes(index).len();
                assert_eq!(found, Ok(Page::Object { tag: 1, len }), "{what}: page {index}");
                assert!(page[..len] == bytes(index), "{what}: page {index}");
                continue;
            };
            let group = match found {
                Ok(Page::Grouped) => worker.get_group(index, &mut buffer),
                Err(error) => Err(error),
                other => panic!("{what}: page {index} is {other:?}"),
            };
            match group {
                Ok(Some(place)) => {
                    let position = usize::try_from(index - from).unwrap();
                    assert_eq!((place.position, place.tag), (position, 2), "{what}");
                    assert!(buffer.payload() == [from.to_le_bytes()[0]; 9000], "{what}");
                    whole += u32::from(from == 10);
                }
                Ok(None) => panic!("{what}: page {index} is in a group"),
                Err(_) => lost += 1,
            }
        }
        let checked = worker.check(0..PAGES);
        assert!(matches!(checked.damaged, 0 | 10), "{what}: {} are lost", checked.damaged);
        assert_eq!(checked.sound + checked.damaged, SOME, "{what}");
        store.compact();
        for index in 10..40 {
            worker.put(index, 1, &bytes(index)).unwrap();
        }
        assert_eq!(worker.check(0..PAGES).sound, SOME, "{what}");
        assert_eq!((store.stats().groups, store.stats().grouped_pages), (0, 0), "{what}");
        worker.discard(0..PAGES);
        worker.rest();
        store.trim();
        assert_eq!(store.stats().mem_used_total, store.resident().unwrap(), "{what}");
    }
    println!("{lost} pages lost, {whole} of the first group read");
    // Reference count and stamp are rebuilt; an entry that names another object costs the group.
    assert!(lost >= 10 * 30, "{lost}");
    assert!(whole >= 10 * 64, "{whole}");
}

#[test]
fn a_group_that_a_damaged_entry_names_is_read_again_for_its_own_pages() {
    let (fd, file) = left_behind_with_groups();
    // The entry of a page of the first group names the second one.
    let mut word = [0; 8];
    file.read_exact_at(&mut word, entry(30)).unwrap();
    file.write_all_at(&word, entry(10)).unwrap();
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    let worker = store.worker().unwrap();
    let mut buffer = GroupBuffer::new();
    assert!(!worker.get_group(11, &mut buffer).unwrap().unwrap().had);
    assert_eq!(worker.get_group(10, &mut buffer), Err(GetError::Lost { index: 10 }));
    assert!(!worker.get_group(31, &mut buffer).unwrap().unwrap().had);
}

#[test]
fn a_table_of_noise_is_taken_over_without_harm() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..20 {
        let (fd, file) = left_behind();
        for index in 0..PAGES {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if round % 2 == 0 || index % 3 == 0 {
                // Half of the rounds have words with most of their bits in range.
                let word = if round % 4 < 2 { random } else { random & !(0x1fff << 31) };
                file.write_all_at(&word.to_le_bytes(), entry(index)).unwrap();
            }
        }
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        let mut worker = store.worker().unwrap();
        worker.check(0..PAGES);
        store.compact();
        for index in 0..PAGES {
            worker.put(index, 1, &bytes(index)).unwrap();
        }
        assert_eq!(worker.check(0..PAGES).sound, PAGES, "round {round}");
        assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    }
}
