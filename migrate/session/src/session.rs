//! One session: the state that its links share, and its end.

pub(crate) mod ending;
mod loss;

use crate::commit::CommitGate;
use crate::credit::{Credits, Grants};
use crate::error::SessionError;
use crate::frame_type::FrameType;
use crate::hello::MAX_LINKS;
use crate::inbound::Inbound;
use crate::links::Links;
use crate::outbound::Outbound;
use crate::outgoing::Outgoing;
use crate::sink::Sink;
use crate::sync::lock;
use crate::tcp_info;
use pages::Arena;
use pipeline::Results;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;
use turns::{Cap, Turns};

/// A link without bytes for this long is lost (W24): three heartbeats. The reader checks every half
/// second, so a dead peer is found within 4 s.
pub const SILENCE: Duration = Duration::from_secs(3);
/// Threads of links that are up or about to end.
const MAX_THREADS: usize = 8 * MAX_LINKS as usize;

/// One migration between two relays. The relay and the links' threads share it.
pub struct Session {
    /// The other end's name, for messages.
    pub peer: String,
    grants: Grants,
    pub(crate) outbound: Outbound,
    pub(crate) inbound: Inbound,
    pub(crate) links: Arc<Links>,
    commit: CommitGate,
    /// The limit on what all links write together; none at a receiver.
    pub(crate) cap: OnceLock<Cap>,
    /// The memory through which the session takes turns with those of other processes.
    pub(crate) turns: OnceLock<Arc<Turns>>,
    /// How long a link may be without bytes, unless that is [`SILENCE`].
    silence: OnceLock<Duration>,
    plain: Arc<Arena>,
    payload: Arc<Arena>,
    pub(crate) sink: Arc<dyn Sink>,
    failure: OnceLock<Arc<SessionError>>,
    failed: AtomicBool,
    /// An ABORT has reached the peer's host.
    informed: AtomicBool,
    /// The peer's FINISH has arrived, or only ours remains to be sent: the end of a link is not a
    /// loss.
    finishing: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Bytes written to the links, including headers and TLS.
    pub bytes_out: AtomicU64,
    /// Bytes read from the links, including headers and TLS.
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
    /// Creates a session of `links` links.
    ///
    /// `payload_slots` is the number of buffers for compressed payloads. A receiver waits for them,
    /// so any number from (links + codec threads x 5) up works; a sender stores unacknowledged
    /// frames in them. `resume` is how long the session outlives its last link; zero ends the
    /// session with the first link that is lost.
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
        let links = Arc::new(Links::new(links, resume));
        Ok(Arc::new(Self {
            peer,
            grants,
            outbound: Outbound::new(grants, links.clone()),
            inbound: Inbound::new(),
            links,
            commit: CommitGate::new(),
            cap: OnceLock::new(),
            turns: OnceLock::new(),
            silence: OnceLock::new(),
            // Both directions use it, so it has twice the credit. In addition, a lost link and its
            // replacement may each be reading a frame that another link delivers as well.
            plain: arena(2 * (grants.buffers() + usize::from(MAX_LINKS)))?,
            payload: arena(payload_slots)?,
            sink,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            informed: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            bytes_out: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
        }))
    }

    /// Limits what all links write together to `rate` bytes per second, as a network interface
    /// counts them. Call it once, before there are links.
    pub fn limit_rate(&self, rate: u64) {
        let _ = self.cap.set(Cap::new(rate));
    }

    /// Makes all links write in turns with the sessions of other processes. Call it once, before
    /// there are links.
    pub fn take_turns(&self, turns: Arc<Turns>) {
        let _ = self.turns.set(turns);
    }

    /// Sets how long a link may be without bytes before it is lost, in place of [`SILENCE`]. Call
    /// it once, before there are links.
    pub fn tolerate_silence(&self, silence: Duration) {
        let _ = self.silence.set(silence);
    }

    /// How long a link may be without bytes before it is lost.
    pub(crate) fn silence(&self) -> Duration {
        self.silence.get().copied().unwrap_or(SILENCE)
    }

    /// Announces that the VM has stopped: the sessions that take turns with this one pause.
    pub fn hurry(&self) {
        if let Some(turns) = self.turns.get() {
            turns.hurry();
        }
    }

    /// The limits on what all links write.
    pub(crate) fn caps(&self) -> impl Iterator<Item = &Cap> {
        let shared = self.turns.get().and_then(|turns| turns.cap());
        self.cap.get().into_iter().chain(shared)
    }

    /// The sender's accounts.
    pub fn credits(&self) -> &Credits {
        &self.outbound.credits
    }

    /// The receiver's grants.
    pub fn grants(&self) -> Grants {
        self.grants
    }

    /// Buffers for plain chunks. The owner of a permit always finds one free.
    pub fn plain(&self) -> &Arc<Arena> {
        &self.plain
    }

    /// Buffers for compressed payloads.
    pub fn payload(&self) -> &Arc<Arena> {
        &self.payload
    }

    /// The queue that the first link empties.
    pub fn outbox(&self) -> &Arc<Results<Outgoing>> {
        &self.outbound.outbox
    }

    /// Queues a frame. After the end of the session the frame is dropped, which is no error.
    pub fn send(&self, frame: Outgoing) {
        self.outbound.send(frame);
    }

    /// Queues a frame ahead of all those queued with [`Session::send`].
    pub fn send_first(&self, frame: Outgoing) {
        self.outbound.send_first(frame);
    }

    /// Gives the DATA of `stream` priority: one link other than the first carries it and nothing
    /// else. A single link sends it ahead of everything else.
    pub fn prioritise(&self, stream: u16) {
        self.outbound.prioritise(stream);
    }

    /// Charges and queues a sequenced frame without payload; false once the session has ended.
    pub fn send_bare(&self, stream: u16, kind: FrameType, flags: u8) -> bool {
        self.credits()
            .issue(stream, kind, flags)
            .map(|header| self.send(Outgoing::Bare(header)))
            .is_some()
    }

    /// Records that everything below `seq` of `stream` was written to QEMU. One writer per stream.
    pub fn delivered(&self, stream: u16, seq: u64, offset: u64, hash: u64) {
        if self.inbound.delivered(stream, seq, offset, hash) {
            self.send(Outgoing::Acks);
        }
    }

    /// How many outages of all links have ended, and for how long nothing was received in them, in
    /// total.
    pub fn resumes(&self) -> (u32, Duration) {
        self.links.resumes()
    }

    /// How long the session outlives its last link.
    pub fn resume_timeout(&self) -> Duration {
        self.links.timeout()
    }

    /// Whether the session has lost all its links and waits for one to come back.
    pub fn has_lost_its_links(&self) -> bool {
        self.links.are_lost()
    }

    /// Whether bytes wait for a link now (the path to the peer is the bottleneck), and how many
    /// bytes the peer's kernel has acknowledged on the links that are up. One system call per link.
    pub fn link_progress(&self) -> (bool, u64) {
        // A limited session's bytes wait for their turn, not for a socket.
        let mut waits = self.caps().any(Cap::holds_back);
        let unsent = self.caps().map(|cap| cap.unsent(self.links.count())).min();
        let unsent = unsent.unwrap_or(u32::MAX);
        let mut acked = 0;
        self.links.each(|link| {
            let link = tcp_info::progress(&link.socket, unsent);
            waits |= link.waits;
            acked += link.acked;
        });
        (waits, acked)
    }

    /// Whether a frame queued now would wait in the kernel, behind bytes that it has not sent. One
    /// system call per link.
    pub fn has_unsent(&self) -> bool {
        let mut has_unsent = false;
        self.links.each(|link| has_unsent |= tcp_info::has_unsent(&link.socket));
        has_unsent
    }

    /// Checks that another link's threads may be started.
    pub(crate) fn check_threads(&self) -> Result<(), SessionError> {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        if threads.len() > MAX_THREADS {
            let what = format!("links of {} come and go too fast", self.peer);
            let source = std::io::ErrorKind::QuotaExceeded.into();
            return Err(SessionError::Resource { what, source });
        }
        Ok(())
    }

    /// Stores the threads of a link for [`Session::join`].
    pub(crate) fn adopt_threads(&self, threads: impl IntoIterator<Item = JoinHandle<()>>) {
        lock(&self.threads).extend(threads);
    }

    /// Asks for permission to write to QEMU the bytes of W20, which may hold the end-of-stream tag.
    /// Returns false once the session has failed, or once an ABORT may have told the peer that no
    /// such bytes were written: the source VM may be running again.
    #[must_use]
    pub fn commit(&self) -> bool {
        !self.has_failed() && self.commit.pass()
    }

    /// Whether bytes of W20 may have been written to QEMU.
    pub fn is_committed(&self) -> bool {
        self.commit.is_passed()
    }

    /// Records that QEMU took bytes of W20 but ended without running its VM.
    pub fn revoke_commit(&self) {
        self.commit.revoke();
    }

    /// Closes the commit gate. Returns whether bytes of W20 may have been written to QEMU. If not,
    /// none will be: a session that is still running fails before it writes them.
    pub fn close_commit(&self) -> bool {
        self.commit.close()
    }

    /// Ends the session if it has not ended, and returns whether bytes of W20 may have been written
    /// to QEMU. If not, none will be (W28).
    pub fn end_and_close_commit(&self, reason: &str) -> bool {
        self.fail(SessionError::Local { reason: reason.into() });
        self.close_commit()
    }
}
