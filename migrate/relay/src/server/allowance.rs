//! Limits the messages that others can cause.

use session::SessionError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time for which an allowance lasts.
const MINUTE: Duration = Duration::from_secs(60);
/// The most messages in that time.
const MOST: u32 = 10;

/// An allowance of ten messages in a minute. It says later how many it has held back.
#[derive(Debug)]
pub struct Allowance {
    since: Instant,
    taken: u32,
    held_back: u64,
}

impl Allowance {
    /// An allowance whose first minute begins now.
    pub fn new(now: Instant) -> Self {
        Self { since: now, taken: 0, held_back: 0 }
    }

    /// The text to print for this message; `None` if too many were printed in this minute. The
    /// first message of a later minute has the number of those before it that were not printed.
    pub fn take(&mut self, now: Instant, text: &str) -> Option<String> {
        let mut text = text.to_owned();
        if now.saturating_duration_since(self.since) >= MINUTE {
            if self.held_back > 0 {
                text.push_str(&format!(" ({} more before it were not named)", self.held_back));
            }
            *self = Self::new(now);
        }
        if self.taken == MOST {
            self.held_back += 1;
            return None;
        }
        self.taken += 1;
        Some(text)
    }
}

/// Connections that did not speak the protocol. A scanner can cause any number of them.
#[derive(Debug)]
pub(super) struct Strangers {
    count: AtomicU64,
    named: Mutex<Allowance>,
}

impl Strangers {
    pub(super) fn new() -> Self {
        Self { count: AtomicU64::new(0), named: Mutex::new(Allowance::new(Instant::now())) }
    }

    /// Counts one more. Returns the message about it, unless too many were printed.
    pub(super) fn add(&self, error: &SessionError) -> Option<String> {
        self.add_at(Instant::now(), error)
    }

    fn add_at(&self, now: Instant, error: &SessionError) -> Option<String> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        named.take(now, &format!("turned a connection away: {error}"))
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_are_named_in_each_minute_and_the_others_counted() {
        let begin = Instant::now();
        let mut allowance = Allowance::new(begin);
        for _ in 0..10 {
            assert_eq!(allowance.take(begin, "x").as_deref(), Some("x"));
        }
        assert_eq!(allowance.take(begin, "x"), None);
        assert_eq!(allowance.take(begin + MINUTE / 2, "x"), None);
        let later = begin + MINUTE;
        let said = allowance.take(later, "y").unwrap();
        assert_eq!(said, "y (2 more before it were not named)");
        assert_eq!(allowance.take(later, "y").as_deref(), Some("y"));
        assert_eq!(allowance.take(later + 2 * MINUTE, "z").as_deref(), Some("z"));
    }

    /// Regression: after the tenth, no more were named until the server's end.
    #[test]
    fn strangers_are_named_again_in_a_later_minute() {
        let (strangers, begin) = (Strangers::new(), Instant::now());
        let add = |now| {
            strangers.add_at(
                now,
                &SessionError::Resource {
                    what: "x".into(),
                    source: std::io::ErrorKind::Other.into(),
                },
            )
        };
        assert_eq!((0..12).filter_map(|_| add(begin)).count(), 10);
        let said = add(begin + 2 * MINUTE).unwrap();
        assert!(said.contains("turned a connection away: ") && said.contains("(2 more"), "{said}");
        assert_eq!(strangers.count(), 13);
    }
}
