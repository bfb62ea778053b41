//! One session: what its links share.

use crate::credit::{Credits, Grants};
use crate::error::SessionError;
use crate::frame::{AckEntry, FrameType, Header, MAX_STREAMS};
use crate::hello::MAX_LINKS;
use crate::kept::{Arrivals, Kept, WINDOW};
use crate::link;
use crate::resume::{Left, Lifeline, LinkState};
use crate::transport::Link;
use crate::waiting;
use codec::UnitHeader;
use pages::{Arena, Slot};
use pipeline::Results;
use serde::{Deserialize, Serialize};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Frames that may wait for a link: every buffer there is, and the frames without payload of every
/// stream.
const OUTBOX_FRAMES: usize = 4096;
/// How long a peer that has nothing more to say may take to close its links.
const FAREWELL: Duration = Duration::from_secs(5);

/// No byte that may hold the end-of-stream tag was written to QEMU yet.
const UNDECIDED: u8 = 0;
/// Some may have been: an ABORT says so.
const COMMITTED: u8 = 1;
/// None was and none will be: the peer may have been told, or QEMU has gone.
const NEVER: u8 = 2;

/// A frame ready for any link.
#[derive(Debug)]
pub enum Outgoing {
    /// A sequenced frame without payload.
    Bare(Header),
    /// DATA: the unit's header and the buffer with its payload.
    Unit {
        /// Payload length filled in by the link.
        header: Header,
        /// The unit's own header.
        unit: UnitHeader,
        /// The first `unit.payload_len` bytes are the payload.
        body: Slot,
    },
    /// A free frame.
    Free(FrameType, Vec<u8>),
    /// Streams have moved: collect and send an ACK.
    Acks,
}

impl Outgoing {
    /// The header of a sequenced frame.
    pub(crate) fn header(&self) -> Option<&Header> {
        match self {
            Self::Bare(header) | Self::Unit { header, .. } => Some(header),
            Self::Free(..) | Self::Acks => None,
        }
    }
}

/// A sequenced frame as it came off a link, in no particular order.
#[derive(Debug)]
pub struct Incoming {
    /// Its header.
    pub header: Header,
    /// DATA: the unit's header, and its payload in the first `payload_len` bytes of a buffer.
    pub unit: Option<(UnitHeader, Slot)>,
}

/// Who takes what comes off the links. Called from the links' threads: it may wait for the codec
/// threads, never for a stream (W17).
pub trait Sink: Send + Sync + 'static {
    /// A sequenced frame arrived.
    ///
    /// # Errors
    /// It cannot be taken; the session ends with this error.
    fn frame(&self, frame: Incoming) -> Result<(), SessionError>;
    /// The peer's final report arrived.
    fn finish(&self, report: &[u8]);
    /// Whether the peer is the one to say FINISH first (W24): it is at the server. Where it is not,
    /// a FINISH that comes before ours was said ends the session.
    fn answers_finish(&self) -> bool {
        false
    }
    /// The session has ended before its time. Called once.
    fn closed(&self, error: &Arc<SessionError>);
    /// Whether a STILL_OPEN of `stream` is true now, just before it goes out, for the first time or
    /// again (W20, W25). After false it never goes.
    fn still_open(&self, stream: u16) -> bool {
        let _ = stream;
        true
    }
    /// Links were lost or have come back: a sentence for a person.
    fn notice(&self, text: &str) {
        let _ = text;
    }
}

/// The JSON of an ABORT.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AbortNote {
    pub(crate) reason: String,
    pub(crate) committed: bool,
}

/// How far one stream and direction was written to QEMU here, for the next ACK.
#[derive(Debug, Default)]
struct Delivered {
    seq: AtomicU64,
    offset: AtomicU64,
    hash: AtomicU64,
    /// Odd while `Session::delivered` writes; the three fields are one value (a sequence lock with
    /// one writer).
    version: AtomicU32,
    acked: AtomicU64,
    /// Sequenced frames taken off the links.
    arrivals: Mutex<Arrivals>,
}

