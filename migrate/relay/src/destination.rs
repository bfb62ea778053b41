//! One migration at the destination: frames in, connections to QEMU out, the return path back.

use crate::barrier::Barriers;
use crate::counters::Counters;
use crate::decode::{Arrived, DecodeJob};
use crate::deliver;
use crate::error::RelayError;
use crate::jobs::raw;
use crate::return_path::ReturnPath;
use crate::source::thread;
use crate::unix::UnixAddress;
use codec::Codec;
use pipeline::{Lanes, Results};
use ring::EventCount;
use session::{FrameType, Grants, Incoming, Session, SessionError, Sink, FLAG_PACKED, MAX_STREAMS};
use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Frames one stream can have waiting; the links refuse more than 1024 (W11).
const WAITING_FRAMES: usize = 2048;
/// How long QEMU's own reaction may take after one of its sockets failed.
const REACTION: Duration = Duration::from_secs(1);
/// How long the source may take to learn of the end.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Buffers for compressed payloads: 64 links at most, and what the codec threads hold.
const PAYLOAD_SLOTS: usize = 256;

/// What the threads tell the one that decides.
pub(crate) enum Event {
    /// QEMU has said SHUT.
    Shut(u32),
    /// QEMU has closed its main connection.
    QemuEof,
    /// QEMU does not take a stream's bytes.
    WriterGone { stream: u16, is_channel: bool, error: String },
    /// The source's main connection ended well (no return path).
    SourceEof,
    /// The session ended before its time.
    Closed(Arc<SessionError>),
    /// The client's report: all is over.
    Finished(Vec<u8>),
}

pub(crate) struct Shared {
    pub(crate) session: Arc<Session>,
    lanes: Arc<Lanes<DecodeJob>>,
    pub(crate) target: UnixAddress,
    pub(crate) page_size: usize,
    /// Bytes granted for a delta cache, until a stream has taken it.
    pub(crate) delta_cache: AtomicU64,
    pub(crate) barriers: Barriers,
    pub(crate) counters: Counters,
    pub(crate) events: Sender<Event>,
    /// The stream asked for a return path.
    pub(crate) return_path: AtomicBool,
    /// The stream holds what starts the VM in postcopy: QEMU may close its socket and run it all
    /// the same.
    pub(crate) postcopy: AtomicBool,
    pub(crate) over: AtomicBool,
    /// QEMU has said SHUT(0): it has all it needs, whatever its channels still take.
    content: AtomicBool,
    main_up: AtomicBool,
    main_event: EventCount,
    streams: Box<[OnceLock<Arc<Results<Arrived>>>]>,
    /// Main first.
    sockets: Mutex<Vec<Arc<UnixStream>>>,
}

/// Breaks the circle session -> sink -> session.
struct DestinationSink {
    shared: OnceLock<Weak<Shared>>,
    events: Mutex<Sender<Event>>,
    notice: Notice,
}

/// Takes sentences for a person.
pub(crate) type Notice = Box<dyn Fn(&str) + Send + Sync>;

impl DestinationSink {
    fn tell(&self, event: Event) {
        let _ = self.events.lock().unwrap_or_else(PoisonError::into_inner).send(event);
    }
}

impl Sink for DestinationSink {
    fn frame(&self, frame: Incoming) -> Result<(), SessionError> {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return Ok(()) };
        shared.frame(frame)
    }

    fn finish(&self, report: &[u8]) {
        self.tell(Event::Finished(report.to_vec()));
    }

    fn answers_finish(&self) -> bool {
        true
    }

    fn closed(&self, error: &Arc<SessionError>) {
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            shared.barriers.wake();
            shared.main_event.notify_all();
        }
        self.tell(Event::Closed(error.clone()));
    }

    fn notice(&self, text: &str) {
        (self.notice)(text);
    }
}

impl Shared {
    fn frame(self: &Arc<Self>, frame: Incoming) -> Result<(), SessionError> {
        let header = frame.header;
        let results = self.stream(header.stream)?;
        let Some((unit, payload)) = frame.unit else {
            let _ = results.push(Arrived { header, chunk: None });
            return Ok(());
        };
        if unit.codec == Codec::Raw && header.flags & FLAG_PACKED == 0 {
            let _ = results.push(Arrived { header, chunk: Some(Ok(payload)) });
            return Ok(());
        }
        // An honest peer stays within its credit, and then there is always one free (W13).
        let chunk =
            self.session.plain().take().ok_or(SessionError::Credit { stream: header.stream })?;
        // Waits for the codec threads, which wait for nobody. Closed lanes mean that the session
        // has ended.
        let _ = self.lanes.submit_wait(DecodeJob { header, unit, payload, chunk }, &results);
        Ok(())
    }

    /// The stream's inbox; its writer starts with its first frame, whichever that is.
    fn stream(self: &Arc<Self>, id: u16) -> Result<Arc<Results<Arrived>>, SessionError> {
        let cell = &self.streams[usize::from(id)];
        if let Some(results) = cell.get() {
            return Ok(results.clone());
        }
        let fresh = Results::new(WAITING_FRAMES);
        let results = cell.get_or_init(|| fresh.clone());
        if Arc::ptr_eq(results, &fresh) {
            let (shared, inbox) = (self.clone(), fresh.clone());
            thread("deliver", move || deliver::run(&shared, id, &inbox))
                .map_err(|error| SessionError::Local { reason: error.to_string() })?;
        }
        Ok(results.clone())
    }

