//! Several threads' operation lists at once, and what each may see.
#![cfg(not(loom))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use store::{GroupBuffer, Keeper, Options, Page, PutError, Seen, Store, Worker, MAX_OBJECT};

/// Few pages and few lengths, so that threads meet.
const PAGES: u64 = 24;
const THREADS: usize = 3;

/// A thread of another test that gets no CPU may hold a lock of the kernel for which the keeper
/// waits. Only a hang takes longer.
const PATIENT: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
enum Op {
    Put { index: u64, len: usize },
    Same { index: u64 },
    Get { index: u64 },
    Discard { index: u64 },
    Replace { index: u64, len: usize },
    Group { from: u64, members: u64, len: usize },
    Leave { index: u64, len: usize },
    Compact,
    Trim,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let index = 0..PAGES;
    let len = prop::sample::select(vec![20_usize, 300, 310, 1500, 1510, 4000, MAX_OBJECT]);
    let op = prop_oneof![
        10 => (index.clone(), len).prop_map(|(index, len)| Op::Put { index, len }),
        1 => index.clone().prop_map(|index| Op::Same { index }),
        10 => index.clone().prop_map(|index| Op::Get { index }),
        2 => index.clone().prop_map(|index| Op::Discard { index }),
        3 => (index.clone(), prop::sample::select(vec![20_usize, 1505, MAX_OBJECT]))
            .prop_map(|(index, len)| Op::Replace { index, len }),
        3 => (index.clone(), 2..9_u64, 400..20_000_usize)
            .prop_map(|(from, members, len)| Op::Group { from, members, len }),
        2 => (index.clone(), prop::sample::select(vec![30_usize, 1505]))
            .prop_map(|(index, len)| Op::Leave { index, len }),
        1 => Just(Op::Compact),
        1 => Just(Op::Trim),
    ];
    prop::collection::vec(op, 50..400)
}

