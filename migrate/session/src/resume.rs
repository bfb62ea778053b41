//! Links come and go, the session stays: which links there are, how new ones are made, and when to
//! give up (W25 to W28).

use crate::error::SessionError;
use crate::hello::{dial_as, Attempt, Hello, HELLO_TIMEOUT};
use crate::session::{lock, Session};
use crate::transport::Link;
use ring::EventCount;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tls::Connector;

/// Between two attempts: a twentieth of the time that has passed, in these bounds. Whoever comes
/// back after 5 s is found within 250 ms.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long an attempt may take to connect: as long again as has passed, in these bounds. The
/// kernel repeats a lost SYN only after a second, so short attempts find a link that is back
/// sooner; long ones come in time for slow links.
const CONNECT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// A link that is lost sooner than this did not stay: the next one is not made at once.
const STAYED: Duration = Duration::from_secs(1);

/// Once our FINISH is said links end because the peer leaves, and its FINISH may still be on its
/// way over another: a new link is made only after this.
const PARTING: Duration = Duration::from_millis(300);

/// What the two threads of a link and the session know of it.
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
    /// It was lost: nothing more is to be written to it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// True for the first to say so.
    pub(crate) fn mark_dead(&self) -> bool {
        !self.dead.swap(true, Ordering::AcqRel)
    }
}

/// What is left when a link is lost.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) links: usize,
    /// Nobody was told that this link, or all of them, had been lost before and were not really
    /// back.
    pub(crate) is_news: bool,
}

/// An outage: from the loss of the last link until something moves again. Links that come back and
/// bring nothing do not end it.
#[derive(Debug, Clone)]
struct Lost {
    /// When the last link was given up.
    at: Instant,
    /// When something was last heard.
    heard: Instant,
    /// When a link was last made.
    back: Option<Instant>,
    why: String,
}

/// The link of one number.
#[derive(Debug, Clone, Default)]
struct Place {
    link: Option<Arc<LinkState>>,
    /// Since when none has stayed.
    gone: Option<Instant>,
    /// The last one did not.
    flaps: bool,
}

#[derive(Debug)]
struct Table {
    last_id: u64,
    /// By number.
    places: Vec<Place>,
    /// When a link was last lost.
    loss: Instant,
    lost: Option<Lost>,
    resumes: u32,
    silent: Duration,
}

impl Table {
    fn links(&self) -> impl Iterator<Item = &Arc<LinkState>> {
        self.places.iter().filter_map(|place| place.link.as_ref())
    }

    /// What is waited for while there is no link.
    fn outage(&self) -> Option<&Lost> {
        self.lost.as_ref().filter(|_| self.links().next().is_none())
    }
}

/// No lane is wanted.
const UNWANTED: u64 = u64::MAX;

/// What a link has to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// It empties the outbox, and without a lane what is urgent before that.
    First,
    /// It carries what is urgent.
    Lane,
    /// It takes what the first one would have to wait for.
    Other,
}

/// The links of a session.
#[derive(Debug)]
pub(crate) struct Lifeline {
    timeout: Duration,
    began: Instant,
    /// Milliseconds from `began` to the last byte of any link. Relaxed: a time for people.
    heard: AtomicU64,
    /// The link that empties the outbox; 0 for none.
    first: AtomicU64,
    /// The link that carries what is urgent and nothing else; 0 for none, [`UNWANTED`] as long as
    /// nothing is urgent.
    lane: AtomicU64,
    /// Links in the table, for who needs no more than that.
    up: AtomicUsize,
    table: Mutex<Table>,
    /// The table has changed, or the session is over.
    changed: EventCount,
}

impl Lifeline {
    pub(crate) fn new(links: u16, timeout: Duration) -> Self {
        let now = Instant::now();
        let table = Table {
            last_id: 0,
            places: vec![Place::default(); usize::from(links)],
            loss: now,
            lost: None,
            resumes: 0,
            silent: Duration::ZERO,
        };
        Self {
            timeout,
            began: now,
            heard: AtomicU64::new(0),
            first: AtomicU64::new(0),
            lane: AtomicU64::new(UNWANTED),
            up: AtomicUsize::new(0),
            table: Mutex::new(table),
            changed: EventCount::new(),
        }
    }

