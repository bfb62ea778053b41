//! A source relay from its first connection to its end. One thread decides ([`Source::run`]); all
//! other threads send it events.

use super::admission;
use super::decision::Decision;
use super::doubt::LOOK;
use super::handle::SourceHandle;
use super::keeper::Keeper;
use super::shared::{Event, Shared, FAREWELL};
use crate::auto::AutoReport;
use crate::counters::Counters;
use crate::entrance::Entrance;
use crate::error::RelayError;
use crate::threads::spawn;
use crate::unix::UnixAddress;
use session::{Redial, Session, SessionError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a wait for the pages of the peer's seed looks for the last offer.
const OFFERS: Duration = Duration::from_millis(5);

/// A source relay with its session open and its socket listening.
pub struct Source {
    pub(super) shared: Arc<Shared>,
    pub(super) redial: Redial,
    /// Taken by `run`; the lock only makes the type `Sync`.
    pub(super) events: Mutex<Receiver<Event>>,
    /// `run` has been called, which ends the session.
    pub(super) has_run: AtomicBool,
}

impl Drop for Source {
    /// Ends a relay whose migration has not begun, and informs the peer, which would otherwise wait
    /// for its links.
    fn drop(&mut self) {
        if self.has_run.load(Ordering::Acquire) {
            return;
        }
        let shared = &self.shared;
        shared.over.store(true, Ordering::Release);
        let reason = "the source relay ends before a migration began".into();
        shared.session.fail(SessionError::Local { reason });
        shared.abort_sockets();
        shared.submitter.pool().close();
        shared.session.join();
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

/// The result of a successful migration.
#[derive(Debug)]
pub struct SourceEnd {
    /// From QEMU's first connection to its last byte.
    pub total: Duration,
    /// The peer's report, JSON; empty when it did not arrive in time.
    pub peer_report: Vec<u8>,
    /// The source had a return path, so success means that the destination runs.
    pub return_path: bool,
    /// How long the last bytes took from QEMU's socket here to QEMU's there: the most that the
    /// relays and the link added to the downtime. `None` in postcopy, where the VM runs before the
    /// last bytes arrive.
    pub hidden_downtime: Option<Duration>,
}

impl Source {
    /// Starts accepting QEMU's connections at `address`.
    ///
    /// # Errors
    /// The path cannot be listened on.
    pub fn listen(&self, address: &UnixAddress) -> Result<(), RelayError> {
        self.accept_on(Arc::new(address.listen()?))
    }

    /// Starts accepting QEMU's connections.
    ///
    /// # Errors
    /// The system refuses the socket or a thread.
    pub fn accept_on(&self, entrance: Arc<dyn Entrance>) -> Result<(), RelayError> {
        let failed = |source| RelayError::Listen { address: entrance.address(), source };
        entrance.prepare().map_err(failed)?;
        let _ = self.shared.entrance.set(entrance.clone());
        let shared = self.shared.clone();
        spawn("accept", move || admission::accept(&shared, &*entrance))
    }

    /// Whether a migration has begun on the relay's socket.
    pub fn has_begun(&self) -> bool {
        self.shared.has_main()
    }

    /// Makes `keeper` hold QEMU's main socket while the destination may be running and the source
    /// does not know yet. Call this once, before [`Source::listen`].
    pub fn set_keeper(&self, keeper: Keeper) {
        let _ = self.shared.keeper.set(keeper);
    }

    /// A handle for other threads.
    pub fn handle(&self) -> SourceHandle {
        SourceHandle(self.shared.clone())
    }

    /// Waits at most `limit`, and while `go_on` returns true, until a peer that has a seed has
    /// offered its pages (W29b): pages that QEMU sends before are sent whole.
    pub fn await_seed(&self, limit: Duration, go_on: impl Fn() -> bool) {
        let (seed, until) = (&self.shared.seed, Instant::now() + limit);
        let has_failed = || self.shared.session.failure().is_some();
        let is_due = || seed.is_promised && !seed.is_complete() && !has_failed();
        while is_due() && Instant::now() < until && go_on() {
            std::thread::sleep(OFFERS);
        }
    }

    /// The session, for its byte counters.
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// The migration's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Counters of the codec threads that use libqpl; empty without any.
    pub fn qpl(&self) -> Vec<qpl::Snapshot> {
        self.shared.qpl.iter().map(|counters| counters.snapshot()).collect()
    }

    /// Counters of the codec threads' accelerators; empty without any.
    pub fn accelerators(&self) -> Vec<qat::Snapshot> {
        self.shared.accelerators.iter().map(|counters| counters.snapshot()).collect()
    }

    /// The results of `auto`, if it was on.
    pub fn auto(&self) -> Option<AutoReport> {
        self.shared.auto.as_ref().map(|auto| auto.report())
    }

    /// QEMU's busy and busy-rate over the whole migration.
    pub fn busy(&self) -> (u64, f64) {
        let counters = self.shared.submitter.counters();
        (counters.busy_pages, counters.busy_rate())
    }

    /// Runs the migration to its end. `notice` gets messages for the user meanwhile; `report` makes
    /// the JSON for the peer.
    ///
    /// # Errors
    /// Returned for every migration that the destination has not confirmed. Without a return path
    /// there is no confirmation: then for every migration whose bytes the destination's socket has
    /// not all taken.
    pub fn run(
        &self,
        mut notice: impl FnMut(&str),
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, RelayError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_run.store(true, Ordering::Release);
        let result = Decision::new(&self.shared, &self.redial, &events, &mut notice)
            .run()
            .and_then(|()| self.finish(&events, report));
        self.end(result)
    }

    /// Ends the session, QEMU's connections and the threads.
    pub(super) fn end(
        &self,
        result: Result<SourceEnd, RelayError>,
    ) -> Result<SourceEnd, RelayError> {
        let shared = &self.shared;
        shared.over.store(true, Ordering::Release);
        if let Err(error) = &result {
            // No queued frame may still reach the destination as if the migration had succeeded
            // (W21).
            shared
                .session
                .fail(SessionError::Local { reason: format!("the source relay ends: {error}") });
            shared.abort_sockets();
        } else {
            shared.close_sockets();
        }
        shared.submitter.pool().close();
        shared.close_return_paths();
        shared.session.join();
        if result.is_err()
            && !shared.session.is_peer_informed()
            && shared.session.resume_timeout() > LOOK
        {
            // The peer waits for links that will not come. It may be unreachable.
            let _ = self.redial.ask();
        }
        result
    }

    /// Exchanges reports after a success.
    pub(super) fn finish(
        &self,
        events: &Receiver<Event>,
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, RelayError> {
        let shared = &self.shared;
        let total = shared.started.get().map_or(Duration::ZERO, Instant::elapsed);
        shared.over.store(true, Ordering::Release);
        let hidden = !shared.has_switched();
        let mut end = SourceEnd {
            total,
            peer_report: Vec::new(),
            return_path: shared.return_path.load(Ordering::Acquire),
            hidden_downtime: hidden.then(|| shared.session.credits().last_delay()),
        };
        if shared.session.failure().is_some() {
            return Ok(end);
        }
        shared.session.send_finish(report());
        let deadline = Instant::now() + FAREWELL;
        loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Finished(report)) => {
                    end.peer_report = report;
                    return Ok(end);
                }
                // Without a return path only the peer knows of a failure.
                Ok(Event::Closed(error))
                    if !end.return_path && matches!(*error, SessionError::Aborted { .. }) =>
                {
                    return Err(RelayError::Ended(error));
                }
                Ok(Event::Closed(_)) | Err(_) => return Ok(end),
                Ok(_) => {}
            }
        }
    }
}
