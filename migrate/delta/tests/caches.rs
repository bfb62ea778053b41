//! The receiver restores the sender's chunks, whatever came before.

use delta::{Counts, Receiver, Sender, RECORD_HEAD, TABLE_ROOM};
use proptest::prelude::*;

const PAGE: usize = 64;
const RECORD: usize = RECORD_HEAD + PAGE;

/// A part of a chunk.
#[derive(Debug, Clone)]
enum Part {
    /// Bytes outside any page.
    Other(Vec<u8>),
    /// Pages from this number on; for each a seed, and how many of its words hold the changing
    /// value.
    Pages(u64, Vec<(u8, usize)>),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..40).prop_map(Part::Other),
        (0_u64..40, proptest::collection::vec((0_u8..3, 0_usize..=PAGE / 8), 1..12))
            .prop_map(|(first, pages)| Part::Pages(first, pages)),
        // Page numbers that differ widely, up to the largest.
        (any::<u64>(), proptest::collection::vec((0_u8..3, 0_usize..=PAGE / 8), 1..3))
            .prop_map(|(first, pages)| Part::Pages(first / PAGE as u64, pages)),
    ]
}

/// The chunk, and its runs of records: offset, address, count.
fn build(parts: &[Part], version: u8) -> (Vec<u8>, Vec<(usize, u64, usize)>) {
    let (mut chunk, mut runs) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Part::Other(bytes) => chunk.extend(bytes),
            Part::Pages(first, pages) => {
                let address = first.wrapping_mul(PAGE as u64);
                runs.push((chunk.len(), address, pages.len()));
                for (i, (seed, words)) in pages.iter().enumerate() {
                    let head = address.wrapping_add((i * PAGE) as u64);
                    chunk.extend(head.to_be_bytes());
                    for word in 0..PAGE / 8 {
                        let byte = if word < *words { version } else { *seed };
                        chunk.extend([byte; 8]);
                    }
                }
            }
        }
    }
    (chunk, runs)
}

