//! Stores that grow: operation lists against a map, with servers that replace each other and ask
//! for more pages.
#![cfg(not(loom))]

mod noise;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use noise::bytes;
use proptest::prelude::*;
use store::{
    Ahead, GetError, GroupBuffer, GrowError, Options, Page, Seen, Store, StoreError, Worker,
};

/// Pages of a new store. The last page of its table has room for more.
const PAGES: u64 = 600;

#[derive(Clone, Debug)]
enum Op {
    /// Stores an object of this length, in a page whose number is this many 65536ths of all.
    Put(u16, usize),
    Same(u16, u64),
    Discard(u16, u64),
    /// Makes a group of neighbours.
    Group(u16),
    Compact,
    Trim,
    /// Another server, with this many pages more. The server before may have got memory for more
    /// or fewer.
    Restart {
        more: u64,
        ahead: Option<u64>,
    },
}

/// The contents of a page: a tag, and bytes.
type Held = HashMap<u64, (u8, Vec<u8>)>;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let at = any::<u16>();
    let op = prop_oneof![
        40 => (at, 1..=4096_usize).prop_map(|(at, len)| Op::Put(at, len)),
        6 => (at, any::<u64>()).prop_map(|(at, word)| Op::Same(at, word)),
        6 => (at, 1..300_u64).prop_map(|(at, count)| Op::Discard(at, count)),
        8 => at.prop_map(Op::Group),
        1 => Just(Op::Compact),
        1 => Just(Op::Trim),
        2 => (0..900_u64, prop::option::of(0..1800_u64))
            .prop_map(|(more, ahead)| Op::Restart { more, ahead }),
    ];
    prop::collection::vec(op, 1..400)
}

fn options(grow_to: u64) -> Options {
    Options { grow_to, reserve: 0, ..Options::default() }
}

fn held(worker: &Worker, index: u64) -> Option<(u8, Vec<u8>)> {
    let mut out = [0; 4096];
    match worker.get(index, &mut out).expect("nothing is damaged") {
        Page::Absent => None,
        Page::Same(word) => Some((0xff, word.to_le_bytes().to_vec())),
        Page::Object { tag, len } => Some((tag, out[..len].to_vec())),
        Page::Grouped => {
            let mut buffer = GroupBuffer::new();
            let found = worker.get_group(index, &mut buffer).unwrap().expect("it is in one");
            Some((0x80 + u8::try_from(found.position).unwrap(), buffer.payload().to_vec()))
        }
        other => panic!("{other:?}"),
    }
}

fn check(store: &Arc<Store>, worker: &Worker, oracle: &Held, pages: u64) {
    assert_eq!(store.pages(), pages);
    for index in 0..pages {
        assert_eq!(held(worker, index).as_ref(), oracle.get(&index), "page {index} of {pages}");
    }
    let beyond = worker.get(pages, &mut [0; 4096]);
    assert!(matches!(beyond, Err(GetError::Index { .. })), "{beyond:?}");
    assert_eq!(store.stats().orig_data_size, oracle.len() as u64 * 4096);
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    assert_eq!(worker.check(0..pages).damaged, 0);
}

fn group(worker: &mut Worker, oracle: &mut Held, first: u64, pages: u64, number: usize) {
    let of = |index: u64| oracle.get(&index).filter(|(tag, _)| *tag < 0x80).cloned();
    let there: Vec<_> = (first..pages)
        .take(12)
        .filter_map(|index| of(index).map(|(tag, bytes)| (index, tag, bytes)))
        .collect();
    let seen: Vec<_> =
        there.iter().map(|(index, tag, bytes)| Seen { index: *index, tag: *tag, bytes }).collect();
    if seen.is_empty() {
        return;
    }
    let payload = bytes(number, 3000);
    let mut buffer = GroupBuffer::new();
    buffer.room()[..3000].copy_from_slice(&payload);
    let joined = worker.put_group(&seen, 9, 3000, &mut buffer).unwrap();
    for (position, (index, ..)) in there.iter().enumerate() {
        assert!(joined & 1 << position != 0, "page {index} was as it was seen");
        oracle.insert(*index, (0x80 + u8::try_from(position).unwrap(), payload.clone()));
    }
}

