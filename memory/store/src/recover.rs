//! Another server's table, taken over.
//!
//! The table is all there is to go by. Every word that names an object claims its place again; what
//! no word names is free. A killed server leaves nothing else behind: pins are taken off, places it
//! had claimed and not published are named by nobody, and neither are those it had not yet freed.
//! How many pages are in a group is counted; the objects of one without pages are freed.
//!
//! A word that names no place, a place of another class's slab, or one that is taken, is not the
//! trace of a killed server but of damage. Which of two words that contradict each other is right,
//! their objects' checksums say. They are asked for the first object of each region only, so that
//! taking over costs a tenth of a microsecond a page; after a contradiction everything is done once
//! more and every one is asked. The page of a wrong one is lost, and no other.

use std::io;

use crate::class::TABLE;
use crate::heap::{class_word, Heap};
use crate::inject;
use crate::layout::{DICTIONARIES, SLAB_BITS};
use crate::object::{checksum, dictionary_of, is_huge, locate};
use crate::slab::{Role, MAX_OBJECTS};
use crate::slot::{Object, Slot, State, Word, MAX_OBJECT, RARE};
use crate::superblock;

/// What the table holds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    pub(crate) pages: u64,
    pub(crate) same: u64,
    pub(crate) huge: u64,
    pub(crate) bytes: u64,
    pub(crate) grouped: u64,
    pub(crate) groups: u64,
    pub(crate) backed: u64,
    pub(crate) lost: u64,
    pub(crate) dictionary: [u64; DICTIONARIES],
}

/// Two words contradict each other: one of them is damaged.
struct Contradiction;

/// Makes the lists of `heap`, which is new, from its table.
pub(crate) fn recover(heap: &Heap) -> io::Result<Found> {
    for strict in [false, true] {
        heap.forget();
        let Ok(found) = scan(heap, strict)? else { continue };
        inject::step();
        link(heap);
        // Whatever a server had ready, or had just taken, has memory and is not counted.
        let surplus = heap.map.resident()? > heap.regions.used();
        heap.regions.adopt_rest(&heap.map, surplus)?;
        inject::step();
        // A slab without memory is one that only a damaged word knows.
        if strict || heap.map.resident()? >= heap.regions.used() {
            return Ok(found);
        }
    }
    unreachable!("a strict scan decides")
}

/// One pass over the table. `strict` believes no word whose object's checksum is wrong.
fn scan(heap: &Heap, strict: bool) -> io::Result<Result<Found, Contradiction>> {
    let mut found = Found::default();
    let mut bytes = [0; MAX_OBJECT];
    let mut kinds = vec![0; heap.map.layout().regions as usize];
    heap.groups.adopt(&heap.map, &heap.regions)?;
    let places = superblock::dictionaries(heap.map.superblock());
    heap.regions.adopt_dictionaries(&heap.map, places)?;
    for (index, slot) in (0_u64..).zip(heap.map.table()) {
        let word = slot.load();
        if word == Word::ABSENT {
            continue;
        }
        found.pages += 1;
        let state = word.state();
        if let Some(State::Same(_)) = state {
            found.same += 1;
            continue;
        }
        if let Some(State::Backed(_)) = state {
            // What it claims is another file's, which is asked when that is there.
            found.backed += 1;
            continue;
        }
        if let Some(State::Member(member)) = state {
            if heap.groups.count(&heap.map, member.group) {
                found.grouped += 1;
                unpin(slot);
            } else {
                found.lost += 1;
                slot.store(Word::LOST);
                inject::step();
            }
            continue;
        }
        if matches!(state, Some(State::Object(object)) if dictionary_of(object.tag).is_some_and(|at| at >= places))
        {
            // Another dictionary would make something else of it.
            found.lost += 1;
            slot.store(Word::LOST);
            inject::step();
            continue;
        }
        let object = match examine(heap, &mut kinds, (index, slot), strict, &mut bytes)? {
            Ok(Some(object)) => object,
            Ok(None) => {
                found.lost += 1;
                continue;
            }
            Err(contradiction) => return Ok(Err(contradiction)),
        };
        found.bytes += u64::from(object.len);
        found.huge += u64::from(is_huge(word, &object));
        found.same += u64::from(object.tag == RARE);
        if let Some(place) = dictionary_of(object.tag) {
            found.dictionary[place] += 1;
        }
    }
    for (group, record) in (0_u32..).zip(heap.groups.records(&heap.map)) {
        // What comes behind an entry that names nothing is not read.
        let (mut sound, mut ended) = (true, false);
        for (number, slot) in record.pieces().iter().enumerate() {
            if slot.load() == Word::ABSENT {
                sound &= number > 0;
                ended = true;
                continue;
            }
            if !record.is_taken() {
                // No page is in it, so that it was being made, or freed.
                slot.store(Word::ABSENT);
                inject::step();
                continue;
            }
            let index = heap.map.layout().piece_index(group, number);
            match examine(heap, &mut kinds, (index, slot), strict, &mut bytes)? {
                Ok(Some(object)) => found.bytes += u64::from(object.len),
                Ok(None) => sound &= ended,
                Err(contradiction) => return Ok(Err(contradiction)),
            }
        }
        if record.is_taken() {
            found.groups += 1;
            // Each of its pages says so when it is read, and leaves it when it is written.
            found.lost += if sound { 0 } else { u64::from(record.parts()) };
        }
    }
    Ok(Ok(found))
}