/// The shared half of a session; threads of its links hold it too.
pub struct Session {
    /// The other end, for messages.
    pub peer: String,
    grants: Grants,
    credits: Credits,
    outbox: Arc<Results<Outgoing>>,
    /// What the first link would have to wait for.
    spill: Arc<Results<Outgoing>>,
    /// What goes before everything else: by the lane, where there is one.
    urgent: Arc<Results<Outgoing>>,
    /// By stream: whether its DATA is urgent.
    urgent_streams: Box<[AtomicBool]>,
    /// What is in flight.
    kept: Kept,
    plain: Arc<Arena>,
    payload: Arc<Arena>,
    delivered: Box<[Delivered]>,
    acks_queued: AtomicBool,
    sink: Arc<dyn Sink>,
    failure: OnceLock<Arc<SessionError>>,
    failed: AtomicBool,
    /// Our FINISH: said again on each new link.
    farewell: OnceLock<Vec<u8>>,
    /// The peer's FINISH has come, or ours is all that is left to say: a link that ends is no loss.
    parting: AtomicBool,
    /// [`UNDECIDED`], [`COMMITTED`] or [`NEVER`]; see `commit`.
    committed: AtomicU8,
    pub(crate) lifeline: Lifeline,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Bytes given to the links, headers and those of TLS included.
    pub bytes_out: AtomicU64,
    /// Bytes taken from the links, likewise.
    pub bytes_in: AtomicU64,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("peer", &self.peer)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// A session that will have `links` links. `payload_slots`: buffers for compressed payloads;
    /// they are waited for, so that any number from (links + codec threads x 5) up works on a
    /// receiver; a sender keeps what is in flight in them. `resume`: how long it outlives its last
    /// link; none at all ends it with the first link that is lost.
    ///
    /// # Errors
    /// The buffers cannot be mapped.
    pub fn new(
        peer: String,
        grants: Grants,
        payload_slots: usize,
        (links, resume): (u16, Duration),
        sink: Arc<dyn Sink>,
    ) -> Result<Arc<Self>, SessionError> {
        let arena = |slots| {
            Arena::new(slots, grants.chunk_bytes).map_err(|source| SessionError::Resource {
                what: format!("cannot map {slots} buffers of {} bytes", grants.chunk_bytes),
                source,
            })
        };
        Ok(Arc::new(Self {
            peer,
            grants,
            credits: Credits::new(grants),
            outbox: Results::new(OUTBOX_FRAMES),
            spill: Results::new(128),
            urgent: Results::new(OUTBOX_FRAMES),
            urgent_streams: (0..MAX_STREAMS).map(|_| AtomicBool::new(false)).collect(),
            kept: Kept::new(),
            // Both directions draw on it; twice the credit keeps each direction's promise. A lost
            // link and the one in its place may both be reading a frame that the other has brought
            // or will bring.
            plain: arena(2 * (grants.buffers() + usize::from(MAX_LINKS)))?,
            payload: arena(payload_slots)?,
            delivered: (0..MAX_STREAMS).map(|_| Delivered::default()).collect(),
            acks_queued: AtomicBool::new(false),
            sink,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            farewell: OnceLock::new(),
            parting: AtomicBool::new(false),
            committed: AtomicU8::new(UNDECIDED),
            lifeline: Lifeline::new(links, resume),
            threads: Mutex::new(Vec::new()),
            bytes_out: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
        }))
    }

    /// Starts the two threads of link `number`, which has said its hello; a link of that number
    /// that is still there is replaced (W26).
    ///
    /// # Errors
    /// The socket or the threads cannot be had; or links come and go faster than their threads.
    pub fn add_link(self: &Arc<Self>, number: u16, link: Link) -> Result<(), SessionError> {
        let socket = link::prepare(link.socket())?;
        {
            let mut threads = lock(&self.threads);
            threads.retain(|thread| !thread.is_finished());
            if threads.len() > MAX_THREADS {
                let what = format!("links of {} come and go too fast", self.peer);
                let source = std::io::ErrorKind::QuotaExceeded.into();
                return Err(SessionError::Resource { what, source });
            }
        }
        let (state, replaced) = self.lifeline.up(number, socket);
        if let Some(old) = replaced {
            let (peer, detail) = (self.peer.clone(), "replaced by a new one".into());
            self.lose(&old, SessionError::LinkLost { peer, detail });
        }
        let threads = link::start(self, &state, link);
        match threads {
            Ok(threads) => lock(&self.threads).extend(threads),
            Err(error) => {
                self.fail(error);
                return Ok(());
            }
        }
        if self.failure.get().is_some() {
            self.cut();
        }
        Ok(())
    }

