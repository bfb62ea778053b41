//! The point from which a source QEMU is in postcopy for good, derived from its main stream.
//!
//! QEMU writes the packaged device state, which starts the destination's VM, then a PING. The first
//! byte behind the PING shows that QEMU is in postcopy: it then no longer starts its own VM. Up to
//! that byte, a source whose socket closes fails and runs its VM again.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the PING behind the packaged state.
const PING: u64 = 9;
/// No packaged state was seen; in the message to the keeper and in [`SharedSwitchover`].
const NONE: u64 = u64::MAX;

/// How far the main stream is from the switch to postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Switchover {
    /// Bytes of the packaged state and the PING still to come.
    left: u64,
}

impl Switchover {
    /// With `packaged` bytes of the packaged state still to come.
    pub(crate) fn after(packaged: u64) -> Self {
        Self { left: packaged.saturating_add(PING).min(NONE - 1) }
    }

    /// Whether the source QEMU has written the whole packaged state.
    pub(crate) fn is_packaged(self) -> bool {
        self.left <= PING
    }

    /// The state after `bytes` more of the stream; `None` once they show that the source QEMU is in
    /// postcopy.
    pub(crate) fn pass(self, bytes: u64) -> Option<Self> {
        self.left.checked_sub(bytes).map(|left| Self { left })
    }

    /// As a number, for another process or thread.
    pub(crate) fn encode(switchover: Option<Self>) -> u64 {
        switchover.map_or(NONE, |there| there.left)
    }

    /// The inverse of [`Switchover::encode`].
    pub(crate) fn decode(number: u64) -> Option<Self> {
        (number != NONE).then_some(Self { left: number })
    }
}

/// A [`Switchover`] shared by several threads; none without postcopy.
pub(crate) struct SharedSwitchover(AtomicU64);

impl SharedSwitchover {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(NONE))
    }

    pub(crate) fn get(&self) -> Option<Switchover> {
        Switchover::decode(self.0.load(Ordering::Acquire))
    }

    pub(crate) fn set(&self, switchover: Option<Switchover>) {
        self.0.store(Switchover::encode(switchover), Ordering::Release);
    }
}
