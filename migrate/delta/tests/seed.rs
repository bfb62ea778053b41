//! Pages that the destination has already arrive unchanged, beside deltas and without a cache.

use delta::{
    fill, offer, page_hash, FillError, Known, OfferError, PageReader, Receiver, SeedKey, Sender,
    MAX_OFFER, RECORD_HEAD, TABLE_ROOM,
};
use proptest::prelude::*;

const PAGE: usize = 64;
const KEY: SeedKey = [7; 32];

/// Page `n` of those that may be in the seed.
fn page(n: u8) -> Vec<u8> {
    (0..PAGE).map(|at| n.wrapping_mul(31).wrapping_add(u8::try_from(at).unwrap())).collect()
}

/// The seed: these pages, by number.
struct Shelf(Vec<u8>);

impl Shelf {
    fn known(&self) -> Known {
        let mut known = Known::default();
        for (first, pages) in (0..).step_by(3).zip(self.0.chunks(3)) {
            let hashes: Vec<_> = pages.iter().map(|&n| page_hash(&KEY, &page(n))).collect();
            known.learn(&offer(first, &KEY, &hashes)).unwrap();
        }
        known
    }

    fn pages(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap()
    }
}

struct Reader<'a>(&'a Shelf, Vec<u8>);

impl PageReader for Reader<'_> {
    fn read(&mut self, number: u32) -> Result<&[u8], String> {
        let n = self.0 .0.get(number as usize).ok_or("no such page")?;
        self.1 = page(*n);
        Ok(&self.1)
    }
}

/// A chunk of runs of records: for each, the number of its first page, and its pages.
fn records(runs: &[(u64, Vec<u8>)]) -> (Vec<u8>, Vec<(usize, u64, usize)>) {
    let (mut chunk, mut places) = (Vec::new(), Vec::new());
    for (first, pages) in runs {
        places.push((chunk.len(), first * PAGE as u64, pages.len()));
        for (&n, number) in pages.iter().zip(*first..) {
            chunk.extend((number * PAGE as u64).to_be_bytes());
            chunk.extend(page(n));
        }
    }
    (chunk, places)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_on_every_chunk(
        shelf in proptest::collection::vec(0_u8..12, 0..20),
        chunks in proptest::collection::vec(
            (proptest::collection::vec((0_u64..30, proptest::collection::vec(0_u8..20, 1..9)), 0..6),
             any::<bool>(), any::<bool>()),
            1..8),
        slots in 0_u64..40,
        room in 0_usize..TABLE_ROOM,
    ) {
        let shelf = Shelf(shelf);
        let known = shelf.known();
        let mut sender = Sender::new(slots * PAGE as u64, PAGE);
        let mut receiver = Receiver::new(slots * PAGE as u64, PAGE);
        let seed = (u32::try_from(slots).unwrap(), shelf.pages());
        for (runs, with_seed, with_cache) in &chunks {
            let (plain, places) = records(runs);
            let mut chunk = plain.clone();
            chunk.resize(plain.len() + room, 0xee);
            sender.use_cache(*with_cache);
            let mut pass = sender.begin(&mut chunk, plain.len(), with_seed.then_some(&known));
            for (at, address, count) in places {
                pass.records(at, address, count);
            }
            let (len, counts) = pass.finish();
            prop_assert!(*with_seed || counts.seeded == 0);
            prop_assert!(*with_cache || counts.stored == 0);
            let (travelling, table) = chunk.split_at_mut(plain.len());
            let table = &table[..len];
            let filled = fill(travelling, (*table).into(), PAGE, seed, &mut Reader(&shelf, Vec::new()));
            prop_assert_eq!(filled, Ok(counts.seeded));
            prop_assert_eq!(receiver.apply(travelling, (*table).into(), seed.1), Ok(counts));
            prop_assert!(travelling == &plain[..]);
        }
    }

    #[test]
    fn bare_pages_arrive_too(
        shelf in proptest::collection::vec(0_u8..12, 0..20),
        pages in proptest::collection::vec(0_u8..20, 0..30),
        head in 0_usize..20,
        base in 0_u32..50,
    ) {
        let shelf = Shelf(shelf);
        let known = shelf.known();
        let mut plain = vec![9; head];
        plain.extend(pages.iter().flat_map(|&n| page(n)));
        let mut chunk = plain.clone();
        chunk.resize(plain.len() + TABLE_ROOM, 0);
        let mut sender = Sender::without_cache(base, PAGE);
        let mut pass = sender.begin(&mut chunk, plain.len(), Some(&known));
        pass.bodies(head, pages.len());
        let (len, counts) = pass.finish();
        let on_shelf = pages.iter().filter(|n| shelf.0.contains(n)).count();
        prop_assert_eq!(counts.seeded, on_shelf as u64);
        let (travelling, table) = chunk.split_at_mut(plain.len());
        let seed = (base, shelf.pages());
        fill(travelling, table[..len].as_ref().into(), PAGE, seed, &mut Reader(&shelf, Vec::new())).unwrap();
        let mut receiver = Receiver::without_cache(base, PAGE);
        prop_assert_eq!(receiver.apply(travelling, table[..len].as_ref().into(), seed.1), Ok(counts));
        prop_assert!(travelling == &plain[..]);
    }

    #[test]
    fn a_hostile_table_is_refused_or_applied_within_bounds(
        table in proptest::collection::vec(any::<u8>(), 0..60),
        len in 0_usize..2000,
        base in 0_u32..9,
    ) {
        let shelf = Shelf(vec![1, 2, 3]);
        let mut plain = vec![7; len];
        let seed = (base, shelf.pages());
        let filled = fill(&mut plain, table.as_slice().into(), PAGE, seed, &mut Reader(&shelf, Vec::new()));
        let mut receiver = Receiver::without_cache(base, PAGE);
        let applied = receiver.apply(&mut plain, table.as_slice().into(), seed.1);
        // Without a cache, each run is one of the seed.
        if let Ok(counts) = applied {
            prop_assert_eq!(filled, Ok(counts.seeded));
        }
    }
}

