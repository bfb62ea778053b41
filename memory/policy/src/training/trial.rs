//! The trial of a dictionary on the held-out pages.

use std::sync::Arc;
use std::time::Instant;

use codec::Dictionary;

use super::{Had, State, Training, AT_ONCE};
use crate::channel::Over;
use crate::stats::{add as count, thread_cpu};
use crate::trainer::{cost, gain, is_held_out, pays, FEWEST};

impl Training {
    pub(super) fn look_for_dictionary(&mut self, until: Instant) -> Result<(), Over> {
        self.state = State::Given(until);
        if !self.channel.flush()? {
            return Ok(());
        }
        let Some(answer) = self.channel.receive(&mut self.bytes)? else { return Ok(()) };
        if answer.len == 0 {
            count(&self.counters.dictionary_no_gain, 1);
            self.last = self.this;
            self.end(true);
            return Ok(());
        }
        let Some(mut room) = self.dictionaries.take_room() else {
            self.fail();
            return Ok(());
        };
        let bytes = &self.bytes[..answer.len];
        if Arc::get_mut(&mut room).is_some_and(|room| room.digest(bytes).is_ok()) {
            // The answer is complete.
            self.channel.close();
            let had = Had::default();
            self.state = State::Trying { room, len: answer.len, next: 0, had };
            Ok(())
        } else {
            self.dictionaries.give_back(room);
            Err(Over::Lied)
        }
    }

    pub(super) fn try_out(&mut self, room: Arc<Dictionary>, len: usize, from: usize, mut had: Had) {
        let to = (from + 3 * AT_ONCE).min(self.found);
        for number in (from..to).filter(|&number| is_held_out(number)) {
            let index = self.indices[number];
            let there = self.is_eligible(index)
                && self.reader.read(&self.worker, index, false, &mut self.plain).is_ok();
            if !there {
                continue;
            }
            let newest = self.dictionaries.newest().map(|(_, newest)| newest);
            let begun = thread_cpu();
            let (encoded, _) = self.encoder.encode_with(newest, &self.plain[..], &mut self.coded);
            let between = thread_cpu();
            had.before += cost(encoded.codec, encoded.len);
            let (encoded, used) =
                self.encoder.encode_with(Some(&room), &self.plain[..], &mut self.coded);
            had.cpu_after += thread_cpu().saturating_sub(between);
            had.cpu_before += between.saturating_sub(begun);
            if used {
                let payload = &self.coded[..encoded.len];
                let decoded = self.decoder.decode_with(&room, payload, &mut self.again[..]);
                if decoded.is_err() || self.again != self.plain {
                    self.drop_room(room);
                    return self.lied();
                }
            }
            had.after += cost(encoded.codec, encoded.len);
            had.pages += 1;
        }
        if to < self.found {
            self.state = State::Trying { room, len, next: to, had };
            return;
        }
        let gain = gain(had.before, had.after);
        if had.pages < FEWEST || !pays(gain, had.cpu_before, had.cpu_after) {
            self.drop_room(room);
            count(&self.counters.dictionary_no_gain, 1);
            self.last = self.this;
            return self.end(true);
        }
        self.encoder.release_dictionary();
        let store = self.worker.store();
        match self.dictionaries.install(store, room, &self.bytes[..len], gain) {
            Ok(_) => {
                count(&self.counters.dictionary_installed, 1);
                self.last = self.this;
                self.pauses = 0;
                self.end(false);
            }
            Err(_) => self.fail(),
        }
    }

    fn drop_room(&mut self, room: Arc<Dictionary>) {
        self.encoder.release_dictionary();
        self.dictionaries.give_back(room);
    }
}
