//! Events that QEMU sends by itself, and the queue of those not yet polled.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::line;

/// A report that QEMU sends by itself, such as `MIGRATION` or `STOP`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Event {
    /// The event's name.
    #[serde(rename = "event")]
    pub name: String,
    /// The event's data; null if it has none.
    #[serde(default)]
    pub data: Value,
    /// When the event happened, by QEMU's clock.
    #[serde(default)]
    pub timestamp: Timestamp,
}

/// A time of the host's clock; negative where QEMU could not read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub struct Timestamp {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Microseconds of that second.
    pub microseconds: i64,
}

impl Timestamp {
    /// The time since `earlier`; zero if `earlier` is later or the times are invalid.
    pub fn since(self, earlier: Self) -> Duration {
        let micros =
            |time: Self| time.seconds.checked_mul(1_000_000)?.checked_add(time.microseconds);
        let passed = micros(self).zip(micros(earlier)).and_then(|(a, b)| a.checked_sub(b));
        Duration::from_micros(passed.and_then(|passed| u64::try_from(passed).ok()).unwrap_or(0))
    }
}

/// A migration causes some 20 events; a guest in trouble can make QEMU send thousands.
const MAX_EVENTS: usize = 1024;
const MAX_EVENT_BYTES: usize = line::MAX_LINE;

/// Events not yet polled, bounded in number and bytes.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: VecDeque<(Event, usize)>,
    bytes: usize,
    pub(crate) dropped: u64,
}

impl Events {
    pub(crate) fn push(&mut self, event: Event, bytes: usize) {
        self.queue.push_back((event, bytes));
        self.bytes += bytes;
        while self.queue.len() > MAX_EVENTS || self.bytes > MAX_EVENT_BYTES {
            self.pop();
            self.dropped += 1;
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        let (event, bytes) = self.queue.pop_front()?;
        self.bytes -= bytes;
        Some(event)
    }
}
