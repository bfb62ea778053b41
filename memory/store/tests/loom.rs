//! Loom models of a slot, a slab and the bytes of its objects: every interleaving, and every value
//! that a weakly ordered load may return.
//!
//! `scripts/loom` runs them, also with each ordering weakened in turn, and then requires a failure.
#![cfg(loom)]
#![expect(unsafe_code, reason = "the models write and read the bytes of objects")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use store::{
    fence_read, fence_write, Backed, Blocks, Freed, Member, Object, Record, Role, Slab, Slot,
    State, Word,
};

/// Objects in the model's slabs.
const OBJECTS: u32 = 2;

/// Explores `model` with `preemptions` forced switches at most; blocking switches are free.
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A table of two slots, two slabs of two objects each, and the objects' bytes: loom's cells detect
/// a reader beside a writer, and a write that is not ordered before a read.
struct Model {
    slots: [Slot; 2],
    slabs: [Slab; 2],
    bytes: [[UnsafeCell<u32>; 2]; 2],
    /// One record of a group, and a cell that stands for its ownership.
    record: Record,
    whose: UnsafeCell<u32>,
    /// Held while a record is taken.
    taking: Mutex<()>,
}

impl Model {
    fn new() -> Self {
        Self {
            slots: [(); 2].map(|()| Slot::new(Word::ABSENT)),
            slabs: [Slab::new(Role::Owned, OBJECTS), Slab::new(Role::Owned, OBJECTS)],
            bytes: [(); 2].map(|()| [(); 2].map(|()| UnsafeCell::new(0))),
            record: Record::new(),
            whose: UnsafeCell::new(0),
            taking: Mutex::new(()),
        }
    }

    fn word(slab: u32, index: u32, tag: u8) -> Word {
        Word::object(Object { slab, index, len: 4, bump: 0, tag })
    }

    /// As `Worker::put`, from the slab that the caller owns; the tag stands for the bytes.
    fn put(&self, slot: usize, slab: u32, tag: u8) -> bool {
        let Some(index) = self.slabs[slab as usize].claim() else { return false };
        let cell = &self.bytes[slab as usize][index as usize];
        // SAFETY: the place is claimed; loom checks just that.
        cell.with_mut(|bytes| unsafe { *bytes = u32::from(tag) });
        let old = self.slots[slot].publish(Self::word(slab, index, tag));
        self.free(old);
        true
    }

    fn free(&self, old: Word) -> Freed {
        match old.state() {
            Some(State::Object(object)) => {
                self.slabs[object.slab as usize].release(object.index, OBJECTS)
            }
            Some(State::Member(_)) => {
                self.drop_part();
                Freed::Done
            }
            _ => Freed::Done,
        }
    }

    /// As `Worker::get`: the bytes must be those of the entry.
    fn get(&self, slot: usize) -> Option<u8> {
        let word = self.slots[slot].pin(true).ok()?;
        if let Some(State::Member(member)) = word.state() {
            let stamp = self.record.stamp();
            let tag = self.get_piece(stamp);
            self.slots[slot].unpin();
            // The tag of a member is its group's, and one more for each position.
            return Some(tag + u8::try_from(member.position).unwrap());
        }
        let Some(State::Object(object)) = word.state() else { unreachable!("it was pinned") };
        let cell = &self.bytes[object.slab as usize][object.index as usize];
        // SAFETY: the object is pinned; loom checks just that.
        let bytes = cell.with(|bytes| unsafe { *bytes });
        self.slots[slot].unpin();
        assert_eq!(bytes, u32::from(object.tag), "bytes of another object");
        Some(object.tag)
    }

