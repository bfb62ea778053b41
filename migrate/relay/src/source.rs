//! The relay beside the source QEMU: accepts its connections, reads them, compresses, sends; hands
//! the return path back.

mod doubt;

use crate::accelerator::{Accelerator, AcceleratorCounters, AcceleratorSnapshot};
use crate::auto::{Auto, AutoConfig, AutoReport};
use crate::counters::Counters;
use crate::decode::Arrived;
use crate::error::RelayError;
use crate::hand_back;
use crate::intake;
use crate::jobs::{EncodeContext, EncodeJob};
use crate::keeper::Keeper;
use crate::unix::{Listening, UnixAddress};
use codec::{Codec, Settings};
use doubt::{hold, last_words, peer_reason, says_never, LOOK};
use pipeline::{Lanes, LanesConfig, Results, Submitter};
use ring::Ring;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use session::{
    dial, random_id, FrameType, Hello, Incoming, Redial, Session, SessionError, Setup, Sink,
    MAX_LINKS, MAX_STREAMS,
};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};
use stream::{Kind, Token};
use tls::Connector;

/// How long a QEMU that has its answer, or a peer that has our report, may take to end its side.
const FAREWELL: Duration = Duration::from_secs(10);

/// What a source relay is told.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// HOST:PORT of `platen receive`.
    pub peer: String,
    /// Secures the links; none sends memory in the clear.
    pub connector: Option<Connector>,
    /// Codec and level, unless `auto` chooses.
    pub settings: Settings,
    /// Codec and level are chosen for each chunk, by what link and CPU have to spare.
    pub auto: Option<AutoConfig>,
    /// Codec threads, at least 1.
    pub compress_threads: usize,
    /// QEMU's compress-wait-thread: wait for a codec thread, or send the chunk as it is.
    pub compress_wait_thread: bool,
    /// TCP connections, 1 to 64.
    pub links: u16,
    /// Page size of the guest, bytes.
    pub page_size: u32,
    /// Which of the peer's targets.
    pub name: Option<String>,
    /// What the peer should tell its QEMU.
    pub setup: Option<Setup>,
    /// How long to wait for a link when all are lost; zero ends the migration with the first that
    /// is lost.
    pub resume: Duration,
    /// Bytes of memory, here and at the peer, for pages as they were sent last, so that one that is
    /// sent again goes as its difference; 0 for none. With `auto` only while the link is what holds
    /// the migration up.
    pub delta_cache: u64,
}

/// What the threads tell the one that decides.
pub(crate) enum Event {
    /// A connection of the source QEMU has ended.
    SourceEof { is_main: bool },
    /// SHUT was handed to the source QEMU.
    Shut(u32),
    /// SHUT was to be handed over, but the source QEMU was gone.
    ShutRefused,
    /// The destination QEMU has closed its main connection.
    DestinationEof,
    /// A stream's return path will bring nothing more.
    BackDone,
    /// The session ended before its time.
    Closed(Arc<SessionError>),
    /// The peer's report.
    Finished(Vec<u8>),
    /// Something a person should read.
    Notice(String),
    /// Somebody wants it to end.
    Stop,
}

/// One connection of the source QEMU.
pub(crate) struct SourceStream {
    pub(crate) id: u16,
    pub(crate) socket: UnixStream,
    /// Set once its first bytes are there.
    pub(crate) kind: OnceLock<Kind>,
    /// Frames of the return path.
    results: OnceLock<Arc<Results<Arrived>>>,
}

