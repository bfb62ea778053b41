//! What goes out: the queues that the links' writers empty, and the frames that are not yet
//! acknowledged.
//!
//! The first link empties the outbox. What it would have to wait for goes to the overflow queue,
//! which the other links empty. The DATA of a stream with priority has a queue of its own: one link
//! carries it and nothing else, or the first link empties it before the outbox.

use crate::credit::{Credits, Grants};
use crate::frame::MAX_STREAMS;
use crate::links::Links;
use crate::outgoing::Outgoing;
use crate::unacked::Unacked;
use pipeline::Results;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Frames that may wait for a link: every buffer there is, and the frames without payload of every
/// stream.
const OUTBOX_FRAMES: usize = 4096;
/// Frames that may wait for the links other than the first.
const OVERFLOW_FRAMES: usize = 128;

/// The sending half of a session.
pub(crate) struct Outbound {
    pub(crate) credits: Credits,
    pub(crate) outbox: Arc<Results<Outgoing>>,
    /// What the first link would have to wait for.
    pub(crate) overflow: Arc<Results<Outgoing>>,
    /// What goes before everything else.
    pub(crate) priority: Arc<Results<Outgoing>>,
    /// By stream: whether its DATA goes by `priority`.
    has_priority: Box<[AtomicBool]>,
    pub(crate) unacked: Unacked,
    /// The payload of our FINISH: sent again on each new link.
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

    /// Queues a frame. After the session has ended it goes nowhere, which is no error.
    pub(crate) fn send(&self, frame: Outgoing) {
        let _ = self.outbox.push(frame);
    }

    /// Queues a frame ahead of all that [`Outbound::send`] has queued.
    pub(crate) fn send_first(&self, frame: Outgoing) {
        let _ = self.priority.push(frame);
        if !self.links.has_priority_link() {
            // The first link empties the queue before it takes anything else; this wakes it.
            self.send(Outgoing::Acks);
        }
    }

    /// Queues a frame again that a lost link had taken.
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

    /// The DATA of `stream` has priority from now on.
    pub(crate) fn prioritise(&self, stream: u16) {
        self.has_priority[usize::from(stream)].store(true, Ordering::Release);
        if self.links.want_priority_link() {
            self.wake_others();
        }
    }

    /// Wakes a link other than the first, which then looks at its role.
    pub(crate) fn wake_others(&self) {
        let _ = self.overflow.push(Outgoing::Acks);
    }

    /// Wakes whichever links can take over the work of one that is gone.
    pub(crate) fn wake_successors(&self) {
        self.wake_others();
        if !self.priority.is_empty() {
            self.send(Outgoing::Acks);
        }
    }

    /// Wakes the link that carries what has priority, which may be the only one left.
    pub(crate) fn wake_priority_link(&self) {
        if self.links.has_priority_link() {
            let _ = self.priority.push(Outgoing::Acks);
        }
    }

    /// Moves what was meant for the other links to the outbox.
    pub(crate) fn reclaim_overflow(&self) {
        while let Some(frame) = self.overflow.pop() {
            self.send(frame);
        }
    }

    /// No more frames; what is queued still goes out unless the session has failed.
    pub(crate) fn close(&self) {
        self.outbox.close();
        self.overflow.close();
        self.priority.close();
    }

    /// Takes note of the payload of our FINISH.
    pub(crate) fn set_finish(&self, report: Vec<u8>) {
        let _ = self.finish.set(report);
    }

    /// The payload of our FINISH, once it was sent.
    pub(crate) fn finish(&self) -> Option<&Vec<u8>> {
        self.finish.get()
    }
}