    /// As compaction: moves the slot's object to the other slab, which the caller owns.
    fn relocate(&self, slot: usize, to: u32) -> bool {
        let Ok(pinned) = self.slots[slot].pin(false) else { return false };
        let Some(State::Object(object)) = pinned.state() else { unreachable!("it was pinned") };
        let claimed = if object.slab == to { None } else { self.slabs[to as usize].claim() };
        let Some(index) = claimed else {
            self.slots[slot].unpin();
            return false;
        };
        let from = &self.bytes[object.slab as usize][object.index as usize];
        // SAFETY: the object is pinned.
        let bytes = from.with(|bytes| unsafe { *bytes });
        let cell = &self.bytes[to as usize][index as usize];
        // SAFETY: the place is claimed.
        cell.with_mut(|to| unsafe { *to = bytes });
        if self.slots[slot].relocate(pinned, Self::word(to, index, object.tag)) {
            self.slabs[object.slab as usize].release(object.index, OBJECTS);
            true
        } else {
            self.slots[slot].unpin();
            self.slabs[to as usize].release(index, OBJECTS);
            false
        }
    }
}

impl Model {
    /// As `Worker::put_group`, with its only object in the slab that the caller owns, for the pages
    /// 0 and 1, if they have the contents `first` and the next.
    fn group(&self, slab: u32, first: u8, stamp: u64) -> u32 {
        let taking = self.taking.lock().unwrap();
        if !self.record.take(3, stamp) {
            return 0;
        }
        drop(taking);
        // SAFETY: the record was taken; loom checks that no other thread has it.
        self.whose.with_mut(|whose| unsafe { *whose = u32::from(first) });
        let Some(index) = self.slabs[slab as usize].claim() else {
            (0..3).for_each(|_| self.drop_part());
            return 0;
        };
        let cell = &self.bytes[slab as usize][index as usize];
        // SAFETY: the place is claimed.
        cell.with_mut(|bytes| unsafe { *bytes = u32::from(first) });
        let old = self.record.pieces()[0].publish(Self::word(slab, index, first));
        assert_eq!(old, Word::ABSENT, "the entry of another group");
        let mut joined = 0;
        for position in 0..2 {
            let done = self.join(position, first + u8::try_from(position).unwrap());
            joined += u32::from(done);
            if !done {
                self.drop_part();
            }
        }
        self.drop_part();
        joined
    }

    fn join(&self, position: u32, content: u8) -> bool {
        let slot = &self.slots[position as usize];
        let Ok(pinned) = slot.pin(false) else { return false };
        let same = match pinned.state() {
            Some(State::Object(object)) => {
                let cell = &self.bytes[object.slab as usize][object.index as usize];
                // SAFETY: the object is pinned.
                cell.with(|bytes| unsafe { *bytes }) == u32::from(content)
            }
            _ => false,
        };
        if same && slot.relocate(pinned, Word::member(Member { group: 0, position })) {
            self.free(pinned);
            return true;
        }
        slot.unpin();
        false
    }

    fn drop_part(&self) {
        if !self.record.drop_part() {
            return;
        }
        // SAFETY: the last part was ours, so the record is; loom checks just that.
        self.whose.with_mut(|whose| unsafe { *whose = 0 });
        let old = self.record.pieces()[0].publish(Word::ABSENT);
        self.free(old);
        self.record.free();
    }

    /// The group's bytes, for a thread that has pinned one of its pages.
    fn get_piece(&self, stamp: u64) -> u8 {
        // SAFETY: a page of it is pinned, so the group stays; loom checks just that.
        let whose = self.whose.with(|whose| unsafe { *whose });
        let piece = &self.record.pieces()[0];
        let word = piece.pin(false).expect("the group is there");
        let Some(State::Object(object)) = word.state() else { unreachable!("it was pinned") };
        let cell = &self.bytes[object.slab as usize][object.index as usize];
        // SAFETY: the object is pinned.
        let bytes = cell.with(|bytes| unsafe { *bytes });
        piece.unpin();
        assert_eq!((bytes, whose), (u32::from(object.tag), bytes), "another group");
        assert_eq!(self.record.stamp(), stamp, "the stamp of another group");
        object.tag
    }