pub(crate) struct Shared {
    pub(crate) session: Arc<Session>,
    pub(crate) submitter: Submitter<EncodeJob>,
    pub(crate) spare: Arc<Ring<Vec<Token>>>,
    pub(crate) counters: Arc<Counters>,
    /// Of each codec thread's accelerator.
    accelerators: Vec<AcceleratorCounters>,
    pub(crate) settings: Settings,
    pub(crate) auto: Option<Arc<Auto>>,
    pub(crate) page_size: usize,
    /// Bytes granted for a delta cache, until a stream has taken it.
    pub(crate) delta_cache: AtomicU64,
    streams: Mutex<Vec<Arc<SourceStream>>>,
    listening: OnceLock<Listening>,
    pub(crate) events: Sender<Event>,
    /// The end of the stream has begun, and a STILL_OPEN is on its way to the links.
    pub(crate) tail_read: AtomicBool,
    /// A STILL_OPEN was given to a link: the destination may run from now on (W23).
    pub(crate) word_sent: AtomicBool,
    pub(crate) return_path: AtomicBool,
    /// The main stream has announced that it may turn to postcopy, or is one that goes on.
    pub(crate) postcopy: AtomicBool,
    /// The source QEMU is in postcopy for good: its VM runs no more, and a closed socket pauses the
    /// migration.
    pub(crate) switched: AtomicBool,
    /// Bytes of the main stream that may still come before that, counted from what was read of it;
    /// 0 without postcopy.
    pub(crate) before_switch: AtomicU64,
    /// Holds QEMU's main socket while this process must not be the only one that does.
    keeper: OnceLock<Keeper>,
    /// It has the socket, to be held whatever comes on it.
    kept: AtomicBool,
    /// SHUT(0) is being handed to the source QEMU, which may close its socket before we can say
    /// that it is done.
    pub(crate) handing_shut: AtomicBool,
    /// Return paths being handed back.
    backs: AtomicUsize,
    /// The migration is over, or will be: no new connections, readers end quietly.
    pub(crate) over: AtomicBool,
    started: OnceLock<Instant>,
}

/// Breaks the circle session -> sink -> session.
struct SourceSink(Arc<OnceLock<Weak<Shared>>>, Mutex<Sender<Event>>);

impl SourceSink {
    fn tell(&self, event: Event) {
        let _ = self.1.lock().unwrap_or_else(PoisonError::into_inner).send(event);
    }
}

impl Sink for SourceSink {
    fn frame(&self, frame: Incoming) -> Result<(), SessionError> {
        let Some(shared) = self.0.get().and_then(Weak::upgrade) else { return Ok(()) };
        let (stream, seq) = (frame.header.stream, frame.header.seq);
        let bad = |detail: &str| SessionError::Sequence { stream, seq, detail: detail.into() };
        let results = shared
            .lock_streams()
            .get(usize::from(stream))
            .and_then(|stream| stream.results.get().cloned())
            .ok_or_else(|| bad("this end has no such return path"))?;
        let chunk = match frame.unit {
            // The return path is small and urgent: it travels as it is (W10).
            Some((unit, _))
                if unit.codec != Codec::Raw
                    || unit.plain_len != frame.header.plain_len
                    || frame.header.table_len > 0 =>
            {
                return Err(bad("the return path is never compressed"));
            }
            unit => unit.map(|(_, slot)| Ok(slot)),
        };
        let _ = results.push(Arrived { header: frame.header, chunk });
        Ok(())
    }

    fn finish(&self, report: &[u8]) {
        self.tell(Event::Finished(report.to_vec()));
    }

    fn closed(&self, error: &Arc<SessionError>) {
        self.tell(Event::Closed(error.clone()));
    }

    /// W20, W25: the word may be said long after QEMU's socket was looked at, and again after an
    /// outage.
    fn still_open(&self, stream: u16) -> bool {
        let Some(shared) = self.0.get().and_then(Weak::upgrade) else { return false };
        let stream = shared.lock_streams().get(usize::from(stream)).cloned();
        let open = stream.is_some_and(|stream| intake::is_open(&stream.socket));
        // Without a return path the source closes when it has written all, and EOF says so.
        if !open && shared.return_path.load(Ordering::Acquire) {
            self.tell(Event::SourceEof { is_main: true });
            return false;
        }
        // The flag first, so that nobody believes the destination cannot run. Then either this sees
        // that the session has failed, and the word stays here, or whoever decides what that means
        // sees the flag (`decide`).
        shared.word_sent.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        shared.session.failure().is_none()
    }

    fn notice(&self, text: &str) {
        self.tell(Event::Notice(text.into()));
    }
}

/// A source relay with its session open and its socket listening.
pub struct Source {
    shared: Arc<Shared>,
    redial: Redial,
    /// Taken by `run`; the lock only makes the type shareable.
    events: Mutex<Receiver<Event>>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

/// Ends a running [`Source`] from elsewhere (Ctrl-C), and shows how it goes.
#[derive(Clone)]
pub struct SourceHandle(Arc<Shared>);

impl std::fmt::Debug for SourceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SourceHandle")
    }
}

