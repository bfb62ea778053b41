//! A counter of bytes that is read again and again, and what it counts within a time.

use std::time::{Duration, Instant};

use anyhow::Result;

/// The counter stood at `bytes` at a moment between `from` and `to`.
#[derive(Debug, Clone, Copy)]
struct Reading {
    from: Instant,
    to: Instant,
    bytes: u64,
}

/// The bytes that were counted within a length of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The longest that it may have been.
    pub length: Duration,
    /// The bytes.
    pub bytes: u64,
}

/// The readings of a counter.
#[derive(Debug, Default)]
pub struct Meter {
    readings: Vec<Reading>,
}

impl Meter {
    /// Reads the counter.
    ///
    /// # Errors
    /// That of the counter.
    pub fn read(&mut self, counter: impl FnOnce() -> Result<u64>) -> Result<()> {
        let from = Instant::now();
        let bytes = counter()?;
        self.readings.push(Reading { from, to: Instant::now(), bytes });
        Ok(())
    }

    /// For each reading, the longest stretch up to it that certainly lasted at most `window`. The
    /// time before the first byte is in none.
    pub fn stretches(&self, window: Duration) -> Vec<Stretch> {
        let first = self.readings.first().map_or(0, |reading| reading.bytes);
        let silent = self.readings.iter().take_while(|reading| reading.bytes == first).count();
        let readings = &self.readings[silent.saturating_sub(1)..];
        let mut begin = 0;
        let stretches = readings.iter().enumerate().map(|(nth, last)| {
            while begin < nth && last.to - readings[begin].from > window {
                begin += 1;
            }
            let Reading { from, bytes, .. } = readings[begin];
            Stretch { length: last.to - from, bytes: last.bytes.saturating_sub(bytes) }
        });
        stretches.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter that is read every 20 ms and has counted so many bytes in each 20 ms.
    fn meter(steps: impl IntoIterator<Item = u64>) -> Meter {
        let (begin, mut bytes) = (Instant::now(), 7);
        let reading = |(nth, step): (u32, u64)| {
            bytes += step;
            let from = begin + nth * Duration::from_millis(20);
            Reading { from, to: from + Duration::from_millis(3), bytes }
        };
        Meter { readings: (0..).zip(steps).map(reading).collect() }
    }

    /// Regression: a scenario compared the bytes since its start with what the limit allows since
    /// then. After seconds below the limit, one of 1.5 times the limit passed.
    #[test]
    fn a_second_above_a_limit_shows_whatever_was_counted_before() {
        let before = [0; 100].into_iter().chain([30; 200]);
        let meter = meter(before.chain([90; 50]).chain([30; 50]));
        let since_begin = meter.readings[349].bytes;
        assert!(since_begin < 350 * 60);
        let stretches = meter.stretches(Duration::from_secs(1));
        assert!(stretches.iter().all(|one| one.length <= Duration::from_secs(1)));
        // Of a length of 983 ms, 980 are between two readings.
        let most = stretches.iter().map(|one| one.bytes).max();
        assert_eq!(most, Some(49 * 90));
    }

    #[test]
    fn the_time_before_the_first_byte_is_in_no_stretch() {
        let meter = meter([0, 0, 0, 0, 0, 5, 5]);
        let stretch = |ms, bytes| Stretch { length: Duration::from_millis(ms), bytes };
        let all = meter.stretches(Duration::from_secs(1));
        assert_eq!(all, [stretch(3, 0), stretch(23, 5), stretch(43, 10)]);
        assert!(Meter::default().stretches(Duration::from_secs(1)).is_empty());
    }
}