    /// As `Worker::modify`, into the slab that the caller owns: adds 4 to the contents.
    fn modify(&self, slot: usize, slab: u32) {
        let slot = &self.slots[slot];
        let pinned = slot.pin(true).expect("an object");
        let Some(State::Object(object)) = pinned.state() else { unreachable!("it was pinned") };
        let from = &self.bytes[object.slab as usize][object.index as usize];
        // SAFETY: the object is pinned.
        let bytes = from.with(|bytes| unsafe { *bytes });
        let tag = u8::try_from(bytes + 4).expect("small");
        let index = self.slabs[slab as usize].claim().expect("there is room");
        let cell = &self.bytes[slab as usize][index as usize];
        // SAFETY: the place is claimed.
        cell.with_mut(|to| unsafe { *to = u32::from(tag) });
        while !slot.supersede(pinned, Self::word(slab, index, tag)) {
            thread::yield_now();
        }
        self.free(pinned);
    }
}

fn spawn(model: &Arc<Model>, run: impl FnOnce(&Model) + Send + 'static) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || run(&model))
}

#[test]
fn a_reader_gets_whole_objects_while_their_places_are_used_again() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let reader = spawn(&model, |model| {
            let seen = model.get(0);
            assert!(matches!(seen, Some(1..=3)), "{seen:?}");
        });
        // The second object goes where there is room, the third where the first one was.
        assert!(model.put(0, 0, 2));
        assert!(model.put(0, 0, 3));
        reader.join().unwrap();
        assert_eq!(model.get(0), Some(3));
    });
}

#[test]
fn an_object_freed_by_another_thread_is_written_again() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        model.put(1, 0, 2);
        // Reads and then frees an object of a slab that it does not own.
        let remote = spawn(&model, |model| {
            assert_eq!(model.get(0), Some(1));
            model.free(model.slots[0].publish(Word::ABSENT));
        });
        // The owner needs a place; there is one if the other thread was faster.
        model.put(1, 0, 3);
        remote.join().unwrap();
        assert!(matches!(model.get(1), Some(2 | 3)));
        assert_eq!(model.get(0), None);
    });
}

#[test]
fn an_object_freed_by_another_thread_is_written_again_when_its_reader_is_done() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        model.put(1, 0, 2);
        let reader = spawn(&model, |model| assert!(matches!(model.get(0), None | Some(1))));
        // Has not read it, and does not own its slab.
        let remote = spawn(&model, |model| {
            model.free(model.slots[0].publish(Word::ABSENT));
        });
        model.put(1, 0, 3);
        reader.join().unwrap();
        remote.join().unwrap();
        assert!(matches!(model.get(1), Some(2 | 3)));
    });
}

#[test]
fn two_writers_of_a_page_free_each_object_once() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let other = spawn(&model, |model| assert!(model.put(0, 1, 2)));
        assert!(model.put(0, 0, 3));
        other.join().unwrap();
        assert!(matches!(model.get(0), Some(2 | 3)));
        // One object remains, and three places are free: a double free or a leak would show here.
        let free = [0, 1].map(|slab| std::iter::from_fn(|| model.slabs[slab].claim()).count());
        assert_eq!(free[0] + free[1], 3);
    });
}

#[test]
fn compaction_moves_under_a_reader_and_a_writer() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let reader = spawn(&model, |model| assert!(matches!(model.get(0), Some(1 | 2))));
        let mover = spawn(&model, |model| {
            model.relocate(0, 1);
        });
        // The writer owns slab 0: it may write where the object was as soon as that is freed.
        assert!(model.put(0, 0, 2));
        reader.join().unwrap();
        mover.join().unwrap();
        assert_eq!(model.get(0), Some(2));
    });
}

#[test]
fn a_modification_comes_before_a_write_or_after_it() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let modifier = spawn(&model, |model| model.modify(0, 1));
        assert!(model.put(0, 0, 2));
        modifier.join().unwrap();
        // Not 5, which would be a modification of the old contents over the new ones.
        assert!(matches!(model.get(0), Some(2 | 6)));
    });
}

#[test]
fn a_modification_waits_for_a_reader() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let reader = spawn(&model, |model| assert!(matches!(model.get(0), Some(1 | 5))));
        model.modify(0, 1);
        // Where the object was there is room again.
        model.put(1, 0, 2);
        model.put(1, 0, 3);
        reader.join().unwrap();
        assert_eq!(model.get(0), Some(5));
    });
}

