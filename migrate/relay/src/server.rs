//! The listening end: links come in, sessions form, each to its target.

use crate::accelerator::AcceleratorSnapshot;
use crate::destination::{DecodeContext, DecodeJob, Destination};
use crate::error::RelayError;
use crate::threads::spawn;
use crate::unix::UnixAddress;
use codec::Codec;
use pipeline::{Lanes, LanesConfig};
use qat::Qat;
use session::{
    random_id, read_preamble, write_preamble, Grants, Hello, Link, SessionError, Welcome,
    HELLO_TIMEOUT, MAX_LINKS, SILENCE,
};
use std::collections::{HashMap, VecDeque};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tls::{Acceptor, Peer, TlsError};

/// Connections that may be saying hello at once. When one more comes the oldest is closed: a peer
/// that means it has said its hello long before, and idle connections keep nobody out.
const MAX_HELLOS: usize = 64;

/// Sessions that have ended and may still be asked about (W28).
const MAX_ENDED: usize = 64;

/// What a receiver is told.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where each named QEMU listens; `None` is the target of a peer that gives no name.
    pub targets: Vec<(Option<String>, UnixAddress)>,
    /// Secures the links and says who may deliver; none takes anybody, in the clear.
    pub acceptor: Option<Acceptor>,
    /// Codec threads, at least 1.
    pub decompress_threads: usize,
    /// A device for units of codec qatzip; without it, and for what it does not do, software.
    pub qat: Option<Arc<Qat>>,
    /// Page size of the guests, bytes.
    pub page_size: u32,
    /// What peers may have in flight.
    pub grants: Grants,
    /// Bytes of delta cache that a session may have here at most; 0 for none.
    pub delta_cache: u64,
    /// How long to wait for a source whose links are all lost; zero ends its migration with the
    /// first that is lost.
    pub resume: Duration,
}

/// What the application does around a session. Called from the session's own thread.
pub trait Host: Send + Sync + 'static {
    /// A peer wants to deliver to `target`: make QEMU ready for it.
    ///
    /// # Errors
    /// A sentence for the peer's user.
    fn prepare(&self, target: &Option<String>, hello: &Hello) -> Result<(), String>;
    /// Runs the migration to its end with [`Destination::run`] and reports it.
    fn serve(&self, target: &Option<String>, destination: &Destination);
    /// Something a person should read.
    fn notice(&self, text: &str);
}

struct Active {
    token: String,
    /// Whose session it is: its other links show the same certificate.
    owner: Option<Peer>,
    links: u16,
    joined: Mutex<Vec<u16>>,
    destination: Arc<Destination>,
}

impl Active {
    /// Whether a peer that shows `token` and was proved to be `peer` is the one it belongs to.
    fn belongs_to(&self, token: &str, peer: Option<&Peer>) -> bool {
        same(&self.token, token) && self.owner.as_ref() == peer
    }
}

/// What is remembered of a session that has ended.
struct Ended {
    session: String,
    token: String,
    owner: Option<Peer>,
    committed: bool,
    confirmed: bool,
}

