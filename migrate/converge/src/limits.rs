//! The limits that the operator sets.

use std::time::Duration;

/// When a migration may turn to postcopy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Postcopy {
    /// The migration never turns to postcopy.
    Never,
    /// The migration turns to postcopy this long after its start, whatever its state is.
    After(Duration),
    /// The migration turns to postcopy when nothing else ends it.
    WhenNeeded,
}

/// The limits that the operator sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest downtime.
    pub max_downtime: Duration,
    /// The migration is cancelled this long after its start; `None` for never.
    pub deadline: Option<Duration>,
    /// Whether the guest may be slowed down.
    pub throttle: bool,
    /// Whether and when the VM may run at the destination before its RAM is there.
    pub postcopy: Postcopy,
}
