//! The waits of a stream's reader: for bytes of QEMU, and for credit.

use super::{Intake, Next, GONE};
use crate::settle::{waiting_bytes, waits_with_end};
use crate::sockets::{is_open, wait_readable};
use crate::source::shared::FAREWELL;
use session::{Permit, SessionError};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stream::Kind;

/// How long a QEMU that has been told to cancel during its setup may keep its socket open.
const OBEYS: Duration = Duration::from_secs(2);

impl Intake<'_> {
    /// Waits until there is something to read; false where the session has ended first.
    ///
    /// # Errors
    /// QEMU has sent nothing for the longest time that its setup takes, or is cancelled there and
    /// does not close its socket: QEMU 11.1 then waits, with its VM, until this end closes it.
    pub(super) fn wait(&self) -> Result<bool, SessionError> {
        let (socket, shared) = (self.stream.socket(), self.shared);
        let facts = self.tokeniser.facts();
        let is_known = self.kind == Kind::Main && !facts.opaque && facts.resyncs == 0;
        if !is_known || facts.sections > 0 || facts.switched {
            // Another thread reads on once the session has ended, and this reader with it.
            let time = self.kind.is_main().then_some(GONE);
            while !wait_readable(socket, time) {
                if shared.session.failure().is_some() {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let (begin, mut cancelled) = (Instant::now(), None);
        while !wait_readable(socket, Some(GONE)) {
            if shared.is_cancelling() {
                cancelled.get_or_insert_with(Instant::now);
            }
            let is_ignored = cancelled.is_some_and(|told: Instant| told.elapsed() >= OBEYS);
            if is_ignored || begin.elapsed() >= shared.setup_timeout {
                return Err(SessionError::Local { reason: silent(begin.elapsed()) });
            }
        }
        Ok(true)
    }

    /// Waits for a permit to have another chunk in flight.
    pub(super) fn permit(&mut self) -> Result<Permit, Next> {
        let shared = self.shared;
        let waiting = shared.auto.as_ref().map(|auto| auto.waiting());
        let permit = loop {
            let deadline = Some(Instant::now() + GONE);
            match shared.session.credits().permit_by(self.stream.id, deadline) {
                Some(Some(permit)) => break permit,
                Some(None) => return Err(Next::Over),
                None if self.kind.is_main() && !shared.is_open(self.stream.socket()) => {
                    let closed = *self.closed.get_or_insert_with(Instant::now);
                    if self.is_cancelled(closed) {
                        return Err(Next::End);
                    }
                    // Without a return path the receiver withholds the stream's tail until EOF,
                    // which follows the last byte: the tail must not use up the window before that.
                    let credits = shared.session.credits();
                    if let Some(permit) = credits.permit_beyond_window(self.stream.id) {
                        break permit;
                    }
                }
                None => {}
            }
        };
        drop(waiting);
        Ok(permit)
    }

    /// Whether to drop the bytes that wait in the socket of a QEMU that closed it at `closed`: QEMU
    /// has cancelled while nothing is acknowledged, perhaps during an outage of a link (W21). In
    /// postcopy for good, which these bytes may show, they may be the end of the VM's memory
    /// (W20h): they have [`FAREWELL`] to go out. So have the bytes of a source that has its PONG,
    /// if they end the stream: a source that writes its end has seen the PONG. Without that end it
    /// may have failed, and run its VM (W20c).
    fn is_cancelled(&self, closed: Instant) -> bool {
        let shared = self.shared;
        let in_postcopy = || {
            let socket = self.stream.socket();
            // The end of a TCP connection has not come: bytes before it may still show that.
            is_open(socket)
                || shared.has_switched()
                || (shared.is_only_answered() && waits_with_end(socket))
                || self.waits_in_postcopy()
        };
        shared.return_path.load(Ordering::Acquire)
            && !(closed.elapsed() < FAREWELL && in_postcopy())
    }

    /// Whether the bytes that wait in the socket, which QEMU has closed, show that it was in
    /// postcopy for good: they reach a section behind the packaged state of QEMU up to 10.1. Such a
    /// source does not run its VM any more, and one that cancels or fails has written no such
    /// section (W20).
    pub(super) fn waits_in_postcopy(&self) -> bool {
        if self.kind != Kind::Main || self.acknowledged || !self.tokeniser.facts().postcopy {
            return false;
        }
        let bytes = waiting_bytes(self.stream.socket());
        let (mut tokeniser, mut packaged) = (self.tokeniser.clone(), self.packaged.clone());
        tokeniser.feed(&bytes, &mut Vec::new());
        let facts = tokeniser.facts();
        facts.switched && !packaged.feed(&bytes, facts.fed, facts.switch_end)
    }
}

/// Why a source that is silent in its setup has its connection closed.
fn silent(waited: Duration) -> String {
    format!(
        "the source QEMU has begun a migration and then sent nothing for {} s: it was probably \
         cancelled at that moment (QEMU 11.1 can then hang, with its VM, until this relay closes \
         its connection). The VM is at the source; start the migration again. If QEMU needs more \
         time for the RAM of this VM: --setup-timeout, or setup_timeout of platen.toml",
        waited.as_secs()
    )
}