    /// Whether a lost link is replaced at all.
    pub(crate) fn resumes(&self) -> bool {
        !self.timeout.is_zero()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn links_up(&self) -> usize {
        self.up.load(Ordering::Acquire)
    }

    /// Looks at each link that is up.
    pub(crate) fn each(&self, look: impl FnMut(&Arc<LinkState>)) {
        lock(&self.table).links().for_each(look);
    }

    pub(crate) fn resumes_so_far(&self) -> (u32, Duration) {
        let table = lock(&self.table);
        (table.resumes, table.silent)
    }

    /// Something came.
    pub(crate) fn hear(&self, now: Instant) {
        let since = now.saturating_duration_since(self.began).as_millis();
        self.heard.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A link begins; with the one that had its number until now.
    pub(crate) fn up(
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
        self.count(&table);
        if let Some(lost) = &mut table.lost {
            lost.back = Some(since);
        }
        (link, replaced)
    }

    /// A link has brought something that shows that the session moves: how long nothing was heard,
    /// if this ends an outage.
    pub(crate) fn moves(&self, link: &LinkState) -> Option<Duration> {
        let mut table = lock(&self.table);
        // What a link brought before it was lost is no sign of life of those that follow.
        table.links().find(|there| there.id == link.id)?;
        let lost = table.lost.take()?;
        let silent = lost.back.unwrap_or_else(Instant::now).saturating_duration_since(lost.heard);
        table.resumes += 1;
        table.silent += silent;
        Some(silent)
    }

    /// A link is lost.
    pub(crate) fn down(&self, link: &LinkState, why: &SessionError) -> Left {
        let mut table = lock(&self.table);
        let now = Instant::now();
        let place = &mut table.places[usize::from(link.number)];
        let stayed = now.saturating_duration_since(link.since) >= STAYED || place.gone.is_none();
        place.flaps = !stayed;
        if stayed {
            place.gone = Some(now);
        }
        let links = self.remove(&mut table, link);
        table.loss = now;
        let is_news = if links > 0 { stayed } else { table.lost.is_none() };
        if links == 0 && is_news {
            let heard = self.began + Duration::from_millis(self.heard.load(Ordering::Relaxed));
            table.lost = Some(Lost { at: now, heard, back: None, why: why.to_string() });
        }
        drop(table);
        self.wake();
        Left { links, is_news }
    }

    /// A link has ended as it should; true for the last one.
    pub(crate) fn ended(&self, link: &LinkState) -> bool {
        self.remove(&mut lock(&self.table), link) == 0
    }

    fn remove(&self, table: &mut Table, link: &LinkState) -> usize {
        if let Some(place) = table.places.get_mut(usize::from(link.number)) {
            place.link.take_if(|there| there.id == link.id);
        }
        self.release(link.id);
        self.count(table)
    }

    /// Counts the links of a table that has changed. Nothing else knows how many there are: a link
    /// may be taken out by its own threads and replaced by another at once.
    fn count(&self, table: &Table) -> usize {
        let up = table.links().count();
        self.up.store(up, Ordering::Release);
        up
    }

    /// What link `id` does now. The first to ask when nobody does a piece of work gets it.
    pub(crate) fn role(&self, id: u64) -> Role {
        // The lane leaves the first one's work to others, if there are any.
        if self.lane.load(Ordering::Acquire) == id && self.links_up() > 1 {
            return Role::Lane;
        }
        if take(&self.first, id) {
            leave(&self.lane, id);
            return Role::First;
        }
        if take(&self.lane, id) {
            return Role::Lane;
        }
        Role::Other
    }

    /// Something is urgent; true for the first to say so.
    pub(crate) fn want_lane(&self) -> bool {
        self.lane.compare_exchange(UNWANTED, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether a link carries what is urgent and nothing else.
    pub(crate) fn has_lane(&self) -> bool {
        !matches!(self.lane.load(Ordering::Acquire), 0 | UNWANTED)
    }

    /// Link `id` does nothing any more.
    pub(crate) fn release(&self, id: u64) {
        leave(&self.first, id);
        leave(&self.lane, id);
    }

    /// Shuts every link at once.
    pub(crate) fn cut(&self) {
        for link in lock(&self.table).links() {
            let _ = link.socket.shutdown(Shutdown::Both);
        }
    }

    /// Lets `keep` look again.
    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }
}

/// Whether link `id` does this work, or gets it here as nobody did.
fn take(work: &AtomicU64, id: u64) -> bool {
    let taken = work.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire);
    taken.is_ok() || taken == Err(id)
}

/// Link `id` does not do this work any more, if it did.
fn leave(work: &AtomicU64, id: u64) {
    let _ = work.compare_exchange(id, 0, Ordering::AcqRel, Ordering::Acquire);
}

/// What a client needs to make a link again.
#[derive(Debug, Clone)]
pub struct Redial {
    peer: String,
    address: Option<SocketAddr>,
    connector: Option<Connector>,
    hello: Hello,
}

/// What a peer says of its session, when ours is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Bytes of W20 may have been written to QEMU. If not, none ever will be.
    pub committed: bool,
    /// QEMU has said that it runs the VM.
    pub confirmed: bool,
}

impl Redial {
    /// `peer` as it was dialled for `first`; `hello` with the token.
    pub fn new(peer: String, first: &Link, connector: Option<Connector>, hello: Hello) -> Self {
        // The address, not the name: while the network is down the resolver may be as well.
        Self { peer, address: first.socket().peer_addr().ok(), connector, hello }
    }

