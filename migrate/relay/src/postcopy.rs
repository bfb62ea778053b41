//! How far a source QEMU is from postcopy, and from the point behind which it never starts its own
//! VM again. All threads of a relay and its keeper use the one type of this module for that
//! boundary.
//!
//! **QEMU up to 10.1** writes the packaged device state, which starts the destination's VM, then a
//! PING. The first byte behind the PING shows that QEMU is in postcopy for good. Up to that byte, a
//! source whose socket closes fails and runs its VM again.
//!
//! **From QEMU 10.2 on** the packaged state ends with PING 0x42. Until the PONG of that number has
//! come back and QEMU's migration thread has seen it, a source whose socket closes fails and runs
//! its VM again, whatever it has written meanwhile.
//!
//! **At its end**, a source of QEMU 8.2 and later that has sent all its memory fails in the same
//! way if its socket closes before SHUT has come.

use rustix::fd::AsFd;
use rustix::net::{recv, RecvFlags};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the PING behind the packaged state.
const PING: u64 = 9;
/// The number of the PING at the end of the packaged state, from QEMU 10.2 on.
pub(crate) const LOADED: u32 = 0x42;

/// Encodings, for another process or thread, of no packaged state, and of the states without a
/// number of bytes.
const NONE: u64 = u64::MAX;
const UNANSWERED: u64 = u64::MAX - 1;
const ANSWERED: u64 = u64::MAX - 2;
const SENT: u64 = u64::MAX - 3;
const SWITCHED: u64 = u64::MAX - 4;

/// How far the main stream is from the switch to postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Switchover {
    /// This many bytes of the packaged state and of the PING behind it are still to come.
    Coming(u64),
    /// QEMU 10.2 and later: the packaged state was read, and its PONG was not given to the source.
    Unanswered,
    /// The PONG goes to the source, or has gone. The destination QEMU has the VM; the source may
    /// not have seen that yet.
    Answered,
    /// The source is in postcopy for good.
    Switched,
    /// The source is in postcopy for good and has sent all its memory. It waits for SHUT.
    Sent,
}

impl Switchover {
    /// The state with `packaged` bytes of the packaged state still to come.
    pub(crate) fn after(packaged: u64) -> Self {
        Self::Coming(packaged.saturating_add(PING).min(SWITCHED - 1))
    }

    /// Whether the source QEMU has written the whole packaged state.
    pub(crate) fn is_packaged(self) -> bool {
        !matches!(self, Self::Coming(left) if left > PING)
    }

    /// The state after `bytes` more of the stream; `None` once they show that the source QEMU is in
    /// postcopy. The bytes of QEMU 10.2 and later never show that.
    pub(crate) fn pass(self, bytes: u64) -> Option<Self> {
        match self {
            Self::Coming(left) => left.checked_sub(bytes).map(Self::Coming),
            other => Some(other),
        }
    }

    /// Reads and drops bytes of the stream for [`pass`](Self::pass), without waiting; returns their
    /// number. The first byte that shows that the source QEMU is in postcopy stays in the socket,
    /// as do those behind it: they may end the stream.
    pub(crate) fn read_on(self, socket: &impl AsFd) -> rustix::io::Result<u64> {
        let mut bytes = [0; 16384];
        let Self::Coming(left) = self else { return Ok(0) };
        let most = usize::try_from(left).unwrap_or(usize::MAX).clamp(1, bytes.len());
        let peek = if left == 0 { RecvFlags::PEEK } else { RecvFlags::empty() };
        let (_, got) = recv(socket, &mut bytes[..most], RecvFlags::DONTWAIT | peek)?;
        Ok(got as u64)
    }

    /// As a number, for another process or thread.
    pub(crate) fn encode(switchover: Option<Self>) -> u64 {
        switchover.map_or(NONE, |there| match there {
            Self::Coming(left) => left,
            Self::Unanswered => UNANSWERED,
            Self::Answered => ANSWERED,
            Self::Switched => SWITCHED,
            Self::Sent => SENT,
        })
    }

    /// The inverse of [`Switchover::encode`].
    pub(crate) fn decode(number: u64) -> Option<Self> {
        match number {
            NONE => None,
            UNANSWERED => Some(Self::Unanswered),
            ANSWERED => Some(Self::Answered),
            SWITCHED => Some(Self::Switched),
            SENT => Some(Self::Sent),
            left => Some(Self::Coming(left)),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_survives_its_way_to_the_keeper() {
        use Switchover::{Answered, Coming, Sent, Switched, Unanswered};
        let most = Switchover::after(u64::MAX);
        for state in [Coming(0), Coming(7), most, Unanswered, Answered, Switched, Sent] {
            assert_eq!(Switchover::decode(Switchover::encode(Some(state))), Some(state));
        }
        assert_eq!(Switchover::decode(Switchover::encode(None)), None);
    }

    #[test]
    fn only_bytes_of_a_source_up_to_10_1_show_that_it_is_in_postcopy() {
        let ping = Switchover::after(5).pass(5).unwrap();
        assert!(ping.is_packaged() && !Switchover::after(1).is_packaged());
        assert_eq!(ping.pass(PING), Some(Switchover::Coming(0)));
        assert_eq!(ping.pass(PING + 1), None);
        for state in [Switchover::Unanswered, Switchover::Answered, Switchover::Sent] {
            assert_eq!(state.pass(1 << 40), Some(state));
            assert!(state.is_packaged());
        }
    }
}
