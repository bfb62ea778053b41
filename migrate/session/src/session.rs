//! One session: what its links share, and how it ends.

use crate::commit::CommitGate;
use crate::credit::{Credits, Grants};
use crate::error::SessionError;
use crate::frame_type::FrameType;
use crate::hello::MAX_LINKS;
use crate::inbound::Inbound;
use crate::links::{LinkState, Links, Remaining};
use crate::outbound::Outbound;
use crate::outgoing::Outgoing;
use crate::sink::Sink;
use crate::sync::lock;
use crate::tcp_info;
use pages::Arena;
use pipeline::Results;
use serde::{Deserialize, Serialize};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a peer that has nothing more to say may take to close its links.
const CLOSING_TIME: Duration = Duration::from_secs(5);
/// Threads of links that are there or on their way out.
const MAX_THREADS: usize = 8 * MAX_LINKS as usize;
/// The longest reason that an ABORT carries, bytes.
const MAX_REASON: usize = 4096;

/// The JSON of an ABORT.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AbortNote {
    pub(crate) reason: String,
    pub(crate) committed: bool,
}

/// One migration between two relays. The relay and the threads of the links share it.
pub struct Session {
    /// The other end, for messages.
    pub peer: String,
    grants: Grants,
    pub(crate) outbound: Outbound,
    pub(crate) inbound: Inbound,
    pub(crate) links: Arc<Links>,
    commit: CommitGate,
    plain: Arc<Arena>,
    payload: Arc<Arena>,
    pub(crate) sink: Arc<dyn Sink>,
    failure: OnceLock<Arc<SessionError>>,
    failed: AtomicBool,
    /// The peer's FINISH has come, or ours is all that is left to send: a link that ends is no
    /// loss.
    finishing: AtomicBool,
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
    /// A session that will have `links` links. `payload_slots`: buffers for compressed payloads. A
    /// receiver waits for them, so any number from (links + codec threads x 5) up works; a sender
    /// holds unacknowledged frames in them. `resume`: how long the session outlives its last link;
    /// zero ends it with the first link that is lost.
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
            // Both directions draw on it; twice the credit keeps each direction's promise. A lost
            // link and the one in its place may both be reading a frame that the other has brought
            // or will bring.
            plain: arena(2 * (grants.buffers() + usize::from(MAX_LINKS)))?,
            payload: arena(payload_slots)?,
            sink,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            bytes_out: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
        }))
    }

    /// The sender's books.
    pub fn credits(&self) -> &Credits {
        &self.outbound.credits
    }

    /// What the receiver grants.
    pub fn grants(&self) -> Grants {
        self.grants
    }

    /// Buffers for plain chunks. The holder of a permit finds one free.
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

    /// Queues a frame. After the session has ended it goes nowhere, which is no error.
    pub fn send(&self, frame: Outgoing) {
        self.outbound.send(frame);
    }

    /// Queues a frame ahead of all that [`Session::send`] has queued.
    pub fn send_first(&self, frame: Outgoing) {
        self.outbound.send_first(frame);
    }

    /// Gives the DATA of `stream` priority: one link, other than the first, is to carry it and
    /// nothing else. A single link sends it ahead of everything else.
    pub fn prioritise(&self, stream: u16) {
        self.outbound.prioritise(stream);
    }

    /// Books and queues a sequenced frame without payload; false once the session has ended.
    pub fn send_bare(&self, stream: u16, kind: FrameType, flags: u8) -> bool {
        self.credits()
            .issue(stream, kind, flags)
            .map(|header| self.send(Outgoing::Bare(header)))
            .is_some()
    }

    /// Everything below `seq` of `stream` was written to QEMU here. One writer per stream.
    pub fn delivered(&self, stream: u16, seq: u64, offset: u64, hash: u64) {
        if self.inbound.delivered(stream, seq, offset, hash) {
            self.send(Outgoing::Acks);
        }
    }

    /// Has everything that was written to QEMU acknowledged once more.
    pub(crate) fn acknowledge_again(&self) {
        if self.inbound.acknowledge_again() {
            self.send(Outgoing::Acks);
        }
    }

    /// How often all links were lost and one came back, and for how long nothing came in all.
    pub fn resumes(&self) -> (u32, Duration) {
        self.links.resumes()
    }

    /// How long the session outlives its last link.
    pub fn resume_timeout(&self) -> Duration {
        self.links.timeout()
    }

    /// Whether a link is up.
    pub fn is_linked(&self) -> bool {
        self.links.links_up() > 0
    }

    /// Whether bytes wait for a link now (the bottleneck is the way to the peer), and the bytes
    /// that the peer's kernel has acknowledged on the links that are up. One system call per link.
    pub fn link_progress(&self) -> (bool, u64) {
        let (mut waits, mut acked) = (false, 0);
        self.links.each(|link| {
            let link = tcp_info::progress(&link.socket);
            waits |= link.waits;
            acked += link.acked;
        });
        (waits, acked)
    }

    /// Whether the threads of another link may be started.
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

    /// Leaves threads of a link to [`Session::join`].
    pub(crate) fn adopt_threads(&self, threads: impl IntoIterator<Item = JoinHandle<()>>) {
        lock(&self.threads).extend(threads);
    }

    /// The error of a link that is lost.
    pub(crate) fn link_lost(&self, detail: &str) -> SessionError {
        SessionError::LinkLost { peer: self.peer.clone(), detail: detail.into() }
    }

    /// A link is of no more use. What it had written and nobody has acknowledged goes over the
    /// others, or waits for the next (W25).
    pub(crate) fn lose(&self, link: &Arc<LinkState>, error: SessionError) {
        if self.has_failed() {
            // Its writer still has to say why.
            return;
        }
        let Some(unacked) = self.outbound.unacked.take(link.id, || link.mark_dead()) else {
            return;
        };
        let _ = link.socket.shutdown(Shutdown::Both);
        if !self.links.resumes_lost() {
            return self.fail(error);
        }
        let Remaining { links: others, is_news } = self.links.lose(link, &error);
        if self.outbound.finish().is_some() || !is_news {
            // Only the peer's report is missing, which may come over another link; or the link was
            // made again and again and did not stay. Neither is worth a notice.
        } else if others == 0 {
            let seconds = self.links.timeout().as_secs();
            self.sink.notice(&format!("{error}; waiting up to {seconds} s for it to come back"));
        } else {
            self.sink.notice(&format!("{error}; {others} others go on"));
        }
        for frame in unacked {
            self.outbound.requeue(frame);
        }
        if self.links.spare_links() == 0 {
            self.outbound.reclaim_overflow();
        }
        // The link may have lost an ACK as well. And other links take over its role.
        self.acknowledge_again();
        self.outbound.wake_priority_link();
        self.outbound.wake_successors();
    }

    /// A link has brought what only a session that goes on brings; a link that is made and lost
    /// again is no more than a part of an outage.
    pub(crate) fn note_progress(&self, link: &LinkState) {
        if let Some(silent) = self.links.note_progress(link) {
            let seconds = silent.as_secs_f64();
            self.sink.notice(&format!("the link to {} is back after {seconds:.1} s", self.peer));
        }
    }

    /// Asks to write bytes that may hold the end-of-stream tag to QEMU (W20). False once the
    /// session has failed or an ABORT may have told the peer that none was written: the source VM
    /// may be running again.
    #[must_use]
    pub fn commit(&self) -> bool {
        !self.has_failed() && self.commit.pass()
    }

    /// Whether bytes of W20 may have been written to QEMU.
    pub fn is_committed(&self) -> bool {
        self.commit.is_passed()
    }

    /// QEMU took bytes of W20 but has ended without running its VM.
    pub fn revoke_commit(&self) {
        self.commit.revoke();
    }

    /// Whether bytes of W20 may have been written to QEMU; after false none will be: a session that
    /// has not ended fails when it gets there.
    pub fn close_commit(&self) -> bool {
        self.commit.close()
    }

    /// Ends the session if it has not ended, and tells whether bytes of W20 may have been written
    /// to QEMU: after false none will be (W28).
    pub fn end_and_close_commit(&self, reason: &str) -> bool {
        self.fail(SessionError::Local { reason: reason.into() });
        self.close_commit()
    }

    /// Ends the session before its time: wakes every waiting thread, tells the peer if it can be
    /// told. The first reason counts.
    pub fn fail(&self, error: SessionError) {
        let error = Arc::new(error);
        if self.failure.set(error.clone()).is_err() {
            return;
        }
        self.failed.store(true, Ordering::Release);
        self.credits().close();
        self.outbound.close();
        self.plain.wake_all();
        self.payload.wake_all();
        self.links.wake();
        self.sink.closed(&error);
    }

    /// Why the session ended before its time, if it did.
    pub fn failure(&self) -> Option<&Arc<SessionError>> {
        self.failure.get()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The payload of an ABORT, when this end is the one that ended the session.
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
        let end = (0..=MAX_REASON.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
        reason.truncate(end.unwrap_or(0));
        let note = AbortNote { reason, committed: self.close_commit() };
        serde_json::to_vec(&note).ok()
    }

    /// Sends the final report: now, and again on each new link until the peer's has come (W27).
    pub fn send_finish(&self, report: Vec<u8>) {
        self.outbound.set_finish(report.clone());
        self.send(Outgoing::Free(FrameType::Finish, report));
    }

    /// The peer's FINISH has come.
    pub(crate) fn note_peer_finished(&self) {
        self.finishing.store(true, Ordering::Release);
        self.links.wake();
    }

    /// A link that ends is no loss.
    pub(crate) fn may_end(&self) -> bool {
        self.is_finishing() || (self.outbound.finish().is_some() && !self.links.resumes_lost())
    }

    /// Nobody needs a new link any more.
    pub(crate) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire)
    }

    /// Ends the links (what is queued still goes out when the session ended well) and waits for
    /// their threads. A peer that never closes its half is cut off.
    pub fn join(&self) {
        self.finishing.store(true, Ordering::Release);
        self.links.wake();
        self.outbound.close();
        let deadline = Instant::now() + CLOSING_TIME;
        while lock(&self.threads).iter().any(|thread| !thread.is_finished()) {
            if Instant::now() >= deadline {
                self.links.cut();
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
}
