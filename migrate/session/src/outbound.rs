//! The sending half: the queues that the links' writers empty, and the unacknowledged frames.
//!
//! The first link empties the outbox. Frames for which it would have to wait go to the overflow
//! queue, which the other links empty. The DATA of a stream with priority has its own queue: one
//! link carries that and nothing else, or the first link empties it before the outbox.

use crate::credit::{Credits, Grants};
use crate::frame::MAX_STREAMS;
use crate::links::Links;
use crate::outgoing::Outgoing;
use crate::unacked::Unacked;
use pipeline::Results;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Frames that may wait for a link: every buffer, and the frames without payload of every stream.
const OUTBOX_FRAMES: usize = 4096;
/// Frames that may wait for the links other than the first.
const OVERFLOW_FRAMES: usize = 128;

/// The sending half of a session.
pub(crate) struct Outbound {
    pub(crate) credits: Credits,
    pub(crate) outbox: Arc<Results<Outgoing>>,
    /// Frames for which the first link would have to wait.
    pub(crate) overflow: Arc<Results<Outgoing>>,
    /// Frames that go before all others.
    pub(crate) priority: Arc<Results<Outgoing>>,
    /// By stream: whether its DATA uses `priority`.
    has_priority: Box<[AtomicBool]>,
    pub(crate) unacked: Unacked,
    /// The payload of our FINISH: repeated on each new link.
    finish: OnceLock<Vec<u8>>,
    links: Arc<Links>,
}

impl Outbound {
    pub(crate) fn new(grants: Grants, links: Arc<Links>) -> Self {
        Self {
            credits: Credits::new(grants),
            outbox: Results::new(OUTBOX_FRAMES),
            overflow: Results::new(OVERFLOW_FRAMES),
            priority: Results::new(OUTBOX_FRAMES),
            has_priority: (0..MAX_STREAMS).map(|_| AtomicBool::new(false)).collect(),
            unacked: Unacked::new(),
            finish: OnceLock::new(),
            links,
        }
    }

    /// Queues a frame. After the end of the session the frame is dropped, which is no error.
    pub(crate) fn send(&self, frame: Outgoing) {
        let _ = self.outbox.push(frame);
    }

    /// Queues a frame ahead of all those queued with [`Outbound::send`].
    pub(crate) fn send_first(&self, frame: Outgoing) {
        let _ = self.priority.push(frame);
        if !self.links.has_priority_link() {
            // The first link empties the queue before it takes anything else; this wakes it.
            self.send(Outgoing::Acks);
        }
    }

    /// Queues the frame of a lost link again.
    pub(crate) fn requeue(&self, frame: Outgoing) {
        let first = match &frame {
            Outgoing::Unit { header, .. } => {
                self.has_priority[usize::from(header.stream)].load(Ordering::Acquire)
            }
            _ => false,
        };
        if first {
            self.send_first(frame);
        } else {
            self.send(frame);
        }
    }

    /// Gives the DATA of `stream` priority from now on.
    pub(crate) fn prioritise(&self, stream: u16) {
        self.has_priority[usize::from(stream)].store(true, Ordering::Release);
        if self.links.want_priority_link() {
            self.wake_others();
        }
    }

    /// Wakes a link other than the first, to check its role.
    pub(crate) fn wake_others(&self) {
        let _ = self.overflow.push(Outgoing::Acks);
    }

    /// Wakes the links that can take over the work of a lost one.
    pub(crate) fn wake_successors(&self) {
        self.wake_others();
        if !self.priority.is_empty() {
            self.send(Outgoing::Acks);
        }
    }

    /// Wakes the priority link, which may be the only one left.
    pub(crate) fn wake_priority_link(&self) {
        if self.links.has_priority_link() {
            let _ = self.priority.push(Outgoing::Acks);
        }
    }

    /// Moves the overflow back to the outbox.
    pub(crate) fn reclaim_overflow(&self) {
        while let Some(frame) = self.overflow.pop() {
            self.send(frame);
        }
    }

    /// Accepts no more frames; queued frames still go out unless the session has failed.
    pub(crate) fn close(&self) {
        self.outbox.close();
        self.overflow.close();
        self.priority.close();
    }

    /// Stores the payload of our FINISH.
    pub(crate) fn set_finish(&self, report: Vec<u8>) {
        let _ = self.finish.set(report);
    }

    /// The payload of our FINISH, once it has been sent.
    pub(crate) fn finish(&self) -> Option<&Vec<u8>> {
        self.finish.get()
    }
}
