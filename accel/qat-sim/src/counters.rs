//! The device's counters, and their report.

use crate::script::MAX_INSTANCES;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The device's counters since the process started or since `reset`.
        ///
        /// `platen_qat_sim_counters` fills this in: 64-bit numbers in this order.
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// One JSON object with a member for each counter.
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
    /// Submissions answered with SUCCESS.
    accepted,
    /// Submissions answered with RETRY.
    retries,
    /// Accepted compress requests.
    compress,
    /// Accepted decompress requests.
    decompress,
    /// Callbacks run by polls, dummies included.
    callbacks,
    /// Dummy answers to requests that died with the device.
    dummies,
    /// Faults that took effect: a refused submission or poll, a corrupted answer, an event.
    faults,
    /// Requests without an answer (current number).
    in_flight,
    /// The most requests in flight of an instance.
    max_in_flight,
    /// CPU time of the device's own threads, nanoseconds: subtract it from the process's to get the
    /// software's cost.
    device_cpu_ns,
    /// Existing sessions (current number).
    sessions,
    /// Calls that would crash a real device: accesses outside of pinned memory, frees of
    /// unallocated addresses.
    violations,
    /// Polls.
    polls,
    /// Plain bytes of executed requests.
    plain_bytes,
    /// Deflated bytes of executed requests.
    deflated_bytes,
    /// Notifications delivered.
    events,
    /// Sessions made.
    sessions_made,
}

/// The counters of one instance, which any thread may increment and read.
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

/// The counters of a process, which outlive stop and start.
#[derive(Debug)]
pub(crate) struct Tallies {
    pub(crate) instances: [Tally; MAX_INSTANCES],
    pub(crate) faults: AtomicU64,
    /// CPU time of device threads that have ended.
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

    /// The sums. Values that are not counted here stay 0.
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
