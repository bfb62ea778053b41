//! Sends samples to the trainer: eligible pages, spread over the table, a few at a time.

use std::time::Instant;

use codec::Codec;
use device::{codec_of, RECOMPRESSED};
use store::Page;

use super::{State, Training, AT_ONCE};
use crate::channel::{Over, SAMPLES};
use crate::trainer::FEWEST;

/// Table entries that a step looks at.
const LOOK_AT: u64 = 4096;

impl Training {
    /// Sends the trainer a few samples, as many as it reads.
    pub(super) fn give(&mut self, until: Instant, from: u64, mut skip: u64) -> Result<State, Over> {
        let full = |cursor, skip| State::Giving { until, cursor, skip, full: true };
        if !self.channel.flush()? {
            return Ok(full(from, skip));
        }
        let pages = self.worker.store().pages();
        let to = from.saturating_add(LOOK_AT).min(pages);
        let before = self.found;
        for index in from..to {
            if self.found == SAMPLES {
                return Ok(self.end_samples(until));
            }
            if self.found - before == AT_ONCE {
                return Ok(State::Giving { until, cursor: index, skip, full: false });
            }
            if !self.is_eligible(index) {
                continue;
            }
            if skip > 0 {
                skip -= 1;
                continue;
            }
            match self.reader.read(&self.worker, index, false, &mut self.plain) {
                Ok(Page::Object { .. }) => {}
                // The page has changed; or it is damaged, and the client that reads it gets the
                // error.
                _ => continue,
            }
            skip = self.every - 1;
            self.indices[self.found] = index;
            self.found += 1;
            self.channel.put_sample(&self.plain);
            if !self.channel.flush()? {
                return Ok(full(index + 1, skip));
            }
        }
        if to < pages {
            Ok(State::Giving { until, cursor: to, skip, full: false })
        } else {
            Ok(self.end_samples(until))
        }
    }

    /// Handles the end of the samples: too few are not worth a dictionary.
    fn end_samples(&mut self, until: Instant) -> State {
        if self.found / 3 < FEWEST {
            self.fail();
            return State::Idle;
        }
        self.channel.put_end();
        State::Given(until)
    }

    /// Whether the page is in no group, compressed by zstd, and not recompressed.
    pub(super) fn is_eligible(&self, index: u64) -> bool {
        matches!(self.worker.peek(index), Ok((Page::Object { tag, .. }, _))
            if tag & RECOMPRESSED == 0 && codec_of(tag) == Some(Codec::Zstd))
    }
}
