//! Operations on a store against a map: in any order, a page holds the bytes stored last, also with
//! dictionaries and a backing device.
//!
//! Input: one byte for the memory limit, then operations of four bytes: operation, page, and two
//! for the length, the word or the number of pages.
#![no_main]

mod shelf;

use std::collections::HashMap;
use std::os::fd::AsFd;

use libfuzzer_sys::fuzz_target;
use shelf::Memory;
use store::{
    format_backing, Added, BackBuffer, Batch, Change, GroupBuffer, GroupError, ModifyError,
    Options, Page, PutError, Seen, Store, Worker, MAX_DICTIONARY, MAX_OBJECT,
};

const PAGES: u64 = 256;
/// More would only be slower.
const MAX_OPS: usize = 2000;

/// The contents stored: the bytes follow from length and number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    Same(u64),
    Object { tag: u8, len: usize, number: usize },
    Grouped { len: usize, number: usize },
    Backed { len: usize, number: usize },
}

/// Changes a part of a page, which becomes one word or an object.
fn modify(
    worker: &mut Worker,
    oracle: &mut HashMap<u64, Held>,
    index: u64,
    number: usize,
    arg: u16,
    mem_limit: u64,
) {
    let (len, tag) = (1 + usize::from(arg) % MAX_OBJECT, (arg >> 12) as u8 & 7);
    let held = match arg % 5 {
        0 => Held::Same(u64::from(arg)),
        _ => Held::Object { tag, len, number },
    };
    let edit = |_, out: &mut [u8; MAX_OBJECT]| {
        *out = bytes(number, len);
        Some(match held {
            Held::Same(word) => Change::Same(word),
            _ => Change::Object { tag, len },
        })
    };
    let before = oracle.get(&index).copied();
    match worker.modify(index, &mut [0; MAX_OBJECT], edit) {
        Ok(()) => drop(oracle.insert(index, held)),
        Err(ModifyError::Put(PutError::Full { .. })) => assert!(mem_limit > 0),
        Err(ModifyError::Grouped { .. }) => assert!(matches!(before, Some(Held::Grouped { .. }))),
        Err(ModifyError::Backed { .. }) => assert!(matches!(before, Some(Held::Backed { .. }))),
        Err(error) => panic!("{error}"),
    }
}

/// Writes those pages that are objects to the backing device, as far as it has room.
fn write_back(worker: &mut Worker, oracle: &mut HashMap<u64, Held>, pages: std::ops::Range<u64>) {
    let mut batch = Batch::new(8);
    let mut gone = Vec::new();
    for index in pages {
        let Some(&Held::Object { tag, len, number }) = oracle.get(&index) else { continue };
        match batch.add(&Seen { index, tag, bytes: &bytes(number, len)[..len] }) {
            Added::Yes => gone.push((index, Held::Backed { len, number })),
            Added::Unfit => {}
            Added::Full => break,
        }
    }
    if batch.is_empty() {
        return;
    }
    let done = worker.write_back(&mut batch).expect("the file takes writes");
    assert_eq!((done.changed, done.pages + done.left), (0, gone.len() as u64));
    gone.retain(|&(index, _)| matches!(worker.peek(index), Ok((Page::Backed, _))));
    assert_eq!(done.pages, gone.len() as u64);
    oracle.extend(gone);
}

fn bytes(number: usize, len: usize) -> [u8; MAX_OBJECT] {
    let mut bytes = [0; MAX_OBJECT];
    for (at, byte) in bytes[..len].iter_mut().enumerate() {
        *byte = (at * 7 + number * 31 + (number >> 8)) as u8;
    }
    bytes
}

