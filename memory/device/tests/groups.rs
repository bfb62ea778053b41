//! A page of a group whose entry in the slot table is damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;

use codec::{Codec, Encoder, Settings};
use device::{PageReader, PAGE, RECOMPRESSED};
use store::{GroupBuffer, Options, Seen, Store, Worker};

/// Pages of a group.
const MEMBERS: u64 = 4;

fn plain(index: u64) -> [u8; PAGE] {
    std::array::from_fn(|at| (at as u64 / 7 * (index + 1)).to_le_bytes()[0])
}

/// Makes a group of the pages from `from` on, as the policy does.
fn group(worker: &mut Worker, from: u64) {
    let raw = Codec::Raw.to_wire();
    let pages: Vec<[u8; PAGE]> = (from..from + MEMBERS).map(plain).collect();
    for (index, page) in (from..).zip(&pages) {
        worker.put(index, raw, page).unwrap();
    }
    let mut encoder = Encoder::new(Settings::default()).unwrap();
    let mut coded = vec![0; pages.len() * PAGE];
    let encoded = encoder.encode(pages.as_flattened(), &mut coded);
    let mut buffer = GroupBuffer::new();
    buffer.room()[..encoded.len].copy_from_slice(&coded[..encoded.len]);
    let seen = |(index, page)| Seen { index, tag: raw, bytes: page };
    let seen: Vec<Seen<'_>> = (from..).zip(pages.iter().map(|page| &page[..])).map(seen).collect();
    let tag = RECOMPRESSED | encoded.codec.to_wire();
    assert_eq!(worker.put_group(&seen, tag, encoded.len, &mut buffer), Ok(0xf));
}

/// Regression: the next page of the other group was read from the group before.
#[test]
fn a_damaged_entry_costs_its_own_page_only() {
    let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
    let mut worker = store.worker().unwrap();
    group(&mut worker, 0);
    group(&mut worker, 8);
    // The entry of page 1 names the other group.
    let entry = |index: u64| 4096 + index * 8;
    let file = File::from(store.fd().try_clone_to_owned().unwrap());
    let mut word = [0; 8];
    file.read_exact_at(&mut word, entry(9)).unwrap();
    file.write_all_at(&word, entry(1)).unwrap();
    let mut reader = PageReader::new(&store);
    let mut out = [0; PAGE];
    for index in [0, 1, 8, 9, 2, 1, 10, 11, 3] {
        let read = reader.read(&worker, index, true, &mut out);
        if index == 1 {
            assert!(read.is_err(), "its own bytes are in no group that it names");
        } else {
            read.unwrap();
            assert!(out == plain(index), "page {index}");
        }
    }
}
