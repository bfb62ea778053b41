//! The links of a session, the role of each, and the outage that starts with the loss of the last
//! one (W25, W26).

use crate::error::SessionError;
use crate::sync::lock;
use ring::EventCount;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A link lost sooner than this counts as flapping: it is not reopened at once.
const STAYED: Duration = Duration::from_secs(1);

/// The state of a link that its two threads and the session share.
#[derive(Debug)]
pub(crate) struct LinkState {
    /// Unique in the session, never 0.
    pub(crate) id: u64,
    number: u16,
    pub(crate) socket: TcpStream,
    since: Instant,
    dead: AtomicBool,
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

/// The state after the loss of a link.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Remaining {
    pub(crate) links: usize,
    /// The loss deserves a notice: it is the first of this link, or of all links, since they last
    /// stayed up.
    pub(crate) is_news: bool,
}

/// The time from the loss of the last link until there is progress. Links that come back without
/// progress do not end it.
#[derive(Debug, Clone)]
pub(crate) struct Outage {
    /// When the last link was lost.
    pub(crate) began: Instant,
    /// When bytes were last received.
    last_received: Instant,
    /// When a link was last opened.
    back: Option<Instant>,
    /// How the last link was lost.
    pub(crate) cause: String,
}

/// The place of the link with one number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    link: Option<Arc<LinkState>>,
    /// The time since which no link has stayed up.
    pub(crate) gone: Option<Instant>,
    /// The last link did not stay up.
    pub(crate) flaps: bool,
}

#[derive(Debug)]
struct Table {
    last_id: u64,
    /// Indexed by the link's number.
    places: Vec<Place>,
    /// When a link was last lost.
    last_loss: Instant,
    outage: Option<Outage>,
    resumes: u32,
    silent: Duration,
}

impl Table {
    fn links(&self) -> impl Iterator<Item = &Arc<LinkState>> {
        self.places.iter().filter_map(|place| place.link.as_ref())
    }

    /// The outage, while no link is up.
    fn outage(&self) -> Option<&Outage> {
        self.outage.as_ref().filter(|_| self.links().next().is_none())
    }
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
        drop(table);
        self.wake();
        Remaining { links, is_news }
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
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn the_role_of_the_first_link_is_passed_on_and_one_link_at_a_time_has_it() {
        let links = Links::new(2, Duration::from_secs(1));
        assert_eq!([5, 5, 6].map(|id| links.role(id)), [Role::First, Role::First, Role::Other]);
        links.release_roles(6);
        assert_eq!(links.role(6), Role::Other);
        links.release_roles(5);
        assert_eq!([6, 5].map(|id| links.role(id)), [Role::First, Role::Other]);
    }

    #[test]
    fn a_link_that_was_never_there_is_missing_since_the_beginning() {
        let links = Links::new(2, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        links.add(0, TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (number, place) = links.missing(0).place.unwrap();
        assert_eq!((number, place.gone), (1, Some(links.began)));
        assert!(!place.flaps);
    }

    #[test]
    fn without_any_link_those_that_were_there_are_tried_first() {
        let links = Links::new(4, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (first, other) = (links.add(0, socket()).0, links.add(2, socket()).0);
        let turns = || [0, 1, 2, 3].map(|turn| links.missing(turn).place.unwrap().0);
        let why = SessionError::Local { reason: "the test".into() };
        links.lose(&other, &why);
        assert_eq!(turns(), [1, 1, 2, 3]);
        links.lose(&first, &why);
        assert_eq!(turns(), [0, 2, 2, 0]);
    }

    #[test]
    fn a_lost_priority_link_is_replaced_and_a_single_link_has_no_priority() {
        let links = Links::new(3, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [a, b, c] = [0, 1, 2].map(|number| links.add(number, socket()).0);
        let roles = || [&a, &b, &c].map(|link| links.role(link.id));
        assert_eq!(roles(), [Role::First, Role::Other, Role::Other]);
        assert!(
            links.want_priority_link() && !links.has_priority_link() && !links.want_priority_link()
        );
        assert_eq!(roles(), [Role::First, Role::Priority, Role::Other]);
        let why = SessionError::Local { reason: "the test".into() };
        // The priority link is lost: another link takes the role.
        links.lose(&b, &why);
        assert!(!links.has_priority_link());
        assert_eq!([&a, &c].map(|link| links.role(link.id)), [Role::First, Role::Priority]);
        // The first link is lost: the priority link does not take its role, the new link does.
        links.lose(&a, &why);
        let b = links.add(1, socket()).0;
        assert_eq!([&c, &b].map(|link| links.role(link.id)), [Role::Priority, Role::First]);
        // A single link is no priority link; when the next one opens there is one again.
        links.lose(&b, &why);
        assert_eq!(links.role(c.id), Role::First);
        assert!(!links.has_priority_link());
        let a = links.add(0, socket()).0;
        assert_eq!([&c, &a].map(|link| links.role(link.id)), [Role::First, Role::Priority]);
    }

    #[test]
    fn a_link_replaced_while_it_is_being_lost_is_counted_once() {
        let links = Links::new(1, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let why = SessionError::Local { reason: "the test".into() };
        let old = links.add(0, socket()).0;
        // Its reader has marked it, but not removed it yet when the new one opens.
        assert!(old.mark_dead());
        let (new, replaced) = links.add(0, socket());
        assert_eq!(replaced.map(|link| link.id), Some(old.id));
        assert_eq!(links.lose(&old, &why).links, 1);
        assert_eq!(links.links_up(), 1);
        assert_eq!(links.lose(&new, &why).links, 0, "no link is left, and nobody will ever know");
        assert!(lock(&links.table).outage.is_some());
    }
}
