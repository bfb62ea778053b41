//! Computes how fast migrations go, from one query to the next.

use host::Record;
use std::collections::HashMap;
use std::time::Instant;

/// Weight of a new value in a rate, which thus covers the last few seconds.
const WEIGHT: f64 = 0.4;

/// Bytes per second of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rate {
    /// Rate of QEMU's migration stream.
    pub(super) plain: f64,
    /// Rate on the network.
    pub(super) network: f64,
    /// Rate of the VM's RAM.
    pub(super) ram: f64,
}

/// The rates of all migrations that run.
#[derive(Debug, Default)]
pub(super) struct Rates(HashMap<String, Known>);

#[derive(Debug)]
struct Known {
    at: Instant,
    bytes: [u64; 3],
    rate: Option<[f64; 3]>,
}

impl Rates {
    /// Takes the counters of a query.
    pub(super) fn take(&mut self, running: &[Record], now: Instant) {
        self.0.retain(|id, _| running.iter().any(|record| record.id == *id));
        for record in running {
            let bytes = [record.plain, record.transferred, record.ram_sent];
            let known =
                self.0.entry(record.id.clone()).or_insert(Known { at: now, bytes, rate: None });
            let span = now.saturating_duration_since(known.at).as_secs_f64();
            if span == 0.0 {
                continue;
            }
            let fresh =
                [0, 1, 2].map(|nth| bytes[nth].saturating_sub(known.bytes[nth]) as f64 / span);
            let mixed = |before: [f64; 3]| {
                [0, 1, 2].map(|nth| before[nth] + WEIGHT * (fresh[nth] - before[nth]))
            };
            known.rate = Some(known.rate.map_or(fresh, mixed));
            (known.at, known.bytes) = (now, bytes);
        }
    }

    /// The rates of a migration; `None` before its second query.
    pub(super) fn of(&self, record: &Record) -> Option<Rate> {
        let [plain, network, ram] = self.0.get(&record.id)?.rate?;
        Some(Rate { plain, network, ram })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_rate_follows_the_last_seconds_and_goes_with_its_migration() {
        let record = |plain| Record { id: "1".into(), plain, ..Record::default() };
        let (mut rates, begin) = (Rates::default(), Instant::now());
        let mut look = |plain, seconds| {
            rates.take(&[record(plain)], begin + Duration::from_secs(seconds));
            rates.of(&record(0)).map(|rate| rate.plain)
        };
        assert_eq!(look(1000, 0), None);
        assert_eq!(look(3000, 2), Some(1000.0));
        assert_eq!(look(3000, 2), Some(1000.0), "no time has passed");
        assert_eq!(look(3000, 3), Some(600.0));
        assert_eq!(look(0, 4), Some(360.0), "a counter that goes back");
        rates.take(&[], begin + Duration::from_secs(5));
        assert_eq!(rates.of(&record(0)), None);
    }
}
