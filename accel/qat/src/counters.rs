//! An engine's counters, readable from any thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a piece was done in software.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The engine has no instance: there is none, or other engines have them all.
    NoInstance,
    /// Load sharing: the device is full, and this CPU is faster now.
    Busy,
    /// The device refused the request (submission not SUCCESS, or RETRY with nothing in flight).
    Refused,
    /// The device answered with an error.
    Failed,
    /// The device returned a wrong checksum, length or output.
    Wrong,
    /// No answer within the deadline.
    Late,
    /// Polling the instance failed.
    Poll,
    /// The device died with the request, or is dead.
    Fatal,
    /// The device is being reset.
    Restarting,
    /// The instance is suspect and has not answered a probe yet.
    Suspect,
    /// The piece is not fit for a device: it has no bytes.
    Unfit,
}

impl Reason {
    /// All reasons, in the order of [`Snapshot::by_software`].
    pub const ALL: [Self; 11] = [
        Self::NoInstance,
        Self::Busy,
        Self::Refused,
        Self::Failed,
        Self::Wrong,
        Self::Late,
        Self::Poll,
        Self::Fatal,
        Self::Restarting,
        Self::Suspect,
        Self::Unfit,
    ];

    /// The words after a count.
    pub fn text(self) -> &'static str {
        match self {
            Self::NoInstance => "without an instance",
            Self::Busy => "while the device was full",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Wrong => "wrong",
            Self::Late => "late",
            Self::Poll => "after failed polls",
            Self::Fatal => "after the device's death",
            Self::Restarting => "during a reset",
            Self::Suspect => "under suspicion",
            Self::Unfit => "not for a device",
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one engine. Only the engine's thread writes them, so a count needs no atomic
        /// read-modify-write.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) software: [AtomicU64; Reason::ALL.len()],
        }

        /// A snapshot of the counters.
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Pieces done in software, by reason; reasons that did not occur are omitted.
            #[serde(serialize_with = "as_map")]
            pub by_software: Vec<(Reason, u64)>,
        }

        impl Counters {
            /// Reads all counters. Each is exact; together they are of about the same moment.
            pub fn snapshot(&self) -> Snapshot {
                Snapshot {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    by_software: Reason::ALL
                        .into_iter()
                        .map(|reason| (reason, self.software[reason as usize].load(Ordering::Relaxed)))
                        .filter(|&(_, count)| count > 0)
                        .collect(),
                }
            }
        }
    };
}

counters! {
    /// Pieces accepted by `submit`.
    submitted,
    /// Pieces delivered, by device or software.
    delivered,
    /// Pieces delivered as the device's output.
    by_device,
    /// Pieces delivered as bad data, which no decoder accepts.
    bad_data,
    /// Bytes of pieces submitted.
    bytes_in,
    /// Bytes of pieces delivered.
    bytes_out,
    /// Submissions that the device answered with RETRY.
    retries,
    /// Submissions that the device refused with another error.
    refusals,
    /// Polls of the instance that failed.
    poll_failures,
    /// Requests that missed their deadline.
    deadlines,
    /// Callbacks that came after their piece was done again in software.
    late,
    /// Slots that the device has although their piece was delivered (current number).
    quarantined,
    /// Times that the instance became suspect.
    suspicions,
    /// Probes sent to a suspect instance.
    probes,
    /// Times that a probe or a restart ended a suspicion.
    recoveries,
    /// Outputs of the device that were decompressed and compared.
    verified,
    /// Pieces in flight in the device (current number).
    in_flight,
    /// Longest time from `submit` to delivery, microseconds.
    longest_wait_us,
    /// Estimated time of a busy device for 1 KiB of input, nanoseconds; 0 before the first
    /// measurement.
    device_ns_per_kib,
    /// Estimated time of this CPU for 1 KiB of input, nanoseconds; 0 before the first measurement.
    software_ns_per_kib,
}

impl Snapshot {
    /// Pieces done in software, for all reasons.
    pub fn software(&self) -> u64 {
        self.by_software.iter().map(|&(_, count)| count).sum()
    }

    /// Pieces done in software for `reason`.
    pub fn software_for(&self, reason: Reason) -> u64 {
        self.by_software.iter().find(|&&(this, _)| this == reason).map_or(0, |&(_, count)| count)
    }
}

fn as_map<S: serde::Serializer>(pairs: &[(Reason, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(reason, count)| (reason, count)))
}

/// Adds to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Sets a gauge.
pub(crate) fn set(counter: &AtomicU64, value: u64) {
    counter.store(value, Ordering::Relaxed);
}
