//! The facts in a chunk: the turn to postcopy, the stop of the VM, the end.

use super::{Intake, Next};
use crate::postcopy::Switchover;
use crate::qemu_socket::QemuSocket;
use crate::settle::buffered;
use crate::sockets::is_open;
use crate::source::shared::{Shared, SourceStream};
use session::{FrameType, SessionError};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stream::{Facts, Kind};

/// How often the reader of the main stream looks for pages of the preempt channel.
const URGENT: Duration = Duration::from_millis(1);
/// How often a reader looks whether QEMU has obeyed a cancel.
const ANSWER: Duration = Duration::from_millis(5);

impl Intake<'_> {
    /// Acts on the facts in the chunk just fed.
    pub(super) fn look(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        let (facts, shared) = (self.tokeniser.facts(), self.shared);
        let refuse = |reason: &str| Err(SessionError::Local { reason: reason.into() });
        if facts.colo {
            return refuse(
                "the source QEMU has x-colo on, which platen does not carry: turn the capability \
                 off",
            );
        }
        if self.kind == Kind::Main && facts.tail && !facts.return_path {
            self.end.feed(bytes);
        }
        let end = facts.switch_end;
        let is_packaged = end > 0 && self.packaged.feed(bytes, facts.fed, end);
        self.acknowledged |= is_packaged;
        if is_packaged && !shared.peer_awaits_pong {
            return refuse(
                "the source QEMU turns to postcopy as QEMU 10.2 and later do: it may still fail \
                 and run its VM when the destination has begun to run it. The platen at the other \
                 end does not know that yet: upgrade it, or use a precopy migration",
            );
        }
        if facts.return_path {
            shared.return_path.store(true, Ordering::Release);
        }
        if facts.postcopy {
            shared.postcopy.store(true, Ordering::Release);
            shared.only_preempt_is_silent.fetch_or(facts.set_up, Ordering::AcqRel);
        }
        let must_wait = || {
            let shows = facts.switched && !self.acknowledged;
            (is_packaged && shared.is_cancelling()) || (shows && !shared.switch())
        };
        while self.kind.is_main() && must_wait() {
            // QEMU closes its socket when it obeys, and answers when it does not.
            if !shared.is_open(self.stream.socket()) || shared.session.failure().is_some() {
                return refuse(
                    "the source QEMU was told to cancel, and turned to postcopy at that moment: the \
                     destination does not get the VM. If the source says 'postmigrate' \
                     (`virsh qemu-monitor-command VM --hmp info status`, `query-status` at its monitor), \
                     let the VM go on: `virsh qemu-monitor-command VM --hmp cont`, \
                     {\"execute\":\"cont\"} at its monitor",
                );
            }
            std::thread::sleep(ANSWER);
        }
        if self.kind.is_main() && facts.switched {
            self.last.feed(bytes);
            let begun = facts.sections - self.begun;
            let read = (facts.fed - bytes.len() as u64, facts.fed);
            look_in_postcopy(shared, self.stream, facts.ram_end, |socket| {
                self.sections.come(Instant::now(), read, begun, || buffered(socket))
            });
            if facts.ram_end {
                self.await_urgent();
            }
        }
        self.begun = facts.sections;
        // The VM has stopped: from here on every millisecond is downtime.
        self.patient =
            !(self.is_tail(facts) || facts.vm_stopped_hint || self.kind == Kind::Preempt);
        if facts.vm_stopped_hint {
            shared.auto.as_ref().inspect(|auto| auto.stopped());
            shared.session.hurry();
        }
        Ok(())
    }

    /// Waits, before the end of a postcopy is sent, until the destination QEMU's socket has every
    /// page of the preempt channel (W18). The source QEMU wrote them before that end. It may be
    /// gone since: the destination gets the pages and the end all the same (W20h).
    fn await_urgent(&self) {
        let shared = self.shared;
        while shared.has_urgent() && shared.session.failure().is_none() {
            std::thread::sleep(URGENT);
        }
    }

    /// Whether the chunk just fed may hold the end-of-stream tag. An unknown stream may hold it
    /// anywhere.
    fn is_tail(&self, facts: &Facts) -> bool {
        self.kind == Kind::Other || (self.kind == Kind::Main && facts.tail)
    }

    /// Announces, behind a chunk that may hold the bytes that start the destination's VM, that
    /// QEMU's socket is still open (W20).
    pub(super) fn tail(&self, len: usize) -> Next {
        let (facts, shared) = (self.tokeniser.facts(), self.shared);
        // The last bytes of the packaged state, perhaps with a section behind them.
        let ends_package = self.acknowledged && facts.fed - (len as u64) < facts.switch_end;
        if !ends_package && (self.acknowledged || !self.is_tail(facts)) {
            return Next::Chunk;
        }
        let switchover = if ends_package {
            Some(Switchover::Unanswered)
        } else {
            (facts.switch_end > 0 && !facts.switched)
                .then(|| Switchover::after(facts.switch_end.saturating_sub(facts.fed)))
        };
        // Set before STILL_OPEN is queued: a link may send it at once.
        shared.switchover.set(switchover);
        shared.tail_read.store(true, Ordering::Release);
        shared.guard(self.stream, switchover);
        let still_open = || shared.session.send_bare(self.stream.id, FrameType::StillOpen, 0);
        if shared.is_open(self.stream.socket()) {
            still_open();
        } else if shared.return_path.load(Ordering::Acquire) {
            if is_open(self.stream.socket()) {
                // Its end comes behind more bytes, which are read first: they may show that the
                // source is in postcopy for good.
                return Next::Chunk;
            }
            if !self.waits_in_postcopy() {
                // Cancelled (W21): no STILL_OPEN can follow any more, and the bytes that the peer
                // holds back may take up all the credit.
                return Next::End;
            }
            // The next chunk is refused if the relay's user has ordered a cancel.
            if shared.switch() {
                still_open();
            }
        }
        Next::Chunk
    }
}

/// Records, behind a chunk of a source in postcopy, whether the source has seen its PONG, and
/// whether it has sent all its memory. `has_seen`: whether the source has seen the PONG, by its
/// sections.
fn look_in_postcopy(
    shared: &Shared,
    stream: &SourceStream,
    sent: bool,
    has_seen: impl FnOnce(&QemuSocket) -> bool,
) {
    if sent {
        // Without a return path the source waits for nothing, and has completed.
        if shared.return_path.load(Ordering::Acquire) {
            shared.sent_all(stream);
        }
    } else if shared.is_only_answered()
        // Bytes of a source that has closed show no migration thread at work.
        && shared.is_open(stream.socket())
        && has_seen(stream.socket())
    {
        shared.set_switched();
    }
}