fn run(ops: Vec<Op>) {
    let mut store = Store::create(PAGES, options(0)).unwrap();
    let capacity = store.capacity();
    let mut worker = store.worker().unwrap();
    let (mut oracle, mut pages) = (Held::new(), PAGES);
    for (number, op) in ops.into_iter().enumerate() {
        let index = |at: u16| (u64::from(at) * pages) >> 16;
        match op {
            Op::Put(at, len) => {
                let bytes = bytes(number, len);
                worker.put(index(at), 3, &bytes).unwrap();
                oracle.insert(index(at), (3, bytes));
            }
            Op::Same(at, word) => {
                worker.put_same(index(at), word).unwrap();
                oracle.insert(index(at), (0xff, word.to_le_bytes().to_vec()));
            }
            Op::Discard(at, count) => {
                let range = index(at)..(index(at) + count).min(pages);
                range.clone().for_each(|index| drop(oracle.remove(&index)));
                worker.discard(range);
            }
            Op::Group(at) => group(&mut worker, &mut oracle, index(at), pages, number),
            Op::Compact => drop(store.compact()),
            Op::Trim => {
                worker.rest();
                store.trim();
            }
            Op::Restart { more, ahead } => {
                let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
                let next = Ahead::map(fd.as_fd()).unwrap();
                let wanted = pages + more;
                if let Some(ahead) = ahead {
                    let grown = next.grow(&options(pages + ahead));
                    assert_eq!(grown.is_ok(), pages + ahead <= capacity, "{grown:?}");
                }
                drop((worker, store));
                store = Store::attach_ahead(next, options(wanted)).unwrap();
                worker = store.worker().unwrap();
                pages = if wanted <= capacity { wanted } else { pages };
                check(&store, &worker, &oracle, pages);
            }
        }
    }
    check(&store, &worker, &oracle, pages);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_store_that_grows_loses_no_page(ops in ops()) {
        run(ops);
    }
}

#[test]
fn a_store_grows_to_its_capacity_and_can_be_filled() {
    let store = Store::create(64, options(0)).unwrap();
    let most = store.capacity();
    assert_eq!(most, 16 * 64);
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    drop(store);
    let store = Store::attach(fd.as_fd(), options(most)).unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..most {
        worker.put(index, 1, &bytes(7, 4096)).unwrap();
    }
    assert_eq!(worker.check(0..most).sound, most);
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
}

#[test]
fn a_store_that_cannot_grow_reports_it_and_stays_unchanged() {
    let store = Store::create(PAGES, options(0)).unwrap();
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    let ahead = Ahead::map(fd.as_fd()).unwrap();
    let said = |options: &Options| ahead.grow(options).unwrap_err().to_string();
    assert_eq!(said(&options(9601)), "store of 600 pages has room for 9600, not for 9601");
    assert_eq!(said(&options(599)), "store of 600 pages cannot shrink to 599");
    let limited = Options { mem_limit: 5 * 4096, ..options(9600) };
    assert_eq!(
        said(&limited),
        "memory limit of 20480 bytes, superblock and slot table alone need 81920: raise the limit \
         (--mem-limit), or make the device smaller"
    );
    let limit = ahead.grow(&limited);
    assert!(matches!(limit, Err(GrowError::Store(StoreError::Limit { .. }))));
    ahead.grow(&options(PAGES)).unwrap();
    drop((store, ahead));
    for options in [options(9601), options(1), limited] {
        let store = Store::attach(fd.as_fd(), options).unwrap();
        assert_eq!(store.pages(), PAGES);
    }
}

/// A stand-by server maps the store before another server grows it, and takes it over later.
#[test]
fn a_standby_server_reads_the_pages_of_a_store_that_grew() {
    let store = Store::create(PAGES, options(0)).unwrap();
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    let mut early = Ahead::map(fd.as_fd()).unwrap();
    drop(store);
    let grown = Store::attach(fd.as_fd(), options(9000)).unwrap();
    let mut worker = grown.worker().unwrap();
    for index in 0..9000 {
        worker.put(index, 1, &bytes(1, 4000)).unwrap();
    }
    // More regions than the smaller store has.
    early.touch();
    drop((worker, grown));
    let store = Store::attach_ahead(early, options(0)).unwrap();
    assert_eq!(store.pages(), 9000);
    assert_eq!(store.worker().unwrap().check(0..9000).sound, 9000);
}
