//! One migration at the destination. One thread decides ([`Destination::run`]); all others send it
//! events.

mod answers;

use super::barrier::Barriers;
use super::begin::Beginning;
use super::decode::{DecodeJob, Parts};
use super::disk;
use super::offer::{self, Offered};
use super::seed::SessionSeed;
use super::shared::{Event, Listen, Shared, Vet};
use super::sink::{DestinationSink, Notice};
use crate::counters::Counters;
use crate::error::{error_chain, RelayError};
use crate::qemu_socket::QemuAddress;
use crate::sockets::LAST_EOF;
use pipeline::Pool;
use ring::EventCount;
use session::{Grants, Histories, Session, SessionError, Sink, MAX_STREAMS};
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long QEMU may take to react after one of its sockets failed.
const REACTION: Duration = Duration::from_secs(1);
/// How long the source may take to acknowledge the end.
const LAST_ACKS: Duration = Duration::from_secs(2);
/// Buffers for compressed payloads: for at most 64 links, and for the codec threads' jobs. With
/// histories, also for all parts that wait for their turn, since the frame that they wait for needs
/// a buffer too.
const PAYLOAD_SLOTS: usize = 256;

/// One migration, from its first link to its end.
pub struct Destination {
    shared: Arc<Shared>,
    sink: Arc<DestinationSink>,
    /// Taken by `run`; the lock only makes the type `Sync`.
    events: Mutex<Receiver<Event>>,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

/// The result of a successful migration.
#[derive(Debug)]
pub struct DestinationEnd {
    /// The source's report, JSON; empty when the links were lost before it arrived.
    pub peer_report: Vec<u8>,
    /// QEMU has confirmed that it runs the VM. Without a return path it cannot confirm: then it is
    /// only known that QEMU took the whole stream.
    pub confirmed: bool,
}

impl Destination {
    /// Creates a migration to `target`, before its first link, or an NBD connection (`is_disk`).
    /// `lifeline`: the number of links, and how long the session outlives the last of them.
    ///
    /// # Errors
    /// The system refuses memory.
    pub(crate) fn new(
        peer: String,
        (grants, lifeline): (Grants, (u16, Duration)),
        (page_size, delta_cache, histories): (usize, u64, Option<Histories>),
        (target, listen, vet): (QemuAddress, Listen, Vet),
        pool: Arc<Pool<DecodeJob>>,
        notice: Notice,
        (is_disk, seed): (bool, Option<Offered>),
    ) -> Result<Self, RelayError> {
        let (events, receiver) = mpsc::channel();
        let sink = DestinationSink::new(events.clone(), notice);
        let waiting = histories.map_or(0, |_| grants.buffers());
        let session = Session::new(peer, grants, PAYLOAD_SLOTS + waiting, lifeline, sink.clone())?;
        session.supervise_links(None)?;
        let shared = Arc::new(Shared {
            session,
            pool,
            target,
            listen,
            vet,
            page_size,
            is_disk,
            delta_cache: AtomicU64::new(delta_cache),
            channel_deltas: OnceLock::new(),
            channel_deltas_ended: AtomicBool::new(false),
            seed: Arc::new(SessionSeed::new(delta::slots(delta_cache, page_size), page_size)),
            histories: Arc::new(Parts::new(histories)),
            barriers: Barriers::default(),
            counters: Counters::default(),
            events,
            return_path: AtomicBool::new(false),
            postcopy: AtomicBool::new(false),
            state_given: AtomicBool::new(false),
            awaits_pong: AtomicBool::new(false),
            loaded: OnceLock::new(),
            qemu_gone: AtomicBool::new(false),
            over: AtomicBool::new(false),
            confirmed: AtomicBool::new(false),
            beginning: Beginning::default(),
            asked: AtomicBool::new(false),
            untold: AtomicBool::new(false),
            main_up: AtomicBool::new(false),
            main_event: EventCount::new(),
            streams: (0..MAX_STREAMS).map(|_| OnceLock::new()).collect(),
            sockets: Mutex::new(Vec::new()),
        });
        sink.set(&shared);
        if let Some(seed) = seed.filter(|(_, most)| *most > 0 && !is_disk) {
            offer::start(&shared, &sink, seed);
        }
        Ok(Self { shared, sink, events: Mutex::new(receiver) })
    }

