//! The end of a session: early, with an ABORT that gives the peer the reason, or with the reports
//! of both.

use super::Session;
use crate::error::SessionError;
use crate::frame::MAX_FREE_PAYLOAD;
use crate::frame_type::FrameType;
use crate::outgoing::Outgoing;
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer without more to send may take to close its links.
const CLOSING_TIME: Duration = Duration::from_secs(5);
/// The longest reason that an ABORT carries, bytes of its JSON. JSON has six bytes for one control
/// character, and a peer refuses an ABORT that is longer than a frame may be.
const MAX_REASON: usize = 4096;

/// The JSON of an ABORT.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AbortNote {
    pub(crate) reason: String,
    pub(crate) committed: bool,
    /// The sender may ask how far the receiver got.
    #[serde(default)]
    pub(crate) asks: bool,
}

impl Session {
    /// Ends the session early: wakes every waiting thread, and informs the peer if possible. Only
    /// the first error counts.
    pub fn fail(&self, error: SessionError) {
        let error = Arc::new(error);
        if self.failure.set(error.clone()).is_err() {
            return;
        }
        self.failed.store(true, Ordering::Release);
        self.credits().close();
        self.outbound.close();
        self.plain.wake_all();
        self.payload.wake_all();
        self.links.wake();
        self.sink.closed(&error);
    }

    /// Why the session ended early, if it did.
    pub fn failure(&self) -> Option<&Arc<SessionError>> {
        self.failure.get()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Why this end ended the session, as an ABORT tells the peer; `None` if this end did not.
    pub fn abort_reason(&self) -> Option<String> {
        let error = self.failure.get()?;
        if matches!(
            **error,
            SessionError::LinkLost { .. }
                | SessionError::NotResumed { .. }
                | SessionError::Aborted { .. }
                | SessionError::Over { .. }
        ) {
            return None;
        }
        let mut reason = error.to_string();
        reason.truncate(fitting(&reason));
        Some(reason)
    }

    /// The payload of an ABORT, if this end ended the session.
    pub(crate) fn abort_note(&self) -> Option<Vec<u8>> {
        let reason = self.abort_reason()?;
        let (committed, asks) = (self.close_commit(), self.sink.may_ask());
        serde_json::to_vec(&AbortNote { reason, committed, asks }).ok()
    }

    /// Records that an ABORT has reached the peer's host.
    pub(crate) fn note_informed(&self) {
        self.informed.store(true, Ordering::Release);
    }

    /// Whether the peer knows that the session has ended early: an ABORT has reached it, or it
    /// ended the session itself. Final after [`Session::join`].
    pub fn is_peer_informed(&self) -> bool {
        self.informed.load(Ordering::Acquire)
            || self.failure().is_some_and(|error| {
                matches!(**error, SessionError::Aborted { .. } | SessionError::Over { .. })
            })
    }

    /// Sends the final report: now, and again on each new link until the peer's has arrived (W27).
    /// A report that is too long for a FINISH is replaced by an empty one: the migration is over,
    /// and its report must not make it fail.
    pub fn send_finish(&self, report: Vec<u8>) {
        let report = if report.len() > MAX_FREE_PAYLOAD { b"{}".to_vec() } else { report };
        self.outbound.set_finish(report.clone());
        self.send(Outgoing::Free(FrameType::Finish, report));
    }

    /// Records that the peer's FINISH has arrived; true for the first one, before this end closes.
    #[must_use]
    pub(crate) fn note_peer_finished(&self) -> bool {
        let is_first = !self.finishing.swap(true, Ordering::AcqRel);
        self.links.wake();
        is_first
    }

    /// Whether the end of a link is not a loss.
    pub(crate) fn may_end(&self) -> bool {
        self.is_finishing() || (self.outbound.finish().is_some() && !self.links.resumes_lost())
    }

    /// Whether no thread needs a new link any more.
    pub(crate) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire)
    }

    /// Ends the links and waits for their threads; after a success, queued frames still go out.
    /// Cuts off a peer that never closes its half.
    pub fn join(&self) {
        self.finishing.store(true, Ordering::Release);
        self.links.wake();
        self.outbound.close();
        let deadline = Instant::now() + CLOSING_TIME;
        while lock(&self.threads).iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                self.links.cut();
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        loop {
            let Some(thread) = lock(&self.threads).pop() else { break };
            // In release builds a panic has aborted the process.
            let _ = thread.join();
        }
    }
}

/// How many bytes of `reason`, up to a whole character, have at most [`MAX_REASON`] bytes in JSON.
fn fitting(reason: &str) -> usize {
    let mut length = 0;
    let mut ends = reason.char_indices().map(|(at, char)| {
        length += match char {
            '"' | '\\' => 2,
            '\0'..='\x1f' => 6,
            _ => char.len_utf8(),
        };
        (at, length)
    });
    ends.find(|(_, length)| *length > MAX_REASON).map_or(reason.len(), |(at, _)| at)
}
