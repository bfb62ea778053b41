//! Messages for a person.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Messages for a person, limited so that no client can fill a disk with them.
pub(super) struct Notices<F> {
    say: F,
    /// The start of the current minute, and the lines in it.
    lines: Mutex<(Instant, u32)>,
}

impl<F: Fn(&str)> Notices<F> {
    pub(super) fn new(say: F) -> Self {
        Self { say, lines: Mutex::new((Instant::now(), 0)) }
    }

    pub(super) fn add(&self, line: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, said) = &mut *lines;
        if began.elapsed() >= Duration::from_secs(60) {
            if *said > LINES {
                (self.say)(&format!("{} more lines in the last minute left out", *said - LINES));
            }
            (*began, *said) = (Instant::now(), 0);
        }
        *said = said.saturating_add(1);
        if *said <= LINES {
            (self.say)(line);
        }
    }
}

const LINES: u32 = 10;