#[test]
fn pages_of_the_seed_go_as_zeros_and_are_no_part_of_the_cache() {
    let shelf = Shelf(vec![1, 2, 3, 4]);
    let known = shelf.known();
    let mut sender = Sender::new(16 * PAGE as u64, PAGE);
    let (plain, places) = records(&[(0, vec![1, 2, 9, 4])]);
    let mut go = || {
        let mut chunk = plain.clone();
        chunk.resize(plain.len() + TABLE_ROOM, 0);
        let mut pass = sender.begin(&mut chunk, plain.len(), Some(&known));
        let (at, address, count) = places[0];
        pass.records(at, address, count);
        let unknown = pass.unknown();
        (pass.finish(), unknown, chunk)
    };
    let ((_, counts), unknown, chunk) = go();
    assert_eq!((counts.stored, counts.deltas, counts.seeded), (1, 0, 3));
    assert!((unknown - 0.25).abs() < 1e-9, "{unknown}");
    assert!(chunk[RECORD_HEAD..RECORD_HEAD + PAGE] == [0; PAGE]);
    // A page that is sent again has changed: its hash is not computed.
    let ((_, counts), unknown, _) = go();
    assert_eq!((counts.stored, counts.deltas, counts.seeded), (4, 1, 0));
    assert!(unknown == 0.0, "{unknown}");
}

#[test]
fn a_wrong_offer_is_named() {
    let wrong = |offers: &[Vec<u8>]| {
        let mut known = Known::default();
        let learnt = offers.iter().try_for_each(|offer| known.learn(offer));
        (learnt.unwrap_err(), known.len())
    };
    let good = offer(5, &KEY, &[[1; 16], [2; 16]]);
    assert_eq!(wrong(&[vec![0; 39]]), (OfferError::Length { got: 39 }, 0));
    assert_eq!(wrong(&[good[..71].to_vec()]), (OfferError::Length { got: 71 }, 0));
    let long = offer(0, &KEY, &vec![[1; 16]; MAX_OFFER + 1]);
    assert_eq!(wrong(std::slice::from_ref(&long)), (OfferError::Length { got: long.len() }, 0));
    let last = offer(u32::MAX, &KEY, &[[1; 16]]);
    assert_eq!(wrong(&[last]), (OfferError::Pages { pages: 1, first: u32::MAX }, 0));
    assert_eq!(wrong(&[good, offer(7, &[8; 32], &[[3; 16]])]), (OfferError::Key, 2));
}

#[test]
fn a_wrong_table_or_page_is_named() {
    let shelf = Shelf(vec![1, 2, 3]);
    let wrong = |table: &[u8]| {
        let mut plain = vec![0; 4 * (RECORD_HEAD + PAGE)];
        fill(&mut plain, table.into(), PAGE, (4, 3), &mut Reader(&shelf, Vec::new())).unwrap_err()
    };
    // gap, pages, step (zigzag), bits. Slots 4 to 6 are the seed.
    let said = wrong(&[8, 2, 12, 3]).to_string();
    assert!(said.contains("names 2 slots from 6 of 7"), "{said}");
    let said = wrong(&[8, 2, 8, 1]).to_string();
    assert!(said.contains("slot 4 of the seed, which never changes"), "{said}");
    let mut plain = vec![0; 100];
    let lost = fill(
        &mut plain,
        [8, 1, 8, 1].as_slice().into(),
        PAGE,
        (0, 9),
        &mut Reader(&shelf, Vec::new()),
    );
    assert_eq!(lost, Err(FillError::Page { number: 4, reason: "no such page".into() }));
}
