//! Recovery: takes over another server's table.
//!
//! Everything is rebuilt from the table alone. Every entry that names an object claims its place
//! again; a place that no entry names is free. Then a killed server leaves no trace: pin counts are
//! cleared, and no entry names a place that it had claimed and not published, or not yet freed. The
//! pages of each group are counted; the objects of a group without pages are freed.
//!
//! An entry that names no place, a place in another class's slab, or a place that is taken, comes
//! from damage and not from a kill. The objects' checksums decide which of two contradicting
//! entries is right. A first scan verifies only the first object of each region, so that taking
//! over costs a tenth of a microsecond a page. After a contradiction, a second scan verifies every
//! object. Only the pages of wrong entries are lost.

use std::io;

use crate::class::{class_word, TABLE};
use crate::entry::{Object, State, Word, MAX_OBJECT, RARE};
use crate::heap::Heap;
use crate::inject;
use crate::layout::{DICTIONARIES, SLAB_BITS};
use crate::object::{checksum, dictionary_of, is_huge, locate};
use crate::record::Record;
use crate::slab::{Role, MAX_OBJECTS};
use crate::slot::Slot;
use crate::superblock;

/// The contents of a table.
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

/// Why a scan stopped early.
enum Stop {
    /// Two entries contradict each other: one of them is damaged.
    Contradiction,
    /// The kernel refused.
    Io(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Rebuilds the lists of a new `heap` from its table.
pub(crate) fn recover(heap: &Heap) -> io::Result<Found> {
    for strict in [false, true] {
        heap.reset();
        let found = match scan(heap, strict) {
            Ok(found) => found,
            Err(Stop::Contradiction) => continue,
            Err(Stop::Io(error)) => return Err(error),
        };
        inject::step();
        link(heap);
        // Slabs that the last server had ready or had just taken have memory that is not counted.
        let surplus = heap.map.resident()? > heap.regions.used();
        heap.regions.adopt_rest(&heap.map, surplus)?;
        inject::step();
        // Only a damaged entry names a counted slab without memory.
        if strict || heap.map.resident()? >= heap.regions.used() {
            return Ok(found);
        }
    }
    unreachable!("a strict scan decides")
}

/// One pass over the table, then over the records of groups. A `strict` scan rejects every entry
/// whose object has a wrong checksum.
fn scan(heap: &Heap, strict: bool) -> Result<Found, Stop> {
    heap.groups.adopt(&heap.map, &heap.regions)?;
    let dictionaries = superblock::dictionaries(heap.map.superblock());
    heap.regions.adopt_dictionaries(&heap.map, dictionaries)?;
    let mut scan = Scan {
        heap,
        strict,
        dictionaries,
        kinds: vec![0; heap.map.layout().regions as usize].into_boxed_slice(),
        bytes: [0; MAX_OBJECT],
        found: Found::default(),
    };
    for (index, slot) in (0_u64..).zip(heap.map.table()) {
        scan.page(index, slot)?;
    }
    for (group, record) in (0_u32..).zip(heap.groups.records(&heap.map)) {
        scan.group(group, record)?;
    }
    Ok(scan.found)
}

/// A scan in progress.
struct Scan<'a> {
    heap: &'a Heap,
    strict: bool,
    /// Dictionaries in the store.
    dictionaries: usize,
    /// Pages a slab of each region; 0 until known.
    kinds: Box<[u32]>,
    bytes: [u8; MAX_OBJECT],
    found: Found,
}

impl Scan<'_> {
    /// One entry of the table.
    fn page(&mut self, index: u64, slot: &Slot) -> Result<(), Stop> {
        let word = slot.load();
        if word == Word::ABSENT {
            return Ok(());
        }
        self.found.pages += 1;
        match word.state() {
            Some(State::Same(_)) => self.found.same += 1,
            // The backing device is checked when it is installed.
            Some(State::Backed(_)) => self.found.backed += 1,
            Some(State::Member(member)) => {
                if self.heap.groups.count(&self.heap.map, member.group) {
                    self.found.grouped += 1;
                    unpin(slot);
                } else {
                    self.lose(slot);
                }
            }
            // The dictionary is missing: with another one the object would decompress to a wrong
            // page.
            Some(State::Object(object))
                if dictionary_of(object.tag).is_some_and(|at| at >= self.dictionaries) =>
            {
                self.lose(slot);
            }
            _ => self.object(index, slot)?,
        }
        Ok(())
    }