/// Claims the object of an entry; `None`, and the entry says that it is lost, if it cannot be
/// right.
fn examine(
    heap: &Heap,
    kinds: &mut [u32],
    (index, slot): (u64, &Slot),
    strict: bool,
    bytes: &mut [u8; MAX_OBJECT],
) -> io::Result<Result<Option<Object>, Contradiction>> {
    let sound = match slot.load().state() {
        Some(State::Object(object)) => match claim(heap, kinds, (index, &object), strict, bytes)? {
            Ok(sound) => sound.then_some(object),
            Err(contradiction) => return Ok(Err(contradiction)),
        },
        _ => None,
    };
    if sound.is_some() {
        unpin(slot);
    } else {
        slot.store(Word::LOST);
        inject::step();
    }
    Ok(Ok(sound))
}

/// Takes off what a killed server had pinned.
fn unpin(slot: &Slot) {
    let word = slot.load();
    if word.unpinned() != word {
        slot.store(word.unpinned());
        inject::step();
    }
}

/// Claims an object's place; `false` if its word cannot be right. `kinds` are the pages of the
/// slabs of each region, 0 until one is known.
fn claim(
    heap: &Heap,
    kinds: &mut [u32],
    (index, object): (u64, &Object),
    strict: bool,
    bytes: &mut [u8; MAX_OBJECT],
) -> io::Result<Result<bool, Contradiction>> {
    let map = &heap.map;
    let Some((class, place)) = locate(map, object) else { return Ok(Ok(false)) };
    let of = TABLE[class];
    let whole = |bytes: &mut [u8; MAX_OBJECT]| {
        let bytes = &mut bytes[..object.len as usize];
        map.read(place, bytes) == checksum(index, object, bytes)
    };
    let contradiction = || Ok(if strict { Ok(false) } else { Err(Contradiction) });
    if strict && !whole(bytes) {
        return Ok(Ok(false));
    }
    let region = object.slab >> SLAB_BITS;
    let kind = &mut kinds[region as usize];
    // What the first object of a region says holds for all of it.
    if *kind == 0 {
        if !whole(bytes) {
            return Ok(Ok(false));
        }
        heap.regions.adopt_region(map, region, of.pages)?;
        *kind = of.pages;
    }
    if *kind != of.pages {
        return contradiction();
    }
    let slab = map.slab(object.slab);
    if slab.role() == Role::Bare {
        slab.reset(Role::Full, class_word(class), of.objects);
        heap.regions.adopt_slab(object.slab, of.pages);
    } else if slab.class() != class_word(class) {
        return contradiction();
    }
    if !slab.claim_this(object.index) {
        return contradiction();
    }
    Ok(Ok(true))
}

/// Lists the slabs with free objects: in the order of their numbers, which is not that of their
/// fullness; compaction makes up for it.
fn link(heap: &Heap) {
    for (region, pages) in heap.regions.known() {
        for number in 0..crate::layout::CUTS[pages as usize].slabs {
            let number = region << SLAB_BITS | number;
            let slab = heap.map.slab(number);
            if slab.role() != Role::Full {
                continue;
            }
            debug_assert!(slab.used_bits().count_ones() <= MAX_OBJECTS);
            let mut list = heap.lock(slab.class() as usize);
            list.slabs += 1;
            if !slab.is_full() {
                slab.settle(Role::Listed);
                list.push_front(&heap.map, number);
            }
        }
    }
}
