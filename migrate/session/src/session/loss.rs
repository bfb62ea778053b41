//! The loss of a link: what was written to it goes over the others, or waits for the next one.

use super::Session;
use crate::error::SessionError;
use crate::links::{LinkState, Remaining};
use crate::outgoing::Outgoing;
use std::net::Shutdown;
use std::sync::Arc;

impl Session {
    /// The error for a lost link.
    pub(crate) fn link_lost(&self, detail: &str) -> SessionError {
        SessionError::LinkLost { peer: self.peer.clone(), detail: detail.into() }
    }

    /// Removes a failed link. Frames written to it and not acknowledged go over the other links, or
    /// wait for the next one (W25).
    pub(crate) fn lose(&self, link: &Arc<LinkState>, error: SessionError) {
        if self.has_failed() {
            // The link's writer still has to send the reason.
            return;
        }
        let Some(unacked) = self.outbound.unacked.take(link.id, || link.mark_dead()) else {
            return;
        };
        let _ = link.socket.shutdown(Shutdown::Both);
        if !self.links.resumes_lost() {
            return self.fail(error);
        }
        let Remaining { links, others, is_news } = self.links.lose(link, &error);
        if self.outbound.finish().is_some() || !is_news {
            // Either only the peer's report is missing, which may come over another link. Or the
            // link was reopened again and again and did not stay up. Neither is worth a notice.
        } else if links == 0 {
            let seconds = self.links.timeout().as_secs();
            self.sink.notice(&format!("{error}; waiting up to {seconds} s for it to come back"));
        } else {
            self.sink.notice(&match others {
                // The error says that a new link has replaced it.
                0 => error.to_string(),
                1 => format!("{error}; 1 other goes on"),
                _ => format!("{error}; {others} others go on"),
            });
        }
        for frame in unacked {
            self.outbound.requeue(frame);
        }
        if self.links.spare_links() == 0 {
            self.outbound.reclaim_overflow();
        }
        // The link may have lost an ACK too. Other links take over its role.
        self.acknowledge_again();
        self.outbound.wake_priority_link();
        self.outbound.wake_successors();
    }

    /// Acknowledges everything written to QEMU again.
    pub(crate) fn acknowledge_again(&self) {
        if self.inbound.acknowledge_again() {
            self.send(Outgoing::Acks);
        }
    }

    /// Records that a link has brought a frame that only a live session sends. A link that is
    /// opened and lost again is part of the outage.
    pub(crate) fn note_progress(&self, link: &LinkState) {
        if let Some(silent) = self.links.note_progress(link) {
            let seconds = silent.as_secs_f64();
            self.sink.notice(&format!("the link to {} is back after {seconds:.1} s", self.peer));
        }
    }
}