/// Accepts links for as long as it lives.
pub struct Server {
    config: ServerConfig,
    host: Arc<dyn Host>,
    lanes: Arc<Lanes<DecodeJob>>,
    /// Of each codec thread's engine.
    accelerators: Vec<Arc<qat::Counters>>,
    sessions: Mutex<HashMap<String, Arc<Active>>>,
    /// Newest last.
    ended: Mutex<VecDeque<Ended>>,
    busy: Mutex<Vec<Option<String>>>,
    /// Oldest first; out of it as soon as the hello is read.
    hellos: Mutex<VecDeque<(u64, TcpStream)>>,
    admitted: AtomicU64,
    /// Connections that were no platen.
    strangers: AtomicU64,
    /// Sessions that have ended.
    served: AtomicU64,
    /// How often it was told to stop.
    stops: AtomicU64,
    /// No new sessions; those that are there go on to their end.
    closing: AtomicBool,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts the codec threads.
    ///
    /// # Errors
    /// A target is no socket; threads cannot be had.
    pub fn new(config: ServerConfig, host: Arc<dyn Host>) -> Result<Arc<Self>, RelayError> {
        for (_, target) in &config.targets {
            target.check_target()?;
        }
        let threads = config.decompress_threads.max(1);
        let mut accelerators = Vec::new();
        let lanes = Lanes::new(
            LanesConfig { threads, name: "decompress", ..LanesConfig::default() },
            |_| {
                let context = DecodeContext::new(config.qat.as_ref());
                accelerators.extend(context.accelerator());
                context
            },
        )
        .map_err(|source| RelayError::Resource {
            what: "cannot start the codec threads".into(),
            source,
        })?;
        Ok(Arc::new(Self {
            config,
            host,
            lanes,
            accelerators,
            sessions: Mutex::new(HashMap::new()),
            ended: Mutex::new(VecDeque::new()),
            busy: Mutex::new(Vec::new()),
            hellos: Mutex::new(VecDeque::new()),
            admitted: AtomicU64::new(0),
            strangers: AtomicU64::new(0),
            served: AtomicU64::new(0),
            stops: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        }))
    }

    /// What the codec threads' accelerators have done since the server was made; empty without any.
    pub fn accelerators(&self) -> Vec<AcceleratorSnapshot> {
        let snapshot =
            |counters: &Arc<qat::Counters>| AcceleratorSnapshot::Qat(counters.snapshot());
        self.accelerators.iter().map(snapshot).collect()
    }

