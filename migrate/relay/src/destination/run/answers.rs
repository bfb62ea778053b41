//! The state of a migration at the destination, for the server, and its messages to the migration.

use super::super::shared::Event;
use super::Destination;
use crate::counters::Counters;
use session::{Session, SessionError};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a source may take to ask about a lost session, beyond twice the time that this end
/// waited for it: the source notices later, waits as long, and asks every 2 s.
const ASKING: Duration = Duration::from_secs(10);

impl Destination {
    /// The session, for adding links and reading byte counters.
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// Whether the migration may go on without codec threads: the bytes that start the VM may have
    /// been written to QEMU, and no chunk is in a codec thread.
    pub(crate) fn needs_no_codecs(&self) -> bool {
        let shared = &self.shared;
        let mut streams = shared.streams.iter().filter_map(OnceLock::get);
        shared.session.is_committed()
            && !shared.postcopy.load(Ordering::Acquire)
            && streams.all(|results| !results.has_jobs())
    }

    /// Whether QEMU has confirmed that it runs the VM.
    pub fn is_confirmed(&self) -> bool {
        self.shared.confirmed.load(Ordering::Acquire)
    }

    /// Whether QEMU has loaded the packaged state of postcopy, for a source that waits for this
    /// answer.
    pub(crate) fn has_loaded(&self) -> bool {
        self.shared.awaits_pong.load(Ordering::Acquire) && self.shared.has_loaded()
    }

    /// Whether the session is in postcopy and QEMU has not reported that it has loaded the packaged
    /// state: a later answer may be better.
    pub(crate) fn is_undecided(&self) -> bool {
        self.shared.postcopy.load(Ordering::Acquire) && !self.shared.has_loaded()
    }

    /// Whether the source has begun its migration: no earlier bytes were for QEMU.
    pub fn has_begun(&self) -> bool {
        self.shared.beginning.has_begun()
    }

    /// Whether the session ends soon for another source that wants its target (W4d).
    pub(crate) fn gives_way(&self) -> bool {
        self.shared.gives_way()
    }

    /// Whether the session ended because another source wanted its target.
    pub(crate) fn gave_way(&self) -> bool {
        self.shared.beginning.is_given_up()
    }

    /// Whether the source may still ask about the session: it was not informed of the end, or it
    /// ended the session in doubt.
    pub(crate) fn was_lost(&self) -> bool {
        let asks = |error: &SessionError| {
            matches!(
                error,
                SessionError::NotResumed { .. } | SessionError::Aborted { asks: true, .. }
            )
        };
        // A client asks where the VM is (W28), and an NBD connection has none.
        !self.shared.is_disk
            && (self.shared.session.failure().is_some_and(|error| asks(error))
                || self.shared.untold.load(Ordering::Acquire))
    }

    /// How long the source of a lost session may take to ask about it.
    pub(crate) fn asking_time(&self) -> Duration {
        2 * self.shared.session.resume_timeout() + ASKING
    }

    /// Whether the source has asked about its lost session.
    pub(crate) fn was_asked(&self) -> bool {
        self.shared.asked.load(Ordering::Acquire)
    }

    /// Records that the source gets the answer to its question (W28).
    pub(crate) fn note_asked(&self) {
        self.shared.asked.store(true, Ordering::Release);
        let _ = self.shared.events.send(Event::Asked);
    }

    /// Waits no longer for the source of a lost session to ask.
    pub(crate) fn stop_waiting(&self) {
        let _ = self.shared.events.send(Event::StopWaiting);
    }

    /// The migration's counters.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}