    /// Runs the migration to its end; `report` makes the JSON for the source.
    ///
    /// # Errors
    /// Returned for every migration except one whose success the source has learned.
    pub fn run(&self, report: impl FnOnce() -> Vec<u8>) -> Result<DestinationEnd, RelayError> {
        let shared = &self.shared;
        let result = match shared.is_disk {
            true => {
                let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
                let report = disk::decide(shared, &events);
                report.map(|peer_report| DestinationEnd { peer_report, confirmed: false })
            }
            false => self.decide(),
        };
        match &result {
            Ok(_) => shared.session.send_finish(report()),
            Err(error) => {
                // Called first: the source gets a better answer once QEMU has loaded the state.
                shared.let_it_load();
                shared.session.fail(SessionError::Local { reason: error_chain(error) });
            }
        }
        shared.over.store(true, Ordering::Release);
        // Read before this end closes the connection itself.
        let ended = shared.qemu_gone.load(Ordering::Acquire) && shared.never_ran();
        shared.close_sockets();
        // Nothing is written any more: the bytes that start the VM in postcopy were written before
        // this, or never will be.
        let never = ended || !shared.state_given.load(Ordering::Acquire);
        if result.is_err() && shared.postcopy.load(Ordering::Acquire) && never {
            shared.session.revoke_commit();
        }
        shared.wake();
        // Pairs with the fence where a stream gets its queue.
        fence(Ordering::SeqCst);
        for results in shared.streams.iter().filter_map(OnceLock::get) {
            results.close();
        }
        shared.seed.close();
        let session = &shared.session;
        session.join();
        shared.histories.close();
        let untold = !session.resume_timeout().is_zero() && !session.is_peer_informed();
        shared.untold.store(result.is_err() && untold, Ordering::Release);
        result
    }

