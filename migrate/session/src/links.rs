//! The links of a session, the role of each, and the outage that starts with the loss of the last
//! one (W25, W26).

mod table;

use crate::error::SessionError;
use crate::sync::lock;
use ring::EventCount;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use table::{Outage, Place, Table};

pub(crate) use table::LinkState;

/// A link lost sooner than this counts as flapping: it is not reopened at once.
const STAYED: Duration = Duration::from_secs(1);

/// The state after the loss of a link.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Remaining {
    pub(crate) links: usize,
    /// Those of `links` that have other numbers: a link may be replaced before its loss is noticed.
    pub(crate) others: usize,
    /// The loss deserves a notice: it is the first of this link, or of all links, since they last
    /// stayed up.
    pub(crate) is_news: bool,
}

/// No stream has priority.
const UNWANTED: u64 = u64::MAX;

/// A link's share of the frames to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// It empties the outbox; without a priority link, the priority queue first.
    First,
    /// It carries frames with priority, and no other frame of a stream.
    Priority,
    /// It carries the overflow of the first link.
    Other,
}

/// The state that the thread for lost links acts on.
#[derive(Debug)]
pub(crate) struct Missing {
    /// The outage, while no link is up.
    pub(crate) outage: Option<Outage>,
    /// When a link was last lost.
    pub(crate) last_loss: Instant,
    /// A number without a link.
    pub(crate) place: Option<(usize, Place)>,
}

/// The links of a session.
#[derive(Debug)]
pub(crate) struct Links {
    /// How long the session outlives its last link.
    timeout: Duration,
    began: Instant,
    /// Milliseconds from `began` to the last byte of any link. Relaxed: only reports use it.
    received: AtomicU64,
    /// The link that empties the outbox; 0 for none.
    first: AtomicU64,
    /// The link that carries only frames with priority; 0 for none, [`UNWANTED`] while no stream
    /// has priority.
    priority: AtomicU64,
    /// How many links the table has; readable without the lock.
    up: AtomicUsize,
    table: Mutex<Table>,
    /// Notified when the table changes, or the session ends.
    changed: EventCount,
}

impl Links {
    pub(crate) fn new(links: u16, timeout: Duration) -> Self {
        let now = Instant::now();
        let table = Table {
            last_id: 0,
            places: vec![Place::default(); usize::from(links)],
            last_loss: now,
            outage: None,
            resumes: 0,
            silent: Duration::ZERO,
        };
        Self {
            timeout,
            began: now,
            received: AtomicU64::new(0),
            first: AtomicU64::new(0),
            priority: AtomicU64::new(UNWANTED),
            up: AtomicUsize::new(0),
            table: Mutex::new(table),
            changed: EventCount::new(),
        }
    }