    /// A link is of no more use. What it had written and nobody has acknowledged goes over the
    /// others, or waits for the next (W25).
    pub(crate) fn lose(&self, link: &Arc<LinkState>, error: SessionError) {
        if self.has_failed() {
            // Its writer still has to say why.
            return;
        }
        let Some(again) = self.kept.take(link.id, || link.mark_dead()) else { return };
        let _ = link.socket.shutdown(Shutdown::Both);
        if !self.lifeline.resumes() {
            return self.fail(error);
        }
        let Left { links: others, is_news } = self.lifeline.down(link, &error);
        if self.farewell.get().is_some() || !is_news {
            // All is over but for the peer's report, which may be on another link: nothing to worry
            // anybody with. Nor is a link that was made again and again did not stay.
        } else if others == 0 {
            let seconds = self.lifeline.timeout().as_secs();
            self.sink.notice(&format!("{error}; waiting up to {seconds} s for it to come back"));
        } else {
            self.sink.notice(&format!("{error}; {others} others go on"));
        }
        for frame in again {
            self.put_back(frame);
        }
        if self.spare_links() == 0 {
            self.unspill();
        }
        // What was acknowledged on it may be lost as well. And whoever waits for the other links'
        // work takes its place.
        self.acknowledge_again();
        let _ = self.spill.push(Outgoing::Acks);
        if self.lifeline.has_lane() {
            // It may be the only one left.
            let _ = self.urgent.push(Outgoing::Acks);
        }
        self.wake_for_urgent();
    }

    /// A link has brought what only a session that goes on brings; a link that is made and lost
    /// again is no more than a part of an outage.
    pub(crate) fn moves(&self, link: &LinkState) {
        if let Some(silent) = self.lifeline.moves(link) {
            let seconds = silent.as_secs_f64();
            self.sink.notice(&format!("the link to {} is back after {seconds:.1} s", self.peer));
        }
    }

    /// The DATA of `stream` is urgent: one link, other than the first, is to carry it and nothing
    /// else. With a single link it goes ahead of everything else on it.
    pub fn open_lane(&self, stream: u16) {
        self.urgent_streams[usize::from(stream)].store(true, Ordering::Release);
        if self.lifeline.want_lane() {
            // Wakes one of those who can take it on themselves.
            let _ = self.spill.push(Outgoing::Acks);
        }
    }

    /// Queues a frame ahead of all that [`Session::send`] has queued.
    pub fn send_urgent(&self, frame: Outgoing) {
        let _ = self.urgent.push(frame);
        if !self.lifeline.has_lane() {
            // The first link empties the queue before it takes anything else; this wakes it.
            self.send(Outgoing::Acks);
        }
    }

    /// Queues a frame again that a lost link had taken.
    pub(crate) fn put_back(&self, frame: Outgoing) {
        let urgent = match &frame {
            Outgoing::Unit { header, .. } => {
                self.urgent_streams[usize::from(header.stream)].load(Ordering::Acquire)
            }
            _ => false,
        };
        if urgent {
            self.send_urgent(frame);
        } else {
            self.send(frame);
        }
    }

    pub(crate) fn urgent(&self) -> &Arc<Results<Outgoing>> {
        &self.urgent
    }

    /// A link has given up being the lane: what it left behind is not to wait for the next urgent
    /// frame.
    pub(crate) fn wake_for_urgent(&self) {
        if !self.urgent.is_empty() {
            self.send(Outgoing::Acks);
        }
    }

    /// Puts what was meant for other links before whoever empties the outbox.
    pub(crate) fn unspill(&self) {
        while let Some(frame) = self.spill.pop() {
            self.send(frame);
        }
    }

    /// Has everything that was written to QEMU acknowledged once more.
    pub(crate) fn acknowledge_again(&self) {
        for state in &self.delivered {
            state.acked.store(0, Ordering::Release);
        }
        if !self.acks_queued.swap(true, Ordering::AcqRel) {
            self.send(Outgoing::Acks);
        }
    }

    /// Links that are up, or were when the last one was lost; at least 1.
    pub(crate) fn links(&self) -> usize {
        self.lifeline.links_up().max(1)
    }

    /// Links that take what the first one would have to wait for.
    pub(crate) fn spare_links(&self) -> usize {
        (self.links() - 1).saturating_sub(usize::from(self.lifeline.has_lane()))
    }

    /// How often all links were lost and one came back, and for how long nothing came in all.
    pub fn resumes(&self) -> (u32, Duration) {
        self.lifeline.resumes_so_far()
    }

    /// How long the session outlives its last link.
    pub fn resume_timeout(&self) -> Duration {
        self.lifeline.timeout()
    }

    /// The frames in flight.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Whether bytes wait for a link now (what is narrow is the way to the peer), and what the
    /// peer's kernel has acknowledged on the links that are up, bytes. A system call for each.
    pub fn link_progress(&self) -> (bool, u64) {
        let (mut waits, mut acked) = (false, 0);
        self.lifeline.each(|link| {
            let link = waiting::progress(&link.socket);
            waits |= link.waits;
            acked += link.acked;
        });
        (waits, acked)
    }

