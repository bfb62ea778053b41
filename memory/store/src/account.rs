//! Counts entries that enter the table, and frees the objects, blocks and groups of entries that
//! leave it.

use crate::entry::{Object, State, Word, RARE};
use crate::heap::Claimed;
use crate::inject;
use crate::object::{is_huge, locate};
use crate::stats::{self, add, sub};
use crate::worker::Worker;

impl Worker {
    /// Counts the page of an entry that this worker put into the table.
    pub(crate) fn count_word(&self, word: Word) {
        let counters = self.counters();
        add(&counters.pages, 1);
        match word.state() {
            Some(State::Object(object)) => {
                add(&counters.bytes, u64::from(object.len));
                stats::count_dictionary(counters, object.tag, 1);
                if object.tag == RARE {
                    add(&counters.same, 1);
                }
                if is_huge(word, &object) {
                    add(&counters.huge, 1);
                    add(&counters.huge_since, 1);
                }
            }
            Some(State::Member(_)) => add(&counters.grouped, 1),
            Some(State::Backed(_)) => add(&counters.backed, 1),
            _ => add(&counters.same, 1),
        }
    }

    /// Frees the object, block or group reference of an entry that this worker removed from the
    /// table.
    pub(crate) fn release_word(&self, old: Word) {
        let counters = self.counters();
        if old != Word::ABSENT {
            sub(&counters.pages, 1);
        }
        match old.state() {
            Some(State::Same(_)) => sub(&counters.same, 1),
            Some(State::Object(object)) => {
                stats::count_dictionary(counters, object.tag, 1_u64.wrapping_neg());
                if object.tag == RARE {
                    sub(&counters.same, 1);
                }
                if is_huge(old, &object) {
                    sub(&counters.huge, 1);
                }
                self.release(&object);
            }
            Some(State::Member(member)) => {
                sub(&counters.grouped, 1);
                self.drop_part(member.group);
            }
            Some(State::Backed(at)) => {
                sub(&counters.backed, 1);
                if let Some(backing) = self.store().backing.get() {
                    backing.drop_hold(at.block);
                }
            }
            _ => {}
        }
    }

    /// Frees an object that no entry names any more.
    pub(crate) fn release(&self, object: &Object) {
        let counters = self.counters();
        sub(&counters.bytes, u64::from(object.len));
        add(&counters.freed, 1);
        // An entry that names no place is damaged. There is nothing to free.
        if let Some((class, _)) = locate(&self.store().heap.map, object) {
            let Object { slab, index, .. } = *object;
            self.store().heap.release(Claimed { slab, class, index });
            inject::step();
        }
    }

    /// Drops one reference to a group; dropping the last one frees the group.
    pub(crate) fn drop_part(&self, group: u32) {
        let heap = &self.store().heap;
        // No group has this number: the entry is damaged and was never counted.
        let Some(record) = heap.groups.record(&heap.map, group) else { return };
        if !record.drop_part() {
            return;
        }
        inject::step();
        for piece in record.pieces() {
            if piece.load() == Word::ABSENT {
                continue;
            }
            let old = piece.publish(Word::ABSENT);
            inject::step();
            if let Some(State::Object(object)) = old.state() {
                self.release(&object);
            }
        }
        heap.groups.put(record);
        add(&self.counters().groups, 1_u64.wrapping_neg());
        inject::step();
    }
}