    /// Accepts links until [`Server::stop`], or with `once` until the first session has ended.
    ///
    /// # Errors
    /// The listening socket fails.
    pub fn run(self: &Arc<Self>, listener: &TcpListener, once: bool) -> Result<(), RelayError> {
        let failed =
            |source| RelayError::Resource { what: "the listening socket failed".into(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        let mut told = false;
        loop {
            if self.stops.load(Ordering::Acquire) > 0
                || (once && self.served.load(Ordering::Acquire) > 0)
            {
                self.closing.store(true, Ordering::Release);
                // Their own threads say goodbye to QEMU and peer. Again and again, as a last hello
                // may still become a session.
                if self.lock_sessions().is_empty() {
                    return Ok(());
                }
                self.end_sessions(&mut told);
            }
            // Links that are lost come back, and questions are asked, until the last session has
            // ended.
            match listener.accept() {
                Ok((socket, peer)) => self.admit(socket, peer.to_string()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    // A plain wait: a link is set up once a migration, and 20 ms more do not
                    // matter.
                    std::thread::sleep(Duration::from_millis(20));
                }
                // A connection that was reset before we took it, or no file descriptor left for
                // now.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Ends the sessions of a receiver that was told to stop. One whose QEMU may be starting the VM
    /// ends only when it was told so twice: its source would be in doubt for good, with nobody left
    /// to ask (W28).
    fn end_sessions(&self, told: &mut bool) {
        let stops = self.stops.load(Ordering::Acquire);
        if stops == 0 {
            return;
        }
        let sessions: Vec<_> = self.lock_sessions().values().cloned().collect();
        for active in sessions {
            let session = active.destination.session();
            if stops == 1 && session.failure().is_none() && session.close_commit() {
                if !std::mem::replace(told, true) {
                    self.host.notice(
                        "the destination QEMU may be starting the VM just now; waiting until the source knows \
                         (interrupt again to end this receiver all the same)",
                    );
                }
                continue;
            }
            let reason = "the receiver was stopped".into();
            session.fail(SessionError::Local { reason });
        }
    }

    /// Ends [`Server::run`] and every session; those whose VM may be starting only when it is said
    /// twice.
    pub fn stop(&self) {
        self.stops.fetch_add(1, Ordering::AcqRel);
    }

    /// Connections turned away because they were no platen.
    pub fn strangers(&self) -> u64 {
        self.strangers.load(Ordering::Relaxed)
    }

    fn lock_sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Active>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_hellos(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.hellos.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said_hello(&self, number: u64) {
        self.lock_hellos().retain(|(waiting, _)| *waiting != number);
    }

    fn admit(self: &Arc<Self>, socket: TcpStream, peer: String) {
        let Ok(kept) = socket.try_clone() else { return };
        let number = self.admitted.fetch_add(1, Ordering::Relaxed);
        {
            let mut hellos = self.lock_hellos();
            if hellos.len() >= MAX_HELLOS {
                if let Some((_, oldest)) = hellos.pop_front() {
                    // Its thread sees the end and goes.
                    let _ = oldest.shutdown(Shutdown::Both);
                }
            }
            hellos.push_back((number, kept));
        }
        let server = self.clone();
        let started = spawn("hello", move || {
            let result = server.hello(socket, &peer, number);
            match result {
                Ok(Some((target, session, active))) => server.serve(&target, &session, &active),
                Ok(None) => {}
                Err(error) => {
                    // A scanner can make as many of these as it likes: the first ten are worth
                    // reading.
                    let count = server.strangers.fetch_add(1, Ordering::Relaxed);
                    if count < 10 {
                        server.host.notice(&format!("turned a connection away: {error}"));
                    }
                }
            }
        });
        if started.is_err() {
            self.said_hello(number);
        }
    }

    /// Takes one link's hello. Gives the session if this link makes one.
    #[allow(clippy::type_complexity, reason = "three things that only travel from here to `serve`")]
    fn hello(
        self: &Arc<Self>,
        socket: TcpStream,
        peer: &str,
        number: u64,
    ) -> Result<Option<(Option<String>, String, Arc<Active>)>, SessionError> {
        let failed = |source| SessionError::Resource {
            what: "cannot set up a link's socket".into(),
            source,
        };
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let secured = socket
            .set_nonblocking(false)
            .and_then(|()| socket.set_write_timeout(Some(HELLO_TIMEOUT)))
            .map_err(failed)
            .and_then(|()| self.secure(socket, peer, deadline));
        let (mut link, hello) = match secured {
            Ok(mut link) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let hello = read_preamble::<Hello>(&mut link, peer, left);
                self.said_hello(number);
                (link, hello)
            }
            Err(error) => {
                self.said_hello(number);
                return Err(error);
            }
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(error) => {
                // An answer for who understands it: another version, or one that wants TLS where
                // there is none.
                if matches!(
                    &error,
                    SessionError::Version { .. } | SessionError::Magic { first: [22, 3, ..], .. }
                ) {
                    refuse(&mut link, peer, &error.to_string());
                }
                return Err(error);
            }
        };
        if let Some((reason, committed, confirmed)) = self.verdict(&hello, link.peer()) {
            let reason = Some(reason);
            let (committed, welcome) = (Some(committed), Welcome::default());
            let welcome = Welcome { error: reason, committed, confirmed, ..welcome };
            return write_preamble(&mut link, peer, &welcome).map(|()| None);
        }
        if let Some(token) = &hello.token {
            let joined = self.join(link, &hello, token, peer);
            return joined.map(|()| None);
        }
        match self.open(&hello, peer, link.peer()) {
            Ok((target, active, welcome)) => {
                let welcomed = write_preamble(&mut link, peer, &welcome)
                    .and_then(|()| active.destination.session().add_link(0, link));
                if let Err(error) = welcomed {
                    let reason = "its first link could not be set up".into();
                    active.destination.session().fail(SessionError::Local { reason });
                    self.forget(&target, &hello.session);
                    return Err(error);
                }
                Ok(Some((target, hello.session, active)))
            }
            Err(reason) => {
                refuse(&mut link, peer, &reason);
                Err(SessionError::Hello { peer: peer.into(), detail: reason })
            }
        }
    }

    /// Shakes hands, unless this end was told to do without.
    fn secure(
        &self,
        socket: TcpStream,
        peer: &str,
        deadline: Instant,
    ) -> Result<Link, SessionError> {
        let Some(acceptor) = &self.config.acceptor else { return Ok(socket.into()) };
        match acceptor.accept(&socket, peer, deadline) {
            Ok(channel) => Ok(Link::secured(socket, channel)),
            Err(error) => {
                if matches!(error, TlsError::Plain { .. }) {
                    let reason = "this end takes TLS only: start the other without --insecure, with certificates \
                                  of this end's CA (`platen cert`)";
                    refuse(&mut socket.into(), peer, reason);
                }
                Err(error.into())
            }
        }
    }

    /// A further link of a session (W4).
    fn join(
        &self,
        mut link: Link,
        hello: &Hello,
        token: &str,
        peer: &str,
    ) -> Result<(), SessionError> {
        let active = self.lock_sessions().get(&hello.session).cloned();
        let refused = |link: &mut Link, reason: &str| {
            refuse(link, peer, reason);
            Err(SessionError::Hello { peer: peer.into(), detail: reason.into() })
        };
        let Some(active) = active.filter(|active| active.belongs_to(token, link.peer())) else {
            return refused(&mut link, "no such session, or not yours");
        };
        let mut joined = active.joined.lock().unwrap_or_else(PoisonError::into_inner);
        let again = joined.contains(&hello.link);
        // Its owner has lost the link, whether this end knows it or not (W26).
        if hello.link >= active.links || (again && self.config.resume.is_zero()) {
            let reason = format!(
                "link {} of {} is there already or does not exist",
                hello.link, active.links
            );
            drop(joined);
            return refused(&mut link, &reason);
        }
        if !again {
            joined.push(hello.link);
        }
        drop(joined);
        let welcome = self.welcome(&active.token);
        write_preamble(&mut link, peer, &welcome)?;
        active.destination.session().add_link(hello.link, link)
    }

    /// W28: how far a session has come, for its own client: one that has ended, or that ends now as
    /// the client's has.
    fn verdict(&self, hello: &Hello, peer: Option<&Peer>) -> Option<(String, bool, bool)> {
        let token = hello.token.as_deref()?;
        let active = self.lock_sessions().get(&hello.session).cloned();
        if let Some(active) = active.filter(|active| active.belongs_to(token, peer)) {
            if !hello.ask {
                return None;
            }
            let session = active.destination.session();
            let committed =
                session.end_and_close_commit("the source lost its links and has given up");
            let reason = "its session ends with this question".into();
            return Some((reason, committed, active.destination.is_confirmed()));
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.iter().find(|ended| {
            ended.session == hello.session
                && same(&ended.token, token)
                && ended.owner.as_ref() == peer
        })?;
        Some(("its session has ended".into(), ended.committed, ended.confirmed))
    }

    fn welcome(&self, token: &str) -> Welcome {
        let grants = self.config.grants;
        Welcome {
            token: token.to_string(),
            chunk_bytes: u32::try_from(grants.chunk_bytes).unwrap_or(u32::MAX),
            stream_frames: grants.stream_frames,
            shared_frames: grants.shared_frames,
            codecs: DECODED.iter().map(|codec| codec.name().to_string()).collect(),
            ..Welcome::default()
        }
    }

    /// Makes the session that link 0 asks for, or a sentence why not.
    fn open(
        self: &Arc<Self>,
        hello: &Hello,
        peer: &str,
        owner: Option<&Peer>,
    ) -> Result<(Option<String>, Arc<Active>, Welcome), String> {
        let ours = self.config.page_size;
        if hello.page_size != ours {
            return Err(format!(
                "the source has page size {}, this end {ours}: give both the same --page-size, that of the guest",
                hello.page_size
            ));
        }
        if hello.ask || hello.link != 0 || hello.links == 0 || hello.links > MAX_LINKS {
            return Err(format!("link {} of {} cannot open a session", hello.link, hello.links));
        }
        if hello.session.len() != 32
            || !hello.session.bytes().all(|digit| digit.is_ascii_hexdigit())
        {
            return Err("the session identifier is not made of 32 hex digits".into());
        }
        if let Some(name) =
            hello.codecs.iter().find(|name| !DECODED.iter().any(|codec| codec.name() == **name))
        {
            return Err(format!("this end does not know the codec '{name}'"));
        }
        if self.closing.load(Ordering::Acquire) {
            return Err("this receiver is ending".into());
        }
        if self.lock_sessions().contains_key(&hello.session) {
            return Err("the session exists already".into());
        }
        let Some((target, address)) =
            self.config.targets.iter().find(|(name, _)| *name == hello.name)
        else {
            let names: Vec<_> =
                self.config.targets.iter().filter_map(|(name, _)| name.as_deref()).collect();
            return Err(match &hello.name {
                Some(name) => format!("no target named '{name}' is allowed here (--allow)"),
                None => format!("say which target by --name; there are: {}", names.join(", ")),
            });
        };
        {
            let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            if busy.contains(target) {
                // Its links are silent first, and then waited for.
                let most = (SILENCE + self.config.resume + SILENCE).as_secs();
                return Err(format!(
                    "a migration to this target is in progress; if its source has died, the target is free within {most} s"
                ));
            }
            busy.push(target.clone());
        }
        let peer = match owner {
            Some(owner) => format!("{peer} ({owner})"),
            None => peer.to_string(),
        };
        let opened = self.open_target(hello, (&peer, owner), target, address);
        if opened.is_err() {
            self.forget(target, &hello.session);
        }
        opened.map(|(active, welcome)| (target.clone(), active, welcome))
    }

    fn open_target(
        &self,
        hello: &Hello,
        (peer, owner): (&str, Option<&Peer>),
        target: &Option<String>,
        address: &UnixAddress,
    ) -> Result<(Arc<Active>, Welcome), String> {
        address.check_target().map_err(|error| error.to_string())?;
        self.host.prepare(target, hello)?;
        let host = self.host.clone();
        let delta_cache = hello.delta_cache.min(self.config.delta_cache);
        let destination = Destination::new(
            peer.to_string(),
            (self.config.grants, (hello.links, self.config.resume)),
            (self.config.page_size as usize, delta_cache),
            address.clone(),
            self.lanes.clone(),
            Box::new(move |text| host.notice(text)),
        );
        let destination = Arc::new(destination.map_err(|error| error.to_string())?);
        let token = random_id().map_err(|error| error.to_string())?;
        let welcome = Welcome { delta_cache, ..self.welcome(&token) };
        let joined = Mutex::new(vec![0]);
        let active =
            Active { token, owner: owner.cloned(), links: hello.links, joined, destination };
        let active = Arc::new(active);
        self.lock_sessions().insert(hello.session.clone(), active.clone());
        Ok((active, welcome))
    }

    fn forget(&self, target: &Option<String>, session: &str) {
        {
            let mut sessions = self.lock_sessions();
            if let Some(active) = sessions.get(session) {
                let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
                if ended.len() >= MAX_ENDED {
                    ended.pop_front();
                }
                // Said for good: a writer that is still there must not make it untrue.
                let committed =
                    active.destination.session().end_and_close_commit("the session has ended");
                ended.push_back(Ended {
                    session: session.into(),
                    token: active.token.clone(),
                    owner: active.owner.clone(),
                    committed,
                    confirmed: active.destination.is_confirmed(),
                });
            }
            sessions.remove(session);
        }
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).retain(|name| name != target);
    }

    fn serve(&self, target: &Option<String>, session: &str, active: &Active) {
        self.host.serve(target, &active.destination);
        self.forget(target, session);
        self.served.fetch_add(1, Ordering::AcqRel);
    }
}

const DECODED: [Codec; 5] = [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz];

fn refuse(link: &mut Link, peer: &str, reason: &str) {
    let welcome = Welcome { error: Some(reason.to_string()), ..Welcome::default() };
    // It may be gone already.
    let _ = write_preamble(link, peer, &welcome);
}

/// Compares secrets without telling by time where they differ.
fn same(ours: &str, theirs: &str) -> bool {
    ours.len() == theirs.len()
        && ours.bytes().zip(theirs.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}