/// How a migration goes, for a progress line.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Plain bytes read from QEMU.
    pub plain: u64,
    /// Bytes given to the links.
    pub transferred: u64,
    /// Non-zero pages.
    pub normal: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Codec threads working right now.
    pub busy_workers: usize,
    /// Codec threads.
    pub workers: usize,
}

impl SourceHandle {
    /// Asks it to end. Before the commit point the source VM goes on.
    pub fn stop(&self) {
        let _ = self.0.events.send(Event::Stop);
    }

    /// Whether the destination may be starting the VM just now, or has it: a cancel could then make
    /// two copies run.
    pub fn in_doubt(&self) -> bool {
        let shared = &self.0;
        shared.return_path.load(Ordering::Acquire)
            && shared.may_run_there()
            && !shared.over.load(Ordering::Acquire)
    }

    /// Figures so far.
    pub fn progress(&self) -> Progress {
        let counters = &self.0.counters;
        Progress {
            plain: counters.plain.load(Ordering::Relaxed),
            transferred: self.0.session.bytes_out.load(Ordering::Relaxed),
            normal: counters.normal.load(Ordering::Relaxed),
            duplicate: counters.duplicate.load(Ordering::Relaxed),
            busy_workers: self.0.submitter.lanes().busy_workers(),
            workers: self.0.submitter.lanes().threads(),
        }
    }
}

/// How it ended well.
#[derive(Debug)]
pub struct SourceEnd {
    /// From QEMU's first connection to its last word, ms.
    pub total: Duration,
    /// The peer's report, JSON; empty when it did not come in time.
    pub peer_report: Vec<u8>,
    /// The source had a return path, so that success means the destination runs.
    pub return_path: bool,
    /// How long the last bytes took from QEMU's socket here to QEMU's there: at most that is what
    /// the relays and the link added to the downtime. `None` in postcopy, where the VM runs before
    /// them.
    pub hidden_downtime: Option<Duration>,
}

impl Source {
    /// Connects the links and starts the codec threads.
    ///
    /// # Errors
    /// The peer cannot be reached or refuses; threads or memory cannot be had.
    pub fn connect(config: &SourceConfig) -> Result<Self, RelayError> {
        Self::connect_with(config, None)
    }