    /// The sender's books.
    pub fn credits(&self) -> &Credits {
        &self.credits
    }

    /// What the receiver grants.
    pub fn grants(&self) -> Grants {
        self.grants
    }

    /// Buffers for plain chunks. Whoever holds a permit finds one free.
    pub fn plain(&self) -> &Arc<Arena> {
        &self.plain
    }

    /// Buffers for compressed payloads.
    pub fn payload(&self) -> &Arc<Arena> {
        &self.payload
    }

    /// Where frames wait for a link.
    pub fn outbox(&self) -> &Arc<Results<Outgoing>> {
        &self.outbox
    }

    pub(crate) fn spill(&self) -> &Arc<Results<Outgoing>> {
        &self.spill
    }

    /// No more frames; what is queued still goes out unless the session has failed.
    pub(crate) fn close_queues(&self) {
        self.outbox.close();
        self.spill.close();
        self.urgent.close();
    }

    pub(crate) fn sink(&self) -> &Arc<dyn Sink> {
        &self.sink
    }

    /// Queues a frame. After the session has ended it goes nowhere, which is no error.
    pub fn send(&self, frame: Outgoing) {
        let _ = self.outbox.push(frame);
    }

    /// Books and queues a sequenced frame without payload; false once the session has ended.
    pub fn send_bare(&self, stream: u16, kind: FrameType, flags: u8) -> bool {
        self.credits
            .issue(stream, kind, flags)
            .map(|header| self.send(Outgoing::Bare(header)))
            .is_some()
    }