    fn attempt(&self, hello: &Hello, passed: Duration) -> Result<Link, SessionError> {
        let connect = passed.clamp(CONNECT.0, CONNECT.1);
        let rest = (4 * connect).min(HELLO_TIMEOUT);
        let attempt = Attempt { address: self.address, connect, handshake: rest, welcome: rest };
        dial_as(&self.peer, self.connector.as_ref(), hello, attempt).map(|(link, _)| link)
    }

    /// Asks a peer that has not answered how far it has come; its session is over then (W28).
    ///
    /// # Errors
    /// It cannot be reached, or knows nothing of this session.
    pub fn ask(&self) -> Result<Verdict, SessionError> {
        let hello = Hello { ask: true, link: 0, ..self.hello.clone() };
        match self.attempt(&hello, CONNECT.0) {
            Err(SessionError::Over { committed, confirmed, .. }) => {
                Ok(Verdict { committed, confirmed })
            }
            Err(error) => Err(error),
            Ok(_) => {
                let detail = "it answers a question with a link".into();
                Err(SessionError::Hello { peer: self.peer.clone(), detail })
            }
        }
    }
}

impl Session {
    /// Starts the thread that ends the session when its last link stays away, and with `redial`
    /// makes lost links anew.
    ///
    /// # Errors
    /// The thread cannot be had.
    pub fn keep_up(self: &Arc<Self>, redial: Option<Redial>) -> Result<(), SessionError> {
        if !self.lifeline.resumes() {
            return Ok(());
        }
        let session = self.clone();
        // Not joined: it may be in the middle of an attempt when the session ends.
        let thread = std::thread::Builder::new()
            .name("lifeline".into())
            .spawn(move || keep(&session, redial.as_ref()));
        thread.map(drop).map_err(|source| SessionError::Resource {
            what: "cannot start the thread that keeps a session's links up".into(),
            source,
        })
    }

    /// Whether a link is up.
    pub fn is_linked(&self) -> bool {
        self.lifeline.links_up() > 0
    }