#[test]
fn a_reader_gets_its_page_while_a_group_is_made_and_another_page_is_removed() {
    explore(2, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        model.put(1, 0, 2);
        let reader = spawn(&model, |model| assert!(matches!(model.get(0), Some(1))));
        let writer = spawn(&model, |model| {
            model.free(model.slots[1].publish(Word::ABSENT));
        });
        model.group(1, 1, 7);
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!((model.get(0), model.get(1)), (Some(1), None));
    });
}

#[test]
fn a_page_rewritten_at_the_same_place_does_not_join_the_group() {
    explore(3, || {
        let model = Arc::new(Model::new());
        // The same entry with other bytes, as when a place is reused.
        let rewritten = |model: &Model, bytes: u32| {
            // The maker of the group may not have freed the last one yet.
            let Some(index) = model.slabs[0].claim() else { return };
            let cell = &model.bytes[0][index as usize];
            // SAFETY: the place is claimed.
            cell.with_mut(|cell| unsafe { *cell = bytes });
            model.free(model.slots[0].publish(Model::word(0, index, 9)));
        };
        rewritten(&model, 1);
        let writer = spawn(&model, move |model| {
            rewritten(model, 3);
            rewritten(model, 5);
        });
        let joined = model.group(1, 1, 7);
        writer.join().unwrap();
        // The writer came last, whether or not the old contents were in a group.
        assert!(joined <= 1);
        assert!(matches!(model.slots[0].load().state(), Some(State::Object(_))));
        // The group has no pages, and its record is free.
        assert!(model.record.take(1, 8));
    });
}

#[test]
fn the_last_reader_frees_a_group_and_its_record_is_reused() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        model.put(1, 0, 2);
        assert_eq!(model.group(1, 1, 7), 2);
        let other = spawn(&model, |model| {
            assert_eq!(model.get(1), Some(2));
            model.free(model.slots[1].publish(Word::ABSENT));
        });
        let reader = spawn(&model, |model| assert!(matches!(model.get(0), Some(1 | 3) | None)));
        model.free(model.slots[0].publish(Word::ABSENT));
        // The last thread has freed it, or is about to.
        model.put(0, 0, 3);
        let again = model.group(1, 3, 8);
        other.join().unwrap();
        reader.join().unwrap();
        assert!(again <= 1);
        assert_eq!(model.get(0), Some(3));
        assert_eq!(model.get(1), None);
    });
}

#[test]
fn an_empty_record_is_reused() {
    explore(3, || {
        let model = Arc::new(Model::new());
        // There is no room for a group's object, so that nothing else orders the two threads.
        for slab in &model.slabs {
            while slab.claim().is_some() {}
        }
        let other = spawn(&model, |model| assert_eq!(model.group(1, 1, 7), 0));
        assert_eq!(model.group(0, 1, 8), 0);
        other.join().unwrap();
        assert!(model.record.take(1, 9));
    });
}

#[test]
fn a_vacated_place_is_written_again() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.put(0, 0, 1);
        let reader = spawn(&model, |model| assert_eq!(model.get(0), Some(1)));
        let other = spawn(&model, |model| {
            model.put(1, 0, 2);
            model.put(1, 0, 3);
        });
        model.relocate(0, 1);
        reader.join().unwrap();
        other.join().unwrap();
        assert_eq!(model.get(0), Some(1));
        assert!(matches!(model.get(1), Some(2 | 3)));
    });
}

#[test]
fn a_full_slab_with_a_free_place_is_listed() {
    explore(3, || {
        let slab = Arc::new(Slab::new(Role::Owned, OBJECTS));
        while slab.claim().is_some() {}
        // How often the slab is in the list behind the class's lock.
        let listed = Arc::new(Mutex::new(0));
        let freer = {
            let (slab, listed) = (Arc::clone(&slab), Arc::clone(&listed));
            thread::spawn(move || {
                if slab.release(0, OBJECTS) == Freed::LookAgain {
                    let mut listed = listed.lock().unwrap();
                    if slab.role() == Role::Full {
                        slab.set_role(Role::Listed);
                        *listed += 1;
                    }
                }
            })
        };
        {
            // The owner has found it full.
            let mut listed = listed.lock().unwrap();
            if slab.set_role(Role::Full) != u64::MAX {
                slab.set_role(Role::Listed);
                *listed += 1;
            }
        }
        freer.join().unwrap();
        assert_eq!(*listed.lock().unwrap(), 1, "a slab with room is in no list, or in it twice");
    });
}