    /// Handles events until the migration has ended. Over 80 lines, because the order of the arms
    /// is part of the rules.
    fn decide(&self) -> Result<DestinationEnd, RelayError> {
        let shared = &self.shared;
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut shut = None;
        let (mut source_eof, mut qemu_eof) = (false, false);
        // QEMU has failed; messages that it sent before may still be under way.
        let mut gone: Option<(Instant, String)> = None;
        loop {
            let event = match &gone {
                None => events.recv().ok(),
                Some((deadline, _)) => {
                    events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
                }
            };
            // Set before QEMU's SHUT(0) is sent to the source: it is visible before any event that
            // follows from that SHUT(0).
            let confirmed = shared.confirmed.load(Ordering::Acquire);
            let all_taken = source_eof && !shared.return_path.load(Ordering::Acquire);
            match event {
                Some(Event::Shut(code)) => {
                    shut = Some(code);
                    if code == 0 {
                        gone = None;
                    }
                }
                Some(Event::SourceEof) => {
                    source_eof = true;
                    if qemu_eof && !shared.return_path.load(Ordering::Acquire) {
                        // QEMU had closed because it had all bytes.
                        gone = None;
                    }
                }
                Some(Event::Finished(peer_report)) if confirmed || all_taken => {
                    return Ok(DestinationEnd { peer_report, confirmed });
                }
                Some(Event::Finished(_)) => {
                    let peer = shared.session.peer.clone();
                    return Err(SessionError::EarlyFinish { peer }.into());
                }
                // Normal at the end: QEMU closes when it has all bytes, and the source sends FINISH
                // once QEMU has confirmed.
                Some(Event::QemuEof { .. }) if confirmed => {}
                Some(Event::QemuEof { unread: false }) if all_taken => {}
                Some(Event::QemuEof { unread: true }) if all_taken => {
                    return Err(RelayError::Unread);
                }
                // Without a return path QEMU closes when it has all bytes, perhaps before its
                // writer could report that.
                Some(Event::QemuEof { unread: false })
                    if gone.is_none() && !shared.return_path.load(Ordering::Acquire) =>
                {
                    qemu_eof = true;
                    let all_given = shared.session.is_committed();
                    let patience = if all_given { LAST_EOF } else { REACTION };
                    gone =
                        Some((Instant::now() + patience, RelayError::DestinationEnded.to_string()));
                }
                Some(Event::QemuEof { .. }) => {
                    // QEMU ended without confirming: its VM does not run, so the source need not be
                    // in doubt. In postcopy this need not hold: QEMU may have paused the migration
                    // with its VM running.
                    if !shared.postcopy.load(Ordering::Acquire) || shared.never_ran() {
                        shared.session.revoke_commit();
                    }
                    return Err(self.qemu_gone(shut, gone.map(|(_, reason)| reason)));
                }
                Some(Event::WriterGone { .. }) if confirmed => {}
                // QEMU closes its channels before it sends SHUT, and starting the VM may take a
                // while. The main connection decides.
                Some(Event::WriterGone { is_channel: true, .. })
                    if shared.session.is_committed() => {}
                Some(Event::WriterGone { stream, error, .. }) => {
                    let until = Instant::now() + REACTION;
                    let (deadline, _) =
                        gone.get_or_insert((until, format!("stream {stream}: {error}")));
                    // QEMU has closed, and not because it had all bytes.
                    *deadline = (*deadline).min(until);
                }
                // The source has QEMU's SHUT(0); only its report is missing.
                Some(Event::Closed(error))
                    if shut == Some(0)
                        && matches!(*error, SessionError::NotResumed { .. })
                        && shared.session.credits().drained(Instant::now()) =>
                {
                    return Ok(DestinationEnd { peer_report: Vec::new(), confirmed: true });
                }
                Some(Event::Closed(cause)) if confirmed => {
                    return self.unheard(&events, cause);
                }
                // The session ends with that question.
                Some(Event::Asked | Event::StopWaiting) => {}
                Some(Event::Closed(error)) => {
                    // The source may have reacted to QEMU's refusal before this end saw QEMU's
                    // socket close.
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

    /// QEMU has confirmed, and the source was not informed. If the links were lost, the source may
    /// ask, and learns of the success from the answer (W28).
    fn unheard(
        &self,
        events: &Receiver<Event>,
        cause: Arc<SessionError>,
    ) -> Result<DestinationEnd, RelayError> {
        if !self.was_lost() && !self.was_asked() {
            return Err(RelayError::Unheard { cause });
        }
        let time = self.asking_time();
        if !self.was_asked() {
            self.sink.notice(&format!(
                "the destination QEMU has confirmed and runs the VM, and the source has not been informed: answering \
                 for up to {} s should it ask",
                time.as_secs()
            ));
        }
        let deadline = Instant::now() + time;
        while !self.was_asked() {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::StopWaiting) | Err(_) => return Err(RelayError::Unheard { cause }),
                Ok(_) => {}
            }
        }
        Ok(DestinationEnd { peer_report: Vec::new(), confirmed: true })
    }

    /// Makes the error for a QEMU that has ended without success. First lets the bytes that QEMU
    /// wrote reach the source.
    fn qemu_gone(&self, shut: Option<u32>, reason: Option<String>) -> RelayError {
        self.shared.session.credits().drained(Instant::now() + LAST_ACKS);
        match (shut, reason) {
            (Some(code), _) => RelayError::DestinationRefused { code },
            (None, Some(reason)) => RelayError::Unsupported { what: reason },
            (None, None) => RelayError::DestinationEnded,
        }
    }
}

#[cfg(test)]
mod tests;