    /// An entry of the table that names an object, or a damaged one.
    fn object(&mut self, index: u64, slot: &Slot) -> Result<(), Stop> {
        let word = slot.load();
        let Some(object) = self.examine(index, slot)? else {
            self.found.lost += 1;
            return Ok(());
        };
        self.found.bytes += u64::from(object.len);
        self.found.huge += u64::from(is_huge(word, &object));
        self.found.same += u64::from(object.tag == RARE);
        if let Some(place) = dictionary_of(object.tag) {
            self.found.dictionary[place] += 1;
        }
        Ok(())
    }

    fn lose(&mut self, slot: &Slot) {
        self.found.lost += 1;
        slot.store(Word::LOST);
        inject::step();
    }

    /// The objects of a group.
    fn group(&mut self, group: u32, record: &Record) -> Result<(), Stop> {
        // Entries behind the first absent one are not read.
        let (mut sound, mut ended) = (true, false);
        for (number, slot) in record.pieces().iter().enumerate() {
            if slot.load() == Word::ABSENT {
                sound &= number > 0;
                ended = true;
                continue;
            }
            if !record.is_taken() {
                // No page is in the group: it was being made, or freed.
                slot.store(Word::ABSENT);
                inject::step();
                continue;
            }
            let index = self.heap.map.layout().piece_index(group, number);
            match self.examine(index, slot)? {
                Some(object) => self.found.bytes += u64::from(object.len),
                None => sound &= ended,
            }
        }
        if record.is_taken() {
            self.found.groups += 1;
            // Reading one of its pages fails, and writing the page removes it from the group.
            self.found.lost += if sound { 0 } else { u64::from(record.parts()) };
        }
        Ok(())
    }

    /// Claims the object of an entry. If the entry cannot be right, marks it as lost and returns
    /// `None`.
    fn examine(&mut self, index: u64, slot: &Slot) -> Result<Option<Object>, Stop> {
        let sound = match slot.load().state() {
            Some(State::Object(object)) => self.claim(index, &object)?.then_some(object),
            _ => None,
        };
        if sound.is_some() {
            unpin(slot);
        } else {
            slot.store(Word::LOST);
            inject::step();
        }
        Ok(sound)
    }

    /// Claims an object's place; `false` if its entry cannot be right.
    fn claim(&mut self, index: u64, object: &Object) -> Result<bool, Stop> {
        let (heap, map) = (self.heap, &self.heap.map);
        let Some((class, place)) = locate(map, object) else { return Ok(false) };
        let of = TABLE[class];
        let bytes = &mut self.bytes[..object.len as usize];
        let mut whole = || map.read(place, bytes) == checksum(index, object, bytes);
        if self.strict && !whole() {
            return Ok(false);
        }
        let region = object.slab >> SLAB_BITS;
        let kind = &mut self.kinds[region as usize];
        // The first object of a region decides the slab length of the whole region, so it is
        // verified.
        if *kind == 0 {
            if !whole() {
                return Ok(false);
            }
            heap.regions.adopt_region(map, region, of.pages)?;
            *kind = of.pages;
        }
        let contradiction = if self.strict { Ok(false) } else { Err(Stop::Contradiction) };
        if *kind != of.pages {
            return contradiction;
        }
        let slab = map.slab(object.slab);
        if slab.role() == Role::Bare {
            slab.reset(Role::Full, class_word(class), of.objects);
            heap.regions.adopt_slab(object.slab, of.pages);
        } else if slab.class() != class_word(class) {
            return contradiction;
        }
        if !slab.claim_this(object.index) {
            return contradiction;
        }
        Ok(true)
    }
}

/// Clears a killed server's pins.
fn unpin(slot: &Slot) {
    let word = slot.load();
    if word.unpinned() != word {
        slot.store(word.unpinned());
        inject::step();
    }
}

/// Lists the slabs with free objects by number, not the fuller ones first; compaction makes up for
/// that.
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
                slab.set_role(Role::Listed);
                list.push_front(&heap.map, number);
            }
        }
    }
}
