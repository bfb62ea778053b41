//! Operations on a store against a map: whatever the order, a page is what was last stored.
//!
//! Input: one byte for the memory limit, then operations of four bytes: what, page, and two for the length, the word or
//! the number of pages.
#![no_main]

use std::collections::HashMap;
use std::os::fd::AsFd;

use libfuzzer_sys::fuzz_target;
use store::{GroupBuffer, GroupError, Options, Page, PutError, Seen, Store, MAX_OBJECT};

const PAGES: u64 = 256;
/// More would only be slower.
const MAX_OPS: usize = 2000;

/// What was stored: the bytes follow from length and number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    Same(u64),
    Object { tag: u8, len: usize, number: usize },
    Grouped { len: usize, number: usize },
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
    let mut worker = store.worker().expect("the first");
    let mut oracle = HashMap::new();
    for (number, op) in ops.chunks_exact(4).take(MAX_OPS).enumerate() {
        let (index, arg) = (u64::from(op[1]), u16::from_le_bytes([op[2], op[3]]));
        match op[0] % 16 {
            0..=7 => {
                let (len, tag) = (1 + usize::from(arg) % MAX_OBJECT, (arg >> 12) as u8 & 7);
                match worker.put(index, tag, &bytes(number, len)[..len]) {
                    Ok(()) => drop(oracle.insert(index, Held::Object { tag, len, number })),
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0),
                    Err(error) => panic!("{error}"),
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
                // Neighbours that are objects, as one; the last one as if it had been written meanwhile.
                let members: Vec<(u64, u8, [u8; MAX_OBJECT], usize)> = (index..PAGES)
                    .take(1 + usize::from(arg >> 11))
                    .filter_map(|index| match oracle.get(&index) {
                        Some(&Held::Object { tag, len, number }) => Some((index, tag, bytes(number, len), len)),
                        _ => None,
                    })
                    .collect();
                let mut seen: Vec<Seen<'_>> = members
                    .iter()
                    .map(|(index, tag, bytes, len)| Seen { index: *index, tag: *tag, bytes: &bytes[..*len] })
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
            (found, held) => panic!("page {index} is {found:?}, expected {held:?}"),
        }
    }
    let stats = store.stats();
    assert!(stats.compr_data_size >= sum);
    assert_eq!(stats.orig_data_size, oracle.len() as u64 * 4096);
    assert_eq!(stats.mem_used_total, store.resident().expect("a file of ours"));
});
