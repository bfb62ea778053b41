//! What the device counts, and its report.

use crate::script::MAX_INSTANCES;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the device has counted since the process began or since `reset`.
        ///
        /// `platen_qat_sim_counters` fills one in: 64-bit numbers in this order.
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// One JSON object, a member each.
            pub fn to_json(&self) -> String {
                let mut text = String::from("{");
                $(let _ = write!(text, "\"{}\": {}, ", stringify!($name), self.$name);)*
                text.push_str("\"simulated\": true}\n");
                text
            }
        }
    };
}

counters! {
    /// Calls to compress or decompress.
    submissions,
    /// Those that were answered SUCCESS.
    accepted,
    /// Those that were answered RETRY.
    retries,
    /// Accepted compress requests.
    compress,
    /// Accepted decompress requests.
    decompress,
    /// Callbacks that polls have run, dummies among them.
    callbacks,
    /// Dummy answers for requests that died with the device.
    dummies,
    /// Faults that acted: a refused submission or poll, a spoilt answer, an event.
    faults,
    /// Requests without an answer now.
    in_flight,
    /// The most that one instance ever had.
    max_in_flight,
    /// CPU time of the device's own threads, nanoseconds: take it off the process's to see the
    /// software's cost.
    device_cpu_ns,
    /// Sessions that exist now.
    sessions,
    /// What a real device would have punished: accesses outside pinned memory, frees of nothing.
    violations,
    /// Polls.
    polls,
    /// Plain bytes of requests that were carried out.
    plain_bytes,
    /// Deflated bytes of the same.
    deflated_bytes,
    /// Notifications delivered.
    events,
    /// Sessions that were ever made.
    sessions_made,
}

/// The counters of one instance. Each is written by whoever does the thing, read by anybody.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Tally {
    pub(crate) submissions: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) compress: AtomicU64,
    pub(crate) decompress: AtomicU64,
    pub(crate) callbacks: AtomicU64,
    pub(crate) dummies: AtomicU64,
    pub(crate) max_in_flight: AtomicU64,
    pub(crate) polls: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) sessions_made: AtomicU64,
    pub(crate) plain_bytes: AtomicU64,
    pub(crate) deflated_bytes: AtomicU64,
    pub(crate) violations: AtomicU64,
}

/// The counters of a process: they outlive stop and start.
#[derive(Debug)]
pub(crate) struct Tallies {
    pub(crate) instances: [Tally; MAX_INSTANCES],
    pub(crate) faults: AtomicU64,
    /// CPU time of device threads that are gone.
    pub(crate) device_cpu_ns: AtomicU64,
}

impl Tallies {
    pub(crate) fn new() -> Self {
        Self {
            instances: std::array::from_fn(|_| Tally::default()),
            faults: AtomicU64::new(0),
            device_cpu_ns: AtomicU64::new(0),
        }
    }

    /// The sums; what is not counted here stays 0.
    pub(crate) fn sum(&self) -> Counters {
        let mut sum = Counters {
            faults: self.faults.load(Ordering::Relaxed),
            device_cpu_ns: self.device_cpu_ns.load(Ordering::Relaxed),
            ..Counters::default()
        };
        for tally in &self.instances {
            let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            sum.submissions += of(&tally.submissions);
            sum.retries += of(&tally.retries);
            sum.compress += of(&tally.compress);
            sum.decompress += of(&tally.decompress);
            sum.callbacks += of(&tally.callbacks);
            sum.dummies += of(&tally.dummies);
            sum.max_in_flight = sum.max_in_flight.max(of(&tally.max_in_flight));
            sum.polls += of(&tally.polls);
            sum.events += of(&tally.events);
            sum.sessions_made += of(&tally.sessions_made);
            sum.plain_bytes += of(&tally.plain_bytes);
            sum.deflated_bytes += of(&tally.deflated_bytes);
            sum.violations += of(&tally.violations);
        }
        sum.accepted = sum.compress + sum.decompress;
        sum
    }

    pub(crate) fn clear(&self) {
        self.faults.store(0, Ordering::Relaxed);
        self.device_cpu_ns.store(0, Ordering::Relaxed);
        for tally in &self.instances {
            for counter in [
                &tally.submissions,
                &tally.retries,
                &tally.compress,
                &tally.decompress,
                &tally.callbacks,
                &tally.dummies,
                &tally.max_in_flight,
                &tally.polls,
                &tally.events,
                &tally.sessions_made,
                &tally.plain_bytes,
                &tally.deflated_bytes,
                &tally.violations,
            ] {
                counter.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Adds to a counter that only statistics read.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_one_flat_object() {
        let text = Counters { submissions: 3, violations: 1, ..Counters::default() }.to_json();
        assert!(text.starts_with("{\"submissions\": 3, \"accepted\": 0, "), "{text}");
        assert!(text.contains("\"violations\": 1, "), "{text}");
        assert!(text.ends_with("\"simulated\": true}\n"), "{text}");
    }
}