/// Bytes that identify their write throughout, so that a mixture of two is detected.
fn bytes(stamp: u64, len: usize) -> Vec<u8> {
    stamp.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// The stamp of what was read; panics if it is a mixture.
fn stamp(page: Page, out: &[u8; MAX_OBJECT]) -> u64 {
    match page {
        Page::Absent => 0,
        Page::Same(word) => word,
        Page::Object { len, tag } => {
            let stamp = u64::from_le_bytes(out[..8].try_into().unwrap());
            assert!(out[..len] == bytes(stamp, len), "a mixture of two objects");
            assert_eq!(u64::from(tag), stamp % 60, "the tag of another object");
            stamp
        }
        Page::Grouped => unreachable!("its group was asked"),
        Page::Backed => unreachable!("there is no backing device"),
    }
}

/// A group's payload: the stamps of its pages, repeated.
fn payload(stamps: &[u64], room: &mut [u8]) {
    let stamps = stamps.iter().flat_map(|stamp| stamp.to_le_bytes()).cycle();
    room.iter_mut().zip(stamps).for_each(|(byte, stamp)| *byte = stamp);
}

/// The stamp of a page, wherever it is.
fn read(worker: &Worker, index: u64, out: &mut [u8; MAX_OBJECT], buffer: &mut GroupBuffer) -> u64 {
    loop {
        let page = worker.get(index, out).expect("nothing is damaged");
        if page != Page::Grouped {
            return stamp(page, out);
        }
        let Some(grouped) = worker.get_group(index, buffer).expect("nothing is damaged") else {
            continue;
        };
        let stamps: Vec<u64> = buffer.payload()[..grouped.members * 8]
            .chunks(8)
            .map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        let mut whole = vec![0; buffer.payload().len()];
        payload(&stamps, &mut whole);
        assert!(whole == buffer.payload(), "a mixture of two groups");
        return stamps[grouped.position];
    }
}

/// Makes a group of the pages from here on that are objects just now.
fn group(worker: &mut Worker, from: u64, members: u64, len: usize, buffer: &mut GroupBuffer) {
    let mut out = [0; MAX_OBJECT];
    let mut found = Vec::new();
    for index in from..(from + members).min(PAGES) {
        if let Page::Object { tag, len } = worker.look(index, &mut out).expect("nothing is damaged")
        {
            found.push((index, tag, out[..len].to_vec()));
        }
    }
    let stamps: Vec<u64> = found
        .iter()
        .map(|(_, _, bytes)| u64::from_le_bytes(bytes[..8].try_into().unwrap()))
        .collect();
    if found.is_empty() {
        return;
    }
    payload(&stamps, &mut buffer.room()[..len]);
    let seen: Vec<_> =
        found.iter().map(|(index, tag, bytes)| Seen { index: *index, tag: *tag, bytes }).collect();
    // At the limit no group is made, which is fine too.
    let _ = worker.put_group(&seen, 1, len, buffer);
}

/// Stamps of a page are given out in order. A page may only have a stamp that was given out, and
/// that no write has replaced which ended before this one began.
// Over 80 lines: the threads share the state that each checks.
fn run(lists: Vec<Vec<Op>>, options: &Options, keeper: bool) {
    let store = Store::create(PAGES, options.clone()).unwrap();
    let keeper = keeper.then(|| Keeper::start(&store).unwrap());
    let clock = Arc::new(AtomicU64::new(1));
    let start = Arc::new(Barrier::new(lists.len()));
    // Every event with its times: (page, stamp, from, to, written).
    let threads: Vec<_> = lists
        .into_iter()
        .map(|list| {
            let (store, clock, start) =
                (Arc::clone(&store), Arc::clone(&clock), Arc::clone(&start));
            thread::spawn(move || {
                let mut worker = store.worker().unwrap();
                let mut out = [0; MAX_OBJECT];
                let mut buffer = GroupBuffer::new();
                let mut events = Vec::new();
                let tick = || clock.fetch_add(1, Ordering::SeqCst);
                start.wait();
                for op in list {
                    let from = tick();
                    match op {
                        Op::Put { index, len } => {
                            match worker.put(
                                index,
                                u8::try_from(from % 60).unwrap(),
                                &bytes(from, len),
                            ) {
                                Ok(()) => events.push((index, from, from, tick(), true)),
                                Err(PutError::Full { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        Op::Same { index } => {
                            worker.put_same(index, from).unwrap();
                            events.push((index, from, from, tick(), true));
                        }
                        Op::Get { index } => {
                            let stamp = read(&worker, index, &mut out, &mut buffer);
                            events.push((index, stamp, from, tick(), false));
                        }
                        Op::Discard { index } => {
                            worker.discard(index..index + 1);
                            // An absent page is not written, which is fine too.
                            events.push((index, 0, from, tick(), true));
                        }
                        Op::Replace { index, len } => {
                            // The same page in another form: no event.
                            let recode = |tag: u8, old: &[u8], out: &mut [u8; MAX_OBJECT]| {
                                let stamp = u64::from_le_bytes(old[..8].try_into().unwrap());
                                out[..len].copy_from_slice(&bytes(stamp, len));
                                Some((tag, len))
                            };
                            worker.replace(index, &mut out, recode).expect("nothing is damaged");
                        }
                        Op::Group { from, members, len } => {
                            group(&mut worker, from, members, len, &mut buffer);
                        }
                        Op::Leave { index, len } => {
                            // As above.
                            let found = worker.look_group(index, &mut buffer);
                            if let Some(grouped) = found.expect("nothing is damaged") {
                                let at = grouped.position * 8;
                                let stamp = &buffer.payload()[at..at + 8];
                                let stamp = u64::from_le_bytes(stamp.try_into().unwrap());
                                let new = bytes(stamp, len);
                                let tag = u8::try_from(stamp % 60).unwrap();
                                let _ = worker.ungroup(index, &buffer, (tag, &new), true);
                            }
                        }
                        Op::Compact => drop(store.compact_step(PAGES / 2)),
                        Op::Trim => drop(store.trim()),
                    }
                }
                events
            })
        })
        .collect();
    let mut events: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    let worker = store.worker().unwrap();
    let mut out = [0; MAX_OBJECT];
    for index in 0..PAGES {
        let from = clock.fetch_add(1, Ordering::SeqCst);
        let stamp = read(&worker, index, &mut out, &mut GroupBuffer::new());
        events.push((index, stamp, from, from + 1, false));
    }
    // Every page is absent before time begins.
    events.extend((0..PAGES).map(|index| (index, 0, 0, 0, true)));
    for &(index, seen, from, to, _) in events.iter().filter(|event| !event.4) {
        let writes = || events.iter().filter(move |event| event.4 && event.0 == index);
        let possible = writes().filter(|write| write.1 == seen && write.2 < to).any(|write| {
            // No other write is entirely between the end of this one and the start of the read.
            !writes().any(|other| other.2 > write.3 && other.3 < from)
        });
        assert!(possible, "page {index} had {seen} between {from} and {to}");
    }
    let grouped = (0..PAGES).filter(|&index| worker.peek(index).unwrap().0 == Page::Grouped);
    assert_eq!(store.stats().grouped_pages, grouped.count() as u64);
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    // Removing the last pages frees the groups.
    let mut worker = worker;
    worker.discard(0..PAGES);
    let stats = store.stats();
    assert_eq!((stats.groups, stats.compr_data_size, stats.orig_data_size), (0, 0, 0));
    drop(keeper);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn threads_read_each_page_as_some_order_of_its_writes(
        lists in prop::collection::vec(ops(), THREADS),
        full in any::<bool>(),
    ) {
        // Room for a part of it, in one half of the cases.
        let mem_limit = if full { 140_000 } else { 0 };
        run(lists, &Options { mem_limit, reserve: 0, ..Options::default() }, false);
    }
}

#[test]
fn a_keeper_runs_beside_threads() {
    let list = |seed: u64| {
        let mut random = seed;
        (0..3000).map(move |_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let index = random >> 33 & 15;
            match random >> 60 {
                0..8 => Op::Put { index, len: 100 + usize::try_from(random >> 40 & 2047).unwrap() },
                8..11 => Op::Get { index },
                11 => Op::Group { from: index, members: 6, len: 9000 },
                12 => Op::Leave { index, len: 1505 },
                13 => Op::Discard { index },
                14 => Op::Same { index },
                _ if random >> 59 & 1 == 0 => Op::Compact,
                _ => Op::Trim,
            }
        })
    };
    let lists = (1..=3).map(|seed| list(seed).collect()).collect();
    run(lists, &Options { reserve: 4 << 20, patience: PATIENT, ..Options::default() }, true);
}

#[test]
fn a_full_store_with_a_keeper_refuses_and_loses_no_page() {
    const PAGES: u64 = 4096;
    let (mem_limit, reserve) = (4 << 20, 1 << 20);
    let options = Options { mem_limit, reserve, patience: PATIENT, ..Options::default() };
    let store = Store::create(PAGES, options).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    let mut worker = store.worker().unwrap();
    let stored: Vec<u64> = (0..PAGES)
        .filter(|&index| {
            let len = if index % 2 == 0 { 1000 } else { 4096 };
            worker.put(index, 7, &bytes(index, len)).is_ok()
        })
        .collect();
    let stats = store.stats();
    assert!(stored.len() > 1000, "{} pages and {stats:?}", stored.len());
    assert!(stored.len() < 3000, "{stats:?}");
    assert!(stats.mem_used_max <= 4 << 20, "{stats:?}");
    // Ready slabs of other lengths are freed before a write is refused.
    assert!(stats.compr_data_size > 3 << 20, "{stats:?}");
    let mut out = [0; MAX_OBJECT];
    for &index in &stored {
        let page = worker.get(index, &mut out).unwrap();
        assert!(matches!(page, Page::Object { tag: 7, .. }));
        assert_eq!(u64::from_le_bytes(out[..8].try_into().unwrap()), index);
    }
    // A refused write leaves the page's old data.
    let full = stored.iter().find(|&&index| worker.put(index, 1, &[1; 3333]).is_err());
    if let Some(&index) = full {
        assert!(matches!(worker.get(index, &mut out), Ok(Page::Object { tag: 7, .. })));
    }
    worker.discard(0..PAGES);
    worker.put(0, 1, &[1; 4096]).expect("there is room again");
    store.set_mem_limit(0);
    for index in 0..PAGES {
        worker.put(index, 7, &bytes(index, 2000)).expect("there is no limit any more");
    }
    drop((worker, keeper));
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
}

#[test]
fn a_store_has_64_workers_at_a_time() {
    let store = Store::create(10, Options::default()).unwrap();
    let workers: Vec<_> = std::iter::from_fn(|| store.worker()).collect();
    assert_eq!(workers.len(), store::MAX_WORKERS);
    drop(workers);
    assert!(store.worker().is_some());
}

#[test]
fn ages_grow_until_a_page_is_read_or_written() {
    let store = Store::create(10, Options::default()).unwrap();
    let mut worker = store.worker().unwrap();
    let age = |worker: &store::Worker, index| worker.peek(index).unwrap().1;
    worker.put(1, 0, b"one").unwrap();
    worker.put(2, 0, b"two").unwrap();
    for _ in 0..3 {
        worker.grow_older(0..10);
    }
    assert_eq!((age(&worker, 0), age(&worker, 1), age(&worker, 2)), (0, 3, 3));
    worker.check(0..10);
    assert_eq!(age(&worker, 1), 3, "checking is not reading");
    worker.get(1, &mut [0; MAX_OBJECT]).unwrap();
    worker.put(2, 0, b"three").unwrap();
    worker.grow_older(0..10);
    assert_eq!((age(&worker, 1), age(&worker, 2)), (1, 1));
    (0..20).for_each(|_| worker.grow_older(0..u64::MAX));
    assert_eq!(worker.peek(1), Ok((Page::Object { tag: 0, len: 3 }, store::MAX_AGE)));
}

#[test]
fn readers_of_one_page_get_whole_objects_and_let_its_writer_in() {
    let store = Store::create(1, Options::default()).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mut worker = store.worker().unwrap();
    worker.put(0, 0, &bytes(0, 4000)).unwrap();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (stop, worker) = (Arc::clone(&stop), store.worker().unwrap());
            thread::spawn(move || {
                let (mut out, mut last, mut seen) = ([0; MAX_OBJECT], 0, 0);
                while !stop.load(Ordering::Relaxed) {
                    let page = worker.get(0, &mut out).expect("nothing is damaged");
                    let now = stamp(page, &out);
                    assert!(now >= last, "{last} was newer than {now}");
                    seen += u64::from(now > last);
                    last = now;
                }
                seen
            })
        })
        .collect();
    for number in 1..30_000_u64 {
        worker.put(0, u8::try_from(number % 60).unwrap(), &bytes(number, 4000)).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let seen: Vec<u64> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    println!("readers saw {seen:?} of the objects");
    assert_eq!(store.stats().compr_data_size, 4000);
}