#[test]
fn an_empty_slab_changes_class_once_no_reader_is_in_it() {
    explore(3, || {
        let model = Arc::new(Model::new());
        model.slabs[0].set_role(Role::Listed);
        model.put(0, 0, 1);
        let freer = spawn(&model, |model| {
            model.get(0);
            model.free(model.slots[0].publish(Word::ABSENT));
        });
        // The list's owner: no other thread claims.
        if model.slabs[0].is_empty(OBJECTS) {
            // Now another class's: its state is reset and its bytes are written.
            model.slabs[0].reset(Role::Owned, 1, OBJECTS);
            assert!(model.put(1, 0, 2));
        }
        freer.join().unwrap();
        assert!(matches!(model.get(1), None | Some(2)));
    });
}

/// Two entries, and a backing device of one block behind its header. The device gives no ordering:
/// a read may return any of the writes, unless the entries order them.
struct Device {
    slots: [Slot; 2],
    blocks: Blocks,
    disk: loom::sync::atomic::AtomicU32,
}

impl Device {
    /// Entry 0 is on the device, with the content 1.
    fn new() -> Self {
        let this = Self {
            slots: [(); 2].map(|()| Slot::new(Word::ABSENT)),
            blocks: Blocks::new(2),
            disk: loom::sync::atomic::AtomicU32::new(0),
        };
        assert!(this.write_back(0, 1));
        this
    }

    /// As `Worker::write_back`, for an entry that names nothing.
    fn write_back(&self, slot: usize, content: u32) -> bool {
        if !self.blocks.is_free(1) {
            return false;
        }
        self.blocks.take(1);
        fence_write();
        self.disk.store(content, loom::sync::atomic::Ordering::Relaxed);
        self.blocks.hold(1);
        let word = Word::backed(Backed { block: 1, whole: true, sum: content });
        let old = self.slots[slot].publish(word);
        assert_eq!(old, Word::ABSENT);
        self.blocks.drop_hold(1);
        true
    }

    /// As `Worker::read_back`; the checksum stands for the bytes.
    fn read_back(&self, slot: usize) -> Option<u32> {
        loop {
            let word = self.slots[slot].load_backed();
            let Some(State::Backed(at)) = word.state() else { return None };
            let got = self.disk.load(loom::sync::atomic::Ordering::Relaxed);
            fence_read();
            if self.slots[slot].load() != word {
                continue;
            }
            assert_eq!(got, at.sum, "bytes of another page");
            return Some(got);
        }
    }

    fn discard(&self, slot: usize) {
        if let Some(State::Backed(at)) = self.slots[slot].publish(Word::ABSENT).state() {
            self.blocks.drop_hold(at.block);
        }
    }
}

#[test]
fn a_reused_block_does_not_pass_as_that_of_its_first_page() {
    explore(3, || {
        let device = Arc::new(Device::new());
        let reader = {
            let device = Arc::clone(&device);
            thread::spawn(move || assert!(matches!(device.read_back(0), None | Some(1))))
        };
        let writer = {
            let device = Arc::clone(&device);
            thread::spawn(move || device.write_back(1, 2))
        };
        device.discard(0);
        reader.join().unwrap();
        let written = writer.join().unwrap();
        assert_eq!(device.read_back(1), written.then_some(2));
    });
}

#[test]
fn a_page_during_writeback_reads_unchanged() {
    explore(3, || {
        let device = Arc::new(Device::new());
        device.discard(0);
        let reader = {
            let device = Arc::clone(&device);
            thread::spawn(move || assert!(matches!(device.read_back(1), None | Some(3))))
        };
        assert!(device.write_back(1, 3));
        reader.join().unwrap();
    });
}