fn send(
    sender: &mut Sender,
    chunk: &mut [u8],
    len: usize,
    runs: &[(usize, u64, usize)],
) -> (usize, Counts) {
    let mut pass = sender.begin(chunk, len, None);
    for &(at, address, count) in runs {
        pass.records(at, address, count);
    }
    pass.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_on_every_chunk(
        // Some chunks go without a table, as while the sender makes none.
        chunks in proptest::collection::vec(
            (proptest::collection::vec(part(), 0..8), proptest::bool::weighted(0.7), any::<bool>()),
            1..12),
        slots in 0_u64..70,
        room in 0_usize..TABLE_ROOM,
    ) {
        let mut sender = Sender::new(slots * PAGE as u64, PAGE);
        let mut receiver = Receiver::new(slots * PAGE as u64, PAGE);
        for (version, (parts, wanted, new)) in (0_u8..).zip(&chunks) {
            let (plain, runs) = build(parts, version);
            if !wanted {
                continue;
            }
            sender.store_new(*new);
            let mut chunk = plain.clone();
            chunk.resize(plain.len() + room, 0xee);
            let (table_len, sent) = send(&mut sender, &mut chunk, plain.len(), &runs);
            prop_assert!(table_len <= room);
            let (travelling, table) = chunk.split_at_mut(plain.len());
            let took = receiver.apply(travelling, table[..table_len].as_ref().into(), 0);
            prop_assert_eq!(took, Ok(sent));
            prop_assert!(travelling == &plain[..]);
        }
    }

    #[test]
    fn a_hostile_table_is_refused_or_applied_within_bounds(
        table in proptest::collection::vec(any::<u8>(), 0..200),
        len in 0_usize..2000,
        slots in 0_u64..40,
    ) {
        let mut receiver = Receiver::new(slots * PAGE as u64, PAGE);
        let mut plain = vec![7; len];
        if let Err(error) = receiver.apply(&mut plain, table.as_slice().into(), 0) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

/// `count` pages from number `first` on, filled with `fill`.
fn pages(first: u64, count: usize, fill: u8) -> (Vec<u8>, Vec<(usize, u64, usize)>) {
    build(&[Part::Pages(first, vec![(fill, 0); count])], 0)
}

#[test]
fn a_page_that_is_sent_again_is_zeros_and_one_that_has_changed_by_half_still_a_difference() {
    let mut sender = Sender::new(128 * PAGE as u64, PAGE);
    let mut go = |words: usize, version: u8| {
        let (plain, runs) = build(&[Part::Pages(5, vec![(9, words)])], version);
        let mut chunk = plain.clone();
        chunk.resize(plain.len() + TABLE_ROOM, 0);
        let (_, counts) = send(&mut sender, &mut chunk, plain.len(), &runs);
        assert_eq!(counts.stored, 1);
        (counts.deltas, chunk[RECORD_HEAD..RECORD].to_vec() == plain[RECORD_HEAD..RECORD])
    };
    assert_eq!(go(0, 1), (0, true), "never seen");
    assert_eq!(go(0, 1), (1, false), "the same again");
    assert_eq!(go(4, 1), (1, false), "half of the words are new");
    assert_eq!(go(8, 2), (0, true), "all of them are");
    assert_eq!(go(8, 2), (1, false), "and kept as they were sent");
}

#[test]
fn a_page_that_lost_its_slot_is_sent_whole() {
    let mut sender = Sender::new(16 * PAGE as u64, PAGE);
    let mut go = |first| {
        let (mut chunk, runs) = pages(first, 1, 3);
        let len = chunk.len();
        chunk.resize(len + TABLE_ROOM, 0);
        send(&mut sender, &mut chunk, len, &runs).1.deltas
    };
    assert_eq!([go(2), go(2), go(18), go(2), go(2)], [0, 1, 0, 0, 1]);
}

#[test]
fn without_new_pages_resent_pages_are_stored() {
    let mut sender = Sender::new(64 * PAGE as u64, PAGE);
    let mut go = |new, first, count| {
        sender.store_new(new);
        let (mut chunk, runs) = pages(first, count, 3);
        let len = chunk.len();
        chunk.resize(len + TABLE_ROOM, 0);
        let (table, counts) = send(&mut sender, &mut chunk, len, &runs);
        assert_eq!(table > 0, counts.stored > 0);
        (counts.stored, counts.deltas)
    };
    assert_eq!(go(true, 0, 4), (4, 0), "pages 0 to 3");
    assert_eq!(go(false, 4, 20), (0, 0), "pages 4 to 23 are new");
    assert_eq!(go(false, 24, 8), (0, 0), "24 to 31 as well");
    assert_eq!(go(false, 2, 4), (4, 2), "all were sent, and 2 and 3 stored");
    assert_eq!(go(false, 30, 4), (2, 0), "30 and 31 were sent, 32 and 33 not");
    assert_eq!(go(false, 0, 34), (34, 8), "0 to 5, 30 and 31 are stored, and all known");
    assert_eq!(go(false, 0, 34), (34, 34));
    assert_eq!(go(true, 34, 2), (2, 0));
}

#[test]
fn pages_beyond_a_full_table_are_sent_whole() {
    let mut sender = Sender::new(1 << 20, PAGE);
    let mut receiver = Receiver::new(1 << 20, PAGE);
    // No two of these pages are consecutive, so that each is a run of its own.
    let parts: Vec<Part> =
        (0..1000).map(|n| Part::Pages(n * 37 % 4099 * 3, vec![(1, 0)])).collect();
    for _ in 0..3 {
        let (plain, runs) = build(&parts, 0);
        let mut chunk = plain.clone();
        chunk.resize(plain.len() + TABLE_ROOM, 0);
        let (len, counts) = send(&mut sender, &mut chunk, plain.len(), &runs);
        assert!(len <= TABLE_ROOM && (200..1000).contains(&counts.stored), "{len} {counts:?}");
        let (travelling, table) = chunk.split_at_mut(plain.len());
        assert_eq!(receiver.apply(travelling, table[..len].as_ref().into(), 0), Ok(counts));
        assert!(travelling == &plain[..]);
    }
}

#[test]
fn a_wrong_table_is_named() {
    let wrong = |table: &[u8]| {
        let mut receiver = Receiver::new(16 * PAGE as u64, PAGE);
        let mut plain = vec![0; 4 * RECORD];
        receiver.apply(&mut plain, table.into(), 0).unwrap_err().to_string()
    };
    // gap, pages, step (zigzag), bits.
    assert!(wrong(&[8, 1]).contains("of 2 bytes breaks off"));
    assert!(wrong(&[8, 1, 0]).contains("breaks off"), "no bits");
    assert!(wrong(&[8, 0, 0]).contains("names 0 pages"));
    assert!(wrong(&[8, 5, 0, 0]).contains("names 5 pages from byte 8 of a chunk of 288"));
    assert!(wrong(&[0xff, 0xff, 0xff, 0xff, 0x0f, 1, 0, 0]).contains("from byte 4294967295"));
    assert!(wrong(&[0xff, 0xff, 0xff, 0xff, 0x1f, 1, 0, 0]).contains("no number"));
    assert!(wrong(&[8, 1, 32, 0]).contains("names 1 slots from 16 of 16"));
    assert!(wrong(&[8, 1, 1, 0]).contains("slots from 4294967295"), "a step below the first");
    assert!(wrong(&[8, 1, 0, 2]).contains("bits for more than the 1 pages"));
}
