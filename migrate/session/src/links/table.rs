//! The places of a session's links, and the outage while there is no link.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The state of a link that its two threads and the session share.
#[derive(Debug)]
pub(crate) struct LinkState {
    /// Unique in the session, never 0.
    pub(crate) id: u64,
    pub(super) number: u16,
    pub(crate) socket: TcpStream,
    pub(super) since: Instant,
    pub(super) dead: AtomicBool,
}

impl LinkState {
    /// The link is lost: nothing more may be written to it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Marks the link as lost; true for the first call.
    pub(crate) fn mark_dead(&self) -> bool {
        !self.dead.swap(true, Ordering::AcqRel)
    }
}

/// The time from the loss of the last link until there is progress. Links that come back without
/// progress do not end it.
#[derive(Debug, Clone)]
pub(crate) struct Outage {
    /// When the last link was lost.
    pub(crate) began: Instant,
    /// When bytes were last received.
    pub(super) last_received: Instant,
    /// When a link was last opened.
    pub(super) back: Option<Instant>,
    /// How the last link was lost.
    pub(crate) cause: String,
}

/// The place of the link with one number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    pub(super) link: Option<Arc<LinkState>>,
    /// The time since which no link has stayed up.
    pub(crate) gone: Option<Instant>,
    /// The last link did not stay up.
    pub(crate) flaps: bool,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) last_id: u64,
    /// Indexed by the link's number.
    pub(super) places: Vec<Place>,
    /// When a link was last lost.
    pub(super) last_loss: Instant,
    pub(super) outage: Option<Outage>,
    pub(super) resumes: u32,
    pub(super) silent: Duration,
}

impl Table {
    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<LinkState>> {
        self.places.iter().filter_map(|place| place.link.as_ref())
    }

    /// The outage, while no link is up.
    pub(super) fn outage(&self) -> Option<&Outage> {
        self.outage.as_ref().filter(|_| self.links().next().is_none())
    }
}