    /// As [`connect`](Self::connect), with an accelerator for codec qatzip. Without one that codec
    /// is software, and what the device does not do, for whatever reason, is done in software.
    ///
    /// # Errors
    /// As for `connect`.
    pub fn connect_with(
        config: &SourceConfig,
        accelerator: Option<&Accelerator>,
    ) -> Result<Self, RelayError> {
        let links = config.links.clamp(1, MAX_LINKS);
        let mut hello = Hello {
            session: random_id()?,
            link: 0,
            links,
            token: None,
            page_size: config.page_size,
            name: config.name.clone(),
            setup: config.setup.clone(),
            codecs: Vec::new(),
            delta_cache: config.delta_cache,
            ask: false,
        };
        let mut candidates = match &config.auto {
            Some(_) => controller::Config::candidates(),
            None => vec![config.settings],
        };
        let device = Settings::new(Codec::DeflateQz, None).ok();
        candidates.extend(device.filter(|_| config.auto.is_some() && accelerator.is_some()));
        for settings in &candidates {
            let name = settings.codec().name();
            if !hello.codecs.iter().any(|known| known == name) {
                hello.codecs.push(name.to_string());
            }
        }
        let connector = config.connector.as_ref();
        let (first, welcome) = dial(&config.peer, connector, &hello)?;
        let grants = session::Grants {
            chunk_bytes: welcome.chunk_bytes as usize,
            stream_frames: welcome.stream_frames,
            shared_frames: welcome.shared_frames,
        };
        let (events, receiver) = mpsc::channel();
        let back = Arc::new(OnceLock::new());
        let sink = Arc::new(SourceSink(back.clone(), Mutex::new(events.clone())));
        let lifeline = (links, config.resume);
        let session = Session::new(config.peer.clone(), grants, grants.buffers(), lifeline, sink)?;
        candidates.retain(|settings| {
            settings.codec() == Codec::Raw
                || welcome.codecs.iter().any(|known| known == settings.codec().name())
        });
        // With `auto` the threads begin with what an accelerator can do, or with what is chosen
        // first.
        let settings = match (&config.auto, device) {
            (None, _) => config.settings,
            (Some(_), Some(device)) if candidates.contains(&device) => device,
            (Some(_), _) => Settings::default(),
        };
        // Contexts are made here once so that a bad level is an error and not a dead thread.
        let mut contexts = Vec::new();
        let mut accelerators = Vec::new();
        for _ in 0..config.compress_threads.max(1) {
            let context = EncodeContext::new(settings, grants.chunk_bytes, accelerator);
            let context = context.map_err(|error| {
                let what = format!("cannot use codec {}: {error}", settings.codec().name());
                RelayError::Unsupported { what }
            })?;
            accelerators.extend(context.accelerator());
            contexts.push(context);
        }
        let lanes =
            LanesConfig { threads: contexts.len(), name: "compress", ..LanesConfig::default() };
        let lanes =
            Lanes::new(lanes, |_| contexts.pop().expect("one context was made for each thread"))
                .map_err(|source| RelayError::Resource {
                    what: "cannot start the codec threads".into(),
                    source,
                })?;
        let auto = config
            .auto
            .as_ref()
            .map(|auto| Arc::new(Auto::new(auto, candidates, config.compress_threads.max(1))));
        let submitter =
            Submitter::new(lanes, session.outbox().clone(), config.compress_wait_thread);
        let shared = Arc::new(Shared {
            session: session.clone(),
            submitter,
            spare: Arc::new(Ring::new(256)),
            counters: Arc::new(Counters::default()),
            accelerators,
            settings,
            auto,
            page_size: config.page_size as usize,
            delta_cache: AtomicU64::new(welcome.delta_cache),
            streams: Mutex::new(Vec::new()),
            listening: OnceLock::new(),
            events,
            tail_read: AtomicBool::new(false),
            word_sent: AtomicBool::new(false),
            return_path: AtomicBool::new(false),
            postcopy: AtomicBool::new(false),
            switched: AtomicBool::new(false),
            before_switch: AtomicU64::new(0),
            keeper: OnceLock::new(),
            kept: AtomicBool::new(false),
            handing_shut: AtomicBool::new(false),
            backs: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            started: OnceLock::new(),
        });
        let _ = back.set(Arc::downgrade(&shared));
        hello.token = Some(welcome.token);
        let redial =
            Redial::new(config.peer.clone(), &first, config.connector.clone(), hello.clone());
        session.add_link(0, first)?;
        for link in 1..links {
            hello.link = link;
            match dial(&config.peer, connector, &hello) {
                Ok((socket, _)) => session.add_link(link, socket)?,
                Err(error) => {
                    session.fail(SessionError::Local {
                        reason: "the client could not open all its links".into(),
                    });
                    session.join();
                    return Err(error.into());
                }
            }
        }
        session.supervise_links(Some(redial.clone()))?;
        if let Some(config) = &config.auto {
            watch(&shared, config)?;
        }
        Ok(Self { shared, redial, events: Mutex::new(receiver) })
    }

