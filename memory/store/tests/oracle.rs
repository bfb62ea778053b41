//! Operation lists against a map: the store has what it reports, whatever happened in between.
#![cfg(not(loom))]

mod noise;
mod shelf;
#[path = "oracle/steps.rs"]
mod steps;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use noise::bytes;
use proptest::prelude::*;
use shelf::Shelf;
use steps::{modify, write_back};
use store::{
    dictionary_of, format_backing, Added, BackBuffer, Batch, Change, GroupBuffer, GroupError,
    ModifyError, Options, Page, PutError, Seen, Store, Worker, DICTIONARY_TAG, MAX_MEMBERS,
    MAX_OBJECT, WHOLE_TAG,
};

const PAGES: u64 = 600;

/// Blocks of the backing device: fewer than there may be pages for.
const BLOCKS: usize = 60;

/// A tag that names no dictionary: there is none, and the next server would treat the page as
/// damaged.
fn plain(tag: u8) -> u8 {
    dictionary_of(tag).map_or(tag, |_| tag & !DICTIONARY_TAG)
}

#[derive(Clone, Debug)]
enum Op {
    Put {
        worker: usize,
        index: u64,
        len: usize,
        tag: u8,
    },
    Same {
        index: u64,
        word: u64,
    },
    Get {
        index: u64,
    },
    Discard {
        from: u64,
        count: u64,
    },
    Replace {
        index: u64,
        len: usize,
        tag: u8,
    },
    /// Writes a part of the page; its contents become this, or, for a same-filled page, this value.
    Modify {
        index: u64,
        len: usize,
        tag: u8,
        word: Option<u64>,
    },
    /// Makes a group of every n-th page from here on.
    Group {
        from: u64,
        every: u64,
        members: usize,
        len: usize,
        /// Pretends that this one was written meanwhile.
        stale: usize,
    },
    Leave {
        index: u64,
        len: usize,
    },
    /// Writes back those of these pages that fit, in a batch of this many blocks.
    WriteBack {
        from: u64,
        count: u64,
        blocks: usize,
        /// Pretends that every n-th of these was written meanwhile.
        stale: usize,
    },
    BringBack {
        index: u64,
        len: usize,
    },
    CompactStep {
        pages: u64,
    },
    Compact,
    Trim,
    Rest {
        worker: usize,
    },
    Age,
    /// Replaces the server.
    Restart,
}