    fn needs_no_link(&self) -> bool {
        self.has_failed() || self.is_parting()
    }
}

fn keep(session: &Arc<Session>, redial: Option<&Redial>) {
    let lifeline = &session.lifeline;
    let mut turn = 0;
    // The last attempt: when it ended, and whether it made a link.
    let mut last: Option<(Instant, bool)> = None;
    loop {
        let (outage, loss, missing) = {
            let table = lock(&lifeline.table);
            let count = table.places.len();
            let missing =
                (0..count).map(|n| (n + turn) % count).find(|n| table.places[*n].link.is_none());
            let missing = missing.map(|n| (n, table.places[n].clone()));
            (table.outage().cloned(), table.loss, missing)
        };
        if session.needs_no_link() {
            return;
        }
        let deadline = outage.as_ref().map(|lost| lost.at + lifeline.timeout);
        if let Some(lost) = outage.as_ref().filter(|lost| lost.at.elapsed() >= lifeline.timeout) {
            let (lost, seconds) = (lost.why.clone(), lifeline.timeout.as_secs());
            return session.fail(SessionError::NotResumed { lost, seconds });
        }
        let all = missing.is_none();
        let (Some(redial), Some((number, place))) = (redial, missing) else {
            lifeline.changed.wait_until(deadline, || {
                let table = lock(&lifeline.table);
                let gap = all && table.places.iter().any(|place| place.link.is_none());
                let news = gap || table.outage().is_some() != outage.is_some();
                (news || session.needs_no_link()).then_some(())
            });
            continue;
        };
        let passed = place.gone.map_or(Duration::ZERO, |gone| gone.elapsed());
        let parting = session.farewell().is_some().then_some(loss + PARTING);
        // An attempt that failed, and one that made a link that did not stay, are not repeated at
        // once.
        let again = last.filter(|(_, made)| !made || place.flaps);
        let pause = again.map(|(at, _)| at + (passed / 20).clamp(PAUSE.0, PAUSE.1));
        if let Some(until) = parting.max(pause).filter(|until| *until > Instant::now()) {
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            lifeline.changed.wait_until(Some(until), || session.needs_no_link().then_some(()));
            continue;
        }
        let number16 = u16::try_from(number).unwrap_or(u16::MAX);
        let hello = Hello { link: number16, ..redial.hello.clone() };
        let result = redial.attempt(&hello, passed);
        if session.needs_no_link() {
            return;
        }
        last = Some((Instant::now(), result.is_ok()));
        turn = number + 1;
        match result {
            Ok(link) => {
                if let Err(error) = session.add_link(number16, link) {
                    return session.fail(error);
                }
            }
            // It is there and has no such session: no attempt will change that.
            Err(error @ (SessionError::Over { .. } | SessionError::Refused { .. }))
                if outage.is_some() =>
            {
                return session.fail(error);
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::Grants;
    use crate::frame::{FrameType, Header, HEADER_BYTES};
    use crate::session::{Incoming, Outgoing, Sink};
    use std::io::Read;
    use std::net::TcpListener;

    struct Nobody;

    impl Sink for Nobody {
        fn frame(&self, _: Incoming) -> Result<(), SessionError> {
            Ok(())
        }

        fn finish(&self, _: &[u8]) {}

        fn closed(&self, _: &Arc<SessionError>) {}
    }

    #[test]
    fn what_was_spilled_for_links_that_are_gone_is_not_forgotten() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let lifeline = (2, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, lifeline, Arc::new(Nobody)).unwrap();
        let header = Header { stream: 7, ..Header::free(FrameType::Open, 0) };
        assert!(session.spill().push(Outgoing::Bare(header)).is_ok());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        session.add_link(1, Link::from(ours)).unwrap();
        let mut frame = [0; HEADER_BYTES];
        loop {
            theirs.read_exact(&mut frame).unwrap();
            let got = Header::from_bytes(&frame, grants.chunk_bytes).unwrap();
            if got.kind == FrameType::Open {
                assert_eq!(got.stream, 7);
                break;
            }
            assert_eq!(got.kind, FrameType::Heartbeat);
        }
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }

    #[test]
    fn the_work_of_the_first_link_passes_on_and_comes_to_one_at_a_time() {
        let lifeline = Lifeline::new(2, Duration::from_secs(1));
        assert_eq!([5, 5, 6].map(|id| lifeline.role(id)), [Role::First, Role::First, Role::Other]);
        lifeline.release(6);
        assert_eq!(lifeline.role(6), Role::Other);
        lifeline.release(5);
        assert_eq!([6, 5].map(|id| lifeline.role(id)), [Role::First, Role::Other]);
    }

    #[test]
    fn the_lane_passes_on_when_its_link_is_lost_and_ends_with_the_last_but_one() {
        let lifeline = Lifeline::new(3, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [a, b, c] = [0, 1, 2].map(|number| lifeline.up(number, socket()).0);
        let roles = || [&a, &b, &c].map(|link| lifeline.role(link.id));
        assert_eq!(roles(), [Role::First, Role::Other, Role::Other]);
        assert!(lifeline.want_lane() && !lifeline.has_lane() && !lifeline.want_lane());
        assert_eq!(roles(), [Role::First, Role::Lane, Role::Other]);
        let why = SessionError::Local { reason: "the test".into() };
        // The lane is lost: another takes it.
        lifeline.down(&b, &why);
        assert!(!lifeline.has_lane());
        assert_eq!([&a, &c].map(|link| lifeline.role(link.id)), [Role::First, Role::Lane]);
        // The first one is lost: the lane leaves its work to the new one.
        lifeline.down(&a, &why);
        let b = lifeline.up(1, socket()).0;
        assert_eq!([&c, &b].map(|link| lifeline.role(link.id)), [Role::Lane, Role::First]);
        // With one link there is no lane, and with the next one there is again.
        lifeline.down(&b, &why);
        assert_eq!(lifeline.role(c.id), Role::First);
        assert!(!lifeline.has_lane());
        let a = lifeline.up(0, socket()).0;
        assert_eq!([&c, &a].map(|link| lifeline.role(link.id)), [Role::First, Role::Lane]);
    }

    #[test]
    fn a_link_replaced_while_it_is_being_lost_is_counted_once() {
        let lifeline = Lifeline::new(1, Duration::from_secs(1));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let why = SessionError::Local { reason: "the test".into() };
        let old = lifeline.up(0, socket()).0;
        // Its reader has marked it, and has not taken it out yet when the new one comes.
        assert!(old.mark_dead());
        let (new, replaced) = lifeline.up(0, socket());
        assert_eq!(replaced.map(|link| link.id), Some(old.id));
        assert_eq!(lifeline.down(&old, &why).links, 1);
        assert_eq!(lifeline.links_up(), 1);
        assert_eq!(
            lifeline.down(&new, &why).links,
            0,
            "no link is left, and nobody will ever know"
        );
        assert!(lock(&lifeline.table).lost.is_some());
    }

    #[test]
    fn of_two_hellos_for_one_number_at_once_the_last_has_the_link() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let lifeline = (1, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, lifeline, Arc::new(Nobody)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ends: Vec<_> = (0..8)
            .map(|_| {
                let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                (ours, listener.accept().unwrap().0)
            })
            .collect();
        let theirs: Vec<_> = std::thread::scope(|scope| {
            let join = |(ours, theirs)| {
                let session = &session;
                scope.spawn(move || {
                    session.add_link(0, Link::from(ours)).unwrap();
                    theirs
                })
            };
            let threads: Vec<_> = ends.into_iter().map(join).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(session.lifeline.links_up(), 1);
        // All but one are shut, and the count follows the last one.
        let is_shut = |socket: &TcpStream| {
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            (&*socket).read_to_end(&mut Vec::new()).is_ok()
        };
        let until = Instant::now() + Duration::from_secs(60);
        while theirs.iter().filter(|socket| is_shut(socket)).count() != 7 {
            assert!(Instant::now() < until, "others than all but one are shut");
        }
        drop(theirs);
        let until = Instant::now() + Duration::from_secs(60);
        while session.is_linked() {
            assert!(Instant::now() < until, "a link that is gone counts for ever");
            std::thread::sleep(Duration::from_millis(10));
        }
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }
}