    /// Starts to accept QEMU's connections.
    ///
    /// # Errors
    /// The path cannot be listened on.
    pub fn listen(&self, address: &UnixAddress) -> Result<(), RelayError> {
        let listening = address.listen()?;
        listening
            .listener
            .set_nonblocking(true)
            .map_err(|source| RelayError::Listen { address: address.to_string(), source })?;
        let _ = self.shared.listening.set(listening);
        let shared = self.shared.clone();
        thread("accept", move || {
            while !shared.over.load(Ordering::Acquire) {
                if let Some(listening) = shared.listening.get() {
                    let mut fds = [PollFd::new(&listening.listener, PollFlags::IN)];
                    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 200_000_000 }));
                }
                shared.accept_waiting();
            }
        })
    }

    /// Has `keeper` hold QEMU's main socket while the destination may be running and the source
    /// does not know yet. To be called before [`Source::listen`], once.
    pub fn kept_by(&self, keeper: Keeper) {
        let _ = self.shared.keeper.set(keeper);
    }

    /// A handle for other threads.
    pub fn handle(&self) -> SourceHandle {
        SourceHandle(self.shared.clone())
    }

    /// The session, for its byte counters.
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// What it has counted.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// What the codec threads' accelerators did; empty without any.
    pub fn accelerators(&self) -> Vec<AcceleratorSnapshot> {
        self.shared.accelerators.iter().map(AcceleratorCounters::snapshot).collect()
    }

    /// How `auto` chose, if it did.
    pub fn auto(&self) -> Option<AutoReport> {
        self.shared.auto.as_ref().map(|auto| auto.report())
    }

    /// QEMU's busy and busy-rate over the whole migration.
    pub fn busy(&self) -> (u64, f64) {
        let counters = self.shared.submitter.counters();
        (counters.busy_pages, counters.busy_rate_since(&pipeline::Counters::default()))
    }

    /// Carries the migration to its end. `notice` gets sentences a person should read meanwhile;
    /// `report` makes the JSON that the peer gets.
    ///
    /// # Errors
    /// Everything but a migration that the destination has confirmed (or, without a return path,
    /// has fully taken).
    pub fn run(
        &self,
        mut notice: impl FnMut(&str),
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, RelayError> {
        let result = self.decide(&mut notice, report);
        let shared = &self.shared;
        shared.over.store(true, Ordering::Release);
        if let Err(error) = &result {
            // Nothing that is queued may still reach the destination as if all were well (W21).
            shared
                .session
                .fail(SessionError::Local { reason: format!("the source relay ends: {error}") });
        }
        shared.close_sockets();
        if result.is_err() && !shared.session.is_linked() && shared.session.resume_timeout() > LOOK
        {
            // Nobody could be told: the peer waits for links that will not come. It need not be
            // reached.
            let _ = self.redial.ask();
        }
        shared.submitter.lanes().close();
        for stream in shared.lock_streams().iter() {
            if let Some(results) = stream.results.get() {
                results.close();
            }
        }
        shared.session.join();
        result
    }

    fn decide(
        &self,
        notice: &mut impl FnMut(&str),
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, RelayError> {
        let shared = &self.shared;
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut main_eof = false;
        let mut shut = None;
        let mut stop_asked = false;
        // The stream has ended well: SHUT(0) is out, or without a return path the destination took
        // all.
        let mut deadline: Option<Instant> = None;
        loop {
            let event = match deadline {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            let return_path = shared.return_path.load(Ordering::Acquire);
            match event {
                Ok(Event::SourceEof { is_main: false }) => {}
                Ok(Event::SourceEof { is_main: true }) => {
                    main_eof = true;
                    match shut {
                        Some(0) => break,
                        Some(code) => return Err(RelayError::DestinationRefused { code }),
                        // Without a return path this is how a migration ends; the destination says
                        // when it has all.
                        None if !return_path && shared.tail_read.load(Ordering::Acquire) => {}
                        // It closed because the session ended, whose own event says why.
                        None if shared.session.failure().is_some() => {}
                        None if shared.handing_shut.load(Ordering::Acquire) => {}
                        None if shared.has_switched() => {
                            let cause = "the source QEMU closed its migration socket".into();
                            return Err(RelayError::Paused { cause });
                        }
                        None => return Err(RelayError::SourceEnded),
                    }
                }
                Ok(Event::Shut(code)) => {
                    shut = Some(code);
                    deadline = Some(Instant::now() + FAREWELL);
                    if main_eof && code == 0 {
                        break;
                    }
                }
                Ok(Event::ShutRefused) => return Err(RelayError::SourceEnded),
                Ok(Event::DestinationEof) => match shut {
                    Some(0) => {}
                    Some(code) => return Err(RelayError::DestinationRefused { code }),
                    None if main_eof && !return_path => break,
                    None => {
                        let reason = peer_reason(&events).unwrap_or(RelayError::DestinationEnded);
                        let cause = match &reason {
                            RelayError::Ended(error) => error.clone(),
                            _ => {
                                let reason = "the destination QEMU closed its migration socket";
                                Arc::new(SessionError::Local { reason: reason.into() })
                            }
                        };
                        let told = says_never(&cause);
                        if shared.has_switched() {
                            return Err(shared.interrupted(&cause, told));
                        }
                        let packaged = shared.before_switch.load(Ordering::Acquire) > 0;
                        if packaged && shared.may_run_there() && !told {
                            // It may have the packaged state, and have paused with its VM running.
                            return Err(hold(shared, &self.redial, &events, cause, notice));
                        }
                        return Err(reason);
                    }
                },
                Ok(Event::Closed(error)) => {
                    // What the destination QEMU said before the end may still be on its way to the
                    // source QEMU, and decides.
                    let last = last_words(shared, &events);
                    main_eof |= last.main_eof;
                    match shut.or(last.shut) {
                        Some(0) => {
                            notice(&format!("the peer left before its report: {error}"));
                            break;
                        }
                        Some(code) => return Err(RelayError::DestinationRefused { code }),
                        None => {}
                    }
                    // Pairs with the fences in `still_open` and `has_gone_over`.
                    fence(Ordering::SeqCst);
                    let told = says_never(&error);
                    if shared.has_switched() {
                        return Err(shared.interrupted(&error, told));
                    }
                    if shared.may_run_there() && !told && return_path && !main_eof {
                        return Err(hold(shared, &self.redial, &events, error, notice));
                    }
                    return Err(RelayError::Ended(error));
                }
                Ok(Event::Finished(_) | Event::BackDone) => {}
                Ok(Event::Notice(text)) => notice(&text),
                Ok(Event::Stop) => {
                    let doubtful = || shut.is_none() && shared.may_run_there();
                    if doubtful() && !stop_asked {
                        stop_asked = true;
                        notice(if shared.has_switched() {
                            "the destination has the VM, and pages of it are still to come; if this relay ends, the VM \
                             pauses there until its migration is taken up again (interrupt again to end it all the \
                             same)"
                        } else {
                            "the destination may be starting the VM just now; waiting for its answer (interrupt \
                             again to end this relay all the same)"
                        });
                        continue;
                    }
                    let reason: Arc<str> = "interrupted by the user".into();
                    let error = || SessionError::Local { reason: reason.to_string() };
                    // No link says the word from here on, and what was said is seen (`still_open`,
                    // `has_gone_over`).
                    shared.session.fail(error());
                    fence(Ordering::SeqCst);
                    if shared.has_switched() && shut.is_none() {
                        return Err(RelayError::Paused { cause: reason.to_string() });
                    }
                    if doubtful() && return_path {
                        if stop_asked {
                            return Err(RelayError::LeftInDoubt);
                        }
                        // Said in this very moment.
                        return Err(hold(shared, &self.redial, &events, Arc::new(error()), notice));
                    }
                    return Err(error().into());
                }
                // QEMU has its answer and keeps its socket: nothing more depends on it.
                Err(_) if shut.is_some_and(|code| code != 0) => {
                    return Err(RelayError::DestinationRefused { code: shut.unwrap_or(1) });
                }
                Err(_) => break,
            }
        }
        let total = shared.started.get().map_or(Duration::ZERO, Instant::elapsed);
        shared.over.store(true, Ordering::Release);
        let mut end = SourceEnd {
            total,
            peer_report: Vec::new(),
            return_path: shared.return_path.load(Ordering::Acquire),
            hidden_downtime: (!shared.has_switched())
                .then(|| shared.session.credits().last_delay()),
        };
        if shared.session.failure().is_none() {
            shared.session.send_finish(report());
            let deadline = Instant::now() + FAREWELL;
            while let Ok(event) =
                events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                match event {
                    Event::Finished(report) => {
                        end.peer_report = report;
                        break;
                    }
                    Event::Closed(_) => break,
                    _ => {}
                }
            }
        }
        Ok(end)
    }
}

impl Shared {
    pub(crate) fn lock_streams(&self) -> MutexGuard<'_, Vec<Arc<SourceStream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts every connection that waits. Holding the lock over `accept` makes it a barrier: who
    /// calls this after QEMU connected knows the connection.
    pub(crate) fn accept_waiting(self: &Arc<Self>) {
        let Some(listening) = self.listening.get() else { return };
        let mut streams = self.lock_streams();
        while let Ok((socket, _)) = listening.listener.accept() {
            if streams.len() >= MAX_STREAMS || socket.set_nonblocking(false).is_err() {
                // QEMU opens at most 257; it sees a closed socket and fails the migration.
                continue;
            }
            let _ = self.started.set(Instant::now());
            let id = u16::try_from(streams.len()).unwrap_or(u16::MAX);
            let stream = Arc::new(SourceStream {
                id,
                socket,
                kind: OnceLock::new(),
                results: OnceLock::new(),
            });
            streams.push(stream.clone());
            let shared = self.clone();
            if let Err(error) = thread("intake", move || intake::run(&shared, &stream)) {
                self.session.fail(SessionError::Local { reason: error.to_string() });
            }
        }
    }

    /// What keeps the pages of a stream of this kind, if anything does: a single stream alone has
    /// an order that both ends know (W29).
    pub(crate) fn deltas(&self, kind: Kind) -> Option<delta::Sender> {
        let granted = match kind {
            Kind::Main => self.delta_cache.swap(0, Ordering::AcqRel),
            _ => 0,
        };
        (granted > 0).then(|| delta::Sender::new(granted, self.page_size))
    }

    /// Whether they are worth their CPU time now.
    pub(crate) fn wants_deltas(&self) -> bool {
        self.auto.as_ref().is_none_or(|auto| auto.wants_deltas())
    }

    /// Multifd channels there are now (W18).
    pub(crate) fn multifd_channels(self: &Arc<Self>) -> u32 {
        self.accept_waiting();
        let streams = self.lock_streams();
        let multifd =
            streams.iter().filter(|stream| intake::classify(self, stream) == Some(Kind::Multifd));
        u32::try_from(multifd.count()).unwrap_or(0)
    }

    /// Makes the stream known to the peer; for a main channel starts what hands the return path
    /// back.
    pub(crate) fn open(self: &Arc<Self>, stream: &Arc<SourceStream>, kind: Kind) -> bool {
        let flags = match kind {
            Kind::Main => 0,
            Kind::Multifd => 1,
            Kind::Other => 2,
            Kind::Preempt => 3,
            Kind::Recovery => 4,
        };
        if kind.is_main() {
            let results = Results::new(2048);
            let _ = stream.results.set(results.clone());
            let (shared, stream) = (self.clone(), stream.clone());
            self.backs.fetch_add(1, Ordering::Relaxed);
            let body = move || {
                hand_back::run(&shared, &stream, &results);
                shared.backs.fetch_sub(1, Ordering::Release);
                let _ = shared.events.send(Event::BackDone);
            };
            if thread("return-path", body).is_err() {
                return false;
            }
        }
        self.session.send_bare(stream.id, FrameType::Open, flags)
    }

    /// Ends every connection of QEMU. A source whose sockets close before SHUT goes on running its
    /// VM.
    pub(crate) fn close_sockets(&self) {
        for stream in self.lock_streams().iter() {
            let _ = stream.socket.shutdown(Shutdown::Both);
        }
    }
}

/// Starts the thread that looks at the flow for `auto`. It ends with the session.
fn watch(shared: &Arc<Shared>, config: &AutoConfig) -> Result<(), RelayError> {
    let Some(auto) = shared.auto.clone() else { return Ok(()) };
    let explain = config.explain.clone();
    let (session, counters) = (shared.session.clone(), shared.counters.clone());
    let (lanes, weak) = (shared.submitter.lanes().clone(), Arc::downgrade(shared));
    thread("auto", move || {
        let worker_cpu = || lanes.cpu_times().iter().sum();
        let is_over = || {
            session.failure().is_some()
                || weak.upgrade().is_none_or(|shared| shared.over.load(Ordering::Acquire))
        };
        auto.watch(&session, &counters, worker_cpu, explain.as_ref(), is_over);
    })
}

pub(crate) fn thread(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), RelayError> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop).map_err(|source| {
        RelayError::Resource { what: format!("cannot start thread {name}"), source }
    })
}