/// The contents of a page.
#[derive(Clone, Debug, PartialEq)]
enum Held {
    Same(u64),
    Object(u8, Vec<u8>),
    /// Payload and position.
    Grouped(u8, Vec<u8>, usize),
    /// On the backing device.
    Backed(u8, Vec<u8>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = 0..PAGES;
    // Few lengths, so that classes fill; the ends of the range, and pages as they are.
    let len = prop_oneof![
        6 => 1200..1230_usize,
        3 => prop::sample::select(vec![1, 59, 60, 61, 76, 1020, 1021, 4091, 4092, 4093]),
        1 => Just(MAX_OBJECT),
        2 => 1..=MAX_OBJECT,
    ];
    let word = prop_oneof![Just(0), Just(u64::MAX), any::<u64>(), any::<u32>().prop_map(u64::from)];
    let op = prop_oneof![
        60 => (0..2_usize, index.clone(), len, 0..store::TAGS)
            .prop_map(|(worker, index, len, tag)| Op::Put { worker, index, len, tag: plain(tag) }),
        6 => (index.clone(), word.clone()).prop_map(|(index, word)| Op::Same { index, word }),
        10 => index.clone().prop_map(|index| Op::Get { index }),
        10 => (index.clone(), 1..=MAX_OBJECT, 0..store::TAGS)
            .prop_map(|(index, len, tag)| Op::Replace { index, len, tag: plain(tag) }),
        10 => (index.clone(), 1..=MAX_OBJECT, 0..store::TAGS, prop::option::weighted(0.2, word))
            .prop_map(|(index, len, tag, word)| Op::Modify { index, len, tag: plain(tag), word }),
        6 => (index.clone(), 1..260_u64, 1..=MAX_MEMBERS, 1..=store::MAX_PAYLOAD, 0..64_usize)
            .prop_map(|(from, every, members, len, stale)| {
                // Near each other, mostly.
                let every = if every < 240 { 1 + every % 3 } else { every };
                Op::Group { from, every, members, len, stale }
            }),
        6 => (index.clone(), 1..=MAX_OBJECT).prop_map(|(index, len)| Op::Leave { index, len }),
        8 => (index.clone(), 1..200_u64, 1..20_usize, 2..9_usize).prop_map(|(from, count, blocks, stale)| {
            Op::WriteBack { from, count, blocks, stale }
        }),
        4 => (index.clone(), 1..=MAX_OBJECT).prop_map(|(index, len)| Op::BringBack { index, len }),
        6 => (index, 0..80_u64).prop_map(|(from, count)| Op::Discard { from, count }),
        4 => (1..400_u64).prop_map(|pages| Op::CompactStep { pages }),
        1 => Just(Op::Compact),
        1 => Just(Op::Trim),
        1 => (0..2_usize).prop_map(|worker| Op::Rest { worker }),
        1 => Just(Op::Age),
        1 => Just(Op::Restart),
    ];
    prop::collection::vec(op, 1..1500)
}

fn workers(store: &Arc<Store>) -> [Worker; 2] {
    [(); 2].map(|()| store.worker().expect("two of 64"))
}

fn held(worker: &Worker, index: u64) -> Option<Held> {
    let mut out = [0xee; MAX_OBJECT];
    match worker.get(index, &mut out).expect("nothing is damaged") {
        Page::Absent => None,
        Page::Same(word) => Some(Held::Same(word)),
        Page::Object { tag, len } => Some(Held::Object(tag, out[..len].to_vec())),
        Page::Grouped => {
            let mut buffer = GroupBuffer::new();
            let first = worker.look_group(index, &mut buffer).unwrap().expect("it is in one");
            let again = worker.get_group(index, &mut buffer).unwrap().expect("it is in one");
            assert!(!first.had && again.had);
            Some(Held::Grouped(again.tag, buffer.payload().to_vec(), again.position))
        }
        Page::Backed => match worker.read_back(index, &mut BackBuffer::new(), &mut out).unwrap() {
            Some(Page::Object { tag, len }) => Some(Held::Backed(tag, out[..len].to_vec())),
            other => panic!("{other:?}"),
        },
    }
}

fn check_all(store: &Arc<Store>, worker: &Worker, oracle: &HashMap<u64, Held>) {
    for index in 0..PAGES {
        assert_eq!(held(worker, index).as_ref(), oracle.get(&index), "page {index}");
    }
    let stats = store.stats();
    assert_eq!(stats.orig_data_size, oracle.len() as u64 * 4096);
    let same = oracle.values().filter(|held| matches!(held, Held::Same(_))).count();
    assert_eq!(stats.same_pages, same as u64);
    // A word that fits no entry is an object of 8 bytes.
    let (mut least, mut most, mut huge, mut grouped, mut backed) = (0, 0, 0, 0, 0);
    let mut groups: Vec<&[u8]> = Vec::new();
    for held in oracle.values() {
        match held {
            Held::Same(_) => most += 8,
            Held::Object(_, bytes) => {
                least += bytes.len() as u64;
                huge += u64::from(bytes.len() > 4092);
            }
            Held::Grouped(_, payload, _) => {
                grouped += 1;
                groups.push(payload);
            }
            Held::Backed(..) => backed += 1,
        }
    }
    assert_eq!(stats.bd_count, backed);
    // No two groups have the same payload.
    groups.sort_unstable();
    groups.dedup();
    least += groups.iter().map(|payload| payload.len() as u64 + 40).sum::<u64>();
    assert_eq!((stats.groups, stats.grouped_pages), (groups.len() as u64, grouped));
    assert!((least..=least + most).contains(&stats.compr_data_size));
    assert_eq!(stats.huge_pages, huge);
    assert_eq!(stats.mem_used_total, store.resident().unwrap(), "memory is counted to the page");
    assert!(stats.mem_limit == 0 || stats.mem_used_total <= stats.mem_limit);
    assert!(stats.mem_used_max >= stats.mem_used_total);
}

// Over 80 lines: one arm for each operation, beside what the model makes of it.
fn run(ops: Vec<Op>, mem_limit: u64) {
    let options = Options { mem_limit, reserve: 0, ..Options::default() };
    let mut store = Store::create(PAGES, options.clone()).unwrap();
    let disk = Shelf::new(BLOCKS);
    format_backing(&disk, "shelf", &store).unwrap();
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let mut threads = workers(&store);
    let mut oracle = HashMap::new();
    let mut batches: Vec<Batch> = (0..20).map(Batch::new).collect();
    for (number, op) in ops.into_iter().enumerate() {
        match op {
            Op::Put { worker, index, len, tag } => {
                let bytes = bytes(number, len);
                match threads[worker].put(index, tag, &bytes) {
                    Ok(()) => drop(oracle.insert(index, Held::Object(tag, bytes))),
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0, "full without a limit"),
                    Err(error) => panic!("{error}"),
                }
                assert_eq!(held(&threads[1 - worker], index).as_ref(), oracle.get(&index));
            }
            Op::Same { index, word } => match threads[0].put_same(index, word) {
                Ok(()) => drop(oracle.insert(index, Held::Same(word))),
                Err(PutError::Full { .. }) => assert!(mem_limit > 0, "full without a limit"),
                Err(error) => panic!("{error}"),
            },
            Op::Get { index } => {
                assert_eq!(held(&threads[0], index).as_ref(), oracle.get(&index));
            }
            Op::Replace { index, len, tag } => {
                let new = bytes(number, len);
                let before = oracle.get(&index);
                let replaced = threads[1].replace(
                    index,
                    &mut [0; MAX_OBJECT],
                    |tag_before, bytes_before, out| {
                        let held = Held::Object(tag_before, bytes_before.to_vec());
                        assert_eq!(Some(&held), before, "page {index}");
                        out[..len].copy_from_slice(&new);
                        (len % 5 > 0).then_some((tag, len))
                    },
                );
                match replaced {
                    Ok(true) => drop(oracle.insert(index, Held::Object(tag, new))),
                    Ok(false) => {
                        let object = matches!(before, Some(Held::Object(..)));
                        assert!(!object || len % 5 == 0 || mem_limit > 0, "page {index}");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Modify { index, len, tag, word } => {
                modify(
                    &mut threads[1],
                    &mut oracle,
                    index,
                    (tag, bytes(number, len)),
                    word,
                    mem_limit,
                );
            }
            Op::Group { from, every, members, len, stale } => {
                let mut seen = Vec::new();
                for index in (from..PAGES).step_by(usize::try_from(every).unwrap()).take(members) {
                    match oracle.get(&index) {
                        Some(Held::Object(tag, bytes)) => seen.push((index, *tag, bytes.clone())),
                        // An invalid one, among those that it might have been.
                        _ if index % 5 == 0 => seen.push((index, 3, vec![1; 20])),
                        _ => {}
                    }
                }
                if let Some((_, _, bytes)) = seen.get_mut(stale) {
                    bytes[0] ^= 1;
                }
                let mut buffer = GroupBuffer::new();
                let payload = bytes(number, len);
                buffer.room()[..len].copy_from_slice(&payload);
                let pages: Vec<Seen<'_>> = seen
                    .iter()
                    .map(|(index, tag, bytes)| Seen { index: *index, tag: *tag, bytes })
                    .collect();
                let near =
                    pages.windows(2).all(|two| two[1].index - two[0].index <= store::MAX_GAP);
                let joined = match threads[0].put_group(&pages, 9, len, &mut buffer) {
                    Ok(joined) => joined,
                    Err(GroupError::Full { .. }) => {
                        assert!(mem_limit > 0, "full without a limit");
                        0
                    }
                    Err(GroupError::Members { .. }) => {
                        assert!(pages.is_empty() || !near);
                        0
                    }
                    Err(error) => panic!("{error}"),
                };
                for (position, (index, tag, bytes)) in seen.into_iter().enumerate() {
                    let was = oracle.get(&index) == Some(&Held::Object(tag, bytes));
                    if joined & 1 << position != 0 {
                        assert!(was, "page {index} was something else");
                        oracle.insert(index, Held::Grouped(9, payload.clone(), position));
                    } else {
                        assert!(!was || joined == 0, "page {index} was as it was seen");
                    }
                }
            }
            Op::Leave { index, len } => {
                let mut buffer = GroupBuffer::new();
                let grouped = matches!(oracle.get(&index), Some(Held::Grouped(..)));
                let found = threads[1].look_group(index, &mut buffer).unwrap();
                assert_eq!(found.is_some(), grouped);
                let new = bytes(number, len);
                match threads[1].ungroup(index, &buffer, (5, &new), len % 2 == 0) {
                    Ok(done) => {
                        assert_eq!(done, grouped);
                        if done {
                            oracle.insert(index, Held::Object(5, new));
                        }
                    }
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0, "full without a limit"),
                    Err(error) => panic!("{error}"),
                }
            }
            Op::WriteBack { from, count, blocks, stale } => {
                write_back(
                    &mut threads[0],
                    &mut oracle,
                    from..from + count,
                    stale,
                    &mut batches[blocks],
                );
            }
            Op::BringBack { index, len } => {
                let mut buffer = BackBuffer::new();
                let mut out = [0; MAX_OBJECT];
                let backed = matches!(oracle.get(&index), Some(Held::Backed(..)));
                let read = threads[1].read_back(index, &mut buffer, &mut out).unwrap();
                assert_eq!(read.is_some(), backed);
                let new = bytes(number, len);
                match threads[1].bring_back(index, &buffer, 5, &new) {
                    Ok(done) => {
                        assert_eq!(done, backed);
                        if done {
                            oracle.insert(index, Held::Object(5, new));
                        }
                    }
                    Err(PutError::Full { .. }) => assert!(mem_limit > 0, "full without a limit"),
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Discard { from, count } => {
                threads[1].discard(from..from + count);
                oracle.retain(|index, _| !(from..from + count).contains(index));
            }
            Op::CompactStep { pages } => drop(store.compact_step(pages)),
            Op::Compact => drop(store.compact()),
            Op::Trim => {
                store.trim();
                assert_eq!(store.stats().mem_ready, 0);
            }
            Op::Rest { worker } => threads[worker].rest(),
            Op::Age => threads[0].grow_older(0..PAGES),
            Op::Restart => {
                let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
                let before = store.stats();
                let generation = store.generation();
                drop((threads, store));
                store = Store::attach(std::os::fd::AsFd::as_fd(&fd), options.clone()).unwrap();
                store.set_backing(disk.boxed(), "shelf").unwrap();
                threads = workers(&store);
                assert_eq!(store.generation(), generation + 1);
                assert_eq!(store.lost_pages(), 0);
                let after = store.stats();
                assert_eq!(after.orig_data_size, before.orig_data_size);
                assert_eq!(after.compr_data_size, before.compr_data_size);
                assert_eq!(after.mem_ready, 0);
                check_all(&store, &threads[0], &oracle);
            }
        }
    }
    check_all(&store, &threads[0], &oracle);
    assert_eq!(threads[0].check(0..PAGES).sound, oracle.len() as u64);
    let backed = oracle.values().filter(|held| matches!(held, Held::Backed(..))).count() as u64;
    let stats = store.backing_stats().unwrap();
    assert!(stats.blocks - stats.free <= backed && stats.failed_reads == 0);
    // All of it given back: the table is what remains.
    threads[0].discard(0..PAGES);
    threads.iter_mut().for_each(Worker::rest);
    store.compact();
    store.trim();
    let empty = Store::create(PAGES, Options::default()).unwrap().stats().mem_used_total;
    assert_eq!(store.stats().mem_used_total, empty);
    assert_eq!(store.resident().unwrap(), empty);
    let stats = store.backing_stats().unwrap();
    assert_eq!(stats.free, stats.blocks, "nothing is left on the backing device");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_store_is_a_map(ops in ops()) {
        run(ops, 0);
    }

    #[test]
    fn a_full_store_loses_no_page(ops in ops(), limit in 60_000..400_000_u64) {
        run(ops, limit);
    }
}

#[test]
fn a_buffer_with_an_earlier_group_of_the_record_is_not_used() {
    let store = Store::create(PAGES, Options::default()).unwrap();
    let mut worker = store.worker().unwrap();
    let mut kept = GroupBuffer::new();
    // Each group is the only one there is; after the memory of records was given back, the next has
    // the first record again.
    for number in 0..300_usize {
        let pages = [bytes(number, 50), bytes(number, 60)];
        let mut seen = Vec::new();
        for (index, bytes) in (7..).zip(&pages) {
            worker.put(index, 1, bytes).unwrap();
            seen.push(Seen { index, tag: 1, bytes });
        }
        let mut buffer = GroupBuffer::new();
        buffer.room()[..40].copy_from_slice(&bytes(number, 40));
        assert_eq!(worker.put_group(&seen, 2, 40, &mut buffer), Ok(3));
        let found = worker.get_group(8, &mut kept).unwrap().expect("it is in one");
        assert_eq!((found.position, found.had), (1, false), "group {number}");
        assert_eq!(kept.payload(), bytes(number, 40), "group {number}");
        worker.discard(0..PAGES);
        if number % 3 > 0 {
            store.trim();
        }
    }
}