    pub(crate) fn main_is_up(&self) {
        if !self.main_up.load(Ordering::Relaxed) {
            self.main_up.store(true, Ordering::Release);
            self.main_event.notify_all();
        }
    }

    /// Waits until the main connection has bytes at QEMU (W19); false when the session has ended.
    pub(crate) fn wait_for_main(&self) -> bool {
        let up = self.main_event.wait_until(None, || {
            let ended = self.has_ended();
            let up = self.main_up.load(Ordering::Acquire);
            (up || ended).then_some(up)
        });
        up.unwrap_or(false)
    }

    /// A connection to QEMU stands.
    pub(crate) fn connected(self: &Arc<Self>, stream: u16, socket: Arc<UnixStream>, is_main: bool) {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if is_main {
            sockets.insert(0, socket.clone());
            let (shared, socket) = (self.clone(), socket.clone());
            if thread("return-path", move || read_back(&shared, stream, &socket)).is_err() {
                let _ = self.events.send(Event::QemuEof);
            }
        } else {
            sockets.push(socket.clone());
        }
        // `close_sockets` may have been here before: `over` is set ahead of it, and both hold the
        // lock.
        if self.over.load(Ordering::Acquire) {
            for socket in sockets.iter() {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    /// Nothing more is to be written to QEMU.
    pub(crate) fn has_ended(&self) -> bool {
        self.session.failure().is_some() || self.over.load(Ordering::Acquire)
    }

    /// A channel no longer takes bytes: normal at the end, when QEMU closes its channels before it
    /// says SHUT. Waits for that word; false when it does not come.
    pub(crate) fn wait_for_content(&self) -> bool {
        let content = self.main_event.wait_until(None, || {
            let content = self.content.load(Ordering::Acquire);
            (content || self.has_ended()).then_some(content)
        });
        content.unwrap_or(false)
    }

    /// Ends QEMU's connections, main first: a QEMU that waits for channels then notices (section
    /// 3.4).
    fn close_sockets(&self) {
        for socket in self.sockets.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Carries the return path back, as it is and at once.
fn read_back(shared: &Shared, stream: u16, mut socket: &UnixStream) {
    let session = &shared.session;
    let mut sniffer = ReturnPath::default();
    if !session.send_bare(stream, FrameType::Open, 0) {
        return;
    }
    let mut bytes = [0; 16384];
    loop {
        let len = match socket.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let bytes = &bytes[..len];
        let found = sniffer.feed(bytes);
        // Before anything that may wait for the source: whoever asks is to hear it in an outage as
        // well (W28).
        if matches!(found, Some((0, _))) {
            shared.content.store(true, Ordering::Release);
            shared.main_event.notify_all();
        }
        let Some(permit) = session.credits().permit(stream) else { return };
        let Some(mut chunk) = session.plain().take_until(None, || session.failure().is_some())
        else {
            return;
        };
        chunk[..len].copy_from_slice(bytes);
        let checksum = codec::checksum(bytes);
        let header = session.credits().issue_data(permit, len, checksum, 0);
        session.send(raw(header, chunk, len, checksum));
        if let Some((code, _)) = found {
            let _ = shared.events.send(Event::Shut(code));
        }
    }
    session.send_bare(stream, FrameType::Eof, 0);
    let _ = shared.events.send(Event::QemuEof);
}

/// One migration, from the first link to the last word.
pub struct Destination {
    shared: Arc<Shared>,
    /// Taken by `run`; the lock only makes the type shareable.
    events: Mutex<Receiver<Event>>,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

/// How it ended well.
#[derive(Debug)]
pub struct DestinationEnd {
    /// The source's report, JSON; empty when the links were lost before it came.
    pub peer_report: Vec<u8>,
}

impl Destination {
    /// A migration to `target`, before its first link. `lifeline`: how many links, and how long it
    /// outlives the last.
    ///
    /// # Errors
    /// Memory cannot be had.
    pub(crate) fn new(
        peer: String,
        (grants, lifeline): (Grants, (u16, Duration)),
        (page_size, delta_cache): (usize, u64),
        target: UnixAddress,
        lanes: Arc<Lanes<DecodeJob>>,
        notice: Notice,
    ) -> Result<Self, RelayError> {
        let (events, receiver) = mpsc::channel();
        let sink = Arc::new(DestinationSink {
            shared: OnceLock::new(),
            events: Mutex::new(events.clone()),
            notice,
        });
        let session = Session::new(peer, grants, PAYLOAD_SLOTS, lifeline, sink.clone())?;
        session.supervise_links(None)?;
        let shared = Arc::new(Shared {
            session,
            lanes,
            target,
            page_size,
            delta_cache: AtomicU64::new(delta_cache),
            barriers: Barriers::default(),
            counters: Counters::default(),
            events,
            return_path: AtomicBool::new(false),
            postcopy: AtomicBool::new(false),
            over: AtomicBool::new(false),
            content: AtomicBool::new(false),
            main_up: AtomicBool::new(false),
            main_event: EventCount::new(),
            streams: (0..MAX_STREAMS).map(|_| OnceLock::new()).collect(),
            sockets: Mutex::new(Vec::new()),
        });
        let _ = sink.shared.set(Arc::downgrade(&shared));
        Ok(Self { shared, events: Mutex::new(receiver) })
    }

    /// Its session, to add links and read byte counters.
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// Whether QEMU has confirmed that it runs the VM.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.shared.content.load(Ordering::Acquire)
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Carries the migration to its end; `report` makes the JSON that the source gets.
    ///
    /// # Errors
    /// Everything but a migration that the source has seen succeed.
    pub fn run(&self, report: impl FnOnce() -> Vec<u8>) -> Result<DestinationEnd, RelayError> {
        let shared = &self.shared;
        let result = self.decide();
        match &result {
            Ok(_) => shared.session.send_finish(report()),
            Err(error) => {
                shared.session.fail(SessionError::Local { reason: deliver::error_chain(error) });
            }
        }
        shared.over.store(true, Ordering::Release);
        shared.close_sockets();
        shared.barriers.wake();
        shared.main_event.notify_all();
        for results in shared.streams.iter().filter_map(OnceLock::get) {
            results.close();
        }
        shared.session.join();
        result
    }

    fn decide(&self) -> Result<DestinationEnd, RelayError> {
        let shared = &self.shared;
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shut = None;
        let mut source_eof = false;
        // QEMU has failed; its own last words may still be on their way.
        let mut gone: Option<(Instant, String)> = None;
        loop {
            let event = match &gone {
                None => events.recv().ok(),
                Some((deadline, _)) => {
                    events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
                }
            };
            // Set before QEMU's word goes anywhere: nothing that follows from it comes before this
            // is seen.
            let confirmed = shared.content.load(Ordering::Acquire);
            let all_taken = source_eof && !shared.return_path.load(Ordering::Acquire);
            match event {
                Some(Event::Shut(code)) => {
                    shut = Some(code);
                    if code == 0 {
                        gone = None;
                    }
                }
                Some(Event::SourceEof) => source_eof = true,
                Some(Event::Finished(peer_report)) if confirmed || all_taken => {
                    return Ok(DestinationEnd { peer_report });
                }
                Some(Event::Finished(_)) => {
                    let peer = shared.session.peer.clone();
                    return Err(SessionError::EarlyFinish { peer }.into());
                }
                // Normal at the end: QEMU closes when it has all, and the source tells us when it
                // is content.
                Some(Event::QemuEof) if confirmed || all_taken => {}
                Some(Event::QemuEof) => {
                    // It did not confirm and is gone: its VM does not run, so the source need not
                    // be in doubt. Not so in postcopy, which it may have paused with its VM
                    // running.
                    if !shared.postcopy.load(Ordering::Acquire) {
                        shared.session.revoke_commit();
                    }
                    return Err(self.qemu_gone(shut, gone.map(|(_, reason)| reason)));
                }
                Some(Event::WriterGone { .. }) if confirmed => {}
                // QEMU closes its channels before it says SHUT, and starting the VM may take its
                // time. Main tells.
                Some(Event::WriterGone { is_channel: true, .. })
                    if shared.session.is_committed() => {}
                Some(Event::WriterGone { stream, error, .. }) => {
                    gone.get_or_insert((
                        Instant::now() + REACTION,
                        format!("stream {stream}: {error}"),
                    ));
                }
                // The source has QEMU's SHUT(0), and all that is missing is its report.
                Some(Event::Closed(error))
                    if shut == Some(0)
                        && matches!(*error, SessionError::NotResumed { .. })
                        && shared.session.credits().drained(Instant::now()) =>
                {
                    return Ok(DestinationEnd { peer_report: Vec::new() });
                }
                Some(Event::Closed(cause)) if confirmed => {
                    return Err(RelayError::Unheard { cause });
                }
                Some(Event::Closed(error)) => {
                    // The source may have answered QEMU's refusal before we saw QEMU's socket end.
                    return Err(match shut {
                        Some(code) if code != 0 => RelayError::DestinationRefused { code },
                        _ => RelayError::Ended(error),
                    });
                }
                None if confirmed => gone = None,
                None => return Err(self.qemu_gone(shut, gone.map(|(_, reason)| reason))),
            }
        }
    }

    /// QEMU has ended without success. Lets the source hear QEMU's own words first.
    fn qemu_gone(&self, shut: Option<u32>, reason: Option<String>) -> RelayError {
        self.shared.session.credits().drained(Instant::now() + LAST_WORDS);
        match (shut, reason) {
            (Some(code), _) => RelayError::DestinationRefused { code },
            (None, Some(reason)) => RelayError::Unsupported { what: reason },
            (None, None) => RelayError::DestinationEnded,
        }
    }
}
