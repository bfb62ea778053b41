//! Decides between the two events of which only one may happen: bytes that start the destination's
//! VM are sent, or QEMU is ordered to cancel.

use super::{Cancelling, Event, Shared, SourceStream};
use crate::postcopy::Switchover;
use session::{Header, Outgoing};
use std::sync::atomic::{fence, Ordering};
use std::sync::{MutexGuard, PoisonError};

impl Shared {
    /// Whether the source QEMU is in postcopy for good.
    pub(in crate::source) fn has_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Whether the destination may have all bytes that start its VM. It has them only after the
    /// source QEMU has written the whole packaged state, even if a STILL_OPEN was sent for a part
    /// of it: if its socket closes earlier, QEMU fails in that write and its own VM goes on. After
    /// the session has failed, no further bytes are sent.
    pub(in crate::source) fn may_run_there(&self) -> bool {
        let complete = || self.switchover.get().is_none_or(Switchover::is_packaged);
        self.has_switched() || self.still_open_sent.load(Ordering::Acquire) && complete()
    }

    /// Whether the source QEMU, up to 10.1, is writing its packaged state or the PING behind it.
    pub(in crate::source) fn turns_to_postcopy(&self) -> bool {
        matches!(self.switchover.get(), Some(Switchover::Coming(_)))
    }

    /// Whether the PONG of the packaged state goes to the source QEMU, or has gone, and the source
    /// QEMU may not have seen it: it could still run its VM if its socket closed.
    pub(in crate::source) fn is_only_answered(&self) -> bool {
        self.switchover.get() == Some(Switchover::Answered) && !self.has_switched()
    }

    /// Whether the source QEMU waits for the PONG of its packaged state.
    pub(in crate::source) fn is_unanswered(&self) -> bool {
        self.switchover.get() == Some(Switchover::Unanswered)
    }

    /// Whether the source QEMU in postcopy has sent all its memory: it would run its VM if its
    /// socket closed before SHUT (QEMU 8.2 and later).
    pub(in crate::source) fn has_sent_all(&self) -> bool {
        self.switchover.get() == Some(Switchover::Sent)
    }

    /// Records that the PONG of the packaged state is about to be written to the source QEMU.
    /// `whole`: the bytes to be written begin and end with a message, so that the keeper may repeat
    /// the PONG.
    pub(in crate::source) fn answer(&self, stream: &SourceStream, whole: bool) {
        if self.is_unanswered() {
            self.switchover.set(Some(Switchover::Answered));
            if whole {
                self.guard(stream, Some(Switchover::Answered));
            }
        }
    }

    /// Records that the source QEMU has sent all its memory.
    pub(in crate::source) fn sent_all(&self, stream: &SourceStream) {
        if !self.has_sent_all() {
            self.set_switched();
            self.switchover.set(Some(Switchover::Sent));
            self.guard(stream, Some(Switchover::Sent));
        }
    }

    /// Called before the source QEMU is ordered to cancel, which starts its VM again: from here on
    /// no bytes that start the destination's VM are sent. False when they may have been sent
    /// already.
    pub(in crate::source) fn forbid_commit(&self) -> bool {
        let mut cancelling = self.lock_cancelling();
        if self.may_run_there() {
            return false;
        }
        cancelling.is_told = true;
        true
    }

    /// Records that the source QEMU has refused to cancel. The STILL_OPENs that were withheld are
    /// queued again, and each is checked again before it is sent.
    pub(in crate::source) fn allow_commit(&self) {
        let mut cancelling = self.lock_cancelling();
        cancelling.is_told = false;
        self.send_withheld(cancelling);
    }

    fn send_withheld(&self, mut cancelling: MutexGuard<'_, Cancelling>) {
        let withheld = std::mem::take(&mut cancelling.withheld);
        // Unlocked first: the queue may be full, and the thread that empties it takes the lock.
        drop(cancelling);
        for header in withheld {
            self.session.send(Outgoing::Bare(header));
        }
    }

    /// Keeps the STILL_OPEN with this header, whose source QEMU has closed its socket, until that
    /// source shows that it was in postcopy for good. Returns false if it has shown that.
    pub(in crate::source) fn withhold(&self, header: &Header) -> bool {
        let mut cancelling = self.lock_cancelling();
        let keeps = !self.has_switched();
        if keeps {
            cancelling.withheld.push(*header);
        }
        keeps
    }

    /// Records that the STILL_OPEN with this header goes to a link now. Returns false when it must
    /// not; then it is kept for [`Shared::allow_commit`].
    pub(in crate::source) fn commit(&self, header: &Header) -> bool {
        let mut cancelling = self.lock_cancelling();
        if cancelling.is_told {
            cancelling.withheld.push(*header);
            return false;
        }
        self.still_open_sent.store(true, Ordering::Release);
        true
    }

    fn lock_cancelling(&self) -> MutexGuard<'_, Cancelling> {
        self.cancelling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the keeper hold the source QEMU's socket: from now on the destination may have the
    /// bytes that start its VM. Until the source is informed, or cannot start its own VM any more,
    /// its socket must stay open even if this process dies.
    pub(in crate::source) fn guard(&self, stream: &SourceStream, switchover: Option<Switchover>) {
        let Some(keeper) = self.keeper.get() else { return };
        // In postcopy the keeper is told at every call, since the remaining bytes become fewer.
        if switchover.is_some() || !self.keeper_has_socket.swap(true, Ordering::AcqRel) {
            if let Err(error) = keeper.hold(stream.socket(), switchover) {
                // The migration goes on without a keeper.
                let _ = self.events.send(Event::Notice(format!(
                    "the process that would keep QEMU's socket if this relay were killed has gone ({error}): if it is \
                     killed before the destination has answered, look there before the source VM goes on"
                )));
            }
        }
    }

    /// Makes the keeper hold the source QEMU's preempt channel as long as its main socket.
    pub(in crate::source) fn guard_preempt(&self, stream: &SourceStream) {
        // A keeper that has gone is reported when it is to hold the main socket.
        let _ = self.keeper.get().map(|keeper| keeper.hold_too(stream.socket()));
    }

    /// Whether the source QEMU is being told to cancel, so that no bytes that start the
    /// destination's VM may be sent.
    pub(in crate::source) fn is_cancelling(&self) -> bool {
        self.lock_cancelling().is_told
    }

    /// Records that the bytes to be sent next show that the source QEMU is in postcopy for good, at
    /// which the destination starts the VM. Returns false when they must not be sent, because the
    /// source QEMU is being told to cancel (W20b).
    pub(in crate::source) fn switch(&self) -> bool {
        if self.has_switched() {
            return true;
        }
        let cancelling = self.lock_cancelling();
        if cancelling.is_told {
            return false;
        }
        self.set_switched();
        self.send_withheld(cancelling);
        true
    }

    /// Records that the source QEMU is in postcopy for good.
    pub(in crate::source) fn set_switched(&self) {
        if !self.switched.swap(true, Ordering::AcqRel) {
            // As in `Sink::still_open`: either the session has failed and the bytes that show the
            // switch are not sent, or `decision` sees the flag.
            fence(Ordering::SeqCst);
            // If this process is killed, the end of the stream may wait in the socket (W20h).
            if let Some(main) = self.streams().iter().find(|stream| stream.kind.is_main()) {
                self.guard(main, Some(Switchover::Switched));
            }
        }
    }
}