    /// Everything below `seq` of `stream` was written to QEMU here. One writer per stream.
    pub fn delivered(&self, stream: u16, seq: u64, offset: u64, hash: u64) {
        let state = &self.delivered[usize::from(stream)];
        // A sequence lock: Release on the way in would let the stores move up, so a full fence
        // follows the odd version.
        let version = state.version.load(Ordering::Relaxed);
        state.version.store(version.wrapping_add(1), Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        state.seq.store(seq, Ordering::Relaxed);
        state.offset.store(offset, Ordering::Relaxed);
        state.hash.store(hash, Ordering::Relaxed);
        state.version.store(version.wrapping_add(2), Ordering::Release);
        if !self.acks_queued.swap(true, Ordering::AcqRel) {
            self.send(Outgoing::Acks);
        }
    }

    /// Whether an arriving frame is new; one that came before is passed over (W11).
    pub(crate) fn expects(&self, header: &Header) -> Result<bool, SessionError> {
        let state = &self.delivered[usize::from(header.stream)];
        let written = state.seq.load(Ordering::Acquire);
        if header.seq >= written.saturating_add(WINDOW) {
            let (stream, seq) = (header.stream, header.seq);
            let detail = format!("it is {} ahead of what was written", seq - written);
            return Err(SessionError::Sequence { stream, seq, detail });
        }
        Ok(lock(&state.arrivals).expects(header.seq))
    }

    /// Takes note of a frame that is here in full; false when another link has brought it
    /// meanwhile.
    pub(crate) fn arrived(&self, header: &Header) -> bool {
        lock(&self.delivered[usize::from(header.stream)].arrivals).take(header.seq)
    }

    /// The ACK of every stream that has moved.
    pub(crate) fn collect_acks(&self, out: &mut Vec<u8>) {
        // Cleared first: a delivery from here on queues another ACK.
        self.acks_queued.store(false, Ordering::Release);
        std::sync::atomic::fence(Ordering::SeqCst);
        for (stream, state) in self.delivered.iter().enumerate() {
            let entry = loop {
                let before = state.version.load(Ordering::Acquire);
                let entry = AckEntry {
                    stream: u16::try_from(stream).unwrap_or(u16::MAX),
                    seq: state.seq.load(Ordering::Relaxed),
                    offset: state.offset.load(Ordering::Relaxed),
                    hash: state.hash.load(Ordering::Relaxed),
                };
                std::sync::atomic::fence(Ordering::Acquire);
                if before % 2 == 0 && state.version.load(Ordering::Relaxed) == before {
                    break entry;
                }
                std::hint::spin_loop();
            };
            if entry.seq > state.acked.fetch_max(entry.seq, Ordering::AcqRel) {
                entry.write(out);
            }
        }
    }

    /// Asks leave to write bytes that may hold the end-of-stream tag to QEMU (W20). False once the
    /// session has failed or an ABORT may have told the peer that none was written: the source VM
    /// may be running again.
    #[must_use]
    pub fn commit(&self) -> bool {
        if self.has_failed() {
            return false;
        }
        // One exchange decides between this and `abort_note`.
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let before = self.committed.compare_exchange(UNDECIDED, COMMITTED, order.0, order.1);
        matches!(before, Ok(_) | Err(COMMITTED))
    }

    /// Whether bytes of W20 may have been written to QEMU.
    pub fn is_committed(&self) -> bool {
        self.committed.load(Ordering::Acquire) == COMMITTED
    }

    /// QEMU took bytes of W20 but has ended without running its VM.
    pub fn uncommit(&self) {
        self.committed.store(NEVER, Ordering::Release);
    }

    /// Ends the session before its time: wakes everybody, tells the peer if it can be told. The
    /// first reason counts.
    pub fn fail(&self, error: SessionError) {
        let error = Arc::new(error);
        if self.failure.set(error.clone()).is_err() {
            return;
        }
        self.failed.store(true, Ordering::Release);
        self.credits.close();
        self.close_queues();
        self.plain.wake_all();
        self.payload.wake_all();
        self.lifeline.wake();
        self.sink.closed(&error);
    }

    /// Why the session ended before its time, if it did.
    pub fn failure(&self) -> Option<&Arc<SessionError>> {
        self.failure.get()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The words for the peer, when this end is the one that ended it.
    pub(crate) fn abort_note(&self) -> Option<Vec<u8>> {
        let error = self.failure.get()?;
        if matches!(
            **error,
            SessionError::LinkLost { .. }
                | SessionError::NotResumed { .. }
                | SessionError::Aborted { .. }
                | SessionError::Over { .. }
        ) {
            return None;
        }
        let mut reason = error.to_string();
        reason.truncate(
            reason
                .char_indices()
                .map(|(at, _)| at)
                .take_while(|at| *at <= 4096)
                .last()
                .unwrap_or(0),
        );
        if error.to_string().len() <= 4096 {
            reason = error.to_string();
        }
        let note = AbortNote { reason, committed: self.has_committed_for_good() };
        serde_json::to_vec(&note).ok()
    }

    /// Sends the final report: now, and again on each new link until the peer's has come (W27).
    pub fn send_finish(&self, report: Vec<u8>) {
        let _ = self.farewell.set(report.clone());
        self.send(Outgoing::Free(FrameType::Finish, report));
    }

    /// Our report, once it was sent.
    pub(crate) fn farewell(&self) -> Option<&Vec<u8>> {
        self.farewell.get()
    }

    /// The peer's FINISH has come.
    pub(crate) fn peer_leaves(&self) {
        self.parting.store(true, Ordering::Release);
        self.lifeline.wake();
    }

    /// A link that ends is no loss.
    pub(crate) fn may_end(&self) -> bool {
        self.is_parting() || (self.farewell.get().is_some() && !self.lifeline.resumes())
    }

    /// Nobody needs a new link any more.
    pub(crate) fn is_parting(&self) -> bool {
        self.parting.load(Ordering::Acquire)
    }

    /// Ends the session if it has not ended, and says for good whether bytes of W20 may have been
    /// written to QEMU: after false none will be (W28).
    pub fn settle(&self, reason: &str) -> bool {
        self.fail(SessionError::Local { reason: reason.into() });
        self.has_committed_for_good()
    }

    /// True once and for all when bytes of W20 may have been written; else none will be: a session
    /// that is not to end fails when it gets there.
    pub fn has_committed_for_good(&self) -> bool {
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let before = self.committed.compare_exchange(UNDECIDED, NEVER, order.0, order.1);
        before == Err(COMMITTED)
    }

    /// Ends the links (what is queued still goes out when the session ended well) and waits for
    /// their threads. A peer that never closes its half is cut off.
    pub fn join(&self) {
        self.parting.store(true, Ordering::Release);
        self.lifeline.wake();
        self.close_queues();
        let deadline = Instant::now() + FAREWELL;
        while lock(&self.threads).iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                self.cut();
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        loop {
            let Some(thread) = lock(&self.threads).pop() else { break };
            // A thread that panicked has aborted the process in release builds.
            let _ = thread.join();
        }
    }

    /// Shuts every link at once.
    pub(crate) fn cut(&self) {
        self.lifeline.cut();
    }
}

/// Threads of links that are there or on their way out.
const MAX_THREADS: usize = 8 * MAX_LINKS as usize;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