    /// Whether lost links are replaced.
    pub(crate) fn resumes_lost(&self) -> bool {
        !self.timeout.is_zero()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The number of links that the session is to have.
    pub(crate) fn count(&self) -> u64 {
        lock(&self.table).places.len() as u64
    }

    pub(crate) fn links_up(&self) -> usize {
        self.up.load(Ordering::Acquire)
    }

    /// The number of links that carry the overflow of the first one.
    pub(crate) fn spare_links(&self) -> usize {
        // Without any link the next one becomes the first, so it is counted.
        (self.links_up().max(1) - 1).saturating_sub(usize::from(self.has_priority_link()))
    }

    /// Calls `look` for each link that is up.
    pub(crate) fn each(&self, look: impl FnMut(&Arc<LinkState>)) {
        lock(&self.table).links().for_each(look);
    }

    /// How many outages have ended, and for how long nothing was received in them, in total.
    pub(crate) fn resumes(&self) -> (u32, Duration) {
        let table = lock(&self.table);
        (table.resumes, table.silent)
    }

    /// Whether there were links, and all of them are lost.
    pub(crate) fn are_lost(&self) -> bool {
        lock(&self.table).outage().is_some()
    }

    /// Records that bytes were received.
    pub(crate) fn note_received(&self, now: Instant) {
        let since = now.saturating_duration_since(self.began).as_millis();
        self.received.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Adds a link; returns its state, and that of the link that had its number before.
    pub(crate) fn add(
        &self,
        number: u16,
        socket: TcpStream,
    ) -> (Arc<LinkState>, Option<Arc<LinkState>>) {
        let mut table = lock(&self.table);
        table.last_id += 1;
        let (id, since, dead) = (table.last_id, Instant::now(), AtomicBool::new(false));
        let link = Arc::new(LinkState { id, number, socket, since, dead });
        let at = usize::from(number);
        if table.places.len() <= at {
            table.places.resize(at + 1, Place::default());
        }
        let replaced = table.places[at].link.replace(link.clone());
        self.recount(&table);
        if let Some(outage) = &mut table.outage {
            outage.back = Some(since);
        }
        (link, replaced)
    }

    /// Records that a link has shown progress. If this ends an outage, returns for how long nothing
    /// was received.
    pub(crate) fn note_progress(&self, link: &LinkState) -> Option<Duration> {
        let mut table = lock(&self.table);
        // Progress of a link that has been lost since is no evidence about the links after it.
        table.links().find(|there| there.id == link.id)?;
        let outage = table.outage.take()?;
        let back = outage.back.unwrap_or_else(Instant::now);
        let silent = back.saturating_duration_since(outage.last_received);
        table.resumes += 1;
        table.silent += silent;
        Some(silent)
    }

    /// Removes a lost link.
    pub(crate) fn lose(&self, link: &LinkState, why: &SessionError) -> Remaining {
        let mut table = lock(&self.table);
        let now = Instant::now();
        let place = &mut table.places[usize::from(link.number)];
        let stayed = now.saturating_duration_since(link.since) >= STAYED || place.gone.is_none();
        place.flaps = !stayed;
        if stayed {
            place.gone = Some(now);
        }
        let links = self.remove(&mut table, link);
        table.last_loss = now;
        let is_news = if links > 0 { stayed } else { table.outage.is_none() };
        if links == 0 && is_news {
            let received = Duration::from_millis(self.received.load(Ordering::Relaxed));
            table.outage = Some(Outage {
                began: now,
                last_received: self.began + received,
                back: None,
                cause: why.to_string(),
            });
        }
        let others = table.links().filter(|there| there.number != link.number).count();
        drop(table);
        self.wake();
        Remaining { links, others, is_news }
    }

    /// Removes a link that has ended in order; true for the last one.
    pub(crate) fn end(&self, link: &LinkState) -> bool {
        self.remove(&mut lock(&self.table), link) == 0
    }

    fn remove(&self, table: &mut Table, link: &LinkState) -> usize {
        if let Some(place) = table.places.get_mut(usize::from(link.number)) {
            place.link.take_if(|there| there.id == link.id);
        }
        self.release_roles(link.id);
        self.recount(table)
    }

    /// Counts the links of a changed table. The table is the only source: a link may be removed by
    /// its own threads and replaced by another at once.
    fn recount(&self, table: &Table) -> usize {
        let up = table.links().count();
        self.up.store(up, Ordering::Release);
        up
    }

    /// The role of link `id` now. A vacant role goes to the first link that asks.
    pub(crate) fn role(&self, id: u64) -> Role {
        // The priority link does not take the first link's role while there are other links.
        if self.priority.load(Ordering::Acquire) == id && self.links_up() > 1 {
            return Role::Priority;
        }
        if claim(&self.first, id) {
            release(&self.priority, id);
            return Role::First;
        }
        if claim(&self.priority, id) {
            return Role::Priority;
        }
        Role::Other
    }

    /// Records that a stream has priority; true for the first call.
    pub(crate) fn want_priority_link(&self) -> bool {
        self.priority.compare_exchange(UNWANTED, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether a link carries only frames with priority.
    pub(crate) fn has_priority_link(&self) -> bool {
        !matches!(self.priority.load(Ordering::Acquire), 0 | UNWANTED)
    }

    /// Vacates the roles of link `id`.
    pub(crate) fn release_roles(&self, id: u64) {
        release(&self.first, id);
        release(&self.priority, id);
    }

    /// Shuts down every link at once.
    pub(crate) fn cut(&self) {
        for link in lock(&self.table).links() {
            let _ = link.socket.shutdown(Shutdown::Both);
        }
    }

    /// The missing links. If several numbers have no link, `place` is the first of them from `turn`
    /// on, cyclically. Without any link, those come first that were there before: others may never
    /// come.
    pub(crate) fn missing(&self, turn: usize) -> Missing {
        let table = lock(&self.table);
        let count = table.places.len();
        let number = (0..count).map(|n| (n + turn) % count);
        let mut missing =
            number.map(|n| (n, &table.places[n])).filter(|(_, place)| place.link.is_none());
        let mut known = missing.clone().filter(|(_, place)| place.gone.is_some());
        let known = table.outage().and_then(|_| known.next());
        let place = known
            .or_else(|| missing.next())
            // A link that was never there is missing since the beginning.
            .map(|(n, place)| {
                (n, Place { gone: place.gone.or(Some(self.began)), ..place.clone() })
            });
        Missing { outage: table.outage().cloned(), last_loss: table.last_loss, place }
    }

    /// Waits until `deadline`, until `is_over`, or until the missing links differ from `known`.
    pub(crate) fn wait_for_change(
        &self,
        deadline: Option<Instant>,
        known: &Missing,
        is_over: impl Fn() -> bool,
    ) {
        self.changed.wait_until(deadline, || {
            let table = lock(&self.table);
            let is_gap =
                known.place.is_none() && table.places.iter().any(|place| place.link.is_none());
            let is_news = is_gap || table.outage().is_some() != known.outage.is_some();
            (is_news || is_over()).then_some(())
        });
    }

    /// Waits until `deadline`, until `is_over`, or until an outage begins or ends that is not one
    /// of `known`.
    pub(crate) fn pause(&self, deadline: Instant, known: &Missing, is_over: impl Fn() -> bool) {
        self.changed.wait_until(Some(deadline), || {
            let is_news = lock(&self.table).outage().is_some() != known.outage.is_some();
            (is_news || is_over()).then_some(())
        });
    }

    /// Wakes the waiting threads.
    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }
}

/// Whether link `id` has this role; takes the role if it is vacant.
fn claim(role: &AtomicU64, id: u64) -> bool {
    let taken = role.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire);
    taken.is_ok() || taken == Err(id)
}

/// Vacates the role if link `id` has it.
fn release(role: &AtomicU64, id: u64) {
    let _ = role.compare_exchange(id, 0, Ordering::AcqRel, Ordering::Acquire);
}

#[cfg(test)]
mod tests;