fuzz_target!(|input: &[u8]| {
    let Some((&limit, ops)) = input.split_first() else { return };
    let mem_limit = if limit < 128 { 0 } else { 16_384 + u64::from(limit) * 2048 };
    let options = Options { mem_limit, reserve: 0, ..Options::default() };
    let mut store = Store::create(PAGES, options.clone()).expect("there is room for the table");
    let disk = Memory::of(40);
    format_backing(&disk, "disk", &store).expect("it is large enough");
    store.set_backing(Box::new(disk.clone()), "disk").expect("it was made for it");
    let mut dictionaries: Vec<Vec<u8>> = Vec::new();
    let mut worker = store.worker().expect("the first");
    let mut oracle = HashMap::new();
    for (number, op) in ops.chunks_exact(4).take(MAX_OPS).enumerate() {
        let (index, arg) = (u64::from(op[1]), u16::from_le_bytes([op[2], op[3]]));
        match op[0] % 16 {
            0..=5 => {
                let (len, tag) = (1 + usize::from(arg) % MAX_OBJECT, (arg >> 12) as u8 & 7);
                match worker.put(index, tag, &bytes(number, len)[..len]) {
                    Ok(()) => drop(oracle.insert(index, Held::Object { tag, len, number })),
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0),
                    Err(error) => panic!("{error}"),
                }
            }
            6 => modify(&mut worker, &mut oracle, index, number, arg, mem_limit),
            7 if arg % 2 == 0 => {
                write_back(&mut worker, &mut oracle, index..index + u64::from(arg >> 9))
            }
            7 => {
                // Rarely; up to three more than the store has places for.
                let len = 8 + usize::from(arg) % (MAX_DICTIONARY - 8);
                let bytes: Vec<u8> = (0..len).map(|at| (at * 5 + number) as u8).collect();
                if let Ok(place) = store.install_dictionary(&bytes, 1) {
                    assert_eq!(place, dictionaries.len());
                    dictionaries.push(bytes);
                }
            }
            8 => {
                let word = u64::from(arg) << (number % 60);
                match worker.put_same(index, word) {
                    Ok(()) => drop(oracle.insert(index, Held::Same(word))),
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0),
                    Err(error) => panic!("{error}"),
                }
            }
            9 | 10 => {
                let end = index + u64::from(arg % 64);
                worker.discard(index..end);
                oracle.retain(|page, _| !(index..end).contains(page));
            }
            11 => drop(store.compact_step(u64::from(arg))),
            12 => drop(store.trim()),
            13 => worker.rest(),
            14 if arg % 2 == 0 => {
                // Neighbouring objects, as one group; the last one as if it had been written
                // meanwhile.
                let members: Vec<(u64, u8, [u8; MAX_OBJECT], usize)> = (index..PAGES)
                    .take(1 + usize::from(arg >> 11))
                    .filter_map(|index| match oracle.get(&index) {
                        Some(&Held::Object { tag, len, number }) => {
                            Some((index, tag, bytes(number, len), len))
                        }
                        _ => None,
                    })
                    .collect();
                let mut seen: Vec<Seen<'_>> = members
                    .iter()
                    .map(|(index, tag, bytes, len)| Seen {
                        index: *index,
                        tag: *tag,
                        bytes: &bytes[..*len],
                    })
                    .collect();
                let stale = arg & 2 > 0;
                if let Some(last) = seen.last_mut().filter(|_| stale) {
                    last.tag ^= 1;
                }
                let len = 1 + usize::from(arg) % MAX_OBJECT;
                let mut buffer = GroupBuffer::new();
                buffer.room()[..len].copy_from_slice(&bytes(number, len)[..len]);
                match worker.put_group(&seen, 7, len, &mut buffer) {
                    Ok(joined) => {
                        assert_eq!(joined.count_ones() as usize, seen.len() - usize::from(stale));
                        for page in seen.iter().take(joined.count_ones() as usize) {
                            oracle.insert(page.index, Held::Grouped { len, number });
                        }
                    }
                    Err(GroupError::Full { .. }) => assert!(mem_limit > 0),
                    Err(_) => assert!(seen.is_empty()),
                }
            }
            14 => worker.grow_older(0..index),
            _ => {
                let fd = store.fd().try_clone_to_owned().expect("one more descriptor");
                drop((worker, store));
                store = Store::attach(fd.as_fd(), options.clone()).expect("its server is gone");
                store.set_backing(Box::new(disk.clone()), "disk").expect("it is the same");
                worker = store.worker().expect("the first");
                assert_eq!(store.lost_pages(), 0);
            }
        }
    }
    let mut out = [0; MAX_OBJECT];
    let mut sum = 0;
    for index in 0..PAGES {
        let found = worker.get(index, &mut out).expect("nothing is damaged");
        let held = oracle.get(&index).copied();
        match (found, held) {
            (Page::Absent, None) => {}
            (Page::Same(word), Some(Held::Same(held))) => assert_eq!(word, held),
            (Page::Object { tag, len }, Some(Held::Object { tag: t, len: l, number })) => {
                assert_eq!((tag, len), (t, l));
                assert!(out[..len] == bytes(number, len)[..len]);
                sum += len as u64;
            }
            (Page::Grouped, Some(Held::Grouped { len, number })) => {
                let mut buffer = GroupBuffer::new();
                let found = worker.get_group(index, &mut buffer).expect("nothing is damaged");
                assert!(found.is_some() && buffer.payload() == &bytes(number, len)[..len]);
            }
            (Page::Backed, Some(Held::Backed { len, number })) => {
                let found = worker.read_back(index, &mut BackBuffer::new(), &mut out);
                assert!(matches!(found, Ok(Some(Page::Object { len: l, .. })) if l == len));
                assert!(out[..len] == bytes(number, len)[..len]);
            }
            (found, held) => panic!("page {index} is {found:?}, expected {held:?}"),
        }
    }
    assert_eq!(store.dictionaries(), dictionaries.len());
    for (place, bytes) in dictionaries.iter().enumerate() {
        let mut out = [0; MAX_DICTIONARY];
        let found = store.dictionary(place, &mut out).expect("it is as it was installed");
        assert!(out[..found.len] == bytes[..]);
    }
    let stats = store.stats();
    assert!(stats.compr_data_size >= sum);
    assert_eq!(stats.orig_data_size, oracle.len() as u64 * 4096);
    assert_eq!(stats.mem_used_total, store.resident().expect("a file of ours"));
});
