//! The time for which a save stops its VM, by the clock of QEMU's events.

use qmp::{Event, Timestamp};
use std::time::Duration;

/// The last time for which the VM was stopped and after which it ran again.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    stopped: Option<Timestamp>,
    last: Option<Duration>,
}

impl Pause {
    /// Notes an event of QEMU. Another client may have stopped the VM before: the last time counts.
    pub(crate) fn note(&mut self, event: &Event) {
        match event.name.as_str() {
            "STOP" => self.stopped = Some(event.timestamp),
            "RESUME" => {
                let since = |stopped| event.timestamp.since(stopped);
                self.last = self.stopped.take().map(since).or(self.last);
            }
            _ => {}
        }
    }

    /// Milliseconds; `None` if the VM was not stopped or does not run again.
    pub(crate) fn millis(&self) -> Option<u64> {
        let last = self.last.filter(|_| self.stopped.is_none())?;
        u64::try_from(last.as_millis()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, seconds: i64) -> Event {
        let timestamp = Timestamp { seconds, microseconds: 0 };
        Event { name: name.into(), data: serde_json::Value::Null, timestamp }
    }

    fn pause(events: &[(&str, i64)]) -> Option<u64> {
        let mut pause = Pause::default();
        events.iter().for_each(|(name, at)| pause.note(&event(name, *at)));
        pause.millis()
    }

    #[test]
    fn the_last_stop_that_ended_counts() {
        assert_eq!(pause(&[("STOP", 1), ("MIGRATION", 2), ("RESUME", 4)]), Some(3000));
        assert_eq!(pause(&[("STOP", 1), ("RESUME", 2), ("STOP", 5), ("RESUME", 7)]), Some(2000));
        assert_eq!(pause(&[("RESUME", 7)]), None);
        assert_eq!(pause(&[("STOP", 1), ("RESUME", 2), ("STOP", 5)]), None);
    }
}
