//! The rounds of training: each begins when it is due, and ends with a result or in vain.

use std::time::{Duration, Instant};

use super::{held, State, Training};
use crate::channel::{Over, Question, SAMPLES};
use crate::stats::add as count;

/// The time limit of a trainer from the request on: its start, the samples, the training. A trainer
/// has nice 19: on two busy cores it gets 7 ms of CPU a second, and it needs about one second.
const PATIENCE: Duration = Duration::from_secs(600);

/// The pause before a due round is considered again, while memory is short.
const PRESSED: Duration = Duration::from_secs(10);

/// The longest pause between rounds, as a multiple of the first.
const MOST_PAUSES: u32 = 24;

impl Training {
    pub(super) fn begin_if_due(&mut self, pressed: bool) {
        if Instant::now() < self.next || self.dictionaries.rooms() == 0 {
            return;
        }
        let store = self.worker.store();
        let (held, freed) = (held(store), store.objects_freed());
        // A new training needs other pages: most were written since the last round, or there are
        // many more.
        let others = self.last.is_none_or(|(then, before)| {
            freed.saturating_sub(before) >= then || held >= then.saturating_mul(4)
        });
        if held < self.least || !others {
            // The number of held pages changes slowly.
            self.next = Instant::now() + Duration::from_secs(1);
            return;
        }
        if pressed {
            count(&self.counters.dictionary_pressed, 1);
            self.next = Instant::now() + PRESSED;
            return;
        }
        count(&self.counters.dictionary_rounds, 1);
        self.this = Some((held, freed));
        self.every = (held / SAMPLES as u64).max(1);
        self.found = 0;
        self.round += 1;
        let newest = store.dictionaries().checked_sub(1);
        let there = newest.and_then(|place| store.dictionary(place, &mut self.bytes).ok());
        let current = there.map_or(0, |found| found.len);
        let question = Question { round: self.round, level: self.trainer.settings.level() };
        match self.channel.open(&question, &self.bytes[..current]) {
            Ok(theirs) => {
                (self.trainer.start)(theirs);
                let (until, skip) = (Instant::now() + PATIENCE, self.every / 2);
                self.state = State::Giving { until, cursor: 0, skip, full: false };
            }
            Err(_) => self.fail(),
        }
    }

    /// Ends the round, because the trainer is gone or its data is invalid.
    pub(super) fn over(&mut self, over: Over) {
        match over {
            Over::Gone => self.late(),
            Over::Lied => self.lied(),
        }
    }

    /// Ends the round, because the trainer did not answer in time: it was killed, hangs, or was
    /// never started.
    pub(super) fn late(&mut self) {
        count(&self.counters.dictionary_late, 1);
        self.give_up();
    }

    /// Ends the round, because the trainer's data is invalid.
    pub(super) fn lied(&mut self) {
        count(&self.counters.dictionary_refused, 1);
        self.give_up();
    }

    /// Ends the round, because memory is short and a trainer may use some.
    pub(super) fn make_room(&mut self) {
        count(&self.counters.dictionary_pressed, 1);
        self.give_up();
    }

    pub(super) fn fail(&mut self) {
        count(&self.counters.dictionary_put_off, 1);
        self.give_up();
    }

    /// Abandons the round and the trainer.
    fn give_up(&mut self) {
        (self.trainer.stop)();
        self.end(true);
    }

    /// Ends the round. The pause grows with consecutive rounds without a result.
    pub(super) fn end(&mut self, in_vain: bool) {
        self.worker.rest();
        self.channel.close();
        if in_vain {
            self.pauses = (self.pauses * 2).clamp(1, MOST_PAUSES);
        }
        self.next = Instant::now() + self.period * self.pauses.max(1);
        self.state = State::Idle;
    }
}
